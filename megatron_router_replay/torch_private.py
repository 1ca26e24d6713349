"""Every private name of torch that the core leans on, in one place; a test runs each.

`surroundings` reads activation checkpoints off the Python call stack. A checkpoint calls the model through its own Python
frames, so the stack says exactly in which checkpoints a router runs, however they are nested and on whichever thread:

    frame                                  what runs                   the object that is the checkpoint
    Function.forward(ctx, ...)             reentrant, first forward    ctx: torch's, Megatron-Core's, Transformer Engine's
    Function.backward(ctx, ...)            reentrant, recompute        the same ctx: it is the node in the graph
    torch.utils.checkpoint.checkpoint      non-reentrant, forward      its _CheckpointFrame
    unpack_hook of a _CheckpointFrame      non-reentrant, recompute    the same _CheckpointFrame
    torch.autograd.Function.apply          a function's forward        none: its forward gets no ctx, so nothing is known
    torch.autograd.graph's engine call     a backward in a recompute   none: below it, only what it calls recomputes

Checkpoints whose forward has no frame of its own (torch's composable one, Transformer Engine's without reentrance) are read
off the saved-tensor hooks that they set: these hold the _CheckpointFrame.

Source: torch 2.13, torch/utils/checkpoint.py, torch/distributed/_composable/checkpoint_activation.py and
torch/autograd/function.py; Transformer Engine d0067d0, transformer_engine/pytorch/distributed.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import FunctionCtx
from torch.utils import _python_dispatch
from torch.utils import checkpoint as torch_checkpoint

Function = TypeVar("Function", bound=Callable[..., Any])

_FRAMES = frozenset({"forward", "backward", "checkpoint", "unpack_hook", "apply", "_engine_run_backward"})
_CHECKPOINT_FILE = torch_checkpoint.__file__
_CHECKPOINT_FRAME = torch_checkpoint._CheckpointFrame.__name__  # Transformer Engine's is named alike
_APPLY = torch.autograd.Function.apply.__code__
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
# Their recompute runs once what their forward ran; that of another function may run it in parts, and in any order.
_REPEATING = frozenset({"CheckpointFunctionBackward", "_CheckpointFunctionBackward"})


def not_compiled(function: Function) -> Function:
    """Keep a function out of torch.compile's graphs: they could hold the micro-batch, the counts or the phase of one call."""
    # torch.compiler.disable does the same, is untyped, and imports all of Dynamo now instead of with the first call.
    return cast(Function, _disable_dynamo(function))


def graph_task() -> int:
    """Return the number of the backward that runs in this thread, another for every backward; -1: none runs."""
    return int(torch._C._current_graph_task_id())


def in_compiled_autograd() -> bool:
    """Return whether compiled autograd traces a backward: there a recompute could be taken for a forward."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")  # slow to import; loaded wherever it traces
    return bool(compiled_autograd and compiled_autograd.in_compiled_autograd_region)


def is_captured(scores: Tensor) -> bool:
    """Return whether what runs now becomes part of a graph that runs again without Python."""
    if scores.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    if torch._C._is_tracing():
        return True
    # make_fx and torch.export trace in a mode of the dispatcher, or of the operators above autograd.
    modes = torch._C._len_torch_dispatch_stack() or torch._ops._len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
    if not modes:
        return False
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")  # slow to import; loaded wherever it traces
    return bool(proxy_tensor and proxy_tensor.get_proxy_mode() is not None)


class Surroundings(NamedTuple):
    """In which activation checkpoints a call runs.

    Args:
        in_backward: a backward runs in this thread, or a checkpoint recomputes outside one.
        recompute: the checkpoint whose recompute this is; None: none is known.
        inside: the checkpoints whose forward this is, innermost first; in a recompute, those that it makes anew.
        unknown: what runs here that may recompute and cannot be told apart; empty: there is nothing of that kind.
    """

    in_backward: bool
    recompute: Any
    inside: tuple[Any, ...]
    unknown: str = ""


NOWHERE = Surroundings(False, None, ())


def surroundings() -> Surroundings:
    """Return in which activation checkpoints the caller runs, and whether as their forward or as a recompute."""
    in_backward = graph_task() != -1
    has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    # The forward of every autograd function turns forward-mode differentiation off, which enable_grad() does not undo, and a
    # non-reentrant checkpoint sets hooks. Where neither is, the walk up the stack is spared: outside all checkpoints.
    if not (in_backward or has_hooks) and torch._C._is_fwd_grad_enabled():
        return NOWHERE
    inside: list[Any] = []
    recompute, unknown, recomputes = None, "", False
    for recomputes, checkpoint in _checkpoints(sys._getframe(1)):
        if recomputes:
            recompute = checkpoint
            break
        if isinstance(checkpoint, str):
            unknown = f"the forward of the autograd function {checkpoint}"
        else:
            inside.append(checkpoint)
    if has_hooks and (recompute is not None or not recomputes):
        for checkpoint in _checkpoints_of_hooks(recompute):
            if any(known is checkpoint for known in inside):
                continue
            if isinstance(recompute, FunctionCtx):
                # Of this recompute, or of a forward that was interrupted by the backward: there is no mark between the two.
                unknown = "a checkpoint by hooks alone (torch's composable one) inside a reentrant one"
            else:
                inside.append(checkpoint)
    return Surroundings(in_backward or recomputes, recompute, tuple(inside), unknown)


def repeats_its_calls(checkpoint: Any) -> bool:
    """Return whether this checkpoint's recompute calls what its forward called once more, in the same order."""
    return not isinstance(checkpoint, FunctionCtx) or type(checkpoint).__name__ in _REPEATING


