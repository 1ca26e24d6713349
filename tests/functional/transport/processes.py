"""Processes of a test's own, which it may kill, and traces large enough to die in the middle of."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from megatron_router_replay import RoutingTrace
from megatron_router_replay.transport import DistributedReceiver, DistributedSender, ParallelLayout, open_store
from megatron_router_replay.transport.rows import TraceRows

LIMITS = {"timeout": timedelta(seconds=20), "ready_timeout": timedelta(seconds=60)}
SHORT = {"timeout": timedelta(seconds=2), "ready_timeout": timedelta(seconds=2)}
LAYERS = (1, 2, 3, 4)
ONE = ParallelLayout(stage_layers=(LAYERS,))
BUCKET = 1 << 20
_PRELOAD = ["megatron_router_replay.testing.preload", "megatron_router_replay.transport"]
"""That of GlooWorkers and more: a process has one fork server, started by whoever needs it first."""


def make_trace(num_tokens: int = 400_000, *, seed: int = 0) -> RoutingTrace:
    """Return 8 ids a layer of 4 layers, 33 bytes a row with the mask; ids are distinct by construction."""
    first = torch.randint(0, 16, (num_tokens, len(LAYERS), 1), generator=torch.Generator().manual_seed(seed))
    return RoutingTrace(
        topk_indices=(first + 16 * torch.arange(8)).to(torch.uint8),
        layer_numbers=LAYERS,
        num_experts=128,
        sequence_lengths=(num_tokens // 4,) * 4,
    )


class Child:
    """A function in a process of its own, started; `result()` is what it returned or the text of what it raised."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if methods and "forkserver" in methods:
            context.set_forkserver_preload(_PRELOAD)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, function, args), daemon=True)
        self.process.start()
        theirs.close()

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until the child said `text`."""
        assert self._pipe.poll(timeout_s), f"the child did not say {text!r}"
        assert self._pipe.recv() == text

    def result(self, timeout_s: float = 60.0) -> Any:
        if not self._pipe.poll(timeout_s):
            raise AssertionError("the child hangs")
        result = self._pipe.recv()
        self.process.join(10)
        return result

    def died_by(self) -> int:
        self.process.join(30)
        return -int(self.process.exitcode)

    def kill(self) -> None:
        self.process.kill()


def _run(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        pipe.send(function(pipe.send, *args))
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}" if str(error) else traceback.format_exc())


def die(*_: Any) -> None:
    """End this process as if it had crashed."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def children(*started: Child) -> Iterator[None]:
    """Kill what is left at the end."""
    try:
        yield
    finally:
        for child in started:
            child.kill()


def receive(say: Any, port: int, layout: ParallelLayout, rank: int, options: dict[str, Any]) -> Any:
    """Receive `steps` batches and return a check sum of each; the options make it slow, or die."""
    limits = options.get("limits", LIMITS)
    store = open_store("127.0.0.1", port, is_server=False)
    place = layout.place_of(rank)
    with DistributedReceiver(store, layout, place, **limits, **options.get("transport", {})) as receiver:
        say("started")
        if options.get("waits_for"):
            store.wait([options["waits_for"]], timedelta(seconds=60))
        if options.get("die") == "first":
            die()
        if options.get("die") == "connected":
            receiver._connect()
            die()
        if options.get("die") == "second bucket":
            receiver.stream(lambda start, trace: die() if start else None)
        if options.get("raise") == "second bucket":
            receiver.stream(lambda start, trace: 1 // (start == 0))
        if options.get("slow"):
            rows: list[RoutingTrace] = []

            def consume(start: int, trace: RoutingTrace) -> None:
                time.sleep(options["slow"])
                rows.append(trace.topk_indices.clone())  # type: ignore[arg-type]

            receiver.stream(consume)
            return [check_sum(torch.cat(rows))]  # type: ignore[call-overload]
        return [check_sum(receiver.receive(options.get("plan")).topk_indices) for _ in range(options.get("steps", 1))]


def check_sum(ids: torch.Tensor) -> int:
    """Return a number that depends on the place of every id."""
    weights = torch.arange(1, ids.shape[0] + 1).view(-1, 1)
    ids = ids.cpu()
    return int((ids.flatten(1).to(torch.int64) * weights).sum())


class DyingRows(TraceRows):
    """A source that ends its process, or raises, when asked for rows behind the first bucket."""

    how = "die"

    def fill(self, part: Any, start: int, stop: int, memory: Any) -> None:
        if start:
            if self.how == "raise":
                raise ValueError("the rows are gone")
            die()
        super().fill(part, start, stop, memory)


def send_and_die(say: Any, port: int, layout: ParallelLayout, bucket_bytes: int) -> None:
    """Send, and die when the first bucket is under way."""
    store = open_store("127.0.0.1", port, is_server=False)
    sender = DistributedSender(store, layout, bucket_bytes=bucket_bytes, **LIMITS)
    sender.send(DyingRows([make_trace()]))
    sender.join()
