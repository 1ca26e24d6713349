"""What the hook costs: one router's selection, live, with Megatron-Core's own replay and with ours, as ratios to live.

python -m benchmarks.router
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import megatron_router_replay as mrr
from benchmarks.measure import medians
from megatron_router_replay.diagnostics.live import LiveComparison
from megatron_router_replay.testing import megatron_on_cpu

SHAPES = [(4096, 64, 6), (8192, 128, 8), (4096, 256, 8), (4096, 512, 10)]


@contextmanager
def session_router(
    num_tokens: int,
    num_experts: int,
    topk: int,
    *,
    live_rows: bool = False,
    kind: str = "replay",
    compare: bool = False,
) -> Iterator[Any]:
    """Yield what a session puts in place of router.router_replay, and a function that queues a micro-batch for it."""
    from megatron_router_replay.mcore.chunk import Chunk, choose_live, choose_replayed
    from megatron_router_replay.mcore.find import FoundRouter
    from megatron_router_replay.mcore.targets import build_targets

    config = SimpleNamespace(moe_router_score_function="softmax", moe_router_pre_softmax=False)
    router = SimpleNamespace(topk=topk, num_experts=num_experts, router_replay=None, config=config)
    found = FoundRouter(name="router", router=router, layer_number=1, is_mtp=False)
    choose = choose_replayed if kind == "replay" else choose_live
    chunk = Chunk(0, torch.nn.Identity(), [found], choose, 0, True)
    routes = torch.rand(num_tokens, 1, num_experts).argsort(dim=2)[:, :, :topk]
    mask = torch.ones(num_tokens, dtype=torch.bool)
    mask[::1024] = not live_rows
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=[1], num_experts=num_experts, replay_mask=mask)
    rows = torch.arange(num_tokens)
    targets = build_targets(trace, rows, torch.zeros_like(rows), device=torch.device("cpu"), with_replayed=compare)
    if compare:
        chunk.routers[0].live_comparison = LiveComparison([1], num_experts=num_experts, topk=topk)

    def queue() -> Any:
        chunk.in_flight.clear()
        chunk.queue(targets if kind == "replay" else None, rows=rows)
        (session_router,) = chunk.routers
        session_router.forwards = chunk._queued - 1
        return session_router

    yield queue


def selection(logits: torch.Tensor, topk: int, backward: bool, router_replay: Callable[[], Any] = lambda: None) -> None:
    """One call of Megatron's routing function, softmax behind the top-k."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    leaf = logits.detach().requires_grad_(backward)
    probs, _ = topk_routing_with_score_function(leaf, topk, router_replay=router_replay())
    if backward:
        probs.backward(torch.ones_like(probs))


def measure(num_tokens: int, num_experts: int, topk: int, *, backward: bool, repeats: int) -> dict[str, float]:
    """Ratios to live routing, by alternative."""
    from megatron.core.transformer.moe import router_replay as theirs

    logits = torch.randn(num_tokens, num_experts)
    own = theirs.RouterReplay()
    own.set_target_indices(torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :topk].contiguous())
    own.set_router_replay_action(theirs.RouterReplayAction.REPLAY_FORWARD)
    sizes = (num_tokens, num_experts, topk)
    with (
        session_router(*sizes) as replay,
        session_router(*sizes, live_rows=True) as replay_live,
        session_router(*sizes, compare=True) as replay_compared,
        session_router(*sizes, kind="record") as record,
    ):
        run = partial(selection, logits, topk, backward)
        seconds = medians(
            {
                "live": run,
                "Megatron's replay": partial(run, lambda: own),
                "replay": partial(run, replay),
                "replay, live rows": partial(run, replay_live),
                "replay, compare_live": partial(run, replay_compared),
                "record": partial(run, record),
            },
            repeats=repeats,
        )
    return {name: value / seconds["live"] for name, value in seconds.items()} | {"live ms": seconds["live"] * 1000}


def main(repeats: int = 15) -> str:
    """Return the table as Markdown."""
    lines = []
    with megatron_on_cpu():
        for backward in (False, True):
            for sizes in SHAPES:
                ratios = measure(*sizes, backward=backward, repeats=repeats)
                if not lines:
                    lines = ["| tokens, experts, topk | pass | " + " | ".join(ratios) + " |"]
                    lines.append("|---" * (2 + len(ratios)) + "|")
                values = " | ".join(f"{value:.2f}" for value in ratios.values())
                lines.append(f"| {', '.join(map(str, sizes))} | {'both' if backward else 'forward'} | {values} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(main())
