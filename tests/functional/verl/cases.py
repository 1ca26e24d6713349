"""Functions that run on every rank: verl's real forward_backward_batch with our replay, and without any replay.

The observation is independent of the package: forward hooks on Megatron's routers read their routing maps, and the tokens
of each position are laid out here by hand.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import verl
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from verl.models.mcore import util
from verl.utils.megatron.router_replay_patch import RouterReplay as VerlRouterReplay
from verl.workers.config import McoreEngineConfig

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.testing.packed_attention import row_positions
from megatron_router_replay.trainers import replayer, token_layers
from megatron_router_replay.trainers import verl as plugin
from tests.functional.mcore.cases import as_map, left_over, moe_routers, watched
from tests.functional.verl.batches import LENGTHS, Sizes, as_verl, make_batch
from tests.functional.verl.engines import OurEngine, StockEngine, build, engine_config, loss_function, model_config
from tests.support.gradients import gradients
from tests.trainers.oracle import ATTACKS, own_routes
from tests.trainers.stand_ins import trainer_imports

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
DYNAMIC = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 24}
FIXED = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
HAS_BUCKETS = hasattr(McoreEngineConfig, "pad_to_length")  # since August 2026
FORCES_LENGTH = "forced_max_seqlen" in inspect.signature(util.preprocess_bshd_engine).parameters


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: ParallelSizes = ParallelSizes()
    config: dict[str, Any] = field(default_factory=dict)
    padded: bool = False  # verl's use_remove_padding=False
    bucket: int | None = None  # verl's pad_to_length_bucket
    multimodal: bool = False
    batching: dict[str, Any] = field(default_factory=lambda: dict(DYNAMIC))

    def engine(self, kind: type, mode: str, *, recompute: bool = True) -> Any:
        config = self.config if recompute else {}  # it has fields of recompute alone
        fields = {"vision_config": {}} if self.multimodal else {}
        return build(
            kind, engine_config(self.layout, mode=mode, padded=self.padded, bucket=self.bucket, **config), **fields
        )


def expected_tokens(case: Case, samples: list[list[int]]) -> Tensor:
    """Return the token of each position of a micro-batch, in the order of this rank's routers; 0 on padding."""
    tp, cp = case.layout.tp_size, case.layout.cp_size
    multiple = tp * cp * (2 if cp > 1 else 1)
    # verl pads to the longest sample of the whole batch, of the micro-batch until August 2026.
    longest = max(LENGTHS if FORCES_LENGTH else map(len, samples))
    local = []
    for sample in samples:
        length = longest if case.padded else len(sample)
        padded = -(-length // multiple) * multiple
        whole = torch.nn.functional.pad(torch.tensor(sample), (0, padded - len(sample)))
        _, rows = row_positions(padded, cp_rank=parallel_state.get_context_parallel_rank(), cp_size=cp)
        local.append(whole[rows])
    if case.bucket is not None:
        local.append(torch.zeros(-sum(map(len, local)) % case.bucket, dtype=torch.int64))
    # A padded batch is [s, b] inside the model, a packed one [total, 1].
    positions = torch.stack(local, dim=1).reshape(-1) if case.padded else torch.cat(local)
    return positions.chunk(tp)[parallel_state.get_tensor_model_parallel_rank()] if tp > 1 else positions


@contextmanager
def entered(chunks: list[Any]) -> Iterator[list[Tensor]]:
    """Yield the input_ids that enter the model's first stage."""
    seen: list[Tensor] = []

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["input_ids"].clone())

    handles = [chunk.register_forward_pre_hook(hook, with_kwargs=True) for chunk in chunks if chunk.pre_process]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def step(engine: Any, data: Any, *, forward_only: bool = False) -> dict[str, Any]:
    """Run one forward_backward_batch of verl; return its output, its gradients and the routing maps."""
    for chunk in engine.module:
        chunk.zero_grad(set_to_none=True)
    engine.microbatches.clear()
    with watched(engine.module) as seen, entered(engine.module) as inputs, torch.set_grad_enabled(not forward_only):
        output = engine.forward_backward_batch(
            data, None if forward_only else loss_function(), forward_only=forward_only
        )
    return {
        "output": output,
        "gradients": {} if forward_only else gradients(engine.module),
        "seen": seen,
        "inputs": inputs,
        "microbatches": list(engine.microbatches),
    }


