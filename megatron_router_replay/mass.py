"""How much probability the live router gives to the experts of a route: the measure of how far the two disagree."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_router_replay.errors import TraceError

ScoreKind = Literal["logits", "probabilities"]
"""Whether scores still need a softmax over the experts."""


def probabilities(scores: Tensor, kind: ScoreKind) -> Tensor:
    """Return scores [num_tokens, num_experts] as float32 rows that add up to 1.

    Raises:
        TraceError: another kind.
    """
    if kind == "logits":
        return torch.softmax(scores.float(), dim=1)
    if kind != "probabilities":
        raise TraceError(f"kind={kind!r} must be 'logits' or 'probabilities'.")
    # Sigmoid scores with an expert bias may be negative and add up to anything.
    positive = scores.float().clamp(min=0.0)
    return positive / positive.sum(dim=1, keepdim=True).clamp(min=1e-20)


def mass_lost(scores: Tensor, kind: ScoreKind, *, live: Tensor, replayed: Tensor) -> Tensor:
    """Return the probability that the live router gives to its own experts beyond that of the replayed ones.

    The order of the columns makes no difference, not even in the last bit: which one a top-k has depends on whether
    gradients are on.

    Args:
        scores: [num_tokens, num_experts], the live router's.
        live, replayed: [num_tokens, topk] of any integer dtype, distinct ids in a row.

    Returns:
        [num_tokens] float32, >= 0, and exactly 0 where both name the same experts.
    """
    of_experts = probabilities(scores.detach(), kind)
    masses = [of_experts.gather(1, chosen.to(torch.int64).sort(dim=1).values).sum(dim=1) for chosen in (live, replayed)]
    # Below 0 only where the live router is held to groups of experts.
    return (masses[0] - masses[1]).clamp(min=0.0)
