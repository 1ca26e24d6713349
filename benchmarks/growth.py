"""How the work of replay grows: tokens, layers, experts and micro-batches doubled four times each.

The work is all of this package's: decoding the response, opening a session, queuing micro-batches, and the hook in each
router's forward (not Megatron's dense map behind it).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import megatron_router_replay as mrr
from benchmarks.ingest import replay_alone
from benchmarks.measure import Section, rounds, single_process, table
from benchmarks.router import Routers, random_routes
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.testing import ParallelSizes, tiny_gpt_config

TITLE = "Growth: time of the work of replay, by size"
BASE = {"tokens": 4096, "layers": 8, "experts": 16, "microbatches": 2}
TOPK = 8
DOUBLINGS = 4
REPEATS = 15


def work(sizes: dict[str, int]) -> Callable[[], None]:
    """Return a function that does the work of replay for these sizes; tokens are those of a micro-batch."""
    tokens, layers, experts, microbatches = sizes.values()
    config = tiny_gpt_config(
        ParallelSizes(), num_layers=layers, num_moe_experts=experts, moe_router_topk=TOPK, hidden_size=64
    )
    model = Routers(config, layers)
    info = ModelRoutingInfo(
        num_layers=layers, moe_layer_numbers=tuple(range(1, layers + 1)), num_experts=experts, topk=TOPK
    )
    arrays = [random_routes(tokens, layers, TOPK, experts).to(torch.uint8).numpy()[:-1] for _ in range(microbatches)]
    rows = torch.arange(tokens * microbatches).view(microbatches, 1, tokens)
    scores = torch.zeros(tokens, experts)

    def run() -> None:
        trace = mrr.engines.vllm.decode_batch(arrays, model=info, num_tokens=[tokens] * microbatches)
        with replay_alone(model, trace) as session:
            for its_rows in rows:
                session.microbatch(its_rows)
                model(scores)

    return run


def measure(*, base: dict[str, int] = BASE, repeats: int = REPEATS) -> dict[str, Any]:
    """Time each size of each axis; the sizes of an axis in turns."""
    raw: dict[str, Any] = {"base": base, "seconds": {}}
    with single_process():
        ParallelSizes().initialize()
        for axis in base:
            sizes = [base[axis] * 2**doubling for doubling in range(DOUBLINGS + 1)]
            alternatives = {str(size): partial(work({**base, axis: size})) for size in sizes}
            raw["seconds"][axis] = rounds(alternatives, repeats=repeats, warm_up=3)
    return raw


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Return the slope of the least-squares line through log(seconds) over log(sizes)."""
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)


def render(raw: dict[str, Any]) -> str:
    """Return the table."""
    rows = []
    for axis, by_size in raw["seconds"].items():
        sizes = [int(size) for size in by_size]
        medians = [sorted(seconds)[len(seconds) // 2] for seconds in by_size.values()]
        found = [f"{exponent(sizes, medians):.2f}", f"{exponent(sizes[-2:], medians[-2:]):.2f}"]
        times = ", ".join(f"{second / medians[0]:.2f}" for second in medians)
        rows.append([axis, f"{sizes[0]} to {sizes[-1]}", f"{medians[0] * 1000:.2f}", times, *found])
    head = ["doubled", "sizes", "first, ms", "ratios to the first", "exponent", "exponent of the last doubling"]
    base = ", ".join(f"{size} {axis}" for axis, size in raw["base"].items())
    return "\n".join(
        [
            f"Base: {base} (tokens of a micro-batch), top-{TOPK}, uint8 arrays. One thread, its processor time, medians. The "
            "exponent is the slope of the line through all sizes on logarithmic scales: 1 is linear, 0 constant; below 1 "
            "where costs that do not grow take their part. Aim: nothing above 1.",
            "",
            table(head, rows),
        ]
    )


def main() -> Section:
    raw = measure()
    return Section(title=TITLE, text=render(raw), raw=raw)
