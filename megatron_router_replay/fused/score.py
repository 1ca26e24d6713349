"""Score: how the logits of chosen experts become probabilities; Megatron-Core's options as one value."""

from __future__ import annotations

from enum import Enum

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
    SQRT_SOFTPLUS = 4
    """Square root of the softplus of the logit; topk is 1. Megatron-Core 0.18 and later."""
    NORMALISED_SQRT_SOFTPLUS = 5
    """The same, divided by their sum over the chosen experts."""

    @property
    def is_normalised(self) -> bool:
        return self in (Score.NORMALISED_SIGMOID, Score.NORMALISED_SQRT_SOFTPLUS)


class Rounding(Enum):
    """Where values are rounded to the logits' dtype; the same for float32 logits."""

    EARLY = "early"
    """Scores, before they are normalised and scaled: Megatron-Core 0.16 and 0.17."""
    LATE = "late"
    """Probabilities, at the very end: Megatron-Core 0.18 and later."""


def parse_score(score_function: str, *, use_pre_softmax: bool, topk: int) -> Score:
    """Return the score of Megatron-Core's `score_function`, `use_pre_softmax` (without effect on sigmoid) and `topk`.

    Raises:
        UnsupportedRouterError: another score function than softmax, sigmoid and sqrtsoftplus.

    Source: Megatron-Core 0.16.1 and 0.18.2, moe_utils.topk_routing_with_score_function.
    """
    if score_function == "softmax":
        return Score.PRE_SOFTMAX if use_pre_softmax else Score.SOFTMAX
    if score_function == "sigmoid":
        return Score.NORMALISED_SIGMOID if topk > 1 else Score.SIGMOID
    if score_function == "sqrtsoftplus":
        return Score.NORMALISED_SQRT_SOFTPLUS if topk > 1 else Score.SQRT_SOFTPLUS
    raise UnsupportedRouterError(
        f"cannot route with moe_router_score_function={score_function!r}: fused.route knows 'softmax', 'sigmoid' and "
        "'sqrtsoftplus'."
    )
