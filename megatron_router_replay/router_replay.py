"""RouterReplay: Megatron-Core's own replay object, with its interface, and without what goes wrong there in silence.

Whoever drives Megatron-Core's class can drive this one: the same names, the same FIFO for recomputes that are announced by
hand. But inside a backward the FIFO decides nothing: a recompute uses what its own forward used (see `recompute`), whatever
the action says by then, and raises if that forward is not known.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from megatron_router_replay.errors import ReplayDataError, ReplayStateError, TraceError, UnsupportedRouterError
from megatron_router_replay.recompute import Selection, check_known, recall, remember
from megatron_router_replay.topk import ComputeTopk, as_target, check_fits, check_not_captured, gather_topk
from megatron_router_replay.torch_private import (
    Surroundings,
    not_compiled,
    outside_selective_checkpoints,
    surroundings,
)


class RouterReplayAction(Enum):
    """What a router's RouterReplay does in the next forward; equal to Megatron-Core's member of the same name."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"

    def __eq__(self, other: object) -> bool:
        # By name and value: a trainer that imported Megatron-Core's enum before install() holds members of that one.
        same_enum = type(other).__name__ == "RouterReplayAction" and isinstance(other, Enum)
        return other is self or (same_enum and cast(Enum, other).value == self.value)

    def __hash__(self) -> int:
        return hash(self._name_)  # as every Enum, so that equal members are equal keys


