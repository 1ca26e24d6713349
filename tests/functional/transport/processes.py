"""Processes of a test's own, which it may kill, threads in their place, and traces large enough to die in the middle of."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from megatron_router_replay import RoutingTrace
from megatron_router_replay.transport import ParallelLayout, RouteGroup, collective, open_store
from megatron_router_replay.transport.gather import TraceRows

LAYERS = (1, 2, 3, 4)
ONE = ParallelLayout(stage_layers=(LAYERS,))
LIMITS: dict[str, Any] = {
    "timeout": timedelta(seconds=120),
    "ready_timeout": timedelta(seconds=180),
}
_PRELOAD = ["megatron_router_replay.testing.preload", "megatron_router_replay.transport"]
"""That of GlooWorkers and more: a process has one fork server, which the first user starts."""


def make_trace(num_tokens: int = 400_000, *, seed: int = 0, num_experts: int = 128) -> RoutingTrace:
    """Return 8 ids a layer of 4 layers, 33 bytes a row with the mask; ids are distinct by construction."""
    first = torch.randint(0, 16, (num_tokens, len(LAYERS), 1), generator=torch.Generator().manual_seed(seed))
    return RoutingTrace(
        topk_indices=first + 16 * torch.arange(8),
        layer_numbers=LAYERS,
        num_experts=num_experts,
        sequence_lengths=(num_tokens // 4,) * 4,
    )


def check_sum(ids: torch.Tensor) -> int:
    """Return a number that depends on the place of every id."""
    weights = torch.arange(1, ids.shape[0] + 1).view(-1, 1)
    return int((ids.cpu().flatten(1).to(torch.int64) * weights).sum())


class Child:
    """A function in a process of its own, started; `result()` is its result or the text of its error."""

    def __init__(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            context.set_forkserver_preload(_PRELOAD)
        self._pipe, child_end = context.Pipe()
        arguments = (child_end, collective._BUCKET_BYTES, partial(function, *args, **options))
        self.process = context.Process(target=_run, args=arguments, daemon=True)
        self.process.start()
        child_end.close()

    def result(self, timeout_s: float = 60.0) -> Any:
        assert self._pipe.poll(timeout_s), "the child hangs"
        return self._pipe.recv()


def attempt(function: Callable[[], Any]) -> Any:
    """Return a function's result, or the text of its error."""
    try:
        return function()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def _run(pipe: Any, bucket_bytes: int, function: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    collective._BUCKET_BYTES = bucket_bytes
    pipe.send(attempt(function))


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Return the results of functions that wait for each other."""
    with ThreadPoolExecutor(len(functions)) as threads:
        return [future.result(300) for future in [threads.submit(function) for function in functions]]


def attempts(*functions: Callable[[], Any]) -> list[Any]:
    """Return the results of functions that wait for each other, or the texts of their errors."""
    return in_threads(*(partial(attempt, function) for function in functions))


@contextmanager
def children(*started: Child) -> Iterator[None]:
    """Kill those that are left at the end."""
    try:
        yield
    finally:
        for child in started:
            child.process.kill()


def die() -> None:
    """End this process as if it had crashed."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stop this process, as a debugger or a hanging driver does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def refuse() -> None:
    """Raise as a consumer or a source of the user's own does."""
    raise ValueError("no room for these rows")


def nothing() -> None:
    """Do nothing."""


def join(port: int, layout: ParallelLayout = ONE, **options: Any) -> RouteGroup:
    """Join the transport that meets at this port."""
    return RouteGroup(open_store("127.0.0.1", port, is_server=False), layout, **LIMITS | options)


def receive(
    port: int,
    layout: ParallelLayout = ONE,
    rank: int = 0,
    *,
    steps: int = 1,
    at_second_bucket: Callable[[], None] | None = None,
    before: Callable[[], Any] = nothing,
    after: Callable[[], Any] = nothing,
    **options: Any,
) -> list[int]:
    """Be a training rank: receive batches and return a check sum of each, unless something is done to it."""
    with join(port, layout, place=layout.place_of(rank), **options) as group:
        before()
        if at_second_bucket is None:
            sums = [check_sum(group.receive().topk_indices) for _ in range(steps)]
            after()
            return sums
        group.stream(lambda start, trace: at_second_bucket() if start else None)
        return []


class FailingRows(TraceRows):
    """A source that does something at the first row after the first bucket."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__([make_trace()])
        self.action = action

    def fill(self, runs: Any, layer_numbers: Any, memory: Any) -> None:
        if runs[0][0] > 0:
            self.action()
        super().fill(runs, layer_numbers, memory)


def send(port: int, layout: ParallelLayout = ONE, *, action: Callable[[], None] = nothing, **options: Any) -> None:
    """Be a rollout process: send a batch, and do something in the middle of it."""
    with join(port, layout, **{"sender": 0} | options) as group:
        group.send(FailingRows(action))


def send_small(group: RouteGroup) -> None:
    """Send a small batch and wait for it."""
    group.send(make_trace(400))
    group.join()