def outside_selective_checkpoints() -> AbstractContextManager[Any]:
    """Hide operations from selective activation checkpointing (context_fn), which pairs those of forward and recompute.

    The choice of experts is made in the forward and looked up in the recompute, by other operations.
    """
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    kinds = (torch_checkpoint._CachingTorchDispatchMode, torch_checkpoint._CachedTorchDispatchMode)
    if not any(isinstance(mode, kinds) for mode in _python_dispatch._get_current_dispatch_mode_stack()):
        return nullcontext()
    return cast(AbstractContextManager[Any], _python_dispatch._disable_current_modes())


def is_spent(checkpoint: Any) -> bool:
    """Return whether a backward has freed what a reentrant checkpoint saved, so that it cannot recompute any more.

    Its node may live on: modules keep tensors of their last forward, and these the graph behind them.
    """
    if not isinstance(checkpoint, FunctionCtx):
        return False  # a _CheckpointFrame is freed together with what was saved
    try:
        _ = checkpoint._raw_saved_tensors  # type: ignore[attr-defined]  # does not unpack them, which could recompute
    except RuntimeError:
        return True
    return False


def _checkpoints(frame: FrameType | None) -> Iterator[tuple[bool, Any]]:
    """Yield (it recomputes, checkpoint) for the checkpoints on the stack, from the innermost outwards.

    An autograd function whose ctx its forward does not get is yielded by its name. In a backward that a recompute runs
    over what it made, whatever recomputes is not that recompute: nothing is known of it.
    """
    known = False  # the autograd function whose `apply` comes next was seen by its ctx
    while frame is not None:
        code = frame.f_code
        name = code.co_name
        if name in _FRAMES:
            checkpoint = None
            if name in ("forward", "backward"):
                first = code.co_varnames[0] if code.co_argcount else "self"
                if first != "self":
                    context = frame.f_locals.get(first)
                    checkpoint = context if isinstance(context, FunctionCtx) else None
                    known = known or (checkpoint is not None and name == "forward")
            elif code is _ENGINE:
                yield True, None
            elif code is _APPLY:
                if not known:
                    yield False, frame.f_locals["cls"].__name__
                known = False
            elif name == "unpack_hook":
                held = frame.f_locals.get("frame")
                checkpoint = held if type(held).__name__ == _CHECKPOINT_FRAME else None
            elif name == "checkpoint" and code.co_filename == _CHECKPOINT_FILE:
                generator = frame.f_locals.get("gen")
                suspended = None if generator is None else generator.gi_frame
                checkpoint = None if suspended is None else suspended.f_locals.get("new_frame")
            if checkpoint is not None:
                yield name in ("backward", "unpack_hook"), checkpoint
        frame = frame.f_back


def _checkpoints_of_hooks(recompute: Any) -> Iterator[Any]:
    """Yield the _CheckpointFrames that the saved-tensor hooks in force belong to, innermost first.

    Args:
        recompute: the checkpoint that recomputes: what was set before its recompute began is not yielded.
    """
    autograd: Any = torch._C._autograd  # its stubs lack one of these
    hooks: list[Any] = []
    if not autograd._saved_tensors_hooks_is_enabled():
        return
    # torch shows the innermost pair alone; a save_on_cpu or an inner checkpoint hides the others.
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(hooks):
        autograd._push_saved_tensors_default_hooks(pack, unpack)
    for pack, _ in hooks:
        names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
        held = dict(zip(names, getattr(pack, "__closure__", None) or ()))
        if "target_frame_ref" in held and held["target_frame_ref"].cell_contents() is recompute:
            return
        checkpoint = held["frame"].cell_contents if "frame" in held else None
        if type(checkpoint).__name__ == _CHECKPOINT_FRAME:
            if checkpoint is recompute:
                return
            yield checkpoint
