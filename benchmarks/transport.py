"""Stream a payload of routes that no process could hold: its rate, and the memory that the transport adds.

python -m benchmarks.transport [--gigabytes 61.5]             # writes benchmarks/RESULTS_transport.md
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import environment, peak_bytes, table
from megatron_router_replay import RoutingTrace
from megatron_router_replay.trace.header import TraceFormat
from megatron_router_replay.transport import ParallelLayout, Place, RouteGroup, open_store
from megatron_router_replay.transport.gather import Memory
from megatron_router_replay.transport.plan import Runs

RESULTS = Path(__file__).parent / "RESULTS_transport.md"
LIMITS: dict[str, Any] = {"timeout": timedelta(minutes=30), "ready_timeout": timedelta(minutes=30)}
MAX_STAGING = 256 << 20
"""Bytes that sending, and receiving, may add to a process, whatever the payload."""

DEEP = TraceFormat(layer_numbers=tuple(range(1, 61)), topk=8, num_experts=256)
ONE = ParallelLayout(stage_layers=(DEEP.layer_numbers,))


def distinct_ids(rows: int, layers: int, topk: int, num_experts: int) -> Tensor:
    """Return routes [rows, layers, topk] uint8, distinct in each row."""
    # In uint8 all along: an int64 in between would be the peak of a process that streams, not its staging.
    step = num_experts // topk
    first = torch.randint(0, step, (rows, layers, 1), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return first + step * torch.arange(topk, dtype=torch.uint8)


def started(function: Callable[..., None], *arguments: Any) -> Any:
    """Start a process of function(queue, *arguments); return the queue."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    context.Process(target=function, args=(queue, *arguments), daemon=True).start()
    return queue


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
    received, sent = started(consume, store.port), started(produce, store.port, num_tokens)
    seconds, sender_staging, sender_peak = sent.get()
    rows, nbytes, receiver_staging, receiver_peak = received.get()
    assert (rows, nbytes) == (num_tokens, num_tokens * 480)
    staging = f"{sender_staging / 1e6:.0f} / {receiver_staging / 1e6:.0f} MB"
    assert max(sender_staging, receiver_staging) < MAX_STAGING, f"staging took {staging}"
    measured = [
        ("tokens x layers x topk", f"{num_tokens / 1e6:.1f} M x 60 x 8"),
        ("bytes of routes", f"{nbytes / 1e9:.1f} GB"),
        ("seconds, rate", f"{seconds:.1f} s, {nbytes / seconds / 1e9:.2f} GB/s"),
        ("peak memory that the transport added, sender / receiver (asserted below 256 MiB)", staging),
        ("peak resident memory, Python and torch included", f"{sender_peak / 1e6:.0f} / {receiver_peak / 1e6:.0f} MB"),
    ]
    return table(["what", "measured"], measured)


def main() -> None:
    """Write RESULTS_transport.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=61.5, help="of routes")
    options = parser.parse_args()
    where, began = environment(), time.monotonic()
    text = streamed(options.gigabytes)
    head = "# Transport\n\nMade by `python -m benchmarks.transport`: one rollout process streams to one training rank."
    RESULTS.write_text(f"{head}\n\n{where}; {(time.monotonic() - began) / 60:.1f} minutes\n\n{text}\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
