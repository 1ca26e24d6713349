"""route: logits and the experts already chosen -> routing probabilities and map, in one pass, with its backward."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_router_replay.errors import ReplayStateError, TraceError, UnsupportedRouterError
from megatron_router_replay.fused import reference
from megatron_router_replay.fused.score import Rounding, Score, parse_score

_TRITON_SCORES = (Score.SOFTMAX, Score.PRE_SOFTMAX, Score.SIGMOID, Score.NORMALISED_SIGMOID)

HAVE_TRITON = find_spec("triton") is not None


def route(
    logits: Tensor,
    topk_indices: Tensor,
    *,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    scaling_factor: float | None = None,
    backend: Literal["torch", "triton"] | None = None,
    exact: bool = False,
    rounding: Rounding = Rounding.EARLY,
) -> tuple[Tensor, Tensor]:
    """Return the probabilities and the map that Megatron-Core's routing makes of these experts.

    Gradients flow to the logits, first ones only.

    Args:
        logits: [num_tokens, num_experts], floating point.
        topk_indices: [num_tokens, topk], any integer dtype and strides, distinct in each row (not checked here). Kept
            for the backward as they are: do not write to them before it.
        score_function, use_pre_softmax, scaling_factor: as in Megatron-Core; 0 and None scale nothing.
        backend: None takes Triton for logits on a GPU where it is installed and has the kernel, else torch.
        exact: with torch, round as Megatron-Core's unfused path does, for a softmax over the chosen experts that takes nine
            times as long on a CPU. Triton's kernel rounds in one way.
        rounding: where Megatron-Core's version rounds; `probe` finds out. Without effect on float32.

    Returns:
        (routing_probs [num_tokens, num_experts] of logits' dtype, 0 where not chosen; routing_map of the same shape, bool).

    Raises:
        ReplayStateError: the rows are not one a token, or more experts than there are.
        TraceError: topk_indices are no integers.
        UnsupportedRouterError: another score function, or backend="triton" without a kernel for it; or later, in the
            backward: create_graph=True.
        RuntimeError: torch's own, on a CPU, for an expert id outside 0..num_experts-1. In the Triton kernel, which
            cannot raise, rows that do not name topk distinct experts get NaN probabilities.

    Source: Megatron-Core 0.16.1 and 0.18.2, moe_utils.topk_routing_with_score_function, behind its top-k.
    """
    _check(logits, topk_indices)
    score = parse_score(score_function, use_pre_softmax=use_pre_softmax, topk=topk_indices.shape[1])
    if topk_indices.device != logits.device:
        topk_indices = topk_indices.to(logits.device, non_blocking=True)
    has_kernel = score in _TRITON_SCORES and (rounding is Rounding.EARLY or logits.dtype is torch.float32)
    if backend is None:
        use_triton = HAVE_TRITON and has_kernel and logits.is_cuda and logits.dtype != torch.float64
        backend = "triton" if use_triton else "torch"
    elif backend == "triton" and not has_kernel:
        raise UnsupportedRouterError(f"Triton has no kernel for {score} with {rounding}: use backend='torch'.")
    routed: tuple[Tensor, Tensor] = _Route.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        logits, topk_indices, score, scaling_factor, backend == "triton", exact, rounding
    )
    return routed


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        topk_indices: Tensor,
        score: Score,
        scaling_factor: float | None,
        triton: bool,
        exact: bool,
        rounding: Rounding,
    ) -> tuple[Tensor, Tensor]:
        if triton:
            from megatron_router_replay.fused import launch

            routing_probs, routing_map, scores = launch.route_forward(logits, topk_indices, score, scaling_factor)
        else:
            routing_probs, routing_map, scores = reference.route_forward(
                logits, topk_indices, score, scaling_factor, exact=exact, rounding=rounding
            )
        # The indices as they came: an eighth of what the scatters take.
        ctx.save_for_backward(topk_indices, scores)
        ctx.score, ctx.scaling_factor, ctx.triton = score, scaling_factor, triton
        ctx.exact, ctx.rounding = exact, rounding
        ctx.mark_non_differentiable(routing_map)
        # Otherwise a loss that leaves the probabilities out would cost a dense tensor of zeros.
        ctx.set_materialize_grads(False)
        return routing_probs, routing_map

    @staticmethod
    def backward(
        ctx: Any, grad_probs: Tensor | None, grad_map: None
    ) -> tuple[Tensor | None, None, None, None, None, None, None]:
        # Grad mode is on here with create_graph=True only; a compiled graph refuses second derivatives by itself.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UnsupportedRouterError(
                "cannot differentiate fused.route twice: a backward with create_graph=True reached it. Take gradients of "
                "gradients through Megatron-Core's unfused routing."
            )
        if grad_probs is None:
            return None, None, None, None, None, None, None
        saved = (*ctx.saved_tensors, ctx.score, ctx.scaling_factor)
        if ctx.triton:
            from megatron_router_replay.fused import launch

            return launch.route_backward(grad_probs, *saved), None, None, None, None, None, None
        grad_logits = reference.route_backward(grad_probs, *saved, exact=ctx.exact, rounding=ctx.rounding)
        return grad_logits, None, None, None, None, None, None


def _check(logits: Tensor, topk_indices: Tensor) -> None:
    if topk_indices.is_floating_point() or topk_indices.dtype is torch.bool:
        raise TraceError(f"topk_indices must be integers, got {topk_indices.dtype}.")
    fits = logits.dim() == 2 and topk_indices.dim() == 2 and topk_indices.shape[0] == logits.shape[0]
    if not fits or not 1 <= topk_indices.shape[1] <= logits.shape[1]:
        raise ReplayStateError(
            f"cannot route logits {list(logits.shape)} to topk_indices {list(topk_indices.shape)}: give [num_tokens, "
            "num_experts] and [num_tokens, topk], one row a token, in the order the router sees them (s-major, this rank's)."
        )