class RouterReplay:
    """The routes one TopKRouter records, and those it replays.

    Attributes:
        target_topk_idx: [num_tokens, topk] the routes the next REPLAY_FORWARD uses, or None. Setting it checks and copies.
        recorded_topk_idx: [num_tokens, topk] int64, a copy of what the last RECORD forward chose, or None; with a static
            buffer the part of the buffer that was written.
        router_replay_action: what the next forward does; None: route live.
        replay_backward_list: FIFO of targets for REPLAY_BACKWARD forwards outside a backward, oldest first; filled by
            `set_target_indices`. Recomputes inside a backward use what their forward used, and take their entry out.
        static_buffer: [max_tokens, topk] that recordings are written into, or None.
        layer_number: Megatron-Core sets it from 0.19 on.
    """

    global_router_replay_instances: ClassVar[list[Any]] = []
    """Every instance, in order of construction; also orphans of rebuilt models, until cleared. Sessions ignore it."""

    find_refusals: ClassVar[Callable[[nn.Module], list[str]] | None] = None
    """Tells why a router's selection cannot be replayed; set by `install`, which knows Megatron-Core."""

    def __init__(self) -> None:
        # Megatron-Core gives no hint of which router this is for, but TopKRouter.__init__ is the caller.
        builder = sys._getframe(1).f_locals.get("self")
        self._router = weakref.ref(builder) if isinstance(builder, nn.Module) else None
        self._start()
        RouterReplay.global_router_replay_instances.append(self)

    def _start(self) -> None:
        self._target: Tensor | None = None
        self._action: RouterReplayAction | None = None
        self._copied_under: RouterReplayAction | None = (
            None  # what its original did, until somebody says what this does
        )
        self._alive: dict[weakref.ref[Selection], None] = {}
        self.recorded_topk_idx: Tensor | None = None
        self.replay_backward_list: list[Tensor] = []
        self.static_buffer: Tensor | None = None
        self.layer_number: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A model may be copied or pickled; its graphs and weak references are not. A copy is not listed, so no static helper
        # would ever stop or feed one that was made while its original was driven.
        return vars(self) | {"_router": None, "_alive": {}, "_action": None, "_copied_under": self._action}

    @classmethod
    def adopt(cls, instances: Iterable[Any]) -> None:
        """Turn instances of Megatron-Core's class into ones of this class, with what they hold; all of them or none.

        Raises:
            TraceError: one holds a target that `set_target_indices` would refuse.
            ReplayStateError: one holds an unknown action.
        """
        # All are checked before the first is changed: half a model would be driven by each class.
        states = [(instance, cls._as_ours(vars(instance))) for instance in instances]
        for instance, state in states:
            # Two of the names are properties here, in front of which nothing of the old class may be left.
            vars(instance).clear()
            instance.__class__ = cls
            vars(instance).update(state)

    @classmethod
    def _as_ours(cls, held: dict[str, Any]) -> dict[str, Any]:
        """Return what an instance of this class has in place of what one of Megatron-Core's class holds."""
        ours = cls.__new__(cls)
        ours._router = None
        ours._start()
        target, queued = held.get("target_topk_idx"), held.get("replay_backward_list", ())
        # A target and its entry in the FIFO stay one tensor, by which a recompute finds the entry.
        copies = {id(held_one): as_target(held_one) for held_one in (target, *queued) if held_one is not None}
        ours._target = None if target is None else copies[id(target)]
        ours.replay_backward_list = [copies[id(entry)] for entry in queued]
        ours.router_replay_action = held.get("router_replay_action")
        for name in ("recorded_topk_idx", "static_buffer", "layer_number"):
            if name in held:
                setattr(ours, name, held[name])
        return vars(ours)

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
                f"cannot distribute {len(all_layers_topk_indices)} replay tensors over {len(instances)} routers: one "
                "each, in order of construction. Routers of another or of a rebuilt model may still be listed: call "
                "RouterReplay.clear_global_router_replay_instances() before building, or use a session."
            )
        # All are checked before the first is set: a step with targets of two batches would train.
        targets = [as_target(topk_indices) for topk_indices in all_layers_topk_indices]
        for instance, target in zip(instances, targets):
            instance.set_target_indices(target)

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

    @staticmethod
    def set_global_static_buffers(static_buffer: Tensor) -> None:
        """Give every instance its part of one buffer to record into.

        Args:
            static_buffer: [max_tokens, num_layers, topk], a layer an instance, in order of construction.

        Raises:
            ReplayStateError: not one layer an instance.

        Source: Megatron-Core 0.17.1, RouterReplay.set_global_static_buffers.
        """
        instances = RouterReplay.global_router_replay_instances
        if static_buffer.dim() != 3 or static_buffer.shape[1] != len(instances):
            raise ReplayDataError(
                f"cannot record {len(instances)} routers into a static buffer of {list(static_buffer.shape)}: it must be "
                "[max_tokens, num_layers, topk] with a layer a router."
            )
        for position, instance in enumerate(instances):
            instance.set_static_buffer(static_buffer[:, position, :])

    @staticmethod
    def clear_global_static_buffers() -> None:
        """Let every instance record into memory of its own again."""
        for instance in RouterReplay.global_router_replay_instances:
            instance.clear_static_buffer()

    @property
    def target_topk_idx(self) -> Tensor | None:
        return self._target

    @target_topk_idx.setter
    def target_topk_idx(self, topk_indices: Any) -> None:
        self._target = None if topk_indices is None else as_target(topk_indices)

    @property
    def router_replay_action(self) -> RouterReplayAction | None:
        return self._action

    @router_replay_action.setter
    def router_replay_action(self, action: Any) -> None:
        if action is None:
            self.clear_router_replay_action()
            return
        ours = next((member for member in RouterReplayAction if member == action), None)
        if ours is None:
            raise ReplayStateError(f"{action!r} is no RouterReplayAction.")
        self._check_asks()
        self._action, self._copied_under = ours, None

    def set_target_indices(self, topk_indices: Tensor | Sequence[Any]) -> None:
        """Set the routes of the next micro-batch and queue them for its recompute.

        Args:
            topk_indices: [num_tokens, topk], any integer dtype, in the order the router sees the tokens; a tensor, an
                array or lists. Copied.

        Raises:
            TraceError: not two-dimensional integers, an id is negative, or a row names an expert twice. On a GPU the
                values are checked without waiting for them: a device-side assertion follows.
        """
        self.target_topk_idx = topk_indices
        assert self._target is not None, "the setter has set it"
        self.replay_backward_list.append(self._target)

    def get_recorded_indices(self) -> Tensor | None:
        """Return what the last RECORD forward chose, [num_tokens, topk] int64, or None."""
        return self.recorded_topk_idx

    def record_indices(self, topk_indices: Tensor) -> None:
        """Keep a copy of what a forward chose; in the static buffer, if there is one.

        Raises:
            ReplayStateError: the static buffer is too small.
        """
        if self.static_buffer is None:
            self.recorded_topk_idx = topk_indices.detach().clone()  # Megatron-Core's class keeps the tensor itself
            return
        num_tokens, topk = topk_indices.shape
        if self.static_buffer.shape[0] < num_tokens or self.static_buffer.shape[1] != topk:
            raise ReplayStateError(
                f"cannot record [{num_tokens}, {topk}] routes into a static buffer of {list(self.static_buffer.shape)}."
            )
        self.static_buffer[:num_tokens].copy_(topk_indices)
        self.recorded_topk_idx = self.static_buffer[:num_tokens]

    def set_static_buffer(self, buffer: Tensor) -> None:
        """Record into this memory from now on, which a CUDA graph may hold.

        Args:
            buffer: [max_tokens, topk], any integer dtype that holds the ids.

        Raises:
            ReplayStateError: it has another shape or kind.
        """
        if buffer.dim() != 2 or buffer.is_floating_point() or buffer.is_complex() or buffer.dtype is torch.bool:
            raise ReplayStateError(
                f"a static buffer must be [max_tokens, topk] integers, got {list(buffer.shape)} {buffer.dtype}."
            )
        self.static_buffer = buffer

    def clear_static_buffer(self) -> None:
        """Record into memory of its own again."""
        self.static_buffer = None

    def clear_indices(self) -> None:
        """Drop target, recording and FIFO."""
        self._target = None
        self.recorded_topk_idx = None
        self.replay_backward_list = []

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        """Set what the next forwards do.

        Raises:
            UnsupportedRouterError: the router never asks for its top-k, or what it asks decides not all (`install` is needed
                to know).
        """
        self.router_replay_action = router_replay_action

    def clear_router_replay_action(self) -> None:
        """Let the router route live again; recomputes of earlier forwards still use what these used."""
        self._action = self._copied_under = None

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
            ReplayStateError: a replay without a target, or a target of another shape than this forward's; a recompute under a
                replay action whose forward is not known; a graph other than torch.compile's is captured; a copy that was
                made during a replay, and was not told what to do.
        """

        def live() -> tuple[Tensor, Tensor]:
            assert default_compute_topk is not None, "routing live needs default_compute_topk"
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        action = self._action
        if action is None and not self._alive:
            if self._copied_under in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD):
                raise ReplayStateError(
                    f"this RouterReplay was copied, with its model, while {self._copied_under.name} was set: the static "
                    "helpers do not reach it, so its target would never change. Say what the copy does: "
                    "router.router_replay.clear_router_replay_action() routes live, set_router_replay_action() replays."
                )
            return live()  # switched off: nothing of ours runs
        # Recording into a static buffer is what a captured graph may do: it writes to the same address in every run.
        if action is not None and not (action == RouterReplayAction.RECORD and self.static_buffer is not None):
            check_not_captured(scores, action.name)
        with outside_selective_checkpoints():
            return self._choose(scores, topk, live)

    def _choose(self, scores: Tensor, topk: int, live: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        action = self._action
        place = surroundings()
        if place.in_backward:
            selection = recall(place, self)
            if selection is not None:
                used = selection.topk_indices
                # A recording made no entry: its recompute, if announced, takes the oldest, as in Megatron-Core's class.
                if (
                    not self._forget(used)
                    and action == RouterReplayAction.REPLAY_BACKWARD
                    and self.replay_backward_list
                ):
                    self.replay_backward_list.pop(0)
                check_fits(used, scores, topk)
                return gather_topk(scores, used, like_topk=True)
            if action in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD):
                raise ReplayStateError(
                    f"{action and action.name} in a recompute whose forward is not known: it ran without an action, or in a "
                    "kind of checkpoint that is not known."
                )
            return live()  # its forward was live too, and a recompute must not overwrite what a forward recorded
        if action is None:
            return live()
        check_known(place)
        if action == RouterReplayAction.RECORD:
            values, indices = live()
            self._check_holds(scores.shape[1])
            self.record_indices(indices)
            self._remember(place, indices)
            return values, indices
        target = self._next_target(action)
        check_fits(target, scores, topk)
        # On a GPU looking would wait for the device; there the gather asserts that each id is an expert's.
        if not target.is_cuda and target.numel() and int(target.max()) >= scores.shape[1]:
            raise TraceError(f"a replay target names expert {int(target.max())} of {scores.shape[1]} experts.")
        self._remember(place, target)
        if not place.inside and not torch.is_grad_enabled():
            self._forget(target)  # forward only: no recompute follows
        return gather_topk(scores, target, like_topk=True)  # a recompute may be of a forward that recorded

    def _check_holds(self, num_experts: int) -> None:
        if self.static_buffer is not None and torch.iinfo(self.static_buffer.dtype).max < num_experts - 1:
            raise ReplayStateError(
                f"a static buffer of {self.static_buffer.dtype} cannot hold the ids of {num_experts} experts: they would "
                "wrap around. Make it int16 or wider."
            )

    def _next_target(self, action: RouterReplayAction) -> Tensor:
        if action == RouterReplayAction.REPLAY_FORWARD:
            if self._target is None:
                raise ReplayStateError(
                    "REPLAY_FORWARD without a target: call set_target_indices or RouterReplay.set_replay_data first."
                )
            return self._target
        if not self.replay_backward_list:
            raise ReplayStateError(
                "REPLAY_BACKWARD with an empty replay_backward_list: every recompute needs one set_target_indices, "
                "in the order of the forwards."
            )
        return self.replay_backward_list.pop(0)

    def _remember(self, place: Surroundings, topk_indices: Tensor) -> None:
        if place.inside:
            selection = Selection(topk_indices, self)
            # Kept while its graph lives, so that the recompute asks for it even if the action is cleared by then.
            self._alive[weakref.ref(selection, partial(self._freed, topk_indices))] = None
            remember(place, self, selection)

    def _freed(self, topk_indices: Tensor, reference: weakref.ref[Selection]) -> None:
        # The checkpoint is gone, recomputed or not (an evaluation, a forward that failed): its FIFO entry goes as well.
        self._alive.pop(reference, None)
        self._forget(topk_indices)

    def _forget(self, used: Tensor) -> bool:
        """Take the entry of what was used out of the FIFO; return whether there was one."""
        for position, target in enumerate(self.replay_backward_list):
            if target is used:  # the very tensor: two micro-batches may have equal routes
                del self.replay_backward_list[position]
                return True
        return False

    def _check_asks(self) -> None:
        router = None if self._router is None else self._router()
        find_refusals = RouterReplay.find_refusals
        if router is None or find_refusals is None or not hasattr(router, "config"):
            return
        reasons = find_refusals(router)
        if reasons:
            raise UnsupportedRouterError(f"cannot replay {type(router).__name__} exactly: " + "; ".join(reasons))
