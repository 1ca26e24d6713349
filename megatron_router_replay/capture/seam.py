"""The seam, directly after expert selection and before dispatch: a router's ids -> the forward in progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling

from megatron_router_replay.capture.buffer import CALL, RoutingBuffer
from megatron_router_replay.capture.errors import CaptureError
from megatron_router_replay.capture.recorder import StepRecorder
from megatron_router_replay.capture.routers import Select

SEAM_ATTRIBUTE = "routed_experts_seam"
"""Name of the attribute of a router module (or MoE layer) that holds its LayerSeam."""


def write_routes(module: nn.Module, topk_indices: Tensor) -> None:
    """Hand over one layer's routes; call it from your own MoE layer, or let a hook do it.

    Costs one attribute check where nothing is captured.

    Args:
        module: the module that a RouterSite named.
        topk_indices: [..., topk], any integer dtype; the leading axes are the tokens in the order of the batch.

    Raises:
        CaptureError: in an announced forward, another number of tokens than announced, or a second call.
    """
    seam = getattr(module, SEAM_ATTRIBUTE, None)
    if seam is not None and seam.is_open():
        seam.take(topk_indices)


class LayerSeam:
    """Takes one layer's routes: eager ones as they are, those of compiled code and CUDA graphs into the live buffer.

    Args:
        layer_index: of the layer along the buffer's first axis.
        buffer: what compiled code writes to.
        recorder: of the forward in progress.
    """

    __slots__ = ("layer_index", "on_gpu", "out", "recorder", "stamp")

    def __init__(self, layer_index: int, buffer: RoutingBuffer, recorder: StepRecorder) -> None:
        self.layer_index = layer_index
        self.out = buffer.views[layer_index]
        self.stamp = buffer.stamp_views[layer_index]
        self.recorder = recorder
        self.on_gpu = self.out.is_cuda

    def is_open(self) -> bool:
        """Return whether routes are wanted: in an announced forward, and in whatever becomes a graph."""
        # Dynamo runs this once, while it traces, and keeps the branch for compiled code.
        return is_compiling() or self.recorder.is_announced or self._is_captured()

    def take(self, topk_indices: Tensor) -> None:
        """Hold an eager router's routes; let compiled code and CUDA graphs write theirs."""
        if is_compiling() or self._is_captured():
            self._write(topk_indices)
        else:
            self.recorder.note(self.layer_index, topk_indices)

    def _is_captured(self) -> bool:
        return self.on_gpu and torch.cuda.is_current_stream_capturing()

    def _write(self, topk_indices: Tensor) -> None:
        rows = topk_indices if topk_indices.dim() == 2 else topk_indices.flatten(0, -2)
        # A larger forward is none that begin_forward announced (that one raises): training on the same model, say.
        if rows.shape[0] <= self.out.shape[0]:
            self.out[: rows.shape[0]].copy_(rows)
        self.stamp.add_(CALL + rows.shape[0])


def hook_of(select: Select) -> Callable[[nn.Module, Any, Any], None]:
    """Return the forward hook of a router: it asks its own module for the seam, so a copy of a model has none of this one."""

    def hand_over(module: nn.Module, args: Any, output: Any) -> None:
        seam = getattr(module, SEAM_ATTRIBUTE, None)
        if seam is None:
            return
        # Between two matrix products nothing of this Python is in the processor's caches, so an eager router on a CPU calls
        # no more than it must: `is_dynamo_compiling` is one call, `is_compiling` two. Dynamo asks nothing behind the first,
        # so that no guard of its code depends on whether a forward is announced.
        if not (is_dynamo_compiling() or seam.on_gpu) and seam.recorder.is_announced:
            seam.recorder.note(seam.layer_index, select(module, args, output))
        elif seam.is_open():
            seam.take(select(module, args, output))

    return hand_over


def attach(module: nn.Module, seam: LayerSeam) -> None:
    """Give a module its seam.

    Raises:
        CaptureError: another capturer's seam is attached to it.
    """
    if getattr(module, SEAM_ATTRIBUTE, None) is not None:
        raise CaptureError(
            f"layer {seam.layer_index}'s {type(module).__name__} is captured already: close() the other capturer first."
        )
    setattr(module, SEAM_ATTRIBUTE, seam)


def detach(module: nn.Module) -> None:
    """Take the seam away again."""
    if hasattr(module, SEAM_ATTRIBUTE):
        delattr(module, SEAM_ATTRIBUTE)
