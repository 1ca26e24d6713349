"""Megatron-LM's own RL loop on a CPU, from the ledger of finished requests to the optimizer: log-probs, reference, training.

The requests are Megatron's records with routes that are drawn here; its engine does not run.
Megatron-LM's training needs its own Megatron-Core, so its checkout must come first on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
import typing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgpack
import numpy as np
import torch
import torch.distributed as dist
import typing_extensions
from torch import Tensor

from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.testing.packed_attention import row_positions
from megatron_router_replay.trainers import megatron_rl
from megatron_router_replay.trainers.request_routes import RequestRoutes
from tests.trainers import oracle, small_model
from tests.trainers.sources import Source, check_megatron
from tests.trainers.stand_ins import Config, missing_modules

SOURCE = Source(name="megatron_rl", packages=("megatron",), variable="MEGATRON_LM_DIR")
PAD, SEQ_LENGTH, EPOCH = 0, 24, 3


def checkout() -> str:
    """Return the folder of the checkout, whose Megatron-Core runs."""
    folder = SOURCE.folder()
    check_megatron(folder)
    return folder


def has_context_parallelism(folder: str) -> bool:
    """Return whether this commit's RL loop splits rows over context-parallel ranks."""
    return "_scatter_for_context_parallel" in Path(folder, "megatron/rl/rl_utils.py").read_text()


class Tokenizer:
    """Numbers for words."""

    library, vocab_size, pad, eod, bos = "numbers", oracle.VOCAB, PAD, oracle.VOCAB - 1, None

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Any, **unused: Any) -> str:
        return " ".join(map(str, ids))


class Timer:
    """Measures nothing."""

    def start(self, *args: Any, **kwargs: Any) -> None:
        pass

    stop = start


@contextmanager
def imports(folder: str) -> Iterator[SimpleNamespace]:
    """Import Megatron-LM's training; yield its modules. Web servers and `typing.override` of Python 3.12 get stand-ins."""
    with ExitStack() as stack:
        stack.enter_context(missing_modules(("fastapi", "openai", "uvicorn")))
        stack.enter_context(mock.patch.object(typing, "override", typing_extensions.override, create=True))
        stack.enter_context(mock.patch.object(sys, "path", [folder, *sys.path]))
        stack.enter_context(oracle.process())
        megatron_rl.install()
        names = {
            "rl": "megatron.rl.rl_utils",
            "packing": "megatron.rl.sequence_packing_utils",
            "local": "megatron.rl.inference.megatron",
            "types": "megatron.rl.agent.api",
            "training": "megatron.training.training",
            "globals": "megatron.training.global_vars",
            "requests": "megatron.core.inference.inference_request",
            "engine": "megatron.core.inference.engines.dynamic_engine",
            "script": "train_rl",
        }
        yield SimpleNamespace(**{name: importlib.import_module(module) for name, module in names.items()})


def arguments(layout: ParallelSizes, *, packs: bool, steps: int, rows: int) -> Config:
    return Config(
        check_for_nan_in_loss_and_grad=False,
        context_parallel_size=layout.cp_size,
        cuda_graph_impl="none",
        data_parallel_size=layout.world_size // (layout.tp_size * layout.pp_size * layout.cp_size),
        global_batch_size=rows // steps,
        grpo_clamp_eps_lower=0.2,
        grpo_clamp_eps_upper=0.2,
        grpo_entropy_term_weight=0.0,
        grpo_group_size=1,
        grpo_kl_beta=0.1,
        grpo_prompts_per_step=rows,
        gtp_weight_remat_size=1,
        empty_unused_memory_level=0,
        micro_batch_size=1,
        rl_sequence_packing_algo="fifo",
        rl_sequence_packing_max_sequences_per_bin=4,
        rl_skip_bos_token=True,
        rl_use_sequence_packing=packs,
        seq_length=SEQ_LENGTH,
        curr_iteration=EPOCH,
    )


class Turn(typing.NamedTuple):
    """A request: its tokens, the routes that the engine recorded, its prompt, and whether it was evicted."""

    ids: Tensor
    routes: Tensor
    prompt: int
    evicted: bool = False


