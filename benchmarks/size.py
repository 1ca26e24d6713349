"""Steps of a rollout at production size, beside plain numpy or torch: time and memory, and how both grow.

    python -m benchmarks.size                  25, 100 and 400 MB of routes, some minutes of processor time
    python -m benchmarks.size 25 100           these sizes, in MB

The processor time of a step is divided by that of the plain copy that it cannot do without, the best of some repeats in
turns. The most memory that it takes, its result included, is divided by the bytes of its result. Linux only.
"""

from __future__ import annotations

import base64
import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

import megatron_router_replay as mrr
from benchmarks.measure import environment, peak_above, rounds, table
from megatron_router_replay import RoutingTrace, engines, merge_traces
from megatron_router_replay.mcore.batches.microbatch import UsedExperts
from tests.unit.mcore import tiny_chunk
from tests.unit.mcore.tiny_chunk import Chunk, tokens

LAYERS, SAMPLE, STAGES, FORWARD = 48, 64, 4, 4096
"""Layers, tokens of a sample, pipeline stages, tokens of a recorded forward."""

KINDS = ((128, 8), (256, 8), (512, 10))
"""(experts, topk): ids of a byte up to 256 experts, of two above."""

Step = tuple[Callable[[], Any], Callable[[], Any]]
"""A step, and the plain copy."""


class Measured(NamedTuple):
    """Processor seconds of a step and of its plain copy, and the most memory of each in bytes of the routes."""

    seconds: float
    plain: float
    peak: float
    plain_peak: float


def random_rows(num_rows: int, num_experts: int, topk: int) -> np.ndarray:
    """Return [num_rows, LAYERS, topk]: no id twice in a route, hardly any row twice."""
    generator = np.random.default_rng(0)
    routes = generator.random((4096, num_experts), dtype=np.float32).argpartition(topk, axis=1)[:, :topk]
    routes = routes.astype(np.uint8 if num_experts <= 256 else np.int16)
    rows = np.empty((num_rows, LAYERS, topk), routes.dtype)
    for layer in range(LAYERS):
        rows[:, layer] = routes[generator.integers(0, len(routes), num_rows)]
    return rows


