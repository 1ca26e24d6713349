"""Cost of finding rows by tokens: the index of a trace beside torch.sort, a micro-batch beside one of rows by hand.

OMP_NUM_THREADS=1 python -m benchmarks.follow
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_router_replay as mrr
from megatron_router_replay.mcore.batches.index import PrefixIndex
from megatron_router_replay.mcore.batches.inputs import read_inputs
from tests.unit.mcore.tiny_chunk import EXPERTS, Chunk, random_routes

LENGTH, PADDING = 512, 64
"""Tokens of a sample; of these, how many are cut off for padding."""

FIRST = 7
"""The token that all samples begin with, as those of a chat template do."""


class _Count(TorchDispatchMode):
    """Counts the operations that reach the device."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += 1
        return function(*args, **(kwargs or {}))


class Model(Chunk):
    """A chunk that takes what Megatron-Core's forward takes."""

    def forward(self, input_ids: Tensor, position_ids: Any = None, packed_seq_params: Any = None) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids)


def least(repeats: int, *calls: Callable[[], object]) -> list[float]:
    """Return the least milliseconds of each call; they take turns."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, times in zip(calls, taken):
            begin = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - begin))
    return [min(times) for times in taken]


def batches(samples: Tensor, rows: Tensor) -> dict[str, tuple[Tensor, Tensor, dict[str, Any]]]:
    """Return name -> tokens and rows [b, s], and other inputs of the forward."""
    kept = LENGTH - PADDING
    right = pad(samples[:, :kept], (0, PADDING)), pad(rows[:, :kept], (0, PADDING), value=-1)
    left = pad(samples[:, :kept], (PADDING, 0)), pad(rows[:, :kept], (PADDING, 0), value=-1)
    positions = {"position_ids": torch.arange(LENGTH).expand(len(samples), -1)}
    bounds = torch.arange(len(samples) + 1, dtype=torch.int32) * LENGTH
    packed = {"packed_seq_params": SimpleNamespace(cu_seqlens_q=bounds)}
    return {
        "packed, no padding": (samples.reshape(1, -1), rows.reshape(1, -1), packed),
        "packed, padding after each sequence": (right[0].reshape(1, -1), right[1].reshape(1, -1), packed),
        "padded, no padding": (samples, rows, {}),
        "padded on the right": (*right, {}),
        "padded on the right, with position_ids": (*right, positions),
        "padded on the left": (*left, {}),
    }


def measure(
    trace: mrr.RoutingTrace, ids: Tensor, rows: Tensor, inputs: dict[str, Any]
) -> tuple[float, float, int, int]:
    """Return the milliseconds of a micro-batch by hand and of a followed one, and the operations of each."""
    model = Model()
    padding = rows < 0 if bool((rows < 0).any()) else None
    session = mrr.replay(model, trace, min_agreement=0, min_replayed=0)
    microbatches: Any = session._microbatches
    (chunk,) = microbatches.chunks

    def by_hand() -> None:
        session.microbatch(rows, model, token_ids=ids, padding=padding)
        chunk.queue.clear()

    def followed() -> None:
        microbatches.follow(chunk, read_inputs(model, (ids,), inputs))
        chunk.queue.clear()

    hand, follow = least(150, by_hand, followed)
    counts = []
    for call in (by_hand, followed):
        with _Count() as count:
            call()
        counts.append(count.number)
    session.close(verify=False)
    return hand, follow, counts[0], counts[1]


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    print("| rows of the trace | index | torch.sort of as many int64 | ratio | bytes a row |")
    print("| --- | --- | --- | --- | --- |")
    for num_rows in (1 << 18, 1 << 20):
        tokens = torch.randint(150_000, (num_rows,), generator=generator, dtype=torch.int32)
        lengths = [LENGTH] * (num_rows // LENGTH)
        keys = torch.randint(-(1 << 62), 1 << 62, (num_rows,), generator=generator)
        made, plain = least(7, partial(PrefixIndex, tokens, lengths), keys.sort)
        nbytes = PrefixIndex(tokens, lengths).nbytes / num_rows
        print(f"| {num_rows:,} | {made:.0f} ms | {plain:.0f} ms | {made / plain:.1f} | {nbytes:.1f} |")

    num_rows = 1 << 18
    samples = torch.randint(10, 150_000, (num_rows // LENGTH, LENGTH), generator=generator)
    samples[:, 0] = FIRST
    trace = mrr.RoutingTrace(
        topk_indices=random_routes(num_rows, 3, 3),
        layer_numbers=(1, 2, 3),
        num_experts=EXPERTS,
        token_ids=samples.flatten().int(),
        sequence_lengths=[LENGTH] * len(samples),
    )
    print("\n| batch of 8,192 tokens | by hand | followed | ratio | operations by hand | followed |")
    print("| --- | --- | --- | --- | --- | --- |")
    chosen = torch.randperm(len(samples), generator=generator)[: 8192 // LENGTH]
    rows = chosen.unsqueeze(1) * LENGTH + torch.arange(LENGTH)
    for name, (ids, at, inputs) in batches(samples[chosen], rows).items():
        hand, follow, *counts = measure(trace, ids, at, inputs)
        print(f"| {name} | {hand:.2f} ms | {follow:.2f} ms | {follow / hand:.1f} | {counts[0]} | {counts[1]} |")


if __name__ == "__main__":
    main()
