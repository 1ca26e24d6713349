"""Cost of finding rows by tokens: sorting a trace's samples, and a micro-batch beside one of rows by hand.

OMP_NUM_THREADS=1 python -m benchmarks.follow
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_router_replay as mrr
from megatron_router_replay.mcore.batches.inputs import read_inputs
from megatron_router_replay.mcore.batches.samples import SortedSamples
from tests.unit.mcore.tiny_chunk import EXPERTS, HIDDEN, Chunk, random_routes
from tests.unit.mcore.tiny_vlm import TinyLanguageModel, TinyVLM

TOKENS = 8192
"""Of a micro-batch."""

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


def batches(taken: Tensor, rows: Tensor, padding: int) -> dict[str, tuple[Tensor, Tensor, dict[str, Any]]]:
    """Return name -> tokens and rows [b, s], and other inputs of the forward.

    Args:
        taken, rows: [b, n], tokens of samples, and their rows in the trace.
        padding: positions that are added to each.
    """
    length = taken.shape[1] + padding
    right = pad(taken, (0, padding)), pad(rows, (0, padding), value=-1)
    left = pad(taken, (padding, 0)), pad(rows, (padding, 0), value=-1)
    bounds = {
        "packed_seq_params": SimpleNamespace(cu_seqlens_q=torch.arange(len(taken) + 1, dtype=torch.int32) * length)
    }
    made = {
        "packed": (right[0].reshape(1, -1), right[1].reshape(1, -1), bounds),
        "rows": (*right, {}),
        "rows, with position_ids": (*right, {"position_ids": torch.arange(length).expand(len(taken), -1)}),
    }
    if padding:
        made["rows, padded on the left"] = (*left, {})
    # Multimodal models, which say by a mask what they keep.
    mask = {"attention_mask": (right[1] >= 0).long()}
    lengths = torch.arange(len(taken) + 1, dtype=torch.int32) * taken.shape[1]
    kept = {**mask, "packed_seq_params": SimpleNamespace(cu_seqlens_q=lengths)}
    made["rows, around a language model"] = (*right, mask)
    made["rows, packed around a language model"] = (right[0], rows.reshape(1, -1), kept)
    return made


def measure(
    trace: mrr.RoutingTrace, ids: Tensor, rows: Tensor, inputs: dict[str, Any]
) -> tuple[float, float, int, int]:
    """Return the milliseconds of a micro-batch by hand and of a followed one, and the operations of each."""
    is_wrapper = "attention_mask" in inputs
    model: Any = TinyVLM() if is_wrapper else Model()
    hidden = torch.zeros(rows.shape[1], rows.shape[0], HIDDEN)
    packed = inputs.get("packed_seq_params")
    padding = rows < 0 if bool((rows < 0).any()) else None
    tokens = ids if ids.shape == rows.shape else ids[inputs["attention_mask"].bool()].unsqueeze(0)
    options: dict[str, Any] = {"padding_token_ids": [0]} if padding is not None and not is_wrapper else {}
    session = mrr.replay(model, trace, min_agreement=0, min_replayed=0, **options)
    microbatches: Any = session._microbatches
    (chunk,) = microbatches.chunks

    def by_hand() -> None:
        session.microbatch(rows, model, token_ids=tokens, padding=padding)
        chunk.given = None

    def followed() -> None:
        if is_wrapper:
            language = {"decoder_input": hidden, "packed_seq_params": packed}
            call = read_inputs(TinyLanguageModel.forward, (None,), language)
            call = replace(call, outer=read_inputs(TinyVLM.forward, (ids,), inputs))
        else:
            call = read_inputs(Model.forward, (ids,), inputs)
        microbatches.look_up_rows(chunk, call)
        chunk.given = None

    hand, follow = least(150, by_hand, followed)
    counts = []
    for call in (by_hand, followed):
        with _Count() as count:
            call()
        counts.append(count.number)
    session.close(check=False)
    return hand, follow, counts[0], counts[1]


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    print("| rows of the trace, samples of 512 | sorted |")
    print("| --- | --- |")
    for num_rows in (1 << 18, 1 << 20):
        tokens = torch.randint(150_000, (num_rows,), generator=generator, dtype=torch.int32).numpy()
        lengths = [512] * (num_rows // 512)
        has_route = torch.arange(num_rows).remainder(512).ne(511).numpy()
        (made,) = least(7, partial(SortedSamples, tokens, lengths, has_route))
        print(f"| {num_rows:,} | {made:.0f} ms |")

    print(f"\n| batch of {TOKENS:,} tokens | samples of | by hand | followed | ratio | operations by hand | followed |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for length in (64, 512, 2048):
        for padding in (0, length // 8):
            for cut in (0, length // 8):
                part = length - padding
                samples = torch.randint(10, 150_000, ((1 << 18) // length, part + cut), generator=generator)
                samples[:, 0] = FIRST
                trace = mrr.RoutingTrace(
                    topk_indices=random_routes(samples.numel(), 3, 3),
                    layer_numbers=(1, 2, 3),
                    num_experts=EXPERTS,
                    token_ids=samples.flatten().int(),
                    sequence_lengths=[part + cut] * len(samples),
                )
                chosen = torch.randperm(len(samples), generator=generator)[: TOKENS // length]
                rows = chosen.unsqueeze(1) * (part + cut) + torch.arange(part)
                for name, (ids, at, inputs) in batches(samples[chosen, :part], rows, padding).items():
                    hand, follow, *counts = measure(trace, ids, at, inputs)
                    what = f"{'cut' if cut else 'whole'}{', padded' if padding else ''}"
                    times = f"{hand:.2f} ms | {follow:.2f} ms | {follow / hand:.1f}"
                    print(f"| {name} | {length}, {what} | {times} | {counts[0]} | {counts[1]} |")


if __name__ == "__main__":
    main()
