"""What the fused path costs: one router's routing, live, replayed by Megatron-Core, by our hook and by fused.route.

python -m benchmarks.fused

Measured in a process of its own, whose allocator keeps freed memory: fresh pages cost more than the arithmetic, and come to
whoever asks first. (Without this, ratios move by a factor of three, mostly in our favour.) One thread, and its processor
time: on a quiet machine that is the time, on a busy one the clock shows only who else ran.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.router import session_router
from megatron_router_replay.fused import route
from megatron_router_replay.testing import megatron_on_cpu
from megatron_router_replay.trace import index_dtype

AIM = (8192, 128, 8)
SHAPES = [
    AIM,
    *((n, *sizes) for n, sizes in itertools.product((4096, 16384), ((64, 6), (128, 8), (256, 8), (512, 10)))),
]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}


def alternatives(sizes: tuple[int, int, int], session: Any) -> dict[str, Any]:
    """Functions of the logits, by name; all but the first use the same random experts."""
    from megatron.core.transformer.moe import router_replay as theirs
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    num_tokens, num_experts, topk = sizes
    routes = torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :topk].contiguous()
    compact = routes.to(index_dtype(num_experts))
    own = theirs.RouterReplay()
    own.set_target_indices(routes)
    own.set_router_replay_action(theirs.RouterReplayAction.REPLAY_FORWARD)
    routing = partial(topk_routing_with_score_function, topk=topk)
    return {
        "live": routing,
        "Megatron's replay": partial(routing, router_replay=own),
        "our hook": lambda logits: routing(logits, router_replay=session()),
        "fused.route": lambda logits: route(logits, compact),
    }


def processor_medians(alternatives: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Return `measure.medians` in seconds of this thread's processor time."""
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for repeat in range(2 + repeats):
        for name in list(alternatives) if repeat % 2 else reversed(list(alternatives)):
            start = time.thread_time()
            alternatives[name]()
            seconds[name].append(time.thread_time() - start)
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


def run(function: Any, logits: Tensor, grad: Tensor | None) -> None:
    """One forward, and the backward if there is a gradient."""
    probs, _ = function(logits.detach().requires_grad_(grad is not None))
    if grad is not None:
        probs.backward(grad)


def measure(sizes: tuple[int, int, int], dtype: torch.dtype, *, backward: bool, repeats: int) -> dict[str, float]:
    """Ratios to live routing and between the replays."""
    logits = torch.randn(sizes[:2]).to(dtype)
    grad = torch.randn(sizes[:2]).to(dtype) if backward else None
    with session_router(*sizes, live_rows=False, kind="replay") as session:
        functions = alternatives(sizes, session)
        seconds = processor_medians(
            {name: partial(run, f, logits, grad) for name, f in functions.items()}, repeats=repeats
        )
    live, theirs, hook, fused = seconds.values()
    ratios = {f"{name} / live": value / live for name, value in seconds.items() if name != "live"}
    return (
        {"live ms": live * 1000} | ratios | {"hook / Megatron's": hook / theirs, "fused / Megatron's": fused / theirs}
    )


def table(repeats: int) -> str:
    """Measure here; return the table as Markdown."""
    lines = []
    with megatron_on_cpu():
        for dtype, backward, sizes in itertools.product((torch.float32, torch.bfloat16), (False, True), SHAPES):
            ratios = measure(sizes, dtype, backward=backward, repeats=repeats)
            if not lines:
                lines = [
                    "| tokens, experts, topk | logits | pass | " + " | ".join(ratios) + " |",
                    "|---" * (3 + len(ratios)) + "|",
                ]
            what = f"{', '.join(map(str, sizes))} | {str(dtype).removeprefix('torch.')} | {'both' if backward else 'forward'}"
            lines.append(f"| {what} | {' | '.join(f'{value:.2f}' for value in ratios.values())} |")
    return "\n".join(lines)


def main(repeats: int = 21) -> str:
    """Measure in a process of its own; return the table as Markdown."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.fused", str(repeats)]
    root = Path(__file__).parents[1]
    return subprocess.run(
        command, cwd=root, env=os.environ | ENVIRONMENT, check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    print(table(int(sys.argv[1])) if len(sys.argv) > 1 else main())
