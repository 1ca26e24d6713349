"""RouterReplay: what one router records and replays, behind Megatron-Core's own interface.

A drop-in for `megatron.core.transformer.moe.router_replay` (0.16.1): whoever drives that class can drive this one.
It differs where the original goes wrong in silence: targets are checked, a recording is a copy, a replay without a
target raises. Most users never touch it; `megatron_router_replay.replay` and `record` do all of this for them.

Source: Megatron-Core 0.16.1, transformer/moe/router_replay.py (interface), moe_utils.topk_routing_with_score_function
(the only caller of `get_replay_topk`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from megatron_router_replay.errors import ReplayStateError, TraceError

Function = TypeVar("Function", bound=Callable[..., Any])

ComputeTopk = Callable[..., tuple[Tensor, Tensor]]
"""(scores [num_tokens, num_experts], topk, num_groups=, group_topk=) -> (values, indices), both [num_tokens, topk]."""


class RouterReplayAction(Enum):
    """What a router's RouterReplay does in the next forward."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"


def in_backward() -> bool:
    """Return whether this thread runs inside an autograd backward, where a router's forward can only be a recompute."""
    return bool(torch._C._current_graph_task_id() != -1)


def not_compiled(function: Function) -> Function:
    """Keep a function out of torch.compile's graphs: they could hold the micro-batch, the counts or the phase of one call."""
    # torch.compiler.disable does the same, is untyped, and imports all of Dynamo now instead of with the first call.
    return cast(Function, _disable_dynamo(function))


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


def is_captured(scores: Tensor) -> bool:
    """Return whether what runs now becomes part of a graph that runs again without Python."""
    if scores.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")  # slow to import; loaded wherever it traces
    return bool(proxy_tensor and proxy_tensor.get_proxy_mode() is not None) or bool(torch._C._is_tracing())


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


