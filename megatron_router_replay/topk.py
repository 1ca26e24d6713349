"""Given experts in place of a router's top-k: what a legal target is, which forward it fits, and its live scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import ReplayStateError, TraceError
from megatron_router_replay.torch_private import is_captured

ComputeTopk = Callable[..., tuple[Tensor, Tensor]]
"""(scores [num_tokens, num_experts], topk, num_groups=, group_topk=) -> (values, indices), both [num_tokens, topk]."""


def gather_topk(scores: Tensor, topk_indices: Tensor, *, like_topk: bool = False) -> tuple[Tensor, Tensor]:
    """Return the live scores of the given experts and their indices, as a top-k would.

    Args:
        scores: [num_tokens, num_experts], the router's dense scores; gradients flow to them.
        topk_indices: [num_tokens, topk], any integer dtype, valid.
        like_topk: keep for the backward what a top-k keeps, the indices and not the scores. A forward that runs a top-k
            needs it in its recompute, where non-reentrant checkpoints compare the two. It runs Python in the backward,
            some 3% of a router's time at 8192 tokens.

    Returns:
        ([num_tokens, topk] of scores' dtype, [num_tokens, topk] int64 on scores' device).
    """
    indices = topk_indices.to(device=scores.device, dtype=torch.int64, non_blocking=True)
    if not like_topk:
        return scores.gather(1, indices), indices
    values: Tensor = _GatherLikeTopk.apply(scores, indices)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return values, indices


class _GatherLikeTopk(torch.autograd.Function):
    """`scores.gather(1, indices)` that keeps for its backward the indices, not the scores."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape = scores.shape
        return scores.gather(1, indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.shape).scatter_(1, ctx.saved_tensors[0], grad), None


def as_target(topk_indices: Any) -> Tensor:
    """Return a checked copy of a replay target, [num_tokens, topk]; of the dtype given, unsigned ones widened.

    Raises:
        TraceError: not two-dimensional integers, an id is negative, or a row names an expert twice.
    """
    try:
        # A copy: a trainer may write its next micro-batch into the same buffer before this one is recomputed.
        target = torch.as_tensor(topk_indices).detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TraceError(
            f"a replay target must be [num_tokens, topk] integers, got {type(topk_indices).__name__}: {error}"
        ) from error
    if target.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch sorts none of these
        target = target.to(torch.int64)
    if target.dim() != 2 or target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        raise TraceError(
            f"a replay target must be [num_tokens, topk] integers, got {list(target.shape)} {target.dtype}."
        )
    ordered = target.sort(dim=1).values
    wrong = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1) | (ordered < 0).any(dim=1)
    if target.is_cuda:
        torch._assert_async(~wrong.any(), "a replay target holds a negative or a repeated expert id")
    elif bool(wrong.any()):
        bad = int(wrong.nonzero()[0])
        raise TraceError(
            f"row {bad} of the replay target is {target[bad].tolist()}: ids must be distinct and not negative; "
            "rows without a route are for a session, which lets the live router decide them."
        )
    return target


def check_fits(target: Tensor, scores: Tensor, topk: int) -> None:
    """Raise unless target is [num_tokens, topk] for these scores.

    Raises:
        ReplayStateError: it is not; too few rows would leave tokens without experts, in silence.
    """
    if target.shape != (scores.shape[0], topk):
        raise ReplayStateError(
            f"the router routes {scores.shape[0]} tokens to {topk} experts each, the routes to replay are "
            f"{list(target.shape)}: give one row a token, in the order the router sees them (s-major, this rank's)."
        )


def check_not_captured(scores: Tensor, who: object) -> None:
    """Raise if what runs now becomes part of a graph that runs again without Python, with the routes of this run.

    Raises:
        ReplayStateError: a CUDA graph is captured, or make_fx, torch.export or torch.jit.trace trace. torch.compile does not
            get here: it leaves the choice of experts out of its graphs.
    """
    if is_captured(scores):
        raise ReplayStateError(
            f"{who} is captured into a graph, which would repeat the routes of the capture. Leave routers out of graphs, or "
            "give them megatron_router_replay.mcore.static.StaticTargets."
        )
