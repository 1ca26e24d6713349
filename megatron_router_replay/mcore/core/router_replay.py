"""RouterReplay: a subclass of Megatron-Core's class with the same interface, which raises where that is silently wrong.

The list of instances, the enum and the static helpers stay Megatron-Core's own, so code that drives its class drives this
one. A missing or misshaped target raises, and a recompute uses the experts on the tape of its forward, in any order of
backwards. Without a tape, REPLAY_BACKWARD takes the targets first in, first out, as Megatron-Core documents.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe import router_replay as upstream
from torch import Tensor
from torch._compile import _disable_dynamo

from megatron_router_replay.errors import ReplayDataError, ReplayStateError, TraceError, UnsupportedRouterError
from megatron_router_replay.mcore.core import hooks, tape
from megatron_router_replay.mcore.core.call import RouterCounts, RoutingCall, TopKRequest
from megatron_router_replay.mcore.core.streams import to_device
from megatron_router_replay.mcore.model.support import refusals
from megatron_router_replay.mcore.model.upstream import REPLAY_METHOD, TOPK_FUNCTION, check_version, takes_replay

_LOG = logging.getLogger(__name__)

RouterReplayAction = upstream.RouterReplayAction
"""Megatron-Core's own enum of the actions of a RouterReplay: RECORD, REPLAY_FORWARD and REPLAY_BACKWARD."""

_ACTIONS = {action.value: action for action in RouterReplayAction}

# A RouterReplay reports nothing; its calls need one. A tape keeps int64, because each conversion is a launch.
_COUNTS = RouterCounts()


