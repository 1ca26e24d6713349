"""Every mode of session as one program on the software GPU: its waits, launches and races, and its wrong decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import megatron_router_replay as mrr
from tests.support import soft_gpu
from tests.support.soft_gpu import SoftGpu, to_gpu
from tests.unit.mcore.tiny_chunk import (
    AROUND,
    EXPERTS,
    TOPK,
    VOCAB,
    Chunk,
    disturb,
    flips,
    random_routes,
    watched,
    wrong_replays,
)

NUM, LAYERS = 3, 3
ROWS = torch.arange(8 * NUM).view(NUM, 2, 4)
IDS = (ROWS * 7) % VOCAB


def _trace(topk: int) -> mrr.RoutingTrace:
    return mrr.RoutingTrace(
        topk_indices=random_routes(8 * NUM, LAYERS, topk=topk),
        layer_numbers=range(1, LAYERS + 1),
        num_experts=EXPERTS,
        token_ids=IDS.flatten(),
    )


TRACE = _trace(TOPK)

Queue = Callable[[int], Any]
"""Gives a micro-batch; called right before its forward."""
Mode = Callable[[Chunk], Iterator[Queue]]


@dataclass
class Asked:
    """Counts of a program of NUM micro-batches.

    Attributes:
        waits, pageable: in queuing, forward and backward.
        at_the_start, at_the_end: waits in opening and leaving the session.
        launches: operations of the last micro-batch, in queuing, forward and backward.
        wrong: decisions, and recorded tokens, that are not the trace's.
        flips: recomputed decisions that are not their forward's.
    """

    waits: list[str] = field(default_factory=list)
    pageable: list[str] = field(default_factory=list)
    at_the_start: list[str] = field(default_factory=list)
    at_the_end: list[str] = field(default_factory=list)
    launches: int = 0
    races: list[str] = field(default_factory=list)
    wrong: int = 0
    flips: int = 0


def no_session(chunk: Chunk) -> Iterator[Queue]:
    yield lambda number: None


def megatron_replay(chunk: Chunk, action: str = "REPLAY_FORWARD") -> Iterator[Queue]:
    """Megatron-Core's own class, its targets on the device beforehand; recomputes are announced, as it wants them."""
    from megatron.core.transformer.moe import router_replay as upstream

    actions = upstream.RouterReplayAction
    for router in chunk.routers:
        router.router_replay = upstream.RouterReplay()
        router.register_forward_pre_hook(lambda router, args: router.router_replay.set_router_replay_action(
            getattr(actions, action) if torch._C._current_graph_task_id() == -1 else actions.REPLAY_BACKWARD
        ))  # fmt: skip
    with _unlogged():
        targets = [[layer.to("cuda") for layer in _layers(number)] for number in range(NUM)]

    def queue(number: int) -> None:
        for router, target in zip(chunk.routers, targets[number]):
            router.router_replay.clear_indices()
            router.router_replay.set_target_indices(target)

    yield queue


def megatron_record(chunk: Chunk) -> Iterator[Queue]:
    yield from megatron_replay(chunk, "RECORD")


def drop_in(chunk: Chunk, on_gpu: bool = False) -> Iterator[Queue]:
    """Our RouterReplay, driven as Megatron-Core's, with targets on the host or on the GPU."""
    from megatron_router_replay.mcore.core.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.clear_global_router_replay_instances()
    for router in chunk.routers:
        router.router_replay = RouterReplay()
    with _unlogged():
        targets = [[layer.to("cuda") if on_gpu else layer for layer in _layers(number)] for number in range(NUM)]

    def queue(number: int) -> None:
        RouterReplay.clear_global_indices()
        RouterReplay.set_replay_data(targets[number])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    yield queue
    RouterReplay.clear_global_router_replay_action()


def _layers(number: int) -> tuple[Tensor, ...]:
    """Return a micro-batch's routes as its routers see them, one [num_tokens, topk] a layer."""
    return TRACE.topk_indices[ROWS[number].t().reshape(-1)].long().unbind(1)