def judge(case: Case, engine: Any, done: dict[str, Any], routes: dict[int, Tensor]) -> Counter[str]:
    """Compare every decision of the routers with the routes of its token.

    Returns:
        Counts of forward decisions, "replayed" and "live", and of micro-batches whose tokens "entered" as expected.
    """
    positions: dict[int, list[Tensor]] = {chunk: [] for chunk in range(len(engine.module))}
    for chunk, samples in done["microbatches"]:
        positions[chunk].append(expected_tokens(case, samples))
    counts: Counter[str] = Counter()
    for tokens, inside in zip(positions[0] if done["inputs"] else [], done["inputs"], strict=True):
        # Before sequence parallelism; this rank's part must be the expected one.
        parts = inside.t().reshape(-1).chunk(case.layout.tp_size)
        # A multimodal model packs and splits inside; its language model enters no ids.
        counts["entered"] += case.multimodal or any(torch.equal(part, tokens) for part in parts)
    for chunk, tokens_of_chunk in positions.items():
        for layer in (router.layer_number for router in moe_routers([engine.module[chunk]])):
            forward, recompute = done["seen"]["forward"][layer], done["seen"]["recompute"][layer]
            assert len(forward) == len(tokens_of_chunk)
            for maps in (forward, recompute):
                for tokens, first, routing_map in zip(tokens_of_chunk, forward, maps):
                    known = torch.tensor([int(token) in routes for token in tokens])
                    target = torch.stack([routes.get(int(t), torch.zeros(99, 2))[layer - 1].long() for t in tokens])
                    expected = as_map(target, routing_map.shape[1])
                    assert torch.equal(routing_map[known], expected[known]), f"wrong experts in layer {layer}"
                    assert bool((routing_map.sum(dim=1) == 2).all())
                    assert torch.equal(routing_map, first), "a recompute chooses as its forward did"
                    if maps is forward:
                        counts["replayed"] += int(known.sum())
                        counts["live"] += int(((tokens != 0) & ~known).sum())
    return counts


@contextmanager
def forced(engine: Any, seen: dict[int, list[Tensor]]) -> Iterator[None]:
    """Replay the observed experts by Megatron's own RouterReplay, micro-batch by micro-batch."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    replayer.uninstall()  # it refuses a pass that drives Megatron's own replay
    handles = []
    for router in moe_routers(engine.module):
        maps = iter(seen[router.layer_number])
        router.router_replay = RouterReplay()
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

        def give(module: Any, args: Any, maps: Any = maps) -> None:
            routing_map = next(maps)
            module.router_replay.set_target_indices(routing_map.nonzero()[:, 1].view(len(routing_map), -1))

        handles.append(router.register_forward_pre_hook(give))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return which of loss, log-probs and gradients are not equal to the last bit."""
    assert one["gradients"].keys() == other["gradients"].keys()
    result = [
        name for name, gradient in one["gradients"].items() if not torch.equal(gradient, other["gradients"][name])
    ]
    if "loss" in one["output"]:
        ours, theirs = (each["output"]["model_output"]["log_probs"] for each in (one, other))
        result += ["log_probs"] * (not torch.equal(ours.values(), theirs.values()))
        result += ["loss"] * (one["output"]["loss"] != other["output"]["loss"])
    return result


def change_routers(engine: Any) -> None:
    """Change router weights, so that no live choice agrees by luck with earlier routes."""
    for router in moe_routers(engine.module):
        with torch.no_grad():
            router.weight.copy_(router.weight.flip(0))


