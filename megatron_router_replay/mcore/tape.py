"""Whoever runs code again carries the tape of its first run.

    a checkpointed function runs     Run    one run of it in this thread: its first run writes a tape, its later runs read it
    a router chooses experts         Entry  one call of one router, on the tape of every function that runs for the first time

A checkpoint keeps the function that its recompute calls. `install` wraps that function, so that the tape lives exactly as
long as the checkpoint, and so as the graph that can ask for a recompute. Nothing is guessed from the order of forwards and
backwards: micro-batches may share a backward, a graph may be used twice, checkpoints may be nested.

    reentrant        CheckpointFunction.forward(ctx, run_function, ...) of torch, Megatron-Core and Transformer Engine
    non-reentrant    the hooks that torch and Transformer Engine enter around a run: _checkpoint_hook, _recomputation_hook

Code that recomputes in another way names its runs itself, with `Tape`, or raises in its backward.

Source: torch 2.13, torch/utils/checkpoint.py; Megatron-Core 0.16.1, tensor_parallel/random.py; Transformer Engine d0067d0,
pytorch/distributed.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self, cast
from weakref import ReferenceType

import torch
from megatron.core.tensor_parallel import random as megatron_checkpoints
from torch.utils import _python_dispatch
from torch.utils import checkpoint as torch_checkpoints

from megatron_router_replay.errors import ReplayStateError

_TAPE = "router_replay_tape"

LEANT_ON: tuple[tuple[Any, str, str], ...] = (
    (torch_checkpoints, "CheckpointFunction", "recomputes of torch's reentrant checkpoints are not told from forwards"),
    (torch_checkpoints, "_checkpoint_hook", "forwards of torch's non-reentrant checkpoints write no tape"),
    (torch_checkpoints, "_recomputation_hook", "recomputes of torch's non-reentrant checkpoints read no tape"),
    (
        megatron_checkpoints,
        "CheckpointFunction",
        "recomputes of Megatron-Core's checkpoints are not told from forwards",
    ),
    (torch._C, "_current_graph_task_id", "a backward without a tape is not noticed"),
    (torch._C, "_len_torch_dispatch_stack", "selective checkpoints and traced graphs are not noticed"),
    (_python_dispatch, "_disable_current_modes", "selective checkpoints pair the wrong operations"),
)
"""(owner, name, what fails if it is gone): private names of torch and Megatron-Core, looked for at `seam.install`."""


@dataclass(slots=True, eq=False)
class Entry:
    """One call of one router, as its recompute must repeat it; it lives with the graph, so it holds no session.

    Args:
        router: the TopKRouter.
        topk_indices: [num_tokens, topk], the experts that it used, in any integer dtype, a tensor or a
            `microbatches.KeptLayer`; None: it ran live and unheld.
        counter: counts the recomputes of this router.
        balance: what its balancing has seen of these tokens; see `balance`.
        in_order: a recompute need not sort the columns; see `seam.Decision`.
    """

    router: Any
    topk_indices: Any
    counter: Any = None
    balance: Any = None
    in_order: bool = False


class Tape:
    """The calls of routers in the first run of one function, in order. Code that runs a function again by itself keeps one.

    with tape.first_run():      # in the forward of your autograd function
        outputs = function(*inputs)
    with tape.again():          # in its backward
        outputs = function(*inputs)

    Make one tape for each part of a function that is run again in another order than in the forward.
    """

    __slots__ = ("__weakref__", "entries", "num_first_runs")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.num_first_runs = 0  # of several, nobody knows which one a later run repeats

    def first_run(self) -> Run:
        """Return a context in which routers write this tape."""
        self.num_first_runs += 1
        return Run(self, reads=False)

    def again(self) -> Run:
        """Return a context in which routers take what this tape holds, from its start."""
        return Run(self, reads=True)


class Run:
    """One run of a function in one thread, from `__enter__` to `__exit__`."""

    __slots__ = ("_position", "reads", "tape", "task")

    def __init__(self, tape: Tape, *, reads: bool) -> None:
        self.tape, self.reads = tape, reads
        self.task = -1
        self._position = 0

    def __enter__(self) -> Self:
        before_run()
        self.task = torch._C._current_graph_task_id()
        _thread.runs.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _thread.runs.remove(self)

    def peek(self) -> Any:
        """Return the router that the first run called where it had come as far as this one; None: it called no more."""
        entries = self.tape.entries
        return entries[self._position].router if self._position < len(entries) else None

    def next(self, router: Any, replay: Any = None) -> Entry:
        """Return what this router used where the first run had come as far as this one.

        Args:
            replay: its own RouterReplay, if it has one; entries of drivers bear that.

        Raises:
            ReplayStateError: the first run called a different router there, or none; or there were several first runs.
        """
        tape, position = self.tape, self._position
        entry = tape.entries[position] if position < len(tape.entries) else None
        if tape.num_first_runs > 1:
            raise ReplayStateError(
                f"MRR413: {layer_of(router)}: a checkpoint ran its function several times in one forward, so the run that is "
                "repeated here is not known. Name the runs with megatron_router_replay.mcore.Tape, one for each part."
            )
        if entry is None or (entry.router is not router and (replay is None or entry.router is not replay)):
            expected = "none" if entry is None else layer_of(entry.router)
            raise ReplayStateError(
                f"MRR413: {layer_of(router)} is recomputed as call {position + 1} of its checkpoint, where the forward "
                f"called {expected}: the checkpointed function must call the same routers in the same order, and its "
                "forward must have run while a session, or a driven RouterReplay, held them."
            )
        self._position += 1
        return entry


class _Thread(threading.local):
    def __init__(self) -> None:
        self.runs: list[Run] = []


_thread = _Thread()

before_run: Callable[[], None] = lambda: None  # noqa: E731
"""The seam's check of itself, called where a tape begins to be written or read."""


