"""Who owns a recompute: what routers chose inside an activation checkpoint is kept on that checkpoint itself.

When a router chooses experts in a forward, the checkpoints that it runs in are read off the call stack, and its choice is
put on each of them: on the `ctx` of a reentrant checkpoint, which is its node in the autograd graph, or on torch's frame of
a non-reentrant one. When a router runs again, the innermost checkpoint that recomputes is on the stack too, and it is the
same object: the choice is found there. So nothing is guessed from the order of forwards and backwards, from outputs or from
counts; several micro-batches may share one backward, a graph may be used twice, checkpoints may be nested and threads may
run backwards at once. A choice lives exactly as long as the graph that can ask for it, and a forward outside every
checkpoint (evaluation, no recompute) leaves nothing. A router that runs inside an autograd function whose recompute could
not be told raises in its forward. A recompute by hand, in a tensor hook, finds nothing: it raises while a session is open,
and cannot be seen once the session was left.

    forward:    router -> remember(surroundings(), router, selection)
    recompute:  router -> recall(surroundings(), router) -> the selection of the same call in that checkpoint's forward
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.torch_private import Surroundings, graph_task, is_spent, repeats_its_calls

_ATTRIBUTE = "router_replay_selections"


class Selection:
    """What a router chose in one forward inside a checkpoint.

    Args:
        topk_indices: [num_tokens, topk], compact or int64; whoever recomputes uses these.
        maker: what chose them, a session's router or a RouterReplay.
        routing: what the maker keeps beside them for the recompute; not read here.
    """

    __slots__ = ("__weakref__", "_checkpoints", "maker", "routing", "topk_indices")

    def __init__(self, topk_indices: Tensor, maker: Any, routing: Any = None) -> None:
        self.topk_indices = topk_indices
        self.maker = maker
        self.routing = routing
        self._checkpoints: list[weakref.ref[Any]] = []

    @property
    def pending(self) -> bool:
        """Whether a recompute can still ask for this; not once a backward has freed what its checkpoints saved."""
        checkpoints = (reference() for reference in self._checkpoints)
        return any(checkpoint is not None and not is_spent(checkpoint) for checkpoint in checkpoints)


class _Selections:
    """The selections inside one checkpoint: for each router those of its calls, in order."""

    __slots__ = ("_calls", "_made", "_repeats_its_calls")

    def __init__(self, repeats_its_calls: bool) -> None:
        self._repeats_its_calls = repeats_its_calls
        self._made: dict[object, list[Selection]] = {}
        # (router, graph task) -> calls in it so far; threads may run several backwards through one graph at once
        self._calls: dict[tuple[object, int], int] = {}

    def add(self, router: object, selection: Selection) -> None:
        self._made.setdefault(router, []).append(selection)

    def next(self, router: object) -> Selection | None:
        """Return the selection of the call that this recompute repeats; None: the forward never called this router.

        Raises:
            ReplayStateError: the recompute calls the router more often than its forward did, or the call cannot be told.
        """
        made = self._made.get(router)
        if made is None:
            return None
        if len(made) > 1 and not self._repeats_its_calls:
            raise ReplayStateError(
                f"an autograd function recomputes, and its forward called the router {len(made)} times: which call this "
                "repeats cannot be told, for it is no activation checkpoint of torch, Megatron-Core or Transformer "
                "Engine. Put one around each call."
            )
        # A checkpoint runs once in a backward, so the number of the backward tells one recompute from the next.
        task = graph_task()
        if task == -1:  # saved tensors of a non-reentrant checkpoint were asked for outside a backward
            if len(made) > 1:
                raise ReplayStateError(
                    f"a checkpoint recomputes outside a backward, and its forward called the router {len(made)} times: which "
                    "call this repeats cannot be told. Run the backward instead."
                )
            return made[0]
        calls = self._calls.get((router, task), 0)
        if calls == len(made):
            raise ReplayStateError(
                f"a recompute calls the router {calls + 1} times, its forward called it {len(made)} times: the checkpointed "
                "function must do the same both times."
            )
        self._calls[router, task] = calls + 1
        return made[calls]


def check_known(place: Surroundings) -> None:
    """Raise if what runs here may be recomputed by something that cannot be told apart.

    Raises:
        ReplayStateError: an autograd function whose forward gets no ctx; a composable checkpoint inside a reentrant one.
    """
    if place.unknown:
        raise ReplayStateError(
            f"a router runs inside {place.unknown}, whose recompute could not be told from others (known: "
            "torch.utils.checkpoint, and autograd functions with forward(ctx, ...) and backward(ctx, ...) as Megatron-Core's "
            "and Transformer Engine's)."
        )


def remember(place: Surroundings, router: object, selection: Selection) -> None:
    """Put a selection on every checkpoint whose forward runs.

    Args:
        place: `surroundings()` of the router's call.
        router: what identifies the router, in sessions the TopKRouter; it lives as long as its checkpoints.
    """
    # On each, not on the innermost alone: an outer one that recomputes calls the router again, and makes the inner anew.
    for checkpoint in place.inside:
        selections = getattr(checkpoint, _ATTRIBUTE, None)
        if selections is None:
            selections = _Selections(repeats_its_calls(checkpoint))
            setattr(checkpoint, _ATTRIBUTE, selections)  # on the object itself, so that it lives exactly as long
        selections.add(router, selection)
        selection._checkpoints.append(weakref.ref(checkpoint))  # weak: the checkpoint holds the selection


def recall(place: Surroundings, router: object) -> Selection | None:
    """Return what the router chose in the forward that this recompute repeats; None: nothing is known of that forward.

    Checkpoints that the recompute makes anew, for their own recompute, get the selection too.

    Raises:
        ReplayStateError: the recompute calls the router more often than its forward did, or as `check_known`.
    """
    selections = getattr(place.recompute, _ATTRIBUTE, None)
    selection = None if selections is None else selections.next(router)
    if selection is not None:
        # The recompute may run inside a function that its forward did not run in, and that is recomputed in its turn.
        check_known(place)
        remember(place, router, selection)
    return selection
