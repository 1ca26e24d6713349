"""The router's table once more, one shape, as processes run by default: all threads, and an allocator that returns memory.

Part router keeps the allocator's pages and so compares arithmetic alone. Here each dense tensor may cost fresh pages, of
which `fused.route` touches the fewest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from benchmarks.measure import Section, ratio, rounds, single_process, table, verdict
from benchmarks.router import AIM, NUM_LAYERS, Routers, random_routes, router_config
from megatron_router_replay.fused import route
from megatron_router_replay.testing import ParallelSizes

TITLE = "Allocator: the same with the system's default allocator"
ENVIRONMENT: dict[str, str] = {}
"""Nothing is set, unlike for the other parts."""
THREADS = (1, 2)


def measure(repeats: int = 60) -> list[dict[str, Any]]:
    """Time live routing, Megatron's replay, ours and `fused.route`, by threads and pass."""
    with single_process():
        ParallelSizes().initialize()
        raw = []
        for threads in THREADS:
            torch.set_num_threads(threads)
            for backward in (False, True):
                seconds = _measure(backward=backward, repeats=repeats)
                raw.append({"threads": threads, "pass": "both" if backward else "forward", "seconds": seconds})
        return raw


def _measure(*, backward: bool, repeats: int) -> dict[str, list[float]]:
    from megatron.core.transformer.moe import router_replay as theirs

    num_tokens, router = AIM
    config = router_config(router)
    num_experts, topk = config.num_moe_experts, config.moe_router_topk
    logits, grad = torch.randn(num_tokens, num_experts), torch.randn(num_tokens, num_experts)
    routes = random_routes(num_tokens, NUM_LAYERS, topk, num_experts)
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=range(1, NUM_LAYERS + 1), num_experts=num_experts)
    by_layer = trace.topk_indices.transpose(0, 1).contiguous()
    live, megatron, ours = Routers(config), Routers(config), Routers(config)
    for layer, module in enumerate(megatron.routers):
        module.router_replay = theirs.RouterReplay()
        module.router_replay.set_target_indices(routes[:, layer].contiguous())
        module.router_replay.set_router_replay_action(theirs.RouterReplayAction.REPLAY_FORWARD)

    def run(model: Callable[[Tensor], list[Tensor]]) -> None:
        probs = model(logits.detach().requires_grad_(backward))
        if backward:
            torch.autograd.backward(probs, [grad] * len(probs))

    with mrr.replay(ours, trace) as session:
        return rounds(
            {
                "live": partial(run, live),
                "Megatron's replay": partial(run, megatron),
                "replay": partial(run, ours),
                "fused.route": partial(run, lambda leaf: [route(leaf, indices)[0] for indices in by_layer]),
            },
            repeats=repeats,
            prepare={"replay": partial(session.microbatch, torch.arange(num_tokens))},
            clock=time.perf_counter,
        )


def render(raw: list[dict[str, Any]]) -> str:
    """Return the table, and the targets under it."""
    head = ["threads", "pass", "Megatron's replay / live", "replay / live", "fused.route / live", "replay / Megatron's"]
    rows = [
        [
            case["threads"],
            case["pass"],
            *(ratio(case["seconds"], name, "live") for name in ("Megatron's replay", "replay", "fused.route")),
            ratio(case["seconds"], "replay", "Megatron's replay"),
        ]
        for case in raw
    ]
    limits = {"forward": 0.50, "both": 0.60}
    targets = [
        verdict(
            f"fused.route / Megatron's replay, {case['threads']} threads, {case['pass']}",
            ratio(case["seconds"], "fused.route", "Megatron's replay"),
            limits[case["pass"]],
        )
        for case in raw
    ]
    return "\n".join([f"{AIM[0]}, {AIM[1]}, float32; wall time.", "", table(head, rows), "", *targets])


def main() -> Section:
    raw = measure()
    return Section(title=TITLE, text=render(raw), raw=raw)
