"""Wrap the checkpoints of torch, Megatron-Core and Transformer Engine, so that each run of their function is a `tape.Run`.

    reentrant        CheckpointFunction.forward(ctx, run_function, ...) of torch, Megatron-Core and Transformer Engine
    non-reentrant    the hooks that torch and Transformer Engine enter around a run: _checkpoint_hook, _recomputation_hook

The tape of a reentrant checkpoint is in the closure of its function, that of a non-reentrant one on its frame. So it lives
exactly as long as the graph that may recompute.

Source: torch 2.13, torch/utils/checkpoint.py; Megatron-Core 0.16.1, tensor_parallel/random.py; Transformer Engine d0067d0,
pytorch/distributed.py.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import ReferenceType

from megatron.core.tensor_parallel import random as megatron_checkpoints
from torch.utils import checkpoint as torch_checkpoints

from megatron_router_replay.mcore.core.tape import CheckpointTape, Run
from megatron_router_replay.mcore.model.upstream import check_names

_TAPE = "router_replay_tape"

_TRANSFORMER_ENGINE = "transformer_engine.pytorch.distributed"
"""Not imported here: a checkpoint of a package that is not loaded cannot run."""

_HOOKS = ("_checkpoint_hook", "_recomputation_hook")


def install() -> None:
    """Wrap the checkpoints of torch, Megatron-Core and Transformer Engine, once each.

    Raises:
        ReplayStateError: a name of Transformer Engine's checkpoints is gone.
    """
    _wrap_reentrant(torch_checkpoints.CheckpointFunction)
    _wrap_reentrant(megatron_checkpoints.CheckpointFunction)
    _wrap_hooks(torch_checkpoints)
    transformer_engine: Any = sys.modules.get(_TRANSFORMER_ENGINE)
    if transformer_engine is not None:
        loss = "its recomputes look like forwards"
        check_names((transformer_engine, name, loss) for name in ("_CheckpointFunction", *_HOOKS))
        _wrap_reentrant(transformer_engine._CheckpointFunction)
        _wrap_hooks(transformer_engine)
        setattr(transformer_engine, _TAPE, True)


def replaced() -> list[str]:
    """Return the functions that `install` wrapped and that are wrapped no more, by their full names."""
    wrapped: list[tuple[Any, str, tuple[str, ...]]] = [
        (torch_checkpoints, "CheckpointFunction", _HOOKS),
        (megatron_checkpoints, "CheckpointFunction", ()),
    ]
    transformer_engine = sys.modules.get(_TRANSFORMER_ENGINE)
    if transformer_engine is not None and hasattr(transformer_engine, _TAPE):
        wrapped.append((transformer_engine, "_CheckpointFunction", _HOOKS))
    names: list[str] = []
    for module, function, hooks in wrapped:
        now = {name: getattr(module, name, None) for name in hooks}
        now[f"{function}.forward"] = getattr(getattr(module, function, None), "forward", None)
        names += [f"{module.__name__}.{name}" for name, each in now.items() if not hasattr(each, _TAPE)]
    return names


def misses_transformer_engine() -> bool:
    """Return whether Transformer Engine was loaded since the last `install`."""
    module = sys.modules.get(_TRANSFORMER_ENGINE)
    return module is not None and not hasattr(module, _TAPE)


def _wrap_reentrant(function: Any) -> None:
    """Make every run of a reentrant checkpoint's function a Run."""
    forward = function.forward
    if hasattr(forward, _TAPE):
        return

    def taped(ctx: Any, run_function: Any, *args: Any) -> Any:
        tape = CheckpointTape()
        is_first = True

        def run(*args: Any, **kwargs: Any) -> Any:
            with Run(tape, reads=not is_first):
                return run_function(*args, **kwargs)

        try:
            return forward(ctx, run, *args)
        finally:
            is_first = False  # the backward calls the same `run`

    setattr(taped, _TAPE, True)
    function.forward = staticmethod(taped)


def _wrap_hooks(module: Any) -> None:
    """Make both runs of a non-reentrant checkpoint a Run; its hooks get the frame that the two share."""
    for name, reads in zip(_HOOKS, (False, True)):
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
            # A frame from before `install` has no tape: routers raise where they find nothing on a new one.
            tape = (getattr(frame, _TAPE, None) if reads else None) or CheckpointTape()
            if not reads:
                setattr(frame, _TAPE, tape)
            self._run = Run(tape, reads=reads)

        def __enter__(self) -> Any:
            entered = super().__enter__()
            try:
                self._run.__enter__()
            except BaseException:
                super().__exit__(None, None, None)
                raise
            return entered

        def __exit__(self, *error: Any) -> Any:
            try:
                self._run.__exit__(*error)
            finally:
                left = super().__exit__(*error)
            return left

    setattr(Taped, _TAPE, True)
    return Taped