def r3(case: Case) -> tuple[Counter[str], dict[str, Any]]:
    """Train on an engine's routes; then train verl's own engine on the observed routes, to the same bits."""
    engine = case.engine(OurEngine, "R3")
    batch = make_batch(parallel_state.get_data_parallel_rank())
    data = as_verl(batch.padded, enable_routing_replay=True, **case.batching)
    done = step(engine, data)
    assert left_over(engine.module) == []
    assert data.get("routed_experts", None) is not None
    assert data["enable_routing_replay"]
    assert any(done["seen"]["recompute"].values()) == ("recompute_granularity" in case.config)
    patched = hasattr(TopKRouter, "_router_replay_patched") or VerlRouterReplay.router_instances
    assert not patched, "verl's own patch of Megatron's classes is applied"
    stock = case.engine(StockEngine, "disabled", recompute=False)
    plain = as_verl(batch.padded, **case.batching)
    assert differences(done, step(stock, plain)), "the oracle would have been met without a replay"
    with forced(stock, done["seen"]["forward"]):
        assert differences(done, step(stock, plain)) == []
    return judge(case, engine, done, batch.routes), done["output"].get("metrics", {})


def r2(case: Case) -> tuple[Counter[str], Counter[str]]:
    """Record the forward of old log-probs, train on different micro-batches and router weights, and compare as in r3."""
    engine = case.engine(OurEngine, "R2")
    batch = make_batch(parallel_state.get_data_parallel_rank())
    del batch.padded["routed_experts"]
    # One sample a micro-batch; training regroups them.
    one_each = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    first = step(engine, as_verl(batch.padded, enable_routing_replay=True, **one_each), forward_only=True)
    # From the last stage to all, as verl's driver hands the batch to every rank of a replica.
    group = parallel_state.get_pipeline_model_parallel_group()
    box = [first["output"]["model_output"]["routed_experts"] if "model_output" in first["output"] else None]
    dist.broadcast_object_list(box, src=dist.get_process_group_ranks(group)[-1], group=group)
    recorded = box[0]
    assert recorded.dtype is torch.uint8
    assert recorded.shape[2] == 6, "four layers, and the tokens' ids in two"
    routes = {
        int(token): route
        for tokens, its_routes in zip(batch.tokens, recorded.unbind(), strict=True)
        for token, route in zip(tokens, its_routes, strict=True)
    }
    recording = judge(case, engine, first, routes)
    change_routers(engine)
    data = as_verl(batch.padded, enable_routing_replay=True, **case.batching)
    data["routed_experts"] = recorded
    done = step(engine, data)
    assert left_over(engine.module) == []
    assert first["microbatches"] != done["microbatches"]
    counts = judge(case, engine, done, routes)
    stock = case.engine(StockEngine, "disabled", recompute=False)
    change_routers(stock)
    with forced(stock, done["seen"]["forward"]):
        assert differences(done, step(stock, as_verl(batch.padded, **case.batching))) == []
    return recording, counts


def r2_of_a_sample_that_ends_in_a_padding_token(case: Case) -> list[float]:
    """Record and replay it; return the share of replayed tokens."""
    engine = case.engine(OurEngine, "R2")
    padded = make_batch(0).padded
    del padded["routed_experts"]
    last = int(padded["response_mask"][1].sum()) - 1
    padded["responses"][1, last] = padded["input_ids"][1, padded["prompts"].shape[1] + last] = 0
    data = as_verl(padded, enable_routing_replay=True, **case.batching)
    output = step(engine, data, forward_only=True)["output"]
    data = as_verl(padded, enable_routing_replay=True, **case.batching)
    data["routed_experts"] = output["model_output"]["routed_experts"]
    share: list[float] = step(engine, data)["output"]["metrics"]["router_replay/replayed_share"]
    return share


def refused(
    case: Case, mode: str, damage: Any, flags: dict[str, Any] | None = None, kind: type = OurEngine
) -> tuple[str, str]:
    """Train on a batch that `damage` changed; return the error, after which no router is registered."""
    engine = case.engine(kind, mode)
    rank = parallel_state.get_data_parallel_rank()
    batch = make_batch(rank)
    damage(batch.padded, rank)
    data = as_verl(batch.padded, **{"enable_routing_replay": True, **case.batching, **(flags or {})})
    with pytest.raises(mrr.RouterReplayError) as error:
        step(engine, data)
    assert left_over(engine.module) == []
    if mode == "R3" and kind is OurEngine:  # it goes on with the next batch
        step(engine, as_verl(make_batch(rank).padded, enable_routing_replay=True, **case.batching))
    return type(error.value).__name__, str(error.value)


