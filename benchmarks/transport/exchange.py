"""Send to receive: the batch from this process to two others, in several ways that take turns."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.transport.common import LIMITS, MESSAGE, ROW_BYTES, STAGES, Row, children, gb_per_s
from megatron_router_replay import RoutingTrace
from megatron_router_replay.transport import DistributedReceiver, DistributedSender, ParallelLayout, open_store

ROUNDS = 7
"""Of which the first, when memory is new and connections are made, does not count."""


class Exchange:
    """A way to get the batch from this process to two others; they wait, without work, while others take their turn."""

    def __init__(self, receive: Callable[..., None], *args: Any) -> None:
        self._store = open_store("127.0.0.1", is_server=True)
        self._processes, self._queue = children(receive, self._store.port, *args)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def step(self) -> None:
        """Send the batch once; counts the seconds until both have it, and this process's CPU seconds."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.send()
        self.seconds.append(time.perf_counter() - wall)
        self.cpu_seconds.append(time.process_time() - cpu)

    def send(self) -> None:
        raise NotImplementedError

    def finish(self) -> list[Any]:
        """Return what the receivers say: [check sums, CPU seconds of each round]."""
        said = [self._queue.get() for _ in self._processes]
        for process in self._processes:
            process.join()
        for checks_of_rank, cpu in said:
            assert len(checks_of_rank) == 1, "every round brought the same"
            self.cpu_seconds = [mine + theirs for mine, theirs in zip(self.cpu_seconds, cpu)]
        return said

    def row(self, what: str, total: int) -> Row:
        return (
            what,
            f"{gb_per_s(total, min(self.seconds[1:]))} best, {gb_per_s(total, statistics.median(self.seconds[1:]))} median; "
            f"{statistics.median(self.cpu_seconds[1:]) / total * 1e9:.2f} CPU s a GB on both sides",
        )


def _receive(rank: int, queue: Any, port: int, reuse: bool) -> None:
    store = open_store("127.0.0.1", port, is_server=False)
    layout = ParallelLayout(stage_layers=STAGES)
    sums, cpu = set(), []
    with DistributedReceiver(store, layout, layout.place_of(rank), reuse_memory=reuse, **LIMITS) as receiver:
        for _ in range(ROUNDS):
            began = time.process_time()
            trace = receiver.receive()
            cpu.append(time.process_time() - began)
            sums.add(int(trace.topk_indices[::997].sum()))
            del trace
    queue.put((sums, cpu))


class Ours(Exchange):
    """This package's way."""

    def __init__(self, traces: list[RoutingTrace], *, reuse: bool) -> None:
        super().__init__(_receive, reuse)
        self._traces = traces
        self.sender = DistributedSender(
            self._store,
            ParallelLayout(stage_layers=STAGES),
            bucket_bytes=MESSAGE // ROW_BYTES * (ROW_BYTES + 1),
            **LIMITS,
        )

    def send(self) -> None:
        self.sender.times.reset()
        self.sender.send(self._traces)
        self.sender.join()

    def finish(self) -> list[Any]:
        said = super().finish()
        self.sender.close()
        expected = [sum(int(part.sum()) for part in _every(self._traces, 997, stage)) for stage in range(2)]
        assert sorted(sums.pop() for sums, _ in said) == sorted(expected), "every rank got its slice"
        return said


def _every(traces: list[RoutingTrace], step: int, stage: int) -> list[torch.Tensor]:
    parts, row = [], 0
    for trace in traces:
        parts.append(trace.topk_indices[(-row) % step :: step, 24 * stage : 24 * stage + 24])
        row += trace.num_tokens
    return parts


def _raw_receive(rank: int, queue: Any, port: int, nbytes: int, memory: str) -> None:
    group = dist.ProcessGroupGloo(_raw_store(port, rank), 1, 2, timedelta(minutes=30))
    whole = memory != "two messages"
    into = torch.empty(nbytes if whole else 2 * MESSAGE, dtype=torch.uint8)
    cpu = []
    for _ in range(ROUNDS):
        began = time.process_time()
        if memory == "new":
            into = torch.empty(nbytes, dtype=torch.uint8)
        _two_in_flight(nbytes, lambda i, size, into=into: group.recv([_piece(into, i, size, whole)], 0, 0))
        cpu.append(time.process_time() - began)
        group.send([torch.zeros(1, dtype=torch.uint8)], 0, 0).wait(timedelta(minutes=1))
    queue.put(({0}, cpu))


