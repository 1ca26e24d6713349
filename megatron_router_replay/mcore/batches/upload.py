"""Routes of a micro-batch on the routers' device: gathered as whole rows, copied once, widened 16 layers at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.mcore.core.streams import current_stream, to_device, wait_stream

_BLOCK = 16
"""Layers that are widened to int64 at once: a launch for each router would cost more, all layers too much memory."""


class LayerRoutes:
    """The routes of a micro-batch on the routers' device; a forward reads each layer once, and so does a recompute.

    Args:
        topk_indices: [num_tokens, num_layers, topk] in the dtype of the trace, written on the current stream.
    """

    __slots__ = ("_blocks", "_stream", "topk_indices")

    def __init__(self, topk_indices: Tensor) -> None:
        self.topk_indices = topk_indices
        self._stream = current_stream(topk_indices.device)
        self._blocks: dict[int, tuple[tuple[Tensor, ...], set[int], Any]] = {}

    def layer(self, position: int) -> Tensor:
        """Return [num_tokens, topk] int64."""
        number = position // _BLOCK
        found = self._blocks.get(number)
        if found is None:
            wait_stream(self._stream, self.topk_indices)
            layers = range(number * _BLOCK, min((number + 1) * _BLOCK, self.topk_indices.shape[1]))
            source = self.topk_indices[:, layers.start : layers.stop].transpose(0, 1)
            widened = source.to(torch.int64, copy=True, memory_format=torch.contiguous_format)
            found = self._blocks[number] = widened.unbind(), set(layers), current_stream(widened.device)
        block, missing, stream = found
        layer = block[position % _BLOCK]
        if stream is not None:
            wait_stream(stream, layer)
        missing.discard(position)
        if not missing:
            self._blocks.pop(number, None)
        return layer


class KeptLayer:
    """One layer of a micro-batch's routes as a tape keeps it; it is widened with its block.

    Args:
        routes: of the micro-batch.
        position: of the layer.
    """

    __slots__ = ("_position", "_routes", "dtype", "shape")

    def __init__(self, routes: LayerRoutes, position: int) -> None:
        self._routes, self._position = routes, position
        num_tokens, _, topk = routes.topk_indices.shape
        self.dtype, self.shape = routes.topk_indices.dtype, (num_tokens, topk)

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return [num_tokens, topk]; `RoutingCall` requests int64, which costs nothing."""
        layer = self._routes.layer(self._position)
        return layer if dtype is torch.int64 else layer.to(dtype)


def take_rows(topk_indices: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Gather whole rows of routes and copy them to the routers' device, without a wait.

    Args:
        topk_indices: [num_rows, num_layers, topk].
        rows: [n] int64 on the host, each a row.

    Returns:
        [n, num_layers, topk] on `device`.
    """
    if not topk_indices.shape[0]:  # an empty trace: its micro-batches have no row
        return topk_indices.new_zeros(rows.numel(), *topk_indices.shape[1:]).to(device)
    if topk_indices.device.type != "cpu":
        return topk_indices.index_select(0, to_device(rows, topk_indices.device)).to(device, non_blocking=True)
    if device.type == "cpu":
        return topk_indices.index_select(0, rows)
    # Page-locked, or the copy would wait for the device; torch reuses such memory only when the copy is done.
    staged = torch.empty(rows.numel(), *topk_indices.shape[1:], dtype=topk_indices.dtype, pin_memory=True)
    torch.index_select(topk_indices, 0, rows, out=staged)
    return staged.to(device, non_blocking=True)
