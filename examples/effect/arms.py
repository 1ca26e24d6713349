"""Routes of each arm in training; the last two are R3 with a planted bug.

This library refuses such bugs where they arise: a shift changes the number of rows, or their tokens (`PayloadError`
in the engines' decoders, `LayoutError` in a session); tokens without a route are counted (`replayed_share`), and refused by
`replay(min_replayed=...)`. So the faults are planted after all checks, in the indices of a trace.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import megatron_router_replay as mrr

Choose = Callable[[mrr.RoutingTrace, mrr.RoutingTrace, int], mrr.RoutingTrace | None]


def shifted(trace: mrr.RoutingTrace) -> mrr.RoutingTrace:
    """Return the trace with every token on the route of the token before it; the first of each sample keeps its own."""
    assert trace.sequence_lengths is not None, "a rollout has samples"
    rows = torch.arange(trace.num_tokens) - 1
    firsts = torch.tensor([0, *trace.sequence_lengths[:-1]]).cumsum(0)
    rows[firsts] += 1
    return _changed(trace, topk_indices=trace.topk_indices[rows], replay_mask=trace.replay_mask)


def without_a_third(trace: mrr.RoutingTrace, *, seed: int) -> mrr.RoutingTrace:
    """Return the trace without the routes of a third of its tokens, drawn at random: the live router decides them."""
    lost = torch.rand(trace.num_tokens, generator=torch.Generator().manual_seed(seed)) < 1 / 3
    return _changed(trace, topk_indices=trace.topk_indices, replay_mask=trace.replay_mask & ~lost)


def _changed(trace: mrr.RoutingTrace, *, topk_indices: Tensor, replay_mask: Tensor) -> mrr.RoutingTrace:
    return mrr.RoutingTrace(
        topk_indices=topk_indices,
        replay_mask=replay_mask,
        layer_numbers=trace.layer_numbers,
        num_experts=trace.num_experts,
        token_ids=trace.token_ids,
        sequence_lengths=trace.sequence_lengths,
    )


ARMS: dict[str, Choose] = {
    # of the engine's routes, those of the trainer's own old-policy forward, and the number of the step; None: live
    "off": lambda engine, trainer, step: None,
    "r2": lambda engine, trainer, step: trainer,
    "r3": lambda engine, trainer, step: engine,
    "r3_shifted": lambda engine, trainer, step: shifted(engine),
    "r3_third_lost": lambda engine, trainer, step: without_a_third(engine, seed=step),
}
