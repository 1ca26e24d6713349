"""Every mode of session as one program on the software GPU: what it asks of the device, and whether it is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
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
    as_map,
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
ROUTES = TRACE.topk_indices.view(NUM, 2, 4, LAYERS, TOPK)

Queue = Callable[[int], dict[str, Any]]
"""Micro-batch -> what its forward gets besides the tokens; called right before it."""
Mode = Callable[[Chunk], Iterator[Queue]]


@dataclass
class Asked:
    """What a program of NUM micro-batches asked of the device, and what it got.

    Attributes:
        waits, pageable: in queuing, forward and backward.
        at_the_start, at_the_end: waits in opening and leaving the session.
        launches: operations of one micro-batch, the last, in queuing, forward and backward.
        all_launches: of the session, its beginning and end too.
        wrong: decisions, and recorded tokens, that are not the trace's.
        flips: recomputed decisions that are not their forward's.
    """

    waits: list[str] = field(default_factory=list)
    pageable: list[str] = field(default_factory=list)
    at_the_start: list[str] = field(default_factory=list)
    at_the_end: list[str] = field(default_factory=list)
    launches: int = 0
    all_launches: int = 0
    races: list[str] = field(default_factory=list)
    wrong: int = 0
    flips: int = 0


def no_session(chunk: Chunk) -> Iterator[Queue]:
    yield lambda number: {}


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

    def queue(number: int) -> dict[str, Any]:
        for router, target in zip(chunk.routers, targets[number]):
            router.router_replay.clear_indices()
            router.router_replay.set_target_indices(target)
        return {}

    yield queue


def megatron_record(chunk: Chunk) -> Iterator[Queue]:
    yield from megatron_replay(chunk, "RECORD")


def drop_in(chunk: Chunk) -> Iterator[Queue]:
    """Our RouterReplay, driven as Megatron-Core's, with targets on the host."""
    from megatron_router_replay.mcore.core.router_replay import RouterReplay, RouterReplayAction

    for router in chunk.routers:
        router.router_replay = RouterReplay()

    def queue(number: int) -> dict[str, Any]:
        for router, target in zip(chunk.routers, _layers(number)):
            router.router_replay.clear_indices()
            router.router_replay.set_target_indices(target)
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        return {}

    yield queue
    for router in chunk.routers:
        router.router_replay.clear_router_replay_action()


def _layers(number: int) -> tuple[Tensor, ...]:
    """Return a micro-batch's routes as its routers see them, one [num_tokens, topk] a layer."""
    return TRACE.topk_indices[ROWS[number].t().reshape(-1)].long().unbind(1)


def in_session(open_session: Callable[[Chunk], Any], queue: Callable[[Any, Chunk, int], Any]) -> Mode:
    def mode(chunk: Chunk) -> Iterator[Queue]:
        with open_session(chunk) as session:
            yield lambda number: queue(session, chunk, number) or {}

    return mode


def _queue_rows(session: Any, chunk: Chunk, number: int, **options: Any) -> None:
    session.microbatch(ROWS[number], chunk, **options)


def attached(chunk: Chunk) -> Iterator[Queue]:
    mrr.attach(chunk)
    with mrr.replay(chunk, TRACE):
        yield lambda number: {"routing_rows": ROWS[number]}


def other_stream(chunk: Chunk) -> Iterator[Queue]:
    """Queued under another current stream than the model's."""
    side = torch.cuda.Stream()

    def queue(number: int) -> dict[str, Any]:
        with torch.cuda.stream(side):
            session.microbatch(ROWS[number], chunk)
        return {}

    with mrr.replay(chunk, TRACE) as session:
        yield queue


def _on_the_gpu(chunk: Chunk, **options: Any) -> Any:
    with _unlogged():
        trace = TRACE.to("cuda")
    return mrr.replay(chunk, trace, **options)


def _queue_gpu_rows(session: Any, chunk: Chunk, number: int) -> None:
    with _unlogged():
        rows = ROWS[number].to("cuda")
    session.microbatch(rows, chunk)


def _queue_all_on_the_gpu(session: Any, chunk: Chunk, number: int) -> None:
    """Queue rows of a trace on the host, all of it on the GPU: the host must read them."""
    with _unlogged():
        rows, ids = ROWS[number].to("cuda"), IDS[number].to("cuda")
        padding, trained = torch.zeros_like(rows) > 0, torch.ones_like(rows)
    session.microbatch(rows, chunk, token_ids=ids, padding=padding, trained=trained)


LIVE = torch.arange(8 * NUM) % 8 == 5
"""A row of each micro-batch that `some live` gives no route."""


def _some_live(chunk: Chunk) -> Any:
    return mrr.replay(chunk, TRACE.without_routes(LIVE))


def recorded(chunk: Chunk) -> Iterator[Queue]:
    """A recording whose trace is the chunk's `recorded` behind it."""
    with mrr.record(chunk) as session:
        yield lambda number: session.microbatch(ROWS[number], chunk) or {}
    chunk.recorded = session.trace()


