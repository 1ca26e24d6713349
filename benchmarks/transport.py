"""What moving routes costs, as a ratio to raw gloo, and a payload that no process could hold.

python -m benchmarks.transport                                # both parts; writes benchmarks/RESULTS_transport.md
python -m benchmarks.transport exchange                       # this part; the other's results stay
python -m benchmarks.transport streamed --gigabytes 5
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure import environment, peak_bytes, table
from megatron_router_replay import RoutingTrace
from megatron_router_replay.trace.header import TraceFormat
from megatron_router_replay.transport import ParallelLayout, Place, RouteGroup, open_store
from megatron_router_replay.transport.gather import Memory
from megatron_router_replay.transport.plan import Runs

RESULTS = Path(__file__).parent / "RESULTS_transport.md"
PARTS = {"exchange": "From traces to training ranks", "streamed": "Streamed"}
LIMITS: dict[str, Any] = {"timeout": timedelta(minutes=30), "ready_timeout": timedelta(minutes=30)}
MESSAGE = 32 << 20
ROUNDS = 7
"""Of which the first, when memory is new and connections are made, does not count."""
MAX_STAGING = 256 << 20
"""Bytes that sending, and receiving, may add to a process, whatever the payload."""

STAGES = ParallelLayout(stage_layers=(tuple(range(1, 25)), tuple(range(25, 49))))
DEEP = TraceFormat(layer_numbers=tuple(range(1, 61)), topk=8, num_experts=256)
ONE = ParallelLayout(stage_layers=(DEEP.layer_numbers,))


def distinct_ids(rows: int, layers: int, topk: int, num_experts: int) -> Tensor:
    """Return routes [rows, layers, topk] uint8, distinct in each row."""
    # In uint8 all along: an int64 in between would be the peak of a process that streams, not its staging.
    step = num_experts // topk
    first = torch.randint(0, step, (rows, layers, 1), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return first + step * torch.arange(topk, dtype=torch.uint8)


def children(function: Callable[..., None], *arguments: tuple[Any, ...]) -> Any:
    """Start a process of function(queue, *arguments) for each of `arguments`; return the queue."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    for each in arguments:
        context.Process(target=function, args=(queue, *each), daemon=True).start()
    return queue


# ---- a batch to two processes, over this package and over raw gloo in turns
def receive(queue: Any, port: int, place: Place) -> None:
    """Be a training rank: put (check sum, CPU seconds) of each round."""
    torch.set_num_threads(1)
    store = open_store("127.0.0.1", port, is_server=False)
    with RouteGroup(store, STAGES, place=place, **LIMITS) as group:
        for _ in range(ROUNDS):
            began = time.process_time()
            trace = group.receive()
            spent = time.process_time() - began
            queue.put((int(trace.topk_indices[::997].sum()), spent))
            del trace


def receive_raw(queue: Any, port: int, rank: int, nbytes: int) -> None:
    """Receive as many bytes in messages of the same size into new memory, two at a time."""
    torch.set_num_threads(1)
    group = raw_group(port, rank, 1)
    for _ in range(ROUNDS):
        began = time.process_time()
        memory = torch.empty(nbytes, dtype=torch.uint8)
        two_in_flight(nbytes, lambda start, stop, memory=memory: group.recv([memory[start:stop]], 0, 0))
        queue.put((0, time.process_time() - began))
        group.send([torch.zeros(1, dtype=torch.uint8)], 0, 0).wait(timedelta(minutes=1))


def raw_group(port: int, rank: int, own_rank: int) -> Any:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return dist.ProcessGroupGloo(dist.PrefixStore(f"raw{rank}", store), own_rank, 2, timedelta(minutes=30))


def two_in_flight(nbytes: int, start: Callable[[int, int], Any]) -> None:
    works: list[Any] = []
    for begin in range(0, nbytes, MESSAGE):
        if len(works) == 2:
            works.pop(0).wait()
        works.append(start(begin, min(begin + MESSAGE, nbytes)))
    for work in works:
        work.wait()


