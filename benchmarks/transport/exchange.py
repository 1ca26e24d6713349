"""Send to receive: a batch from this process to two others, over this package and over raw gloo in turns."""

from __future__ import annotations

import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.transport.common import LIMITS, Row, children, gb_per_s, table
from megatron_router_replay import RoutingTrace
from megatron_router_replay.transport import ParallelLayout, RouteGroup, open_store

ROUNDS = 7
"""Of which the first, when memory is new and connections are made, does not count."""
SAMPLE, NUM_LAYERS, TOPK, NUM_EXPERTS = 4096, 48, 8, 128
LAYOUT = ParallelLayout(stage_layers=(tuple(range(1, 25)), tuple(range(25, 49))))
MESSAGE = 32 << 20


class Exchange(ABC):
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

    @abstractmethod
    def send(self) -> None:
        """Send the batch, until both have it."""

    def finish(self) -> list[Any]:
        """Return the receivers' check sums and add their CPU seconds of each round."""
        results = [self._queue.get() for _ in self._processes]
        for process in self._processes:
            process.join()
        for _, cpu in results:
            self.cpu_seconds = [own + received for own, received in zip(self.cpu_seconds, cpu)]
        return [sums for sums, _ in results]

    def row(self, what: str, total: int) -> Row:
        return (
            what,
            f"{gb_per_s(total, min(self.seconds[1:]))} best, {gb_per_s(total, statistics.median(self.seconds[1:]))} median; "
            f"{statistics.median(self.cpu_seconds[1:]) / total * 1e9:.2f} CPU s a GB on both sides",
        )


def _receive(rank: int, queue: Any, port: int) -> None:
    store = open_store("127.0.0.1", port, is_server=False)
    sums, cpu = set(), []
    with RouteGroup(store, LAYOUT, place=LAYOUT.place_of(rank), **LIMITS) as group:
        for _ in range(ROUNDS):
            began = time.process_time()
            trace = group.receive()
            cpu.append(time.process_time() - began)
            sums.add(int(trace.topk_indices[::997].sum()))
            del trace
    queue.put((sums, cpu))


class Ours(Exchange):
    """This package's way."""

    def __init__(self, traces: list[RoutingTrace]) -> None:
        super().__init__(_receive)
        self._traces = traces
        self._group = RouteGroup(self._store, LAYOUT, sender=0, **LIMITS)

    def send(self) -> None:
        self._group.send(self._traces)
        self._group.join()

    def finish(self) -> list[Any]:
        received = super().finish()
        self._group.close()
        whole = torch.cat([trace.topk_indices for trace in self._traces])[::997]
        expected = [{int(whole[:, :24].sum())}, {int(whole[:, 24:].sum())}]
        assert sorted(map(sorted, received)) == sorted(map(sorted, expected)), "every rank got its slice, every time"
        return received


def _raw_receive(rank: int, queue: Any, port: int, nbytes: int) -> None:
    group = dist.ProcessGroupGloo(_raw_store(port, rank), 1, 2, timedelta(minutes=30))
    cpu = []
    for _ in range(ROUNDS):
        began = time.process_time()
        memory = torch.empty(nbytes, dtype=torch.uint8)
        _two_in_flight(nbytes, lambda start, stop, memory=memory: group.recv([memory[start:stop]], 0, 0))
        cpu.append(time.process_time() - began)
        group.send([torch.zeros(1, dtype=torch.uint8)], 0, 0).wait(timedelta(minutes=1))
    queue.put((set(), cpu))


def _raw_store(port: int, rank: int) -> Any:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(f"raw{rank}", store)


def _two_in_flight(nbytes: int, start: Callable[[int, int], Any]) -> None:
    works: list[Any] = []
    for begin in range(0, nbytes, MESSAGE):
        if len(works) == 2:
            works.pop(0).wait()
        works.append(start(begin, min(begin + MESSAGE, nbytes)))
    for work in works:
        work.wait()


class Raw(Exchange):
    """Messages of the same size over the same gloo, of memory that lies ready: nothing is gathered."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        super().__init__(_raw_receive, nbytes)
        self._groups = [
            dist.ProcessGroupGloo(_raw_store(self._store.port, rank), 0, 2, timedelta(minutes=30)) for rank in range(2)
        ]
        self._memory = torch.ones(MESSAGE, dtype=torch.uint8)

    def send(self) -> None:
        threads = [threading.Thread(target=self._send, args=(group,)) for group in self._groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _send(self, group: Any) -> None:
        _two_in_flight(self._nbytes, lambda start, stop: group.send([self._memory[: stop - start]], 1, 0))
        group.recv([torch.zeros(1, dtype=torch.uint8)], 1, 0).wait(timedelta(minutes=1))


def exchange(gigabytes: float) -> str:
    """Send the batch in two ways that take turns, so that who else uses the machine slows both down."""
    torch.set_num_threads(1)
    first = [torch.randint(0, 16, (SAMPLE, NUM_LAYERS, 1)) for _ in range(4)]
    routes = [(ids + 16 * torch.arange(TOPK)).to(torch.uint8) for ids in first]
    num_samples = max(4, round(gigabytes * 1e9 / routes[0].nbytes))
    traces = [
        RoutingTrace(topk_indices=routes[i % 4].clone(), layer_numbers=tuple(range(1, 49)), num_experts=NUM_EXPERTS)
        for i in range(num_samples)
    ]
    total = sum(trace.topk_indices.nbytes for trace in traces)
    ours, raw = Ours(traces), Raw(total // 2)
    for number in range(ROUNDS):
        for way in (ours, raw) if number % 2 else (raw, ours):
            way.step()
    ours.finish()
    raw.finish()
    ratios = [theirs / own for own, theirs in zip(ours.seconds[1:], raw.seconds[1:])]
    best = min(raw.seconds[1:]) / min(ours.seconds[1:])
    rows = [
        ours.row("**this package**", total),
        raw.row("raw gloo, nothing gathered", total),
        ("**ratio**", f"**{statistics.median(ratios):.2f}** median of {len(ratios)} rounds, {best:.2f} of the best"),
    ]
    return (
        f"{total / 1e9:.2f} GB of routes, {num_samples} samples of {SAMPLE} tokens x {NUM_LAYERS} layers x top-{TOPK} of "
        f"{NUM_EXPERTS}, to the processes of two pipeline stages, over loopback, into new memory:\n\n{table(rows)}"
    )