class RouterReplay(upstream.RouterReplay):  # type: ignore[misc]
    """The routes that one TopKRouter records, and those that it replays. Attributes and static helpers are Megatron-Core's.

    Attributes:
        target_topk_idx: [num_tokens, topk] the routes the next REPLAY_FORWARD uses, or None.
        recorded_topk_idx: [num_tokens, topk] int64, a copy of the experts of the last RECORD forward, or None; with a static
            buffer the part of the buffer that was written.
        router_replay_action: the action of the next forward; None: route live.
        replay_backward_list: FIFO of targets, filled by `set_target_indices`. Each forward or recompute under REPLAY_BACKWARD
            takes one entry off; a recompute of a checkpoint uses what its forward used. A forward that failed leaves its
            entry: call `clear_indices` before its targets are set again.
        static_buffer: [max_tokens, topk] that recordings are written into, or None; Megatron-Core's own, since 0.17.
    """

    def __init__(self) -> None:
        self._action: Any = None
        self._checked: Any = None  # the router with settings that were checked
        self.static_buffer: Tensor | None = None  # 0.16 has neither
        self.layer_number: int | None = None
        super().__init__()

    @property
    def router_replay_action(self) -> Any:
        return self._action

    @router_replay_action.setter
    def router_replay_action(self, action: Any) -> None:
        if action is not None:
            # By value: a trainer may have an enum of its own with the same members.
            known = _ACTIONS.get(getattr(action, "value", None))
            if known is None:
                raise ReplayStateError(f"MRR101: {action!r} is no RouterReplayAction.")
            action = known
            if not hooks.is_installed():
                hooks.install()
                hooks.check_installed()
        self._action = action

    @staticmethod
    def set_replay_data(all_layers_topk_indices: list[Tensor]) -> None:
        """Give every instance its target, in order of construction.

        Raises:
            ReplayStateError: not one tensor an instance; it is a ValueError too, as Megatron-Core's.
            TraceError: see `set_target_indices`; nothing is set then.
        """
        instances = RouterReplay.global_router_replay_instances
        if len(all_layers_topk_indices) != len(instances):
            raise ReplayDataError(
                f"MRR417: cannot distribute {len(all_layers_topk_indices)} replay tensors over {len(instances)} routers: one "
                "each, in order of construction. Routers of another or of a rebuilt model may still be listed: call "
                "RouterReplay.clear_global_router_replay_instances() before building, or use a session."
            )
        # All are checked before the first is set: a step with targets of two batches would train.
        for instance, (target, queued) in zip(instances, as_targets(all_layers_topk_indices)):
            # The list may have one of Megatron-Core's own class, too.
            if isinstance(instance, RouterReplay):
                instance._keep_target(target, queued)
            else:
                instance.set_target_indices(target)

    def set_target_indices(self, topk_indices: Tensor | Sequence[Any]) -> None:
        """Set the routes of the next micro-batch, and queue them for its recompute.

        Args:
            topk_indices: [num_tokens, topk], any integer dtype, in the order the router sees the tokens; a tensor, an
                array or lists. Copied.

        Raises:
            TraceError: not two-dimensional integers, an id is negative, or a row names an expert twice. On a GPU the
                values are checked without waiting for them: a device-side assertion follows.
        """
        self._keep_target(*as_targets([topk_indices])[0])

    def _keep_target(self, target: Tensor, queued: Tensor) -> None:
        self.target_topk_idx = target
        # Another copy: a driver may write the next micro-batch into target_topk_idx before this one is recomputed.
        self.replay_backward_list.append(queued)

    def record_indices(self, topk_indices: Tensor) -> None:
        """Keep a copy of the experts of a forward.

        Args:
            topk_indices: [num_tokens, topk]; written into Megatron-Core's static buffer, if one is set.
        """
        if self.static_buffer is None:
            self.recorded_topk_idx = topk_indices.detach().clone()  # Megatron-Core's class keeps the tensor itself
        else:
            super().record_indices(topk_indices)

    @_disable_dynamo
    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (scores, ids) of a call's experts, [num_tokens, topk] each.

        A router passes the hook on `TopKRouter.routing`, whose RoutingCall answers; a call without a router comes here.

        Args: see `TopKRequest`.

        Raises:
            ReplayStateError: see `hooks.routing_call` and `RoutingCall.get_replay_topk`; or the hook that a router's call
                passes was replaced while an action is set.
        """
        if self._action is None:
            values, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            return values, indices
        hooks.check_installed()
        call, is_written = hooks.routing_call(self, self, scores.shape[:1])
        assert call is not None, "it has an action"
        routed = call.get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        if is_written:
            tape.write(call.entry())
        if call.source is not None:
            self._on_routed(call)
        return routed

    # ---- calls of its router, see `ExpertSource` and `hooks`
    @property
    def _announces_recomputes(self) -> bool:
        """Return whether a call in a backward takes the next target of the list."""
        return self._action is RouterReplayAction.REPLAY_BACKWARD

    @property
    def _may_be_captured(self) -> bool:
        """Return whether a graph may have its calls: a static buffer has the same address in every run."""
        return self._action is RouterReplayAction.RECORD and self.static_buffer is not None

    def _routing_state(self, router: Any, shape: torch.Size) -> tuple[RouterCounts, Any]:
        """Check a router's settings before its first call; this object is the micro-batch as well.

        Raises:
            UnsupportedRouterError: the router's selection cannot be replayed exactly.
        """
        if router is not self and self._checked is not router:
            if reasons := refusals(router):
                raise UnsupportedRouterError(
                    f"MRR401: cannot replay {tape.layer_of(router)} exactly: " + "; ".join(reasons)
                )
            self._checked = router
        return _COUNTS, self

    def _experts(self, call: RoutingCall, request: TopKRequest) -> Tensor | None:
        """Return the target of a forward, None under RECORD."""
        call.in_order = True  # the driver's order, as with Megatron-Core's class
        num_experts, buffer = request.scores.shape[1], self.static_buffer
        if self._action == RouterReplayAction.RECORD:
            if buffer is not None and torch.iinfo(buffer.dtype).max < num_experts - 1:
                raise ReplayStateError(
                    f"MRR417: a static buffer of {buffer.dtype} is too narrow for the ids of {num_experts} experts: they "
                    "would wrap around. Make it int16 or wider."
                )
            return None
        target: Any = self.target_topk_idx
        if self._action == RouterReplayAction.REPLAY_BACKWARD:
            target = self.replay_backward_list.pop(0) if self.replay_backward_list else None
        if target is None:
            raise ReplayStateError(
                f"MRR417: {self._action.name} without a target: call set_target_indices or RouterReplay.set_replay_data "
                "before each forward. REPLAY_BACKWARD takes the targets in the order of the forwards, each once."
            )
        version, largest = getattr(target, _CHECKED, (None, None))
        if version is None or version != target._version:
            ((target, _),) = as_targets([target])  # assigned by hand, or written to since
            largest = getattr(target, _CHECKED)[1]
        # On a GPU looking would wait for the device; there the gather asserts that each id is an expert's.
        if largest is not None and largest >= num_experts:
            raise TraceError(f"MRR103: a replay target names expert {largest} of {num_experts} experts.")
        used = to_device(target, request.scores.device)
        # A driver may write its next micro-batch into the target; the tape keeps the experts of this one.
        return used.clone() if call.is_written and used is target else used

    def _on_routed(self, call: RoutingCall) -> None:
        """Record the experts of a forward under RECORD."""
        if self._action == RouterReplayAction.RECORD:
            assert call.used is not None, "it was requested"
            with tape.hidden_from_selective_checkpoint():  # its recompute records nothing
                self.record_indices(call.used)


setattr(RouterReplay, REPLAY_METHOD, RouterReplay.get_replay_topk)

_CHECKED = "router_replay_checked"
"""On a target: (its version when it was checked, its largest id; None: on a GPU). One written to since is checked again."""


def as_targets(targets: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    """Return two checked copies of each replay target, [num_tokens, topk]; of the dtype given, unsigned ones widened.

    Raises:
        TraceError: not two-dimensional integers, an id is negative, or a row names an expert twice.
    """
    given = [_as_target(target) for target in targets]
    alike: dict[Any, list[int]] = {}
    for position, target in enumerate(given):
        alike.setdefault((target.shape, target.dtype, target.device), []).append(position)
    copies: list[Any] = [None] * len(given)
    for positions in alike.values():
        # Copies, because a trainer may write its next micro-batch into the same buffer before this one is recomputed; all
        # layers at once, because each step is a launch.
        first = torch.stack([given[position] for position in positions])
        second = first.clone()
        ordered = first.sort(dim=2).values
        is_right = (ordered[..., 1:] > ordered[..., :-1]).all() & (ordered[..., :1] >= 0).all()
        largest: list[int | None] = [None] * len(positions)
        if is_right.is_cuda:
            torch._assert_async(is_right, "a negative or repeated expert id in a replay target")
        elif not bool(is_right):
            wrong = (ordered[..., 1:] == ordered[..., :-1]).any(dim=2) | (ordered < 0).any(dim=2)
            layer, row = wrong.nonzero()[0].tolist()
            raise TraceError(
                f"MRR103: row {row} of the replay target is {first[layer][row].tolist()}: ids must be distinct and not "
                "negative; rows without a route are for a session, which lets the live router decide them."
            )
        elif ordered.numel():
            largest = ordered[..., -1].amax(dim=1).tolist()
        for position, pair, largest_id in zip(positions, zip(first.unbind(), second.unbind()), largest):
            copies[position] = pair
            for target in pair:
                # An inference tensor has no version, and is checked at each use.
                setattr(target, _CHECKED, (None if target.is_inference() else target._version, largest_id))
    return copies


def _as_target(topk_indices: Any) -> Tensor:
    try:
        target = torch.as_tensor(topk_indices).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TraceError(
            f"MRR417: a replay target must be [num_tokens, topk] integers, got {type(topk_indices).__name__}: {error}"
        ) from error
    if target.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch sorts none of these
        target = target.to(torch.int64)
    if target.dim() != 2 or target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        raise TraceError(
            f"MRR417: a replay target must be [num_tokens, topk] integers, got {list(target.shape)} {target.dtype}."
        )
    return target


# ---- in the place of Megatron-Core's own
_ORIGINAL = upstream.RouterReplay if upstream.RouterReplay is not RouterReplay else RouterReplay.__mro__[1]
_replaced: list[ModuleType] = []


def install() -> None:
    """Let `moe_enable_routing_replay=True` build our RouterReplay from now on.

    Call it before the model is built. Every loaded `megatron` module that has Megatron-Core's class gets ours, inference
    modules too. A second call changes nothing. Sessions do not need it: they work on any model, with the config flag on or
    off.

    Raises:
        UnsupportedRouterError: this Megatron-Core has no router replay, or its routers never call one.
        ReplayStateError: a model with the flag was built before; nothing is changed then.
    """
    check_version()
    if not takes_replay(getattr(router_module, TOPK_FUNCTION)):
        raise UnsupportedRouterError(
            f"MRR402: install() has no effect in miles' Megatron-LM: its {TOPK_FUNCTION} calls miles' manager, and no "
            "RouterReplay. Use a session (replay, record, freeze_recompute), which needs no install()."
        )
    built = sum(type(each) is _ORIGINAL for each in _ORIGINAL.global_router_replay_instances)
    if built:
        raise ReplayStateError(
            f"MRR417: install() comes before the model: {built} RouterReplay objects of Megatron-Core's own class exist, and "
            "would not be ours. Call it before the model is built; if their model is gone, call "
            "RouterReplay.clear_global_router_replay_instances() first. A session needs no install()."
        )
    hooks.install()
    # In every module: one that did `from ... import RouterReplay` has its own name for the original.
    for module_name, module in list(sys.modules.items()):
        # Not getattr, with which a module that loads its names lazily would import them now.
        if module_name.split(".")[0] == "megatron" and vars(module).get("RouterReplay") is _ORIGINAL:
            module.RouterReplay = RouterReplay  # type: ignore[attr-defined]
            _replaced.append(module)
    _LOG.info("installed: Megatron-Core builds our RouterReplay, %d names replaced", len(_replaced))


def uninstall() -> None:
    """Put Megatron-Core's own class back. Models that are built already keep their objects.

    A router that once had a session or an action raises MRR412 in a recompute without a tape; after this call it routes live,
    unless it has one now.
    """
    while _replaced:
        _replaced.pop().RouterReplay = _ORIGINAL  # type: ignore[attr-defined]
    hooks.forget()
    _LOG.info("uninstalled: Megatron-Core builds its own RouterReplay")
