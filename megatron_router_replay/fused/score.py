"""Score: how the logits of chosen experts become probabilities; Megatron-Core's options as one value."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from megatron_router_replay.errors import UnsupportedRouterError


class Score(Enum):
    """What the probabilities of the chosen experts are."""

    SOFTMAX = 0
    """Softmax over the chosen experts' logits."""
    PRE_SOFTMAX = 1
    """Softmax over all experts' logits, of the chosen."""
    SIGMOID = 2
    """Sigmoid of the logit; topk is 1."""
    NORMALISED_SIGMOID = 3
    """Sigmoid of the logits, divided by their sum over the chosen experts."""


def parse_score(score_function: str, *, use_pre_softmax: bool, topk: int) -> Score:
    """Return the score of Megatron-Core's `score_function`, `use_pre_softmax` (without effect on sigmoid) and `topk`.

    Raises:
        UnsupportedRouterError: another score function than softmax and sigmoid.

    Source: Megatron-Core 0.16.1, moe_utils.topk_routing_with_score_function.
    """
    if score_function == "softmax":
        return Score.PRE_SOFTMAX if use_pre_softmax else Score.SOFTMAX
    if score_function == "sigmoid":
        return Score.NORMALISED_SIGMOID if topk > 1 else Score.SIGMOID
    raise UnsupportedRouterError(
        f"cannot route with moe_router_score_function={score_function!r}: fused.route knows 'softmax' and 'sigmoid'."
    )


def selection_scores(
    logits: Tensor, *, score_function: str, use_pre_softmax: bool = False, expert_bias: Tensor | None = None
) -> Tensor:
    """Return the scores whose top-k Megatron-Core takes, [num_tokens, num_experts].

    Args:
        logits: [num_tokens, num_experts], floating point.
        score_function, use_pre_softmax: as in Megatron-Core.
        expert_bias: [num_experts] or None; without effect on softmax, as in Megatron-Core.

    Source: Megatron-Core 0.16.1, moe_utils.topk_routing_with_score_function.
    """
    score = parse_score(score_function, use_pre_softmax=use_pre_softmax, topk=1)
    if score is Score.SOFTMAX:
        return logits
    if score is Score.PRE_SOFTMAX:
        return torch.softmax(logits, dim=-1, dtype=torch.float32).type_as(logits)
    scores = torch.sigmoid(logits.float()).type_as(logits)
    return scores if expert_bias is None else scores + expert_bias