MODES: dict[str, Mode] = {
    "no session": no_session,
    "Megatron's replay": megatron_replay,
    "Megatron's record": megatron_record,
    "record": recorded,
    "replay": in_session(lambda chunk: mrr.replay(chunk, TRACE), _queue_rows),
    "replay without agreement": in_session(lambda chunk: mrr.replay(chunk, TRACE, min_agreement=0), _queue_rows),
    "attached": attached,
    "some live": in_session(_some_live, _queue_rows),
    "verify": in_session(lambda chunk: mrr.replay(chunk, TRACE, verify=True), _queue_rows),
    "trace on the GPU": in_session(_on_the_gpu, _queue_gpu_rows),
    "trace on the GPU, all routed": in_session(lambda chunk: _on_the_gpu(chunk, min_replayed=1.0), _queue_gpu_rows),
    "rows on the GPU": in_session(lambda chunk: mrr.replay(chunk, TRACE), _queue_all_on_the_gpu),
    "another stream": other_stream,
    "freeze": in_session(lambda chunk: mrr.freeze_recompute(chunk), lambda *args: None),
    "drop-in": drop_in,
}
LIVE_MODES = ("no session", "record", "Megatron's record", "freeze")
"""In which the routers choose by themselves."""


def ask(name: str, recompute: str, **options: Any) -> dict[str, Any]:
    """Run a mode on the software GPU, in a process of its own; see `Asked`."""
    asked = Asked()
    with SoftGpu() as gpu:
        chunk = Chunk(LAYERS, **options)
        chunk.around = AROUND[recompute]
        to_gpu(chunk)
        tokens = [ids.to("cuda") for ids in IDS]
        mode = contextmanager(MODES[name])(chunk)
        with _watched(chunk) as seen:
            with gpu.logged() as log:
                queue = mode.__enter__()
            asked.at_the_start += log.waits
            asked.all_launches += log.kernels
            for number in range(NUM):
                with gpu.logged() as log:
                    others = queue(number)
                    loss = chunk(tokens[number], number, **others).square().sum()
                    with _unlogged():
                        disturb(chunk, seed=number)
                    loss.backward()
                asked.waits += log.waits
                asked.pageable += log.pageable
                asked.launches = log.kernels
                asked.all_launches += log.kernels
            with gpu.logged() as log:
                mode.__exit__(None, None, None)
            asked.at_the_end += log.waits
            asked.all_launches += log.kernels
        on_host = {key: [routing_map.cpu() for routing_map in maps] for key, maps in seen.items()}
        asked.flips = flips(on_host)
        if name not in LIVE_MODES:
            asked.wrong = wrong_replays(on_host, TRACE.without_routes(LIVE) if name == "some live" else TRACE)
        elif name == "record":
            asked.wrong = wrong_replays(on_host, chunk.recorded) + int(
                (chunk.recorded.token_ids != IDS.flatten()).sum()
            )
        asked.races = sorted(set(gpu.races))
    return asdict(asked)


def ask_top4(name: str, recompute: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run a mode that replays rows, or none, with routers of four experts a token."""
    with mock.patch.dict(globals(), TRACE=_trace(4)):
        return ask(name, recompute, moe_router_topk=4, **options)


def told_late(what: str) -> str:
    """Return what a session says, when it is left, of a fault that only the device knew of."""
    with SoftGpu():
        chunk: Any = to_gpu(Chunk(LAYERS))
        trace, rows, ids = TRACE.to("cuda"), ROWS[0].to("cuda"), IDS[0].to("cuda")
        if what != "nothing":
            rows[0, 1] = -1
        if what.startswith("another token"):
            ids[1, 2] += 1
            # Not compared: a position without a row, and one whose row the trace knows no token of.
            ids[0, 1] += 1
            ids[0, 3] += 1
            trace = TRACE._with(token_ids=TRACE.token_ids.index_fill(0, torch.tensor(3), -1)).to("cuda")
        least = 1.0 if what in ("nothing", "no route") else 0
        session = mrr.replay(chunk, trace, min_replayed=least)
        session.microbatch(rows, chunk, token_ids=ids if what == "another token queued" else None)
        chunk(ids)
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


def captured(what: str) -> str:
    """Return what is said where a CUDA graph captures a micro-batch that is queued, or a router."""
    with SoftGpu():
        chunk: Any = to_gpu(Chunk(LAYERS))
        ids = IDS[0].to("cuda")
        session = mrr.replay(chunk, TRACE)
        if what == "router":
            session.microbatch(ROWS[0], chunk)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                chunk(ids) if what == "router" else session.microbatch(ROWS[0], chunk)
        except (mrr.RouterReplayError, RuntimeError) as error:
            return str(error)
        finally:
            session.close(verify=False)
    return ""


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
        # What the host waited for in here, the program has not waited for.
        soft_gpu.HOST.clock = soft_gpu.Clock(known | {soft_gpu.HOST: soft_gpu.HOST.clock.get(soft_gpu.HOST, 0)})


def targets_on_the_gpu(num_layers: int) -> tuple[int, list[str], int]:
    """Return (launches, waits) of `set_replay_data` with targets on the GPU, and the wrong decisions of the next forward."""
    from megatron_router_replay.mcore import RouterReplay, RouterReplayAction

    RouterReplay.clear_global_router_replay_instances()
    routes = random_routes(8, num_layers)
    with SoftGpu() as gpu:
        chunk: Any = to_gpu(Chunk(num_layers))
        for router in chunk.routers:
            router.router_replay = RouterReplay()
        targets = [layer.to("cuda") for layer in routes.long().unbind(1)]
        with gpu.logged() as log:
            RouterReplay.set_replay_data(targets)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        with watched(chunk) as seen:
            chunk(IDS[0].to("cuda"))
        RouterReplay.clear_global_router_replay_action()
        maps = [maps[0].cpu() for maps in seen.values()]
    RouterReplay.clear_global_router_replay_instances()
    wrong = sum(int((got != as_map(routes[:, layer])).any(dim=1).sum()) for layer, got in enumerate(maps))
    return log.kernels, log.waits, wrong
