"""Each activation checkpoint writes the router calls of its forward on a tape, and its recompute replays them.

    Run      a run of a checkpointed function in this thread: a forward run writes the tape, a recompute reads it
    Entry    one router call, written on the tape of every forward run that is open

The order of forwards and backwards does not matter: one backward may cover several micro-batches, an autograd graph may run
backward twice, and checkpoints may be nested. The module `checkpoints` opens the runs of Megatron-Core's and torch's
checkpoints. A checkpoint function of the user's own must open its runs with `Tape`; otherwise its backward raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast

import torch
from torch.utils import _python_dispatch

from megatron_router_replay.errors import ReplayStateError


@dataclass(slots=True, eq=False)
class Entry:
    """A router call of a forward, for its recompute. It lives as long as the autograd graph, and refers to no session.

    Args:
        router: the TopKRouter, or a RouterReplay that was called without one.
        topk_indices: [num_tokens, topk], the experts that it used, in any integer dtype, a tensor or a
            `upload.KeptLayer`; None: neither a session nor an action of a RouterReplay applied.
        counter: the counts of this router.
        in_order: the columns have the order that a recompute uses; see `RoutingCall`.
    """

    router: Any
    topk_indices: Any
    counter: Any = None
    in_order: bool = False


class Tape:
    """Keep the router calls of a function's forward, in order, for its recomputes.

    with tape.forward():      # in the forward of your autograd function
        outputs = function(*inputs)
    with tape.recompute():    # in its backward
        outputs = function(*inputs)

    A tape keeps at most one call of each router, and a second one raises: calls of one router may be recomputed in a
    different order. If a function calls a router several times, give each of these calls a tape of its own.
    """

    __slots__ = ("__weakref__", "entries", "num_forwards")
    may_repeat_routers = False

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.num_forwards = 0  # above 1, the run that a recompute repeats is ambiguous

    def forward(self) -> Run:
        """Return a context in which router calls are written on this tape. Each `with` is one run."""
        return Run(self, reads=False)

    def recompute(self) -> Run:
        """Return a context in which routers replay this tape's entries, first to last."""
        return Run(self, reads=True)


class CheckpointTape(Tape):
    """The tape of a checkpoint. It may have several calls of a router, which its recompute repeats in order."""

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
        # torch ends a recompute early, by an exception, once it has every saved tensor: that is no error.
        if kind is None and self.reads and self._position < len(self.tape.entries):
            missing = self.tape.entries[self._position].router
            raise ReplayStateError(
                f"MRR413: a recompute ended after {self._position} calls of routers, but its forward made "
                f"{len(self.tape.entries)}; the next was {layer_of(missing)}. Run the whole function again, or keep one "
                "megatron_router_replay.mcore.Tape for each part of it."
            )

    def next(self, router: Any) -> Entry:
        """Return the next entry, which must be this router's.

        Raises:
            ReplayStateError: the forward run called a different router there, or none; or the tape has several forward runs.
        """
        tape, position = self.tape, self._position
        entry = tape.entries[position] if position < len(tape.entries) else None
        if tape.num_forwards > 1:
            raise ReplayStateError(
                f"MRR413: {layer_of(router)}: a checkpoint ran its function several times in one forward, so the run that is "
                "repeated here is ambiguous. Use one megatron_router_replay.mcore.Tape for each run."
            )
        if entry is None or entry.router is not router:
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
"""Called as each run begins: once `hooks` is imported, it checks that the hook on `TopKRouter` is installed."""


class CheckpointState(NamedTuple):
    """Distinguish a recompute from a forward, for a router's call in this thread.

    Args:
        recompute: the innermost one; None: there is none, or a backward runs inside it.
        repeats: in a recompute or in a backward.
        is_written: the innermost run is a forward run, which writes router calls.
    """

    recompute: Run | None
    repeats: bool
    is_written: bool


# Made once, because every call of a router gets one.
_NO_RECOMPUTE = {
    (repeats, is_written): CheckpointState(None, repeats, is_written)
    for repeats in (False, True)
    for is_written in (False, True)
}


def checkpoint_state() -> CheckpointState:
    """Return the CheckpointState of this thread."""
    # A number for every backward; -1: none runs in this thread.
    task, runs = torch._C._current_graph_task_id(), _thread.runs
    for run in reversed(runs):
        if run.reads:
            # A backward nested in a recompute makes router calls that are not on this tape.
            return CheckpointState(run if run.task == task else None, True, run is not runs[-1])
    return _NO_RECOMPUTE[task != -1, bool(runs)]


def has_entry(router: Any) -> bool:
    """Return whether this thread recomputes a checkpoint whose forward called the router."""
    run = checkpoint_state().recompute
    return run is not None and any(entry.router is router for entry in run.tape.entries)


def write(entry: Entry) -> None:
    """Write a router call on the tape of each open forward run.

    In a recompute, only those that opened inside it.
    """
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


def pairs_operations() -> bool:
    """Return whether a selective checkpoint may pair the operations of forward and recompute now."""
    # Without an open run, an active dispatch mode belongs to no checkpoint and stays on, such as make_fx when it traces a
    # RouterReplay that records into a static buffer.
    return bool(torch._C._len_torch_dispatch_stack() and _thread.runs)


def hidden_from_selective_checkpoint() -> AbstractContextManager[Any]:
    """Hide operations from selective checkpointing, where it may pair them."""
    if not pairs_operations():
        return nullcontext()
    return cast(AbstractContextManager[Any], _python_dispatch._disable_current_modes())


def layer_of(router: Any) -> str:
    """Return a router's name for messages; layers of an MTP block count from 1 in Megatron-Core since 0.17."""
    if getattr(router, "layer_number", 0) is None:
        return f"a {type(router).__name__}"  # which is called without its router
    mtp = "MTP " if getattr(router, "is_mtp_layer", False) else ""
    return f"{mtp}layer {getattr(router, 'layer_number', '?')}"
