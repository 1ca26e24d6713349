"""`route` in plain torch: one gather, one scatter into probabilities, one into the map; the backward the same way round.

With exact=True every step is the operation that Megatron-Core runs, on the same values in the same dtype, so that results
keep its rounding. Only its detours are gone: scatters that copy what they write into, the map by way of int32, and scores of
experts that nobody chose. Otherwise the softmax over the chosen experts runs down columns, not along rows of topk entries,
which takes a ninth of the time on a CPU and rounds some results differently, by one unit in the last place.

Source: Megatron-Core 0.16.1 (Rounding.EARLY) and 0.18.2 (LATE), moe_utils.topk_routing_with_score_function, and what autograd
makes of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_router_replay.fused.score import Rounding, Score

_SIGMOIDS = (Score.SIGMOID, Score.NORMALISED_SIGMOID)


def route_forward(
    logits: Tensor,
    topk_indices: Tensor,
    score: Score,
    scaling_factor: float | None,
    *,
    exact: bool,
    rounding: Rounding = Rounding.EARLY,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, map and what the backward needs: float32 scores.

    Args:
        logits: [num_tokens, num_experts].
        topk_indices: [num_tokens, topk], any integer dtype.
        exact: round as Megatron-Core does.
        rounding: of the Megatron-Core version.

    Returns:
        (routing_probs and routing_map [num_tokens, num_experts]; scores [num_tokens, topk], or [num_tokens, num_experts] for
        PRE_SOFTMAX; for the square roots the chosen logits).
    """
    dtype = logits.dtype if rounding is Rounding.EARLY else torch.float32
    indices = topk_indices.to(torch.int64)
    if score is Score.PRE_SOFTMAX:
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        probs = scores.gather(1, indices).to(dtype)
    elif score is Score.SOFTMAX:
        chosen_logits = logits.gather(1, indices)
        scores = (
            torch.softmax(chosen_logits, dim=-1, dtype=torch.float32)
            if exact
            else torch.softmax(chosen_logits.t(), dim=0, dtype=torch.float32).t()
        )
        probs = scores.to(dtype)
    else:
        scores = logits.gather(1, indices).float()
        if score in _SIGMOIDS:
            scores = torch.sigmoid(scores)
            probs = scores.to(dtype)
        else:
            probs = torch.nn.functional.softplus(scores).sqrt().to(dtype)
        if score.is_normalised:
            probs = probs / _total(probs)
    if scaling_factor:
        probs = probs * scaling_factor
    routing_probs = torch.zeros_like(logits).scatter_(1, indices, probs.to(logits.dtype))
    # A tensor of ones: torch scatters a tensor three times as fast as a number.
    chosen = torch.ones_like(indices, dtype=torch.bool)
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, indices, chosen)
    return routing_probs, routing_map, scores


def route_backward(
    grad_probs: Tensor,
    topk_indices: Tensor,
    scores: Tensor,
    score: Score,
    scaling_factor: float | None,
    *,
    exact: bool,
    rounding: Rounding = Rounding.EARLY,
) -> Tensor:
    """Return the gradient of the logits, [num_tokens, num_experts] of grad_probs' dtype."""
    indices = topk_indices.to(torch.int64)
    grad = grad_probs.gather(1, indices)
    if rounding is Rounding.LATE:
        grad = grad.float()
    if scaling_factor:
        grad = grad * scaling_factor
    if score is Score.PRE_SOFTMAX:
        # Dense, because Megatron's sum over all experts rounds in an order of its own.
        dense = torch.zeros_like(scores).scatter_(1, indices, grad.float())
        return _softmax_backward(dense, scores).to(grad_probs.dtype)
    if score is Score.SOFTMAX:
        grad = (
            _softmax_backward(grad.float(), scores) if exact else _softmax_backward(grad.float().t(), scores.t(), 0).t()
        )
    else:
        softplus = None if score in _SIGMOIDS else torch.nn.functional.softplus(scores)
        values = scores if softplus is None else softplus.sqrt()
        if score.is_normalised:
            grad = _normalised_backward(grad, values.to(grad.dtype))
        if softplus is None:
            grad = torch.ops.aten.sigmoid_backward(grad.float(), values)
        else:
            grad = torch.ops.aten.softplus_backward(grad.float() / (2 * values), scores, 1, 20)
    return torch.zeros_like(grad_probs).scatter_(1, indices, grad.to(grad_probs.dtype))


def _softmax_backward(grad: Tensor, softmax: Tensor, dim: int = -1) -> Tensor:
    result: Tensor = torch.ops.aten._softmax_backward_data(grad, softmax, dim, softmax.dtype)
    return result


def _total(scores: Tensor) -> Tensor:
    return scores.sum(dim=-1, keepdim=True) + 1e-20


def _normalised_backward(grad: Tensor, scores: Tensor) -> Tensor:
    """Return the gradient of `scores` in scores / _total(scores), rounded where autograd would."""
    total = _total(scores)
    return grad / total + (-grad * (scores / total / total)).sum(dim=-1, keepdim=True)
