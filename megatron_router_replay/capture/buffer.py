"""The device memory of a capture: every router writes its ids into it, in eager code, compiled code and CUDA graphs.

It is allocated once and never moves, because graphs keep its addresses: each replay writes to the live buffer. A stamp counts
the calls and rows of its layer since the forward was announced. So a bypass of the capture is found: a fused kernel, a
layer that did not run or ran twice, a router that saw a different number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from megatron_router_replay.capture.routers import CaptureError, RouterSite

CALL = 1 << 24
"""Added to a layer's stamp by each call, besides its number of rows."""

UNSEEN, MASKED = -1, -2
"""In place of a token id: the model's input_ids were not seen; its attention_mask hides the token."""

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


class RoutingBuffer:
    """Device memory of a forward: its routes, stamps and token ids.

    Routes have the narrowest dtype that fits num_experts + 1 values: an id outside 0..num_experts - 1 is clamped to -1 or
    num_experts before it is narrowed, so that it is still detected.

    Args:
        num_layers, max_num_tokens, topk, num_experts: L, N, K, E.
        device: where the routers run.
    """

    def __init__(
        self, *, num_layers: int, max_num_tokens: int, topk: int, num_experts: int, device: torch.device
    ) -> None:
        self.max_num_tokens, self.topk, self._num_experts = max_num_tokens, topk, num_experts
        dtypes = (torch.uint8, torch.int16, torch.int32)
        dtype = next(dtype for dtype in dtypes if num_experts <= torch.iinfo(dtype).max)
        with torch.inference_mode(False):  # a tensor that is created in inference mode cannot be written outside
            self.routes = torch.zeros((num_layers, max_num_tokens, topk), dtype=dtype, device=device)
            # As tensors: with numbers, clamp writes no other dtype than it reads.
            self._bounds = (torch.tensor(-1, device=device), torch.tensor(num_experts, device=device))
            # Stamps and token ids side by side, so that a step needs two copies and not three.
            self.head = torch.zeros(num_layers + max_num_tokens, dtype=torch.int32, device=device)
            self.stamps, self.token_ids = self.head[:num_layers], self.head[num_layers:]
            self._layers = self._slots = self.routes.unbind()
            self._layer_stamps = self.stamps.unsqueeze(1).unbind()
        self.is_open = True
        self.num_announced: int | None = None
        self.eager_stamps = [0] * num_layers
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            # Else CUDA graphs of torch.compile copy the tensor they mutate, or are skipped because of the mutation.
            for tensor in (self.routes, *self._layers, *self._layer_stamps):
                torch._dynamo.mark_static_address(tensor)

    def hook(self, layer_index: int, site: RouterSite) -> Callable[[nn.Module, Any, Any], None]:
        """Return the forward hook that writes one router's ids."""

        def write_ids(module: nn.Module, args: Any, output: Any) -> None:
            # A deep copy of the model carries this hook, too.
            if module is site.module and self._is_wanted():
                self._write(layer_index, site, site.select(module, args, output))

        return write_ids

    def begin(self, num_tokens: int) -> None:
        """Count the calls and rows of every layer from 0; eager routers write until `end`."""
        self.stamps.zero_()
        self.eager_stamps = [0] * len(self._layers)
        # Decode steps repeat one size, and slicing each layer takes longer than a write.
        if len(self._slots[0]) != num_tokens:
            self._slots = self.routes[:, :num_tokens].unbind()
        self.num_announced = num_tokens

    def end(self) -> None:
        """Let eager routers write no more."""
        self.num_announced = None

    def step_size(self, num_tokens: int) -> int:
        """Return how many bytes `gather` writes: a multiple of four, because the next step begins with int32."""
        num_layers = len(self._layers)
        num_bytes = num_layers * num_tokens * self.topk * self.routes.element_size()
        return 4 * (num_layers + num_tokens + -(-num_bytes // 4))

    def split_step(self, step: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return views of a step's bytes: stamps and token ids [L + num_tokens] int32, routes [L, num_tokens, K]."""
        num_layers = len(self._layers)
        end, size = 4 * (num_layers + num_tokens), num_layers * num_tokens * self.topk
        routes = step[end:].view(self.routes.dtype)[:size]
        return step[:end].view(torch.int32), routes.view(num_layers, num_tokens, self.topk)

    def gather(self, destination: Tensor, num_tokens: int) -> None:
        """Write a step to `step_size` bytes, as `split_step` reads it."""
        head, routes = self.split_step(destination, num_tokens)
        head.copy_(self.head[: len(head)])
        routes.copy_(self.routes[:, :num_tokens])

    def _is_graph(self) -> bool:
        return is_compiling() or (self._on_gpu and torch.cuda.is_current_stream_capturing())

    def _is_wanted(self) -> bool:
        # Dynamo evaluates this once, while it traces: compiled code always writes, so no guard depends on announcements.
        return self.is_open and (self._is_graph() or self.num_announced is not None)

    def _write(self, layer_index: int, site: RouterSite, topk_indices: Tensor) -> None:
        """Write [..., topk] ids of the forward's tokens, in the order of the batch.

        Raises:
            CaptureError: no integers, or a shape that was not announced.
        """
        if topk_indices.dtype not in _INTEGERS:
            raise CaptureError(
                f"MRR701: layer_number {site.layer_number} handed over {topk_indices.dtype}: expected integer expert ids."
            )
        rows = topk_indices if topk_indices.dim() == 2 else topk_indices.flatten(0, -2)
        # clamp needs -1, which no unsigned dtype has, and num_experts, which may not fit narrow ones.
        rows = rows if rows.dtype in (torch.int64, torch.int32) else rows.long()
        num_rows, is_graph = rows.shape[0], self._is_graph()
        # In a graph the sizes are constants of the capture, and the stamp shows a different number of rows later.
        if rows.shape[1] != self.topk or not (is_graph or num_rows == self.num_announced):
            raise CaptureError(
                f"MRR702: layer_number {site.layer_number} routed {num_rows} tokens to {rows.shape[1]} experts each, "
                f"{self.num_announced} tokens were announced and topk is {self.topk}. Announce all rows of the batch, None "
                "for those of no request; a part of them, as under sequence parallelism, cannot be captured."
            )
        if not is_graph:
            # Between two matrix products each operation takes 30 us and more, so eager calls are counted in Python.
            torch.clamp(rows, *self._bounds, out=self._slots[layer_index])
            self.eager_stamps[layer_index] += CALL + num_rows
            return
        # A larger forward is none that was announced (that raises): training on the same model, say.
        if num_rows <= self.max_num_tokens:
            self._layers[layer_index][:num_rows].copy_(rows.clamp(-1, self._num_experts))
        self._layer_stamps[layer_index].add_(CALL + num_rows)