def steps(rows: np.ndarray, num_experts: int) -> dict[str, Step]:
    """Return the steps for these routes; they are made one after another, so that one's inputs are not the next one's."""
    num_rows, _, topk = rows.shape
    options: dict[str, Any] = {"num_experts": num_experts, "layer_numbers": range(1, LAYERS + 1)}
    ids = np.random.default_rng(1).integers(0, 30_000, num_rows).astype(np.int32)
    found: dict[str, Step] = {}

    cuts = range(0, num_rows, SAMPLE)
    samples, tokens_of = [rows[i : i + SAMPLE - 1] for i in cuts], [ids[i : i + SAMPLE] for i in cuts]
    found["from_samples"] = (
        lambda: RoutingTrace.from_samples(tokens_of, samples, **options),
        lambda: np.concatenate(samples),
    )
    wide = [each.astype(np.int32) for each in samples[: max(1, len(samples) // 4)]]
    found["from_samples, int32"] = (
        lambda: RoutingTrace.from_samples(tokens_of[: len(wide)], wide, **options),
        lambda: np.concatenate(wide).astype(rows.dtype),
    )
    trace = RoutingTrace.from_samples(tokens_of, samples, **options)
    per_stage = LAYERS // STAGES
    stages = [trace.select_layers(range(1 + i * per_stage, 1 + (i + 1) * per_stage)).clone() for i in range(STAGES)]
    found["merge_traces, 4 stages"] = (
        lambda: merge_traces(stages),
        lambda: torch.cat([each.topk_indices for each in stages], dim=1),
    )
    place = torch.arange(num_rows) // 512 % 4
    ranks = [trace.without_routes(place != i) for i in range(4)]
    found["merge_traces, 4 ranks of rows"] = (
        lambda: merge_traces(ranks, allow_gaps=True),
        lambda: torch.cat([each.topk_indices[each.replay_mask] for each in ranks]),
    )
    recording, used = recorded(num_rows, rows, num_experts)
    found["recording.trace()"] = recording.trace, lambda: torch.cat(used)
    found["trace[i] of all samples"] = (
        lambda: [trace[i] for i in range(len(trace))],
        lambda: [trace.topk_indices[i : i + SAMPLE] for i in cuts],
    )
    text = base64.b64encode(rows[: num_rows // 4].astype(np.int32)).decode()
    model = engines.ModelRoutingInfo(
        num_layers=LAYERS, moe_layer_numbers=tuple(options["layer_numbers"]), num_experts=num_experts, topk=topk
    )
    token_ids = np.resize(ids, num_rows // 4 + 1)
    found["SGLang's int32"] = (
        lambda: engines.sglang.decode(text, model=model, token_ids=token_ids),
        lambda: np.frombuffer(base64.b64decode(text), "<i4").astype(rows.dtype),
    )
    found["keep a forward"] = kept(min(num_rows, 32_768), num_experts, topk)
    return found


def recorded(num_rows: int, rows: np.ndarray, num_experts: int) -> tuple[Any, list[torch.Tensor]]:
    """Return a recording as of packed forwards of FORWARD tokens, and their routes."""
    chunk = Chunk(LAYERS, num_moe_experts=num_experts, moe_router_topk=rows.shape[2])
    for router in chunk.routers:
        router.weight.data = torch.randn(num_experts, router.weight.shape[1])
    for layer in chunk.layers:
        layer.experts.data = torch.zeros(num_experts, *layer.experts.shape[1:])
    tiny_chunk.EXPERTS = num_experts
    with mrr.record(chunk, padding_token_ids=[]) as recording:
        chunk(tokens())
    found = recording._recorded._recorded[0]
    used = [torch.from_numpy(rows[i : i + FORWARD]) for i in range(0, num_rows, FORWARD)]
    found[:] = [
        found[0]._replace(
            rows=torch.arange(len(each)),
            routes=each,
            token_ids=torch.arange(len(each)) % 30_000,
            lengths=torch.tensor([len(each)]),
        )
        for each in used
    ]
    return recording, used


def kept(num_rows: int, num_experts: int, topk: int) -> Step:
    """Return the step in which a forward's experts, int64 of each layer, become one narrow tensor."""
    layers = [torch.rand(num_rows, num_experts).topk(topk).indices for _ in range(4)] * (LAYERS // 4)
    dtype = torch.uint8 if num_experts <= 256 else torch.int16
    narrow = [each.to(dtype) for each in layers]

    def keep() -> Any:
        used = UsedExperts(LAYERS, dtype)
        for position, each in enumerate(layers):
            used.put(position, each)
        return used.topk_indices

    return keep, lambda: torch.stack(narrow, dim=1)


def measure(megabytes: int, num_experts: int, topk: int, repeats: int) -> dict[str, Measured]:
    """Return the measurements of each step; one thread."""
    torch.set_num_threads(1)
    itemsize = 1 if num_experts <= 256 else 2
    num_rows = megabytes * 1_000_000 // (LAYERS * topk * itemsize) // FORWARD * FORWARD
    found = {}
    for name, (step, plain) in steps(random_rows(num_rows, num_experts, topk), num_experts).items():
        seconds = rounds({"step": step, "plain": plain}, repeats=repeats, warm_up=1, clock=time.process_time)
        result = _bytes_of(step())
        peaks = [peak_above(each) / result for each in (step, plain)]
        found[name] = Measured(min(seconds["step"]), min(seconds["plain"]), *peaks)
    return found


def _bytes_of(result: Any) -> int:
    """Return the bytes of a trace's tensors, of a tensor, or of a list of traces that share them."""
    if isinstance(result, torch.Tensor):
        return result.nbytes
    traces = result if isinstance(result, list) else [result]
    return sum(tensor.nbytes for trace in traces for _, tensor in trace._tensors())


def main(arguments: list[str]) -> None:
    """Print the table of each kind."""
    sizes = [int(each) for each in arguments] or [25, 100, 400]
    print(environment(), "\n", sep="")
    for num_experts, topk in KINDS:
        by_size = {size: measure(size, num_experts, topk, repeats=5 if size < 400 else 3) for size in sizes}
        lines = []
        for name in by_size[sizes[0]]:
            each = [by_size[size][name] for size in sizes]
            growth = math.log(each[-1].seconds / each[0].seconds) / math.log(sizes[-1] / sizes[0]) if each[1:] else 1.0
            lines.append(
                [
                    name,
                    " / ".join(f"{one.seconds * 1e3:.0f}" for one in each),
                    " / ".join(f"{one.seconds / one.plain:.1f}" for one in each),
                    " / ".join(f"{one.peak:.2f}" for one in each),
                    f"{growth:.2f}",
                ]
            )
        sizes_text = " / ".join(map(str, sizes))
        head = ["step", f"ms at {sizes_text} MB", "time / plain", "peak / result", "time grows as size to the"]
        print(f"top-{topk} of {num_experts}, {LAYERS} layers, samples of {SAMPLE} tokens:\n")
        print(table(head, lines), "\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
