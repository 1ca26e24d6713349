"""Send a payload that no process could hold."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import peak_bytes
from benchmarks.transport.common import LIMITS, Row, children, gb_per_s, table
from megatron_router_replay import RoutingTrace
from megatron_router_replay.trace.header import TraceFormat
from megatron_router_replay.transport import ParallelLayout, RouteGroup, open_store
from megatron_router_replay.transport.gather import Memory
from megatron_router_replay.transport.plan import Runs


class GeneratedRows:
    """Routes that exist only while they are sent: 60 layers, a block of distinct ids shifted by the row."""

    format = TraceFormat(layer_numbers=tuple(range(1, 61)), topk=8, num_experts=256)

    def __init__(self, num_tokens: int) -> None:
        self.sequence_lengths = (num_tokens // 1024,) * 1024
        self.block = block(1 << 16)

    def fill(self, runs: Runs, layer_numbers: tuple[int, ...], memory: Memory) -> None:
        ids, at = memory["topk_indices"], 0
        for start, stop in runs:
            while start < stop:
                begin = start % len(self.block)
                count = min(stop - start, len(self.block) - begin)
                ids[at : at + count] = self.block[begin : begin + count]
                start, at = start + count, at + count
        memory["replay_mask"].fill_(True)


def block(rows: int) -> torch.Tensor:
    # In uint8 all along: an int64 in between would be the peak of this process, not what the transport adds.
    first = torch.randint(0, 32, (rows, 60, 1), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return first + 32 * torch.arange(8, dtype=torch.uint8)


MAX_STAGING = 256 << 20
"""Bytes that sending, and receiving, may add to a process, whatever the payload."""


def resident_bytes() -> int:
    """Return the memory that this process has now: Python, torch, and here the routes that are sent over and over."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _consume(rank: int, queue: Any, port: int) -> None:
    expected, seen = block(1 << 16), [0, 0]
    store = open_store("127.0.0.1", port, is_server=False)
    layout = ParallelLayout(stage_layers=(GeneratedRows.format.layer_numbers,))

    def consume(start: int, trace: RoutingTrace) -> None:
        assert start == seen[0], "buckets come in order"
        rows = torch.arange(start, start + trace.num_tokens, 101)
        assert torch.equal(trace.topk_indices[::101], expected[rows % len(expected)])
        seen[0] += trace.num_tokens
        seen[1] += trace.topk_indices.nbytes

    before = resident_bytes()
    with RouteGroup(store, layout, place=layout.place_of(0), **LIMITS) as group:
        group.stream(consume)
    queue.put((*seen, peak_bytes() - before, peak_bytes()))


def _produce(rank: int, queue: Any, port: int, num_tokens: int) -> None:
    store = open_store("127.0.0.1", port, is_server=False)
    layout = ParallelLayout(stage_layers=(GeneratedRows.format.layer_numbers,))
    source = GeneratedRows(num_tokens)
    before = resident_bytes()
    with RouteGroup(store, layout, sender=0, **LIMITS) as group:
        began = time.perf_counter()
        group.send(source)
        group.join()
        seconds = time.perf_counter() - began
    queue.put((seconds, peak_bytes() - before, peak_bytes()))


def streamed(gigabytes: float) -> str:
    """Send a payload that no process could hold, through the same code."""
    num_tokens = round(min(gigabytes * 1e9 / 480, 128e6)) // 1024 * 1024
    store = open_store("127.0.0.1", is_server=True)
    receivers, received = children(_consume, store.port, ranks=1)
    senders, sent = children(_produce, store.port, num_tokens, ranks=1)
    seconds, sender_staging, sender_peak = sent.get()
    rows, nbytes, receiver_staging, receiver_peak = received.get()
    for process in (*receivers, *senders):
        process.join()
    assert (rows, nbytes) == (num_tokens, num_tokens * 480)
    staging = f"{sender_staging / 1e6:.0f} / {receiver_staging / 1e6:.0f} MB"
    assert max(sender_staging, receiver_staging) < MAX_STAGING, f"staging took {staging}"
    rate = nbytes / seconds
    measured: list[Row] = [
        ("tokens x layers x topk", f"{num_tokens / 1e6:.1f} M x 60 x 8"),
        ("bytes of routes", f"{nbytes / 1e9:.1f} GB"),
        ("seconds, rate", f"{seconds:.1f} s, {gb_per_s(nbytes, seconds)}"),
        ("peak memory that the transport added, sender / receiver (asserted below 256 MiB)", staging),
        ("peak resident memory, Python and torch included", f"{sender_peak / 1e6:.0f} / {receiver_peak / 1e6:.0f} MB"),
    ]
    payloads: list[Row] = []
    for what, tokens, layers, ranks in (
        ("Qwen3-30B-A3B, 1024 x 16k", 1024 * 16384, 48, 8),
        ("60 layers, 512 x 32k", 512 * 32768, 60, 8),
        ("60 layers, 1024 x 128k", 1024 * 131072, 60, 32),
    ):
        size = tokens * layers * 8
        per_rank = size / ranks
        payloads.append(
            (
                f"{what}: {tokens / 1e6:.0f} M tokens x {layers} layers x 8 x 1 byte",
                f"{size / 1e9:.1f} GB in all, {per_rank / 1e9:.2f} GB to each of {ranks} (data rank, stage)s; one sender at "
                f"the rate above {size / rate:.0f} s, at 50 GB/s {size / 50e9:.1f} s",
            )
        )
    return (
        f"{table(measured)}\n\nOn paper, bytes = tokens x layers x topk (x 2 above 256 experts) + 1 a token and stage for "
        f"the mask; the 50 GB/s is an assumed link, not measured:\n\n{table(payloads)}"
    )