def exchange(gigabytes: float) -> str:
    """Send the batch in two ways that take turns, so that other programs slow both down."""
    torch.set_num_threads(1)
    routes = distinct_ids(4096, 48, 8, 128)
    num_samples = max(4, round(gigabytes * 1e9 / routes.nbytes))
    options: dict[str, Any] = {"layer_numbers": tuple(range(1, 49)), "num_experts": 128}
    traces = [RoutingTrace(topk_indices=routes.roll(i % 4, 0), **options) for i in range(num_samples)]
    total = sum(trace.topk_indices.nbytes for trace in traces)
    store = open_store("127.0.0.1", is_server=True)
    queues = {
        "this package": children(receive, *((store.port, place) for place in STAGES.places())),
        "raw gloo": children(receive_raw, *((store.port, rank, total // 2) for rank in range(2))),
    }
    group = RouteGroup(store, STAGES, sender=0, **LIMITS)
    raw = [raw_group(store.port, rank, 0) for rank in range(2)]
    memory = torch.ones(MESSAGE, dtype=torch.uint8)  # it lies ready: raw gloo gathers nothing

    def send() -> None:
        group.send(traces)
        group.join()

    def send_to(peer: Any) -> None:
        two_in_flight(total // 2, lambda start, stop: peer.send([memory[: stop - start]], 1, 0))
        peer.recv([torch.zeros(1, dtype=torch.uint8)], 1, 0).wait(timedelta(minutes=5))

    def send_raw() -> None:
        threads = [threading.Thread(target=send_to, args=(peer,)) for peer in raw]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    sends = {"this package": send, "raw gloo": send_raw}
    seconds: dict[str, list[float]] = {way: [] for way in sends}
    cpu: dict[str, list[float]] = {way: [] for way in sends}
    whole = torch.cat([trace.topk_indices for trace in traces])[::997]
    expected = sorted([int(whole[:, :24].sum()), int(whole[:, 24:].sum())])
    for number in range(ROUNDS):
        for way in list(sends) if number % 2 else reversed(list(sends)):
            wall, spent = time.perf_counter(), time.process_time()
            sends[way]()
            seconds[way].append(time.perf_counter() - wall)
            sums, received = zip(*[queues[way].get() for _ in range(2)])
            cpu[way].append(time.process_time() - spent + sum(received))
            assert way == "raw gloo" or sorted(sums) == expected, "every rank got its slice, every time"
    group.close()
    rows = [
        (
            way,
            f"{rate(total, min(seconds[way][1:]))} best, {rate(total, statistics.median(seconds[way][1:]))} median; "
            f"{statistics.median(cpu[way][1:]) / total * 1e9:.2f} CPU s a GB on both sides",
        )
        for way in sends
    ]
    ratios = [theirs / own for own, theirs in zip(*(seconds[way][1:] for way in sends))]
    rows.append(("**ratio**", f"**{statistics.median(ratios):.2f}** median of {len(ratios)} rounds"))
    return (
        f"{total / 1e9:.2f} GB of routes, {num_samples} samples of 4096 tokens x 48 layers x top-8 of 128, to the processes "
        f"of two pipeline stages, over loopback, into new memory:\n\n{table(['way', 'measured'], rows)}"
    )


# ---- a payload that no process could hold
class GeneratedRows:
    """Routes that exist only while they are sent: a block of distinct ids, again and again."""

    format = DEEP

    def __init__(self, num_tokens: int) -> None:
        self.sequence_lengths = (num_tokens // 1024,) * 1024
        self.block = distinct_ids(1 << 16, DEEP.num_layers, DEEP.topk, DEEP.num_experts)

    def fill(self, runs: Runs, layer_numbers: tuple[int, ...], memory: Memory) -> None:
        ids, at = memory["topk_indices"], 0
        for start, stop in runs:
            while start < stop:
                begin = start % len(self.block)
                count = min(stop - start, len(self.block) - begin)
                ids[at : at + count] = self.block[begin : begin + count]
                start, at = start + count, at + count
        memory["replay_mask"].fill_(True)


def resident_bytes() -> int:
    """Return the memory that this process has now: Python, torch, and here the block of routes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def consume(queue: Any, port: int) -> None:
    """Be the training rank: compare every 101st row, count all of them."""
    expected, seen = GeneratedRows(0).block, [0, 0]

    def check(start: int, trace: RoutingTrace) -> None:
        assert start == seen[0], "buckets come in order"
        rows = torch.arange(start, start + trace.num_tokens, 101)
        assert torch.equal(trace.topk_indices[::101], expected[rows % len(expected)])
        seen[0] += trace.num_tokens
        seen[1] += trace.topk_indices.nbytes

    before = resident_bytes()
    with RouteGroup(open_store("127.0.0.1", port, is_server=False), ONE, place=Place(), **LIMITS) as group:
        group.stream(check)
    queue.put((*seen, peak_bytes() - before, peak_bytes()))


def produce(queue: Any, port: int, num_tokens: int) -> None:
    """Be the rollout process."""
    source = GeneratedRows(num_tokens)
    before = resident_bytes()
    with RouteGroup(open_store("127.0.0.1", port, is_server=False), ONE, sender=0, **LIMITS) as group:
        began = time.perf_counter()
        group.send(source)
        group.join()
        seconds = time.perf_counter() - began
    queue.put((seconds, peak_bytes() - before, peak_bytes()))


def streamed(gigabytes: float) -> str:
    """Send a payload that no process could hold, through the same code."""
    num_tokens = round(min(gigabytes * 1e9 / 480, 128e6)) // 1024 * 1024
    store = open_store("127.0.0.1", is_server=True)
    received, sent = children(consume, (store.port,)), children(produce, (store.port, num_tokens))
    seconds, sender_staging, sender_peak = sent.get()
    rows, nbytes, receiver_staging, receiver_peak = received.get()
    assert (rows, nbytes) == (num_tokens, num_tokens * 480)
    staging = f"{sender_staging / 1e6:.0f} / {receiver_staging / 1e6:.0f} MB"
    assert max(sender_staging, receiver_staging) < MAX_STAGING, f"staging took {staging}"
    measured = [
        ("tokens x layers x topk", f"{num_tokens / 1e6:.1f} M x 60 x 8"),
        ("bytes of routes", f"{nbytes / 1e9:.1f} GB"),
        ("seconds, rate", f"{seconds:.1f} s, {rate(nbytes, seconds)}"),
        ("peak memory that the transport added, sender / receiver (asserted below 256 MiB)", staging),
        ("peak resident memory, Python and torch included", f"{sender_peak / 1e6:.0f} / {receiver_peak / 1e6:.0f} MB"),
    ]
    return table(["what", "measured"], measured)


def rate(nbytes: float, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f} GB/s"


def main() -> None:
    """Run some parts or all, and write their sections of RESULTS_transport.md; the other sections stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], help="default: all")
    parser.add_argument("--gigabytes", type=float, help="of routes; default 0.6 for exchange, 61.5 for streamed")
    options = parser.parse_args()
    run = {
        "exchange": partial(exchange, options.gigabytes or 0.6),
        "streamed": partial(streamed, options.gigabytes or 61.5),
    }
    head, *sections = RESULTS.read_text().split("\n## ")
    kept = {title: rest.strip() for title, _, rest in (section.partition("\n") for section in sections)}
    for part in options.parts or PARTS:
        where, began = environment(), time.monotonic()
        text = run[part]()
        kept[PARTS[part]] = f"{where}; {(time.monotonic() - began) / 60:.1f} minutes\n\n{text}"
        print(f"## {PARTS[part]}\n\n{kept[PARTS[part]]}\n", flush=True)
        RESULTS.write_text("\n\n".join([head.strip(), *(f"## {title}\n\n{kept[title]}" for title in kept)]) + "\n")


if __name__ == "__main__":
    main()