def _piece(memory: torch.Tensor, i: int, size: int, whole: bool) -> torch.Tensor:
    start = (i if whole else i % 2) * MESSAGE
    return memory[start : start + size]


def _raw_store(port: int, rank: int) -> Any:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(f"raw{rank}", store)


def _two_in_flight(nbytes: int, start: Callable[[int, int], Any]) -> None:
    works: list[Any] = []
    for i in range(-(-nbytes // MESSAGE)):
        if len(works) == 2:
            works.pop(0).wait()
        works.append(start(i, min(MESSAGE, nbytes - i * MESSAGE)))
    for work in works:
        work.wait()


class Raw(Exchange):
    """Messages of the same size over the same gloo: of two that lie ready, or of the batch, which has to be gathered."""

    def __init__(self, traces: list[RoutingTrace], *, memory: str, gathered: bool) -> None:
        self._nbytes = sum(trace.topk_indices.nbytes for trace in traces) // 2
        super().__init__(_raw_receive, self._nbytes, memory)
        self._traces = traces if gathered else None
        self._groups = [
            dist.ProcessGroupGloo(_raw_store(self._store.port, rank), 0, 2, timedelta(minutes=30)) for rank in range(2)
        ]
        self._memory = [torch.ones(2 * MESSAGE, dtype=torch.uint8) for _ in range(2)]

    def send(self) -> None:
        threads = [threading.Thread(target=self._send, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _send(self, rank: int) -> None:
        group, rows = self._groups[rank], self._rows(rank)

        def start(i: int, size: int) -> Any:
            message = _piece(self._memory[rank], i, size, False)
            if self._traces is not None:
                at = 0
                for part in next_rows(rows, size // ROW_BYTES):
                    message[at : at + part.numel()].view(part.shape).copy_(part)
                    at += part.numel()
            return group.send([message], 1, 0)

        _two_in_flight(self._nbytes, start)
        group.recv([torch.zeros(1, dtype=torch.uint8)], 1, 0).wait(timedelta(minutes=1))

    def _rows(self, rank: int) -> list[torch.Tensor]:
        return [trace.topk_indices[:, 24 * rank : 24 * rank + 24] for trace in self._traces or []]


def next_rows(parts: list[torch.Tensor], count: int) -> Iterator[torch.Tensor]:
    """Take `count` rows from the front of `parts`."""
    while count:
        part = parts.pop(0)
        if len(part) > count:
            parts.insert(0, part[count:])
        yield part[:count]
        count -= min(count, len(part))


def exchange(traces: list[RoutingTrace]) -> list[Row]:
    """Send the batch in several ways that take turns, so that who else uses the machine slows all of them down."""
    ways: dict[str, Exchange] = {
        "**this package**, into new memory": Ours(traces, reuse=False),
        "raw gloo, nothing gathered, into new memory": Raw(traces, memory="new", gathered=False),
        "**this package**, into the same memory (`reuse_memory=True`)": Ours(traces, reuse=True),
        "raw gloo, gathered from the samples, into the same memory": Raw(traces, memory="same", gathered=True),
        "raw gloo, nothing gathered, the same two messages over and over": Raw(
            traces, memory="two messages", gathered=False
        ),
    }
    for number in range(ROUNDS):
        for way in list(ways.values())[:: 1 if number % 2 else -1]:
            way.step()
    total = sum(trace.topk_indices.nbytes for trace in traces)
    rows = []
    for what, way in ways.items():
        way.finish()
        rows.append(way.row(what, total))
    new, raw_new, same, gathered, ready = ways.values()
    for what, one, other in (
        ("**ratio**, new memory", new, raw_new),
        ("**ratio**, same memory, to raw gloo that gathers as it must", same, gathered),
        ("**ratio**, same memory, to raw gloo that gathers nothing and keeps nothing", same, ready),
    ):
        ratios = [theirs / ours for ours, theirs in zip(one.seconds[1:], other.seconds[1:])]
        best = min(other.seconds[1:]) / min(one.seconds[1:])
        rows.append(
            (what, f"**{statistics.median(ratios):.2f}** median of {len(ratios)} rounds, {best:.2f} of the best")
        )
    assert isinstance(same, Ours)
    legs = same.sender.times.metrics("")
    rows.append(
        ("leg partition, beside sending", f"{legs['rollout_partition_gb_per_s']:.2f} GB/s in each of two threads")
    )
    return rows
