"""Compare the routes of samples with equal tokens: the same inputs with noise, or different inputs?

Engines round differently from run to run, and the samples of a rollout may be of several weight versions. Both move some of a
token's experts. A different image under equal placeholder tokens moves nearly all of them, over as many tokens as it has.
So experts are counted, not decisions, of which one in three may differ in a top-8 model after a training step; and over
windows that an image fills.

Tokens repeat, and a loop of tokens at a near-tie differs in every turn. Decisions of a window for the same experts in the
same layer are of one *kind*, and count together as one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_router_replay.trace import RoutingTrace

_WINDOW, _STEP = 16, 4
"""Rows of a window, as few as an image has; and from where to where windows move."""

_ALIKE, _FEW, _FEW_DECISIONS = 0.5, 5.0, 2
"""Routes are of different inputs if fewer experts than this share of a window's, less a few, are equal beyond chance.

The few are `_FEW` experts, or those of `_FEW_DECISIONS` decisions if these are more. They keep few decisions from being
evidence: with weights of a KL of 0.1, a few decisions of a loop may move as a whole. In a sample that is shorter than a
window one unlucky token counts more, so the share falls with the root of its rows. `python -m examples.effect.equal_samples`
measures how many pairs are refused.
"""

_MOST_WINDOWS = 1024
"""Windows that are compared at once, to bound memory."""


def unlike(trace: RoutingTrace, first: int, other: int, count: int) -> str:
    """Return how the routes of `count` rows of two samples differ beyond noise and drift of weights; "": they do not."""
    rows = (trace.replay_mask[first : first + count] & trace.replay_mask[other : other + count]).nonzero().squeeze(1)
    # Sorted, because the order of a token's experts is no difference.
    one, two = (trace.topk_indices[begin + rows].sort(dim=2).values for begin in (first, other))
    if torch.equal(one, two):
        return ""
    shared = torch.stack([(one == two[:, :, k : k + 1]).any(dim=2) for k in range(trace.topk)]).sum(0).float()
    by_chance, few = trace.topk**2 / trace.num_experts, max(_FEW, _FEW_DECISIONS * trace.topk)
    starts = torch.arange(0, max(1, len(rows) - _WINDOW + _STEP), _STEP, device=rows.device)
    starts.clamp_(max=max(0, len(rows) - _WINDOW))  # the last window is no shorter
    positions = torch.arange(min(_WINDOW, len(rows)), device=rows.device)
    kinds, least = _kinds(one), _ALIKE * (len(positions) / _WINDOW) ** 0.5
    for some in torch.split(starts, _MOST_WINDOWS):
        at = some.unsqueeze(1) + positions
        of_rows = kinds[at].transpose(1, 2)  # [windows, layers, rows]
        weights = 1 / (of_rows.unsqueeze(3) == of_rows.unsqueeze(2)).sum(3)
        alike = (weights * (shared[at].transpose(1, 2) - by_chance)).sum((1, 2))
        most = weights.sum((1, 2)) * (trace.topk - by_chance)
        margin, worst = (alike - least * most + few).min(0)
        if margin < 0:
            begin, end = int(rows[at[worst, 0]]), int(rows[at[worst, -1]])
            share = float(alike[worst] / most[worst])
            return (
                f"have different routes (positions {begin} to {end} share {share:.0%} of their experts beyond chance)"
            )
    return ""


def _kinds(experts: Tensor) -> Tensor:
    """Return a number for the experts of each decision, [n, num_layers] int64; equal for equal ones."""
    kinds = torch.zeros(experts.shape[:2], dtype=torch.int64, device=experts.device)
    for expert in experts.unbind(2):
        kinds = kinds * 1_000_003 + expert
    return kinds
