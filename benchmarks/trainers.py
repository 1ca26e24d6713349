"""What a micro-batch's routes cost in a trainer: its own code, and the same as examples/trainers edits it.

    SLIME_DIR=... MILES_DIR=... NEMO_RL_DIR=... SKYRL_DIR=... .venv/bin/python -m benchmarks.trainers [TOKENS LAYERS PASSES]

Two packed samples of TOKENS each, stamped once and laid out in each of PASSES passes, from the trainer's fields to what
its routers read (`prepare`), and the routers of all layers (`route`);
in turns in one process, CPU seconds of one thread. A trainer whose folder is not named is left out. slime and miles patch
Megatron-LM for their routers, which Megatron-Core as released does not have: only their preparation is measured.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import megatron_router_replay as mrr
from benchmarks.measure import environment, ratio, rounds, table
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.testing.tiny_gpt import build_tiny_gpt, tiny_gpt_config
from tests.support.one_rank import only_rank
from tests.trainers import miles, nemo_rl, skyrl, slime
from tests.trainers.sources import Source
from tests.trainers.stand_ins import trainer_imports

TOKENS, LAYERS, PASSES = map(int, sys.argv[1:4]) if __name__ == "__main__" and sys.argv[1:] else (2048, 24, 1)
EXPERTS, REPEATS = 128, 40


@dataclass(kw_only=True)
class Batch:
    """Two samples, with routes as an engine sends them, and a chunk with one router a layer."""

    routes: Tensor  # [2, TOKENS, LAYERS, topk] int32
    tokens: Tensor  # [2, TOKENS]
    chunk: Any
    sessions: list[Any] = field(default_factory=list)
    forget: Callable[[], None] = field(default=lambda: None)  # what the trainer's own code has kept of the call before


Preparation = Callable[[Batch], Callable[[], None]]


def of_slime(folder: str, *, edited: bool) -> Preparation:
    with trainer_imports(folder, slime.SOURCE.packages, services=slime.SERVICES):
        from slime.backends.megatron_utils import cp_utils, model
        from slime.utils.routing_replay import RoutingReplay
    args = SimpleNamespace(num_experts=EXPERTS, data_pad_size_multiplier=8, allgather_cp=False)
    options = {**vars(args), "sequence_parallel": False}
    trained = torch.ones(2, TOKENS).index_fill(1, torch.tensor([TOKENS - 1]), 0).view(1, -1)

    def prepare(batch: Batch) -> Callable[[], None]:
        routes, tokens = list(batch.routes[:, :-1]), list(batch.tokens)
        laid_out = {"unconcat_tokens": tokens, "tokens": batch.tokens.view(1, -1), "full_loss_masks": trained}
        replays = [RoutingReplay() for _ in range(LAYERS)]
        batch.forget = RoutingReplay.clear_all

        def own() -> None:
            for _ in range(PASSES):
                layers = cp_utils.prepare_routed_experts_for_routing_replay(routes, tokens, **options)
                for layer, replay in enumerate(replays):
                    replay.record(layers[:, layer])

        def fed() -> None:
            stamped = mrr.stamp_batch(routes, tokens, num_experts=EXPERTS)
            for _ in range(PASSES):
                model._feed_routes(args, batch.chunk, laid_out | {"rollout_routed_experts": stamped})
                reopened(batch)

        return fed if edited else own

    return prepare


def of_miles(folder: str, *, edited: bool) -> Preparation:
    with trainer_imports(folder, miles.SOURCE.packages, services=miles.SERVICES):
        from miles.backends.megatron_utils import model, parallel, replay_utils
        from miles.backends.training_utils import data, replay_data
        from miles.backends.training_utils.parallel import set_parallel_state
        from miles.utils.ft_utils.process_group_utils import GroupInfo
        from miles.utils.replay_base import Replay

        parallel.mpu.get_data_parallel_group_gloo = parallel.mpu.get_data_parallel_group
        parallel.get_args = lambda: miles.arguments_of_slime(ParallelSizes(), qkv_format="thd", allgather_cp=False)
        set_parallel_state(parallel.create_megatron_parallel_state(GroupInfo(rank=0, size=1, group=None)))
    args = SimpleNamespace(qkv_format="thd", data_pad_size_multiplier=8, allgather_cp=False, sequence_parallel=False)
    masks = list(torch.ones(2, TOKENS - 8))
    others = {"total_lengths": [TOKENS] * 2, "response_lengths": [TOKENS - 8] * 2, "loss_masks": masks}
    field = "rollout_routed_experts"

    def prepare(batch: Batch) -> Callable[[], None]:
        replays = [Replay() for _ in range(LAYERS)]
        batch.forget = lambda: [replay.clear() for replay in replays] and None
        given = {"models": [SimpleNamespace(module=batch.chunk)], "num_microbatches": [1], "replay_list": replays}
        given["register_replay_list_func"] = replay_utils.register_replay_list_moe

        def get_batch(routes: list[Tensor], *keys: str) -> tuple[Any, Any]:
            fields = {**others, "tokens": list(batch.tokens), field: routes}
            iterator = data.DataIterator(fields, micro_batch_size=2)
            return iterator, data.get_batch(iterator, ["tokens", *others, *keys], 8)

        def own() -> None:
            for _ in range(PASSES):
                iterator, _ = get_batch(list(batch.routes[:, :-1]))
                fields = iterator.rollout_data
                replay_data.fill_replay_data(
                    args=args, data_iterator=[iterator], rollout_data=fields, data_key=field, **given
                )

        def fed() -> None:
            stamped = mrr.stamp_batch(batch.routes[:, :-1], batch.tokens, num_experts=EXPERTS, dtype=torch.int16)
            for _ in range(PASSES):
                model._feed_routes(batch.chunk, get_batch(stamped, field)[1])
                reopened(batch)

        return fed if edited else own

    return prepare


def of_nemo_rl(folder: str, *, edited: bool) -> Preparation:
    with trainer_imports(folder, nemo_rl.SOURCE.packages, services=nemo_rl.SERVICES):
        from nemo_rl.models.megatron.router_replay import clear_router_replay, set_router_replay_forward

    def prepare(batch: Batch) -> Callable[[], None]:
        routes, tokens = batch.routes.to(torch.int16).flatten(0, 1).unsqueeze(0), batch.tokens.view(1, -1)
        batch.forget = lambda: clear_router_replay(batch.chunk)

        def fed() -> None:  # the lines of the page; there they stand in the midst of longer functions
            filler = range(routes.shape[-1])
            stamped = mrr.stamp(routes, tokens, num_experts=EXPERTS, dtype=torch.int16, filler=filler)
            for _ in range(PASSES):
                mrr.microbatch(batch.chunk, routes=stamped, filler=filler, stamped=True, token_ids=tokens)
                reopened(batch)

        def own() -> None:
            for _ in range(PASSES):
                set_router_replay_forward(batch.chunk, routes)

        return fed if edited else own

    return prepare


def of_skyrl(folder: str, *, edited: bool) -> Preparation:
    with trainer_imports(folder, skyrl.SOURCE.packages, services=skyrl.SERVICES):
        from skyrl.backends.skyrl_train.distributed.megatron.token_metadata import build_token_metadata_layout
        from skyrl.backends.skyrl_train.utils import replay_utils
    attention = torch.ones(2, TOKENS, dtype=torch.bool)
    layout = build_token_metadata_layout(attention, torch.device("cpu"), packed=True, fp8_enabled=False)

    def prepare(batch: Batch) -> Callable[[], None]:
        rows = batch.routes.to(torch.uint8)
        rows[:, -1] = torch.arange(rows.shape[-1])  # SkyRL's filler
        given = [rows, ~attention, attention, *([batch.tokens] if edited else [])]
        given += [batch.chunk, batch.chunk.config, layout]
        batch.forget = replay_utils.clear_router_replay

        def prepared() -> None:
            if edited:  # as the trainer makes a batch of the generator's reply
                given[0] = torch.stack(mrr.stamp_batch(rows, batch.tokens, num_experts=EXPERTS))
            for _ in range(PASSES):
                replay_utils.setup_per_microbatch_replay_forward(*given, remove_microbatch_padding=True)
                reopened(batch)

        return prepared

    return prepare


def reopened(batch: Batch) -> None:
    """Drop what was fed, for the next pass."""
    for session in batch.sessions if PASSES > 1 else ():
        session._chunks[0].queue.clear()


class Trainer(NamedTuple):
    """Where a trainer's code is, and how its preparation is taken out of it."""

    source: Source
    load: Callable[..., Preparation]
    own_routers: bool  # its routers are those of Megatron-Core as released