def in_session(open_session: Callable[[Chunk], Any], queue: Callable[[Any, Chunk, int], Any]) -> Mode:
    def mode(chunk: Chunk) -> Iterator[Queue]:
        with open_session(chunk) as session:
            yield lambda number: queue(session, chunk, number)

    return mode


def _queue_rows(session: Any, chunk: Chunk, number: int) -> None:
    session.microbatch(ROWS[number], chunk)


def _queue_on_another_stream(session: Any, chunk: Chunk, number: int) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        session.microbatch(ROWS[number], chunk)


def _on_the_gpu(chunk: Chunk, some_live: bool = False) -> Any:
    with _unlogged():
        trace = (TRACE.without_routes(LIVE) if some_live else TRACE).to("cuda")
    return mrr.replay(chunk, trace)


def _queue_gpu_rows(session: Any, chunk: Chunk, number: int) -> None:
    with _unlogged():
        rows = ROWS[number].to("cuda")
    session.microbatch(rows, chunk)


def _queue_all_on_the_gpu(session: Any, chunk: Chunk, number: int) -> None:
    """Queue rows of a trace on the host, all of it on the GPU: the host must read them."""
    with _unlogged():
        rows, ids = ROWS[number].to("cuda"), IDS[number].to("cuda")
        padding = torch.zeros_like(rows) > 0
    session.microbatch(rows, chunk, token_ids=ids, padding=padding)


LIVE = torch.arange(8 * NUM) % 8 == 5
"""A row of each micro-batch that `some live` gives no route."""


def _some_live(chunk: Chunk) -> Any:
    return mrr.replay(chunk, TRACE.without_routes(LIVE))


def recorded(chunk: Chunk) -> Iterator[Queue]:
    """A recording whose trace is the chunk's `recorded` at the end."""
    with mrr.record(chunk) as session:
        yield lambda number: session.microbatch(ROWS[number], chunk)
    chunk.recorded = session.trace()


MODES: dict[str, Mode] = {
    "no session": no_session,
    "Megatron's replay": megatron_replay,
    "Megatron's record": megatron_record,
    "record": recorded,
    "replay": in_session(lambda chunk: mrr.replay(chunk, TRACE), _queue_rows),
    "some live": in_session(_some_live, _queue_rows),
    "verify": in_session(lambda chunk: mrr.replay(chunk, TRACE, verify=True), _queue_rows),
    "trace on the GPU": in_session(_on_the_gpu, _queue_gpu_rows),
    "trace on the GPU, some live": in_session(partial(_on_the_gpu, some_live=True), _queue_gpu_rows),
    "rows on the GPU": in_session(lambda chunk: mrr.replay(chunk, TRACE), _queue_all_on_the_gpu),
    "another stream": in_session(lambda chunk: mrr.replay(chunk, TRACE), _queue_on_another_stream),
    "freeze": in_session(lambda chunk: mrr.freeze_recompute(chunk), lambda *args: None),
    "drop-in": drop_in,
    "drop-in, targets on the GPU": lambda chunk: drop_in(chunk, on_gpu=True),
}
LIVE_MODES = ("no session", "record", "Megatron's record", "freeze")
"""In which the routers choose by themselves."""


def ask(name: str, recompute: str, options: dict[str, Any]) -> Asked:
    """Run a mode on the software GPU, in a process of its own, with a model of these options."""
    asked = Asked()
    trace = _trace(options.get("moe_router_topk", TOPK))
    with SoftGpu() as gpu, mock.patch.dict(globals(), TRACE=trace):
        chunk = Chunk(LAYERS, **options)
        chunk.around = AROUND[recompute]
        to_gpu(chunk)
        tokens = [ids.to("cuda") for ids in IDS]
        mode = contextmanager(MODES[name])(chunk)
        with _watched(chunk) as seen:
            with gpu.logged() as log:
                queue = mode.__enter__()
            asked.at_the_start += log.waits
            for number in range(NUM):
                with gpu.logged() as log:
                    queue(number)
                    loss = chunk(tokens[number], number).square().sum()
                    with _unlogged():
                        disturb(chunk, seed=number)
                    loss.backward()
                asked.waits += log.waits
                asked.pageable += log.pageable
                asked.launches = log.kernels
            with gpu.logged() as log:
                mode.__exit__(None, None, None)
            asked.at_the_end += log.waits
        on_host = {key: [routing_map.cpu() for routing_map in maps] for key, maps in seen.items()}
        asked.flips = flips(on_host)
        if name not in LIVE_MODES:
            asked.wrong = wrong_replays(on_host, TRACE.without_routes(LIVE) if "some live" in name else TRACE)
        elif name == "record":
            asked.wrong = wrong_replays(on_host, chunk.recorded) + int(
                (chunk.recorded.token_ids != IDS.flatten()).sum()
            )
        asked.races = sorted(set(gpu.races))
    return asked


