"""Activation checkpointing recomputes with other experts than its forward: found, named, frozen.

Noise between forward and recompute stands for a kernel that is not deterministic. What each router's forward and its
recompute used becomes two traces; `diff_traces` names the layers that flip. `mrr.freeze_recompute`, one line before the
training loop, ends it.

    python -m examples.walkthroughs.recompute_flips             # layer 4's router is noisy: exit code 1
    python -m examples.walkthroughs.recompute_flips --no-noise  # nothing to report: exit code 0
"""

import sys
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from examples.walkthroughs.tiny_run import NUM_TOKENS, build, routers_of, train_step
from megatron_router_replay.testing import ParallelSizes, run_ranks

PP2 = ParallelSizes(pp_size=2)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
NOISY_LAYER = 4


def add_noise(chunks: list[Any]) -> None:
    """Let one router see other logits in a recompute than in its forward."""
    generator = torch.Generator().manual_seed(11)
    for router in routers_of(chunks):
        if router.layer_number == NOISY_LAYER:

            def noisy(hidden: Tensor, gating: Any = router.gating) -> Tensor:
                logits = gating(hidden)
                in_recompute = torch._C._current_graph_task_id() != -1
                return logits + 0.1 * torch.randn(logits.shape, generator=generator) if in_recompute else logits

            router.gating = noisy


def watch(chunks: list[Any]) -> dict[str, dict[int, list[Tensor]]]:
    """Collect the experts that leave every router, apart for forwards and recomputes, in order of the calls."""
    seen: dict[str, dict[int, list[Tensor]]] = {"forward": {}, "recompute": {}}

    def hook(router: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        phase = "recompute" if torch._C._current_graph_task_id() != -1 else "forward"
        experts = output[1].to(torch.int8).topk(router.topk, dim=1).indices
        seen[phase].setdefault(router.layer_number, []).append(experts)

    for router in routers_of(chunks):
        router.register_forward_hook(hook)
    return seen


def as_trace(layers: dict[int, list[Tensor]], rows: Tensor, num_experts: int) -> mrr.RoutingTrace:
    """What one rank's routers used, at the global rows of its tokens."""
    numbers = sorted(layers)
    used = torch.stack([torch.cat(layers[number]) for number in numbers], dim=1)
    placed = torch.empty_like(used)
    placed[rows] = used
    return mrr.RoutingTrace(topk_indices=placed, layer_numbers=numbers, num_experts=num_experts)


def forward_and_recompute(noise: bool, freeze: bool) -> tuple[mrr.RoutingTrace, mrr.RoutingTrace]:
    """One training step on this rank: what its forwards used, and what its recomputes used."""
    chunks, microbatches, _ = build(PP2, **FULL)
    if noise:
        add_noise(chunks)
    seen = watch(chunks)
    frozen = mrr.freeze_recompute(chunks) if freeze else None  # the one line, before the training loop
    train_step(PP2, chunks, microbatches)
    if frozen is not None:
        frozen.close()
    rows = torch.cat([microbatch["rows"].t().reshape(-1) for microbatch in microbatches])  # Megatron is s-major
    num_experts = routers_of(chunks)[0].num_experts
    return as_trace(seen["forward"], rows, num_experts), as_trace(seen["recompute"], rows, num_experts)


def main() -> int:
    noise = "--no-noise" not in sys.argv
    ranks = run_ranks(2, forward_and_recompute, noise, False)
    diff = mrr.diff_traces(
        [forward for forward, _ in ranks], [again for _, again in ranks], name_a="forwards", name_b="recomputes"
    )
    print(diff)
    assert diff.rows_compared == NUM_TOKENS
    flipped = {
        number: int(different)
        for number, different in zip(diff.layer_numbers, diff.overlap_counts[:, :-1].sum(dim=1))
        if different
    }
    if not flipped:
        print("verdict: every recompute used its forward's experts")
        return 0
    ranks = run_ranks(2, forward_and_recompute, noise, True)
    after = mrr.diff_traces([forward for forward, _ in ranks], [again for _, again in ranks])
    print(f"with freeze_recompute: {after.decisions_different} of {after.decisions} decisions flip")
    print(
        f"verdict: recomputes flip in layers {flipped}; freeze_recompute {'ends' if after.same else 'DOES NOT END'} it"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
