"""The forward in progress: every layer's routes as the routers returned them, copied once for all layers at its end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_router_replay.capture.errors import CaptureError

_OWN_COPY = -1
"""In place of a tensor's version: nobody else holds it."""


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.uint16, torch.uint32, torch.uint64)


class StepRecorder:
    """Holds the ids of one announced forward, one tensor a layer.

    Args:
        layer_numbers: of the layers, for messages.
        topk: ids a token and layer.
        device: where the ids are collected; those of a router on another device are copied there at once.
    """

    def __init__(self, layer_numbers: Sequence[int], *, topk: int, device: torch.device) -> None:
        self._layer_numbers = layer_numbers
        self._device = device
        self._on_cpu = device.type == "cpu"  # a device is compared in several times the time that asking for this takes
        self._held: list[Tensor | None] = [None] * len(layer_numbers)
        self._versions = [0] * len(layer_numbers)
        self._num_held = 0
        self._shape = torch.Size((0, topk))
        self.is_announced = False

    def begin(self, num_tokens: int) -> None:
        """Expect the ids of `num_tokens` tokens from every layer."""
        if self._shape[0] != num_tokens:
            self._shape = torch.Size((num_tokens, self._shape[1]))

    def note(self, layer_index: int, topk_indices: Tensor) -> None:
        """Hold what a layer's router chose, without a copy; `collect` looks at it.

        Raises:
            CaptureError: the layer's second in this forward.
        """
        if self._held[layer_index] is not None:
            raise CaptureError(
                f"layer_number {self._layer_numbers[layer_index]} was run a second time in one announced forward: whose "
                "routes hold cannot be known. Announce every forward by itself."
            )
        try:
            self._versions[layer_index] = topk_indices._version
        except RuntimeError:
            # Torch counts no writes to the tensors of inference mode, so a later one could not be noticed.
            topk_indices = topk_indices.clone()
            self._versions[layer_index] = _OWN_COPY
        self._held[layer_index] = topk_indices
        self._num_held += 1

    @property
    def is_complete(self) -> bool:
        """Whether every layer's routes came by `note`, none by compiled code."""
        return self._num_held == len(self._held)

    def noted(self) -> tuple[bool, ...]:
        """Return which layers' routes came by `note`."""
        return tuple(tensor is not None for tensor in self._held)

    def collect(self, destination: Tensor, live: Tensor) -> None:
        """Copy the routes of all layers.

        Args:
            destination: [num_layers, num_tokens, topk] int64, contiguous.
            live: [num_layers, max_num_tokens, topk], where compiled code wrote those of the other layers.

        Raises:
            CaptureError: a router handed over another number of tokens than announced, or no ids, or someone wrote to its
                ids after it returned them.
        """
        for layer_index, (tensor, version) in enumerate(zip(self._held, self._versions)):
            if tensor is None:
                continue
            if version != _OWN_COPY and tensor._version != version:
                raise CaptureError(
                    f"the ids of layer_number {self._layer_numbers[layer_index]} were written to in place after the router "
                    "chose them, so they are no longer what it chose: copy them there, or call write_routes yourself and "
                    "hand over a clone."
                )
            is_here = tensor.is_cpu if self._on_cpu else tensor.device == self._device
            if not (is_here and tensor.dtype is torch.int64 and tensor.shape == self._shape):
                self._held[layer_index] = self._as_ids(layer_index, tensor)
        if self.is_complete:
            torch.stack(self._held, out=destination)  # type: ignore[arg-type]  # none is None
            return
        destination.copy_(live[:, : destination.shape[1]])
        for layer_index, tensor in enumerate(self._held):
            if tensor is not None:
                destination[layer_index].copy_(tensor)

    def end(self) -> None:
        """Let go of the routers' tensors; nothing is announced any more."""
        if self._num_held:
            self._held = [None] * len(self._held)
            self._num_held = 0
        self.is_announced = False

    def _as_ids(self, layer_index: int, topk_indices: Tensor) -> Tensor:
        """Return ids that came in another shape, dtype or place as the others are."""
        number = self._layer_numbers[layer_index]
        if topk_indices.dtype not in _INTEGERS:
            raise CaptureError(f"layer_number {number} handed over {topk_indices.dtype}: expected integer expert ids.")
        rows = topk_indices.flatten(0, -2) if topk_indices.dim() > 2 else topk_indices
        if rows.shape != self._shape:
            num_tokens, topk = self._shape
            raise CaptureError(
                f"layer_number {number} routed {rows.shape[0]} tokens, {num_tokens} were announced (its ids have shape "
                f"{list(rows.shape)}, expected [{num_tokens}, {topk}]). Announce all rows of the batch, None for those that "
                "are nobody's; a part of them, as under sequence parallelism, cannot be captured."
            )
        return rows.to(self._device, torch.int64)