def error_of(what: str) -> str:
    """Return the error of a session whose rows, trace and ids are on the GPU."""
    with SoftGpu():
        chunk: Any = to_gpu(Chunk(LAYERS))
        trace, rows, ids = TRACE.to("cuda"), ROWS[0].to("cuda"), IDS[0].to("cuda")
        if what != "nothing":
            rows[0, 1] = -1
        if what == "another token":
            ids[1, 2] += 1
            # Not compared: a position without a row, and one whose row the trace knows no token of.
            ids[0, 1] += 1
            ids[0, 3] += 1
            trace = TRACE._with(token_ids=TRACE.token_ids.index_fill(0, torch.tensor(3), -1)).to("cuda")
        session = mrr.replay(chunk, trace, min_replayed=0 if what == "another token" else 1.0)
        session.microbatch(rows, chunk)
        try:
            chunk(ids)
            session.close()
        except mrr.RouterReplayError as error:
            session.close(check=False)
            return str(error)
    return ""


def error_of_a_stale_capture() -> str:
    """Return the error of a session on the GPU in which tokens 100 to 166 of sample 1 have one and the same row."""
    ids = torch.randint(VOCAB, (2, 300), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(600).view(2, 1, 300)
    with mrr.record(recorded := Chunk(LAYERS)) as recording:
        recording.microbatch(rows.view(2, 300))
        recorded(ids)
    right = recording.trace()
    routes = right.topk_indices.clone()
    routes[400:467] = torch.tensor([6, 7])
    trace = right._with(topk_indices=routes, token_ids=ids.flatten(), sequence_lengths=(300, 300))
    with SoftGpu():
        chunk: Any = to_gpu(Chunk(LAYERS))
        session = mrr.replay(chunk, trace, ask_every_layer=True)
        for number in range(2):
            for chunk.fail_at in (0, None) if number else (None,):  # the second micro-batch fails, and is repeated
                session.microbatch(rows[number].to("cuda"), chunk)
                with suppress(ArithmeticError):
                    chunk(ids[number : number + 1].to("cuda"))
        try:
            session.close()
        except mrr.RouterReplayError as error:
            return str(error)
    return ""


def ran_under_another_stream() -> list[str]:
    """Return the races of a replay, some of whose rows are live, which is left under another current stream than it ran."""
    with SoftGpu() as gpu:
        chunk: Any = to_gpu(Chunk(LAYERS))
        side = torch.cuda.Stream()
        ids = IDS[0].to("cuda")
        with _some_live(chunk) as session:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                session.microbatch(ROWS[0], chunk)
                chunk(ids)
        return sorted(set(gpu.races))


@contextmanager
def _watched(chunk: Chunk) -> Iterator[Any]:
    """As `watched`, whose own operations are not logged."""
    with watched(chunk) as seen:
        for router in chunk.routers:
            (number, hook), *_ = list(router._forward_hooks.items())[-1:]

            def unlogged(*args: Any, hook: Any = hook) -> None:
                with _unlogged():
                    hook(*args)

            router._forward_hooks[number] = unlogged
        yield seen


@contextmanager
def _unlogged() -> Iterator[None]:
    gpu: Any = soft_gpu.in_use()
    log, gpu.log = gpu.log, None
    known = soft_gpu.Clock(soft_gpu.HOST.clock)
    try:
        yield
    finally:
        gpu.log = log
        # Waits in here are none of the program.
        soft_gpu.HOST.clock = soft_gpu.Clock(known | {soft_gpu.HOST: soft_gpu.HOST.clock.get(soft_gpu.HOST, 0)})