def moment() -> tuple[Run | None, bool, bool]:
    """Return where this thread is in its runs.

    Returns:
        (the run that repeats a first run, the innermost; None: there is none, or a backward runs in it,
        whether what runs now repeats a forward: it is a recompute, or is called by a backward,
        whether it runs for the first time and may run again, so that a router's call is written).
    """
    # A different number for every backward; -1: none runs in this thread.
    task, runs = torch._C._current_graph_task_id(), _thread.runs
    for run in reversed(runs):
        if run.reads:
            # A backward inside a recompute calls code that this recompute's first run did not call.
            return (run if run.task == task else None), True, run is not runs[-1]
    return None, task != -1, bool(runs)


def repeats() -> bool:
    """Return whether what this thread runs now repeats a forward: it is a recompute, or is called by a backward."""
    return moment()[1]


def write(entry: Entry) -> None:
    """Put a router's call on the tape of every first run inside the innermost recompute of this thread."""
    for run in reversed(_thread.runs):
        if run.reads:
            return
        run.tape.entries.append(entry)


_NOTHING = nullcontext()


def unpaired() -> AbstractContextManager[Any]:
    """Hide operations that only one of forward and recompute runs from a selective checkpoint, which pairs those of both."""
    if not torch._C._len_torch_dispatch_stack():
        return _NOTHING
    return cast(AbstractContextManager[Any], _python_dispatch._disable_current_modes())


def layer_of(router: Any) -> str:
    """Return a router's name for messages, or that of an attention with an indexer."""
    return f"{'the indexer of ' if hasattr(router, 'indexer') else ''}layer {getattr(router, 'layer_number', '?')}"


def install() -> None:
    """Wrap the checkpoints of torch, Megatron-Core and Transformer Engine, once each. The last one is wrapped only if it is
    loaded.

    Raises:
        ReplayStateError: one of the names that this leans on is gone.
    """
    check_names(LEANT_ON)
    _wrap_reentrant(torch_checkpoints, "CheckpointFunction")
    _wrap_reentrant(megatron_checkpoints, "CheckpointFunction")
    _wrap_hooks(torch_checkpoints)
    transformer_engine = sys.modules.get("transformer_engine.pytorch.distributed")
    if transformer_engine is not None:
        loss = "its recomputes are not told from forwards"
        names = ("_CheckpointFunction", "_checkpoint_hook", "_recomputation_hook")
        check_names((transformer_engine, name, loss) for name in names)
        _wrap_reentrant(transformer_engine, "_CheckpointFunction")
        _wrap_hooks(transformer_engine)


def is_installed() -> bool:
    """Return whether the checkpoints are still wrapped."""
    hooks = all(
        hasattr(getattr(torch_checkpoints, name), _TAPE) for name in ("_checkpoint_hook", "_recomputation_hook")
    )
    functions = (torch_checkpoints.CheckpointFunction.forward, megatron_checkpoints.CheckpointFunction.forward)
    return hooks and all(hasattr(forward, _TAPE) for forward in functions)


def check_names(names: Iterable[tuple[Any, str, str]]) -> None:
    """Raise if a name is gone, as listed in LEANT_ON.

    Raises:
        ReplayStateError: names it, and what fails without it.
    """
    for owner, name, loss in names:
        # What only a base class declares is gone, too.
        if getattr(getattr(owner, name, None), "__isabstractmethod__", not hasattr(owner, name)):
            raise ReplayStateError(
                f"MRR402: {owner.__name__} has no {name}, so {loss}: use a tested version (docs/support.md)."
            )


def _wrap_reentrant(module: Any, name: str) -> None:
    """Let every run of the function that a reentrant checkpoint keeps be a Run."""
    function = getattr(module, name)
    forward = function.forward
    if hasattr(forward, _TAPE):
        return

    def taped(ctx: Any, run_function: Any, *args: Any) -> Any:
        tape = Tape()
        is_first = True

        def run(*args: Any, **kwargs: Any) -> Any:
            with tape.first_run() if is_first else tape.again():
                return run_function(*args, **kwargs)

        try:
            return forward(ctx, run, *args)
        finally:
            is_first = False

    setattr(taped, _TAPE, True)
    function.forward = staticmethod(taped)


def _wrap_hooks(module: Any) -> None:
    """Let every run of a non-reentrant checkpoint be a Run; both of its runs know the frame that they belong to."""
    for name, reads in (("_checkpoint_hook", False), ("_recomputation_hook", True)):
        hook = getattr(module, name)
        if not hasattr(hook, _TAPE):
            setattr(module, name, _taped_hook(hook, reads))


def _taped_hook(hook: Any, reads: bool) -> Any:
    class Taped(hook):  # type: ignore[misc]
        def __init__(self, frame: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(frame, *args, **kwargs)
            # torch gives a recompute a weak reference to its frame, Transformer Engine the frame.
            if isinstance(frame, ReferenceType):
                frame = frame()
            if reads:
                # A frame from before `install` has no tape: routers raise where they find nothing on this one.
                self._run = (getattr(frame, _TAPE, None) or Tape()).again()
            else:
                setattr(frame, _TAPE, Tape())
                self._run = getattr(frame, _TAPE).first_run()

        def __enter__(self) -> Any:
            entered = super().__enter__()
            try:
                self._run.__enter__()
            except BaseException:
                super().__exit__(None, None, None)
                raise
            return entered

        def __exit__(self, *error: Any) -> Any:
            self._run.__exit__()
            return super().__exit__(*error)

    setattr(Taped, _TAPE, True)
    return Taped