def rollouts(*, joins_turns: bool) -> tuple[list[list[Turn]], dict[int, Tensor]]:
    """Return the turns of each rollout, and the route [LAYERS, TOPK] of each token that has one.

    Single turns, two turns of one conversation, of which the second prefills the first with routes that must not win, two
    that were tokenized again, and a request that was evicted. Every token of a row is in no other row, but for the end
    token of a single turn, which has no route.

    Args:
        joins_turns: Megatron-LM trains a conversation as one row; else there is none here: its turns would share tokens.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = (7, 12, 5, 16, 9, 3, 11, 14, 10, 6)
    ids = list((torch.randperm(oracle.VOCAB - 2, generator=generator)[: sum(lengths)] + 1).split(lengths))

    def routes(count: int) -> Tensor:
        part = torch.rand(count, oracle.LAYERS, oracle.EXPERTS, generator=generator).argsort(dim=2)[:, :, : oracle.TOPK]
        part[:, 0] = 0  # layer 1 is dense
        return part

    requests = [[Turn(part, routes(len(part) - 1), len(part) // 2)] for part in ids[:6]]
    one, two = ids[6], torch.cat([ids[6], ids[7][:9]])
    first = [Turn(one, routes(len(one) - 1), 4)] if joins_turns else []
    requests.append([*first, Turn(two, routes(len(two) - 1), len(one) + 3)])
    requests.append([Turn(ids[8][:6], routes(5), 2), Turn(ids[8][6:], routes(3), 2)])
    requests.append([Turn(ids[9], routes(5), 2, evicted=True)])
    route_of: dict[int, Tensor] = {}
    for turns in requests:
        if len(turns) == 1:
            turns[0].ids[-1] = oracle.VOCAB - 1
        for turn in turns:
            for token, route in zip(turn.ids.tolist(), turn.routes):
                if not turn.evicted:
                    route_of.setdefault(token, route)
    return requests, route_of


def generate(modules: SimpleNamespace, chunks: list[Any], requests: list[list[Turn]], *, other_tokens: bool) -> Any:
    """Let the engines of the data-parallel ranks finish the requests; return the rollouts and the ledger of all ranks."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    requests_of, names = modules.requests, {}
    columns = [number - 1 for number in megatron_rl._routed_layers(chunks)]  # of this rank's stage
    engine = SimpleNamespace(
        controller=SimpleNamespace(inference_wrapped_model=SimpleNamespace(model=chunks[0].module)),
        pg_collection=SimpleNamespace(mp=parallel_state.get_model_parallel_group()),
        local_metadata_ledger_enabled=True,
        local_metadata_ledger={},
        socket_for_receiving_requests=SimpleNamespace(send=lambda payload: sent.append(payload)),
    )
    sent: list[bytes] = []
    modules.rl._INFERENCE_INTERFACE = interface = modules.local.MegatronLocal.model_construct(host="", port=0)
    interface._inference_engine = engine
    assert modules.rl.get_inference_interface(None, None, chunks) is interface
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)  # and nobody ends it
    # Context-parallel ranks have engines of their own, as Megatron-LM builds its inference model without this parallelism.
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    records = []
    for i, turns in enumerate(requests):
        for k, turn in enumerate(turns):
            uid = names[i, k] = f"chatcmpl-{i}-{k}"
            if (i + k) % replicas != replica:
                continue
            record = requests_of.DynamicInferenceRequestRecord.from_request(
                requests_of.DynamicInferenceRequest(
                    request_id=10 * i + k,
                    uid=uid,
                    prompt_tokens=turn.ids[: turn.prompt],
                    generated_tokens=turn.ids[turn.prompt :].tolist(),
                    policy_epoch=[(0, EPOCH)],
                    kv_cache_epoch=[(0, EPOCH)],
                    sampling_params=requests_of.SamplingParams(num_tokens_to_generate=32),
                    status=requests_of.Status.COMPLETED,
                )
            )
            first = record.requests[0]
            first.add_event_add_engine()
            if turn.evicted:
                record.checkpoint()
                record.requests[-1].kv_cache_epoch = [(0, EPOCH)]
                record.requests[-1].status = requests_of.Status.COMPLETED
            elif columns:
                first.routing_indices = turn.routes[:, columns].numpy().astype(np.int16)
            records.append(record)
    # The engine's own function needs its cache; the hook gets what it returns.
    megatron_rl._finish(lambda self: ([], records), engine)
    if parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_pipeline_model_parallel_rank() == 0:
        send_records(modules, engine, records)
        for each in msgpack.unpackb(sent[0], strict_map_key=False)[1]:
            assert each["routing_indices"] is None, "an HTTP reply carries no routes"
    with mock.patch.object(dist, "all_gather_object", gather := mock.Mock(wraps=dist.all_gather_object)):
        ledger = interface.merge_global_request_ledgers()
    assert all(len(pickle.dumps(each)) < 400 for each in gather.call_args.args[1].values()), "a ticket, and no routes"

    def mask(turn: Turn) -> list[bool]:
        return [i >= turn.prompt for i in range(len(turn.ids))]

    groups = [
        modules.types.RolloutGroup(
            rollouts=[
                modules.types.TokenRollout(
                    trajectory=[
                        [int(turn.ids[0]) + (other_tokens and i == 3), *turn.ids[1:].tolist()] for turn in turns
                    ],
                    reward=float(i % 2),
                    generation_mask=[mask(turn) for turn in turns],
                    logprobs=[[-1.0] * sum(mask(turn)) for turn in turns],
                    env_id="numbers",
                    completion_ids=[names[i, k] for k in range(len(turns))],
                    generation_cap=sum(mask(turns[-1])),
                )
            ]
        )
        for i, turns in enumerate(requests)
    ]
    return groups, ledger