def asked(attack: str) -> None:
    """Train, with agreement checked, on long samples with the model's own routes and one attack."""
    engine, sizes = Case().engine(OurEngine, "R3"), Sizes(prompts=(100,) * 6, responses=(100,) * 6)

    def rollout(tokens: list[Tensor]) -> list[Tensor]:
        return ATTACKS.get(attack, list)([own_routes(engine.module, part)[:-1] for part in tokens])

    with mock.patch.dict(plugin.options, min_agreement=0.25):
        step(engine, as_verl(make_batch(0, sizes, rollout).padded, enable_routing_replay=True, **FIXED))


def partly_live(case: Case, damage: Any) -> tuple[Counter[str], dict[str, Any]]:
    """Train on a batch in which the tokens that `damage` returns have no routes and are live."""
    engine = case.engine(OurEngine, "R3")
    batch = make_batch(0)
    lost = damage(batch.padded, 0)
    routes = {token: route for token, route in batch.routes.items() if token not in lost}
    done = step(engine, as_verl(batch.padded, enable_routing_replay=True, **case.batching))
    return judge(case, engine, done, routes), done["output"]["metrics"]


def zeros_behind_the_last_generation(padded: dict[str, Tensor], rank: int) -> set[int]:
    """A multi-turn sample that ends in an answer of a tool, and a sample that only fills up the batch."""
    response, width = padded["response_mask"], padded["prompts"].shape[1]
    response[3, 8:] = 0  # the last 4 of 12 tokens of the response are a tool's, and the engine never saw them
    response[3, 2:4] = 0  # an answer of a tool between two generations has routes
    routes, sent = padded["routed_experts"], slice(width - 2, width + 7)
    routes[3, sent] = token_layers.add(routes[3, sent, :-2], padded["input_ids"][3, sent], sample=3)
    routes[3, width + 7 :] = 0
    response[5] = 0
    routes[5] = 0
    return {*padded["responses"][3, 7:].tolist(), *padded["input_ids"][5].tolist()}


def lose_rows(padded: dict[str, Tensor], rank: int) -> set[int]:
    """Zeros where the engine lost the routes of two tokens of sample 1, in every layer; returns the tokens."""
    at = padded["prompts"].shape[1] + 1
    padded["routed_experts"][1, at : at + 2, :-2] = 0
    return set(padded["input_ids"][1, at : at + 2].tolist())


def lose_rows_of_rank_1(padded: dict[str, Tensor], rank: int) -> None:
    if rank == 1:
        lose_rows(padded, rank)


def shift_by_one(padded: dict[str, Tensor], rank: int) -> None:
    """The route of each token at the next one, as after a token too much in front."""
    padded["routed_experts"] = padded["routed_experts"].roll(1, dims=1)


def exchange_samples(padded: dict[str, Tensor], rank: int) -> None:
    padded["routed_experts"][[0, 6]] = padded["routed_experts"][[6, 0]]  # equally long prompts


def lose_rows_on_the_way(padded: dict[str, Tensor], rank: int) -> None:
    padded["routed_experts"][1, 8:10] = 0


def cut_rows_on_the_way(padded: dict[str, Tensor], rank: int) -> None:
    """The last row of a sample, which nothing trained depends on."""
    padded["routed_experts"][1, 7 + 5 - 2] = 0


def lose_ids(padded: dict[str, Tensor], rank: int) -> None:
    """The agent loop's process did not add them."""
    padded["routed_experts"] = padded["routed_experts"][:, :, :-2]


def drop_routes(padded: dict[str, Tensor], rank: int) -> None:
    del padded["routed_experts"]


def nothing(padded: dict[str, Tensor], rank: int) -> None:
    pass


