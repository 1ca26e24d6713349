"""`route` in Triton: the kernels, launched on torch tensors; the interface of `reference.py`, without a host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_router_replay.fused import kernels
from megatron_router_replay.fused.score import Score

_TILE = 2048
"""Elements of the dense tile that one program holds: 16 a thread."""


def route_forward(
    logits: Tensor, topk_indices: Tensor, score: Score, scaling_factor: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, map and what the backward needs; see `reference.route_forward`.

    For PRE_SOFTMAX the backward needs the logits: a softmax made twice is cheaper than one kept in float32.
    """
    logits = logits.contiguous()
    num_tokens, topk = topk_indices.shape
    routing_probs = torch.empty_like(logits)
    routing_map = torch.empty_like(logits, dtype=torch.bool)
    dense = score is Score.PRE_SOFTMAX
    scores = logits if dense else logits.new_empty((num_tokens, topk), dtype=torch.float32)
    if num_tokens:
        blocks, sizes = _launch(logits.shape, topk)
        kernels.route_forward[blocks](
            logits,
            topk_indices,
            routing_probs,
            routing_map.view(torch.uint8),
            scores,
            *logits.shape,
            *topk_indices.stride(),
            float(scaling_factor or 1.0),
            SCORE=score.value,
            SCALED=bool(scaling_factor),
            **sizes,
        )
    return routing_probs, routing_map, scores


def route_backward(
    grad_probs: Tensor, topk_indices: Tensor, scores: Tensor, score: Score, scaling_factor: float | None
) -> Tensor:
    """Return the gradient of the logits, [num_tokens, num_experts] of grad_probs' dtype."""
    grad_logits = torch.empty_like(grad_probs, memory_format=torch.contiguous_format)
    if len(grad_probs):
        blocks, sizes = _launch(grad_probs.shape, topk_indices.shape[1])
        kernels.route_backward[blocks](
            grad_probs,
            topk_indices,
            scores,
            grad_logits,
            *grad_probs.shape,
            *grad_probs.stride(),
            *topk_indices.stride(),
            float(scaling_factor or 1.0),
            SCORE=score.value,
            SCALED=bool(scaling_factor),
            **sizes,
        )
    return grad_logits


def _launch(shape: torch.Size, topk: int) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid and the tile sizes: all of a row in one program, as many rows as fill a tile."""
    num_tokens, num_experts = shape
    experts = 1 << (num_experts - 1).bit_length()
    rows = max(1, _TILE // experts)
    sizes = {"TOPK": topk, "SLOTS": 1 << (topk - 1).bit_length(), "EXPERTS": experts, "ROWS": rows}
    return (-(-num_tokens // rows),), sizes