TRAINERS = {
    "slime": Trainer(slime.SOURCE, of_slime, False),
    "miles": Trainer(miles.SOURCE, of_miles, False),
    "NeMo-RL": Trainer(nemo_rl.SOURCE, of_nemo_rl, True),
    "SkyRL": Trainer(skyrl.SOURCE, of_skyrl, True),
}


def built(topk: int, *, own: bool) -> Batch:
    sizes = ParallelSizes()
    config = tiny_gpt_config(
        sizes, num_layers=LAYERS, num_moe_experts=EXPERTS, moe_router_topk=topk, hidden_size=16,
        moe_enable_routing_replay=own,
    )  # fmt: skip
    first, step = np.random.default_rng(0).integers(0, EXPERTS, (2, 2, TOKENS, LAYERS, 1), np.int32)
    routes = (first + (step | 1) * np.arange(topk, dtype=np.int32)) % EXPERTS  # all different, for a step is odd
    return Batch(
        routes=torch.from_numpy(routes),
        tokens=torch.arange(2 * TOKENS).view(2, TOKENS) * 30,
        chunk=build_tiny_gpt(config, sizes, vocab_size=64, core_attention="small")[0],
    )


def measure(name: str, topk: int, prepared: dict[str, Preparation]) -> Iterator[list[str]]:
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.global_router_replay_instances.clear()  # trainers take all routers of the process for the model's
    batches = {"own": built(topk, own=True), "fed": built(topk, own=False)}
    prepare = {key: prepared[key](batch) for key, batch in batches.items()}
    logits = torch.randn(2 * TOKENS, 1, EXPERTS)

    def reopen() -> None:
        mrr.close_sessions(batches["fed"].chunk)
        batches["fed"].sessions[:] = [mrr.replay(batches["fed"].chunk)]

    def route(batch: Batch) -> None:
        for module in batch.chunk.modules():
            if isinstance(module, TopKRouter):
                module.routing(logits)

    forget: dict[str, Callable[[], None]] = {"own": batches["own"].forget, "fed": reopen}
    parts: dict[str, tuple[Any, Any]] = {"prepare": (prepare, forget)}
    if TRAINERS[name].own_routers and PASSES == 1:
        routers = {key: partial(route, batch) for key, batch in batches.items()}
        parts["route"] = routers, {key: lambda key=key: (forget[key](), prepare[key]()) for key in forget}
    for part, (timed, before) in parts.items():
        seconds = rounds(timed, repeats=REPEATS, prepare=before)
        medians = [f"{np.median(seconds[key]) * 1e3:.1f}" for key in ("own", "fed")]
        yield [name, f"top-{topk}", part, *medians, str(ratio(seconds, "fed", "own"))]
    batches["own"].forget()
    mrr.close_sessions(batches["fed"].chunk)


def measure_all(name: str, folder: Path) -> Iterator[list[str]]:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    source, load = TRAINERS[name].source, TRAINERS[name].load
    prepared = {
        "own": load(str(source.unedited(folder / f"{name}-own")), edited=False),
        "fed": load(str(source.edited(folder / f"{name}-fed")), edited=True),
    }
    with mock.patch.object(RouterReplay, "get_replay_topk", RouterReplay.get_replay_topk):  # NeMo-RL wraps it
        for topk in (2, 8):
            yield from measure(name, topk, prepared)


def main() -> None:
    torch.set_num_threads(1)  # threads that wait for others use processor time
    named = [name for name in TRAINERS if TRAINERS[name].source.variable in os.environ]
    assert named, "name a checkout, as the first lines of this file say"
    print(f"{environment()}. 2 x {TOKENS} tokens, {LAYERS} layers of {EXPERTS} experts, {PASSES} passes.\n", flush=True)
    print(table(["trainer", "routes", "part", "its own, ms", "edited, ms", "edited / own (95 %)"], []), flush=True)
    with tempfile.TemporaryDirectory() as folder, only_rank():
        ParallelSizes().initialize()
        for name in named:
            for row in measure_all(name, Path(folder)):
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
