"""Each checkpoint keeps a tape of its forward, and its recompute reads that tape.

    Run      a run of a checkpointed function in this thread: the first one writes the tape, later ones read it
    Entry    a call of a router, written on the tape of every first run that is open

The order of forwards and backwards does not matter: micro-batches may share a backward, a graph may be used twice, and
checkpoints may be nested. `checkpoints` opens the runs of all checkpoints that it wraps. Other code that recomputes opens its
runs with `Tape`, or its backward raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch.utils import _python_dispatch

from megatron_router_replay.errors import ReplayStateError


@dataclass(slots=True, eq=False)
class Entry:
    """A router's call, as its recompute must repeat it; it lives as long as the graph, so it has no session.

    Args:
        router: the TopKRouter; the RouterReplay that a call took its experts from.
        topk_indices: [num_tokens, topk], the experts that it used, in any integer dtype, a tensor or a
            `upload.KeptLayer`; None: it ran live, without a session or an action.
        counter: counts the recomputes of this router.
        in_order: a recompute need not sort the columns; see `RoutingCall`.
    """

    router: Any
    topk_indices: Any
    counter: Any = None
    in_order: bool = False


class Tape:
    """Keep the router calls of a function's first run, in order, for its later runs.

    with tape.forward():      # in the forward of your autograd function
        outputs = function(*inputs)
    with tape.recompute():    # in its backward
        outputs = function(*inputs)

    It takes one call of each router. Make one tape for each part of a function that calls a router several times: the parts
    may run again in a different order than in the forward.
    """

    __slots__ = ("__weakref__", "entries", "num_forwards")
    may_repeat_routers = False

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.num_forwards = 0  # above 1, the run that a recompute repeats is ambiguous

    def forward(self) -> Run:
        """Return a context in which routers write this tape. Entered twice, it is two runs."""
        return Run(self, reads=False)

    def recompute(self) -> Run:
        """Return a context in which routers take their experts from this tape's start."""
        return Run(self, reads=True)


class CheckpointTape(Tape):
    """The tape of a checkpoint, which runs its function again as a whole: equal calls of a router keep their order."""

    __slots__ = ()
    may_repeat_routers = True


class Run:
    """A run of a function in one thread, from `__enter__` to `__exit__`."""

    __slots__ = ("_position", "reads", "tape", "task")

    def __init__(self, tape: Tape, *, reads: bool) -> None:
        self.tape, self.reads = tape, reads

    def __enter__(self) -> Self:
        before_run()
        self.task = torch._C._current_graph_task_id()
        self._position = 0
        self.tape.num_forwards += not self.reads
        _thread.runs.append(self)
        open_runs.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        _thread.runs.remove(self)
        open_runs.remove(self)
        # An exception of torch's ends a recompute early, once it has every saved tensor.
        if kind is None and self.reads and self._position < len(self.tape.entries):
            missing = self.tape.entries[self._position].router
            raise ReplayStateError(
                f"MRR413: a recompute ended after {self._position} calls of routers, but its forward made "
                f"{len(self.tape.entries)}; the next was {layer_of(missing)}. Run the whole function again, or keep one "
                "megatron_router_replay.mcore.Tape for each part of it."
            )

    def peek(self) -> Any:
        """Return the router of the next entry; None: the first run called no more."""
        entries = self.tape.entries
        return entries[self._position].router if self._position < len(entries) else None

    def next(self, router: Any, replay: Any = None) -> Entry:
        """Return the next entry, which must be this router's.

        Args:
            replay: the router's own RouterReplay, if it has one. Entries of its calls name it and not the router.

        Raises:
            ReplayStateError: the first run called a different router there, or none; or there were several first runs.
        """
        tape, position = self.tape, self._position
        entry = tape.entries[position] if position < len(tape.entries) else None
        if tape.num_forwards > 1:
            raise ReplayStateError(
                f"MRR413: {layer_of(router)}: a checkpoint ran its function several times in one forward, so the run that is "
                "repeated here is ambiguous. Name the runs with megatron_router_replay.mcore.Tape, one for each part."
            )
        if entry is None or (entry.router is not router and (replay is None or entry.router is not replay)):
            expected = "none" if entry is None else layer_of(entry.router)
            raise ReplayStateError(
                f"MRR413: {layer_of(router)} is recomputed as call {position + 1} of its checkpoint, where the forward "
                f"called {expected}: the checkpointed function must call the same routers in the same order, and its "
                "forward must have run in a session, or under an action of a RouterReplay."
            )
        self._position += 1
        return entry


class _Thread(threading.local):
    def __init__(self) -> None:
        self.runs: list[Run] = []


_thread = _Thread()
open_runs: list[Run] = []
"""The open runs of all threads."""

before_run: Callable[[], None] = lambda: None  # noqa: E731
"""The hook's check of itself, called where a tape begins to be written or read."""


def checkpoint_state() -> tuple[Run | None, bool, bool]:
    """Return the place of this thread in its runs.

    Returns:
        (the innermost recompute; None: there is none, or a backward runs inside it,
        whether a call now repeats a forward: it is in a recompute, or a backward calls it,
        whether it runs for the first time and may run again, so that a router's call is written).
    """
    # A number for every backward; -1: none runs in this thread.
    task, runs = torch._C._current_graph_task_id(), _thread.runs
    for run in reversed(runs):
        if run.reads:
            # A backward inside a recompute calls code that this recompute's first run did not call.
            return (run if run.task == task else None), True, run is not runs[-1]
    return None, task != -1, bool(runs)


def in_recompute() -> bool:
    """Return whether this thread repeats a forward now: it runs a recompute, or a backward."""
    return checkpoint_state()[1]


def write(entry: Entry) -> None:
    """Put a router's call on the tape of every first run inside the innermost recompute of this thread."""
    for run in reversed(_thread.runs):
        if run.reads:
            return
        entries = run.tape.entries
        if not run.tape.may_repeat_routers and any(each.router is entry.router for each in entries):
            raise ReplayStateError(
                f"MRR413: {layer_of(entry.router)} is called twice under one mcore.Tape, and the two calls may run again in "
                "a different order. Keep one mcore.Tape for each call."
            )
        entries.append(entry)


_NOTHING = nullcontext()


def hidden_from_selective_checkpoint() -> AbstractContextManager[Any]:
    """Hide operations that only the forward, or only its recompute, runs: a selective checkpoint pairs the two."""
    # Outside of any run, a mode is not a checkpoint's: make_fx traces a RouterReplay that records into a static buffer.
    if not (torch._C._len_torch_dispatch_stack() and _thread.runs):
        return _NOTHING
    return cast(AbstractContextManager[Any], _python_dispatch._disable_current_modes())


def layer_of(router: Any) -> str:
    """Return a router's name for messages."""
    return f"layer {getattr(router, 'layer_number', '?')}"