class RouterReplay:
    """The routes one TopKRouter records, and those it replays.

    Attributes:
        target_topk_idx: [num_tokens, topk] the routes the next REPLAY_FORWARD uses, or None.
        recorded_topk_idx: [num_tokens, topk] int64, a copy of what the last RECORD forward chose, or None.
        router_replay_action: what the next forward does; None: route live.
        replay_backward_list: FIFO of what recomputes use, oldest first; filled by `set_target_indices`.
    """

    global_router_replay_instances: ClassVar[list[RouterReplay]] = []
    """Every instance, in order of construction; also orphans of rebuilt models, until cleared. Sessions ignore it."""

    def __init__(self) -> None:
        self.target_topk_idx: Tensor | None = None
        self.recorded_topk_idx: Tensor | None = None
        self.router_replay_action: RouterReplayAction | None = None
        self.replay_backward_list: list[Tensor] = []
        RouterReplay.global_router_replay_instances.append(self)

    @staticmethod
    def set_replay_data(all_layers_topk_indices: list[Tensor]) -> None:
        """Give every instance its target, in order of construction.

        Raises:
            ReplayStateError: not one tensor an instance.
            TraceError: see `set_target_indices`; nothing is set then.
        """
        instances = RouterReplay.global_router_replay_instances
        if len(all_layers_topk_indices) != len(instances):
            raise ReplayStateError(
                f"cannot distribute {len(all_layers_topk_indices)} replay tensors over {len(instances)} routers: one "
                "each, in order of construction. Routers of another or of a rebuilt model may still be listed: call "
                "RouterReplay.clear_global_router_replay_instances() before building, or use a session."
            )
        for topk_indices in all_layers_topk_indices:
            _check_target(topk_indices)
        for instance, topk_indices in zip(instances, all_layers_topk_indices):
            instance._set_checked_target(topk_indices)

    @staticmethod
    def get_recorded_data() -> list[Tensor | None]:
        """Return every instance's recording, in order of construction."""
        return [instance.get_recorded_indices() for instance in RouterReplay.global_router_replay_instances]

    @staticmethod
    def clear_global_indices() -> None:
        """Drop targets, recordings and FIFOs of every instance."""
        for instance in RouterReplay.global_router_replay_instances:
            instance.clear_indices()

    @staticmethod
    def set_global_router_replay_action(router_replay_action: RouterReplayAction) -> None:
        """Set the action of every instance."""
        for instance in RouterReplay.global_router_replay_instances:
            instance.set_router_replay_action(router_replay_action)

    @staticmethod
    def clear_global_router_replay_action() -> None:
        """Let every instance's router route live again."""
        for instance in RouterReplay.global_router_replay_instances:
            instance.clear_router_replay_action()

    @staticmethod
    def clear_global_router_replay_instances() -> None:
        """Forget every instance; routers keep theirs."""
        RouterReplay.global_router_replay_instances.clear()

    def set_target_indices(self, topk_indices: Tensor) -> None:
        """Set the routes of the next micro-batch and queue them for its recompute.

        Args:
            topk_indices: [num_tokens, topk], any integer dtype, in the order the router sees the tokens.

        Raises:
            TraceError: not two-dimensional integers, an id is negative, or a row names an expert twice. On a GPU the
                values are checked without waiting for them: a device-side assertion follows.
        """
        _check_target(topk_indices)
        self._set_checked_target(topk_indices)

    def _set_checked_target(self, topk_indices: Tensor) -> None:
        self.target_topk_idx = topk_indices
        self.replay_backward_list.append(topk_indices)

    def get_recorded_indices(self) -> Tensor | None:
        """Return what the last RECORD forward chose, [num_tokens, topk] int64, or None."""
        return self.recorded_topk_idx

    def record_indices(self, topk_indices: Tensor) -> None:
        """Keep a copy of what a forward chose."""
        self.recorded_topk_idx = topk_indices.detach().clone()

    def clear_indices(self) -> None:
        """Drop target, recording and FIFO."""
        self.target_topk_idx = None
        self.recorded_topk_idx = None
        self.replay_backward_list = []

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        """Set what the next forwards do."""
        self.router_replay_action = router_replay_action

    def clear_router_replay_action(self) -> None:
        """Let the router route live again."""
        self.router_replay_action = None

    @not_compiled
    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: ComputeTopk | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and indices of the experts that this forward uses; Megatron-Core calls this for its top-k.

        Args:
            scores: [num_tokens, num_experts], live; logits or probabilities, with the expert bias where there is one.
            topk: experts for each token.
            num_groups, group_topk: group-limited routing, passed on to `default_compute_topk`.
            default_compute_topk: the live top-k.

        Returns:
            ([num_tokens, topk] scores of the chosen experts, [num_tokens, topk] int64).

        Raises:
            ReplayStateError: a replay without a target, or a target of another shape than this forward's; a graph other
                than torch.compile's is captured.
        """
        action = self.router_replay_action
        if action is not None:
            check_not_captured(scores, action.name)
        if action is RouterReplayAction.REPLAY_FORWARD and in_backward():
            # The target is the last forward's; this recompute may be of an earlier micro-batch.
            action = RouterReplayAction.REPLAY_BACKWARD
        if action is RouterReplayAction.REPLAY_FORWARD:
            if self.target_topk_idx is None:
                raise ReplayStateError(
                    "REPLAY_FORWARD without a target: call set_target_indices or RouterReplay.set_replay_data first."
                )
            target = self.target_topk_idx
        elif action is RouterReplayAction.REPLAY_BACKWARD:
            if not self.replay_backward_list:
                raise ReplayStateError(
                    "REPLAY_BACKWARD with an empty replay_backward_list: every recompute needs one set_target_indices, "
                    "in the order of the forwards."
                )
            target = self.replay_backward_list.pop(0)
        else:
            assert default_compute_topk is not None, "routing live needs default_compute_topk"
            values, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            # A recompute must not overwrite what its forward recorded.
            if action is RouterReplayAction.RECORD and not in_backward():
                self.record_indices(indices)
            return values, indices
        check_fits(target, scores, topk)
        if not target.is_cuda and target.numel() and int(target.max()) >= scores.shape[1]:
            raise TraceError(f"a replay target names expert {int(target.max())} of {scores.shape[1]} experts.")
        return gather_topk(scores, target, like_topk=True)  # a recompute may be of a forward that recorded


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


def _check_target(topk_indices: Tensor) -> None:
    if topk_indices.dim() != 2 or topk_indices.is_floating_point() or topk_indices.dtype is torch.bool:
        raise TraceError(
            f"a replay target must be [num_tokens, topk] integers, got {list(topk_indices.shape)} {topk_indices.dtype}."
        )
    ordered = topk_indices.sort(dim=1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).all() & (ordered >= 0).all()
    if topk_indices.is_cuda:
        torch._assert_async(distinct, "a replay target holds a negative or a repeated expert id")
    elif not bool(distinct):
        bad = int(((ordered[:, 1:] == ordered[:, :-1]).any(dim=1) | (ordered < 0).any(dim=1)).nonzero()[0])
        raise TraceError(
            f"row {bad} of the replay target is {topk_indices[bad].tolist()}: ids must be distinct and not negative; "
            "rows without a route are for a session, which lets the live router decide them."
        )