def send_records(modules: SimpleNamespace, engine: Any, records: list[Any]) -> None:
    """Let the engine note finished requests in its ledger and send its replies."""
    send = getattr(modules.engine.DynamicInferenceEngine, "_send_request_records_to_coordinator", None)
    if send is not None:
        send(engine, records)
        return
    # Before August 14, 2026, these lines were part of a function that needs the engine's cache.
    merged = [record.merge() for record in records]
    for each in merged:
        engine.local_metadata_ledger[each.uid] = modules.requests.FinishedRequestRecord.from_request(each)
    engine.socket_for_receiving_requests.send(msgpack.packb([0, [each.serialize() for each in merged]]))


def step(
    folder: str,
    layout: ParallelSizes,
    options: dict[str, Any],
    flags: dict[str, Any],
) -> Any:
    """Log-probs, the reference's, and training steps; {pass: (decisions, wrong)} of each, and the bytes that came in.

    Args:
        flags: packs, steps; replays=False: our hooks see a model without the flag; other_tokens: a rollout has others.
    """
    flags = {"packs": False, "steps": 1, "replays": True, "other_tokens": False} | flags
    with imports(folder) as modules:
        megatron_rl._store = RequestRoutes()
        chunks = build(layout, **options)
        rows, *_ = inspect.signature(modules.rl.prepare_trajectories).parameters
        requests, route_of = rollouts(joins_turns=rows == "rows")
        args = arguments(layout, packs=flags["packs"], steps=flags["steps"], rows=len(requests))
        tokenizer = Tokenizer()
        timers = lambda *args, **kwargs: Timer()  # noqa: E731
        modules.globals._GLOBAL_ARGS, modules.globals._GLOBAL_TIMERS = args, timers
        modules.globals._GLOBAL_TOKENIZER = tokenizer
        prepare_globals()
        with oracle.watched(chunks, route_of) as seen, ExitStack() as stack:
            transformer_engine = SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
            stack.enter_context(mock.patch.multiple(modules.rl, create=True, HAVE_TEX=True, tex=transformer_engine))
            groups, ledger = generate(modules, chunks, requests, other_tokens=flags["other_tokens"])
            compute = modules.rl.compute_logprobs_batch

            def marking(*args: Any, **kwargs: Any) -> Any:
                result = compute(*args, **kwargs)
                seen.mark()
                return result

            stack.enter_context(mock.patch.object(modules.rl, "compute_logprobs_batch", marking))
            if not flags["replays"]:
                stack.enter_context(mock.patch.object(megatron_rl, "_is_on", return_value=False))
                megatron_rl.replayer.uninstall()
            reference = {name: value.clone() for name, value in chunks[0].state_dict().items() if value is not None}
            iterator, *_ = modules.rl.prepare_data_for_update(
                model=chunks,
                ref_state_dict=reference,
                rollouts=groups,
                tokenizer=tokenizer,
                sequence_packing=flags["packs"],
                is_correction=False,
                request_ledger=ledger,
            )
            metrics = []
            for number in range(flags["steps"]):
                args.curr_iteration = EPOCH + number
                losses, *_ = modules.training.train_step(
                    modules.script.forward_step,
                    iterator,
                    chunks,
                    small_model.NoOptimizer(),
                    SimpleNamespace(step=lambda increment: None),
                    chunks[0].config,
                    modules.training.get_forward_backward_func(),
                    iteration=number,
                )
                metrics.append({name: float(value) for name, value in losses.items()})
                seen.mark()
        return seen.counts(), megatron_rl._store.bytes_received, metrics


class HalfPrecision(torch.nn.Module):
    """Takes the option of Megatron-LM's wrapper for half precision, in which RL always runs, and computes as it is."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module, self.config = module, module.config

    def forward(self, *args: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def build(layout: ParallelSizes, *, dense: int = 1, **options: Any) -> list[Any]:
    """Return this rank's chunk, whose first layers are dense."""
    frequency = [int(i >= dense) for i in range(oracle.LAYERS)]
    (chunk,) = small_model.build(layout, moe_enable_routing_replay=True, moe_layer_freq=frequency, **options)
    chunk.module = HalfPrecision(chunk.module)
    return [chunk]


def partitioned_indices(cu_seqlens: Tensor, length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Return the positions of a context-parallel rank, as Transformer Engine's `thd_get_partitioned_indices` does."""
    sequence, position = row_positions(length, cp_rank=cp_rank, cp_size=cp_size, cu_seqlens=cu_seqlens)
    return cu_seqlens[sequence] + position


def prepare_globals() -> None:
    """Begin Megatron-LM's process-wide state anew."""
    from megatron.core import num_microbatches_calculator, rerun_state_machine

    rerun_state_machine.destroy_rerun_state_machine()
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.DISABLED)
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 4, 1, 1, False)