def unmarked(case: Case, mode: str) -> list[str]:
    """A batch that is marked not to be replayed (a reference's log-probs): verl's stock path, live."""
    engine, stock = case.engine(OurEngine, mode), case.engine(StockEngine, "disabled")
    padded = make_batch(0).padded
    done = step(engine, as_verl(padded, enable_routing_replay=False, **case.batching))
    return differences(done, step(stock, as_verl(padded, **case.batching)))


def chosen(mode: str, fields: dict[str, Any] | None = None, packer: Any = None, head: str = "language_model") -> bool:
    """Make an engine by verl's registry; return whether this package replays in it, and verl's own replay does not.

    Args:
        packer: in place of the installed verl's.
    """
    from verl.workers.engine import EngineRegistry

    config = engine_config(ParallelSizes(), mode=mode)
    installed, util.preprocess_bshd_engine = util.preprocess_bshd_engine, packer or util.preprocess_bshd_engine
    try:
        engine = EngineRegistry.new(
            model_type=head,
            backend="megatron",
            model_config=model_config(**(fields or {})),
            engine_config=config,
            optimizer_config=None,
            checkpoint_config=None,
        )
    finally:
        util.preprocess_bshd_engine = installed
    assert type(engine).__module__ == "verl.workers.engine.megatron.transformer_impl"
    assert engine.engine_config is config
    is_ours = hasattr(engine, "mrr_mode")
    assert engine.enable_routing_replay == (mode != "disabled" and not is_ours)
    return is_ours


def chosen_under_audit() -> bool:
    with mock.patch.dict(os.environ, MRR_AUDIT="1"):
        return chosen("R3")


def preprocess_bshd_engine(input_ids: Any, interleave: bool = False) -> None:
    pass


def patched_by_verl() -> str:
    """A critic has its own replay on in this process."""
    chosen("R3", head="value_model")  # a worker of its own: nothing takes its patch out again
    return refused(Case(), "R2", nothing)[1]


ROUTES = [[[3, 1]], [[0, 2]], [[2, 1]]]


def agent_loop(modes: list[str], as_list: bool) -> list[tuple[Tensor, Tensor]]:
    """Run verl's own `_run_agent_loop`, with an engine's reply in place of a loop, and no store behind it.

    Returns:
        By mode, the routes that verl's postprocess gets, and those that verl lays out of it for its store.
    """
    with trainer_imports(str(Path(verl.__file__).parents[1]), ("verl",)):  # for what it imports and is not installed
        from verl.experimental.agent_loop import agent_loop as module

        def reply() -> Any:
            return module.AgentLoopOutput(
                prompt_ids=[5, 6],
                response_ids=[7, 70_000],
                response_mask=[1, 1],
                metrics={},
                extra_fields={},
                routed_experts=np.array(ROUTES, dtype=np.uint8),
            )

        class Loop:
            async def run(self, sampling_params: Any, **kwargs: Any) -> Any:
                return [reply()] if as_list else reply()

        class Worker(module.AgentLoopWorker):  # type: ignore[misc]
            def __init__(self, mode: str) -> None:
                megatron = SimpleNamespace(router_replay=SimpleNamespace(mode=mode))
                rollout = SimpleNamespace(actor=SimpleNamespace(megatron=megatron), rollout=SimpleNamespace(trace={}))
                self.config = SimpleNamespace(actor_rollout_ref=rollout, data={})
                self.llm_client = self.tokenizer = self.processor = self.hf_model_type = None
                self.dataset_cls = self.tools = None

            async def _agent_loop_postprocess(self, output: Any, validate: Any, **kwargs: Any) -> Any:
                return output

        module._agent_loop_registry["mine"] = {}
        module.hydra.utils.instantiate = lambda **kwargs: Loop()
        trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False}
        results = []
        for mode in modes:
            done = asyncio.run(Worker(mode)._run_agent_loop({}, trajectory, agent_name="mine", trace=False))
            (done,) = done if as_list else (done,)
            results.append((torch.as_tensor(done.routed_experts), done.as_dict()["routed_experts"]))
        return results
