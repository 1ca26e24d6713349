"""The device memory of a capture, allocated once and never moved: what compiled code writes to, and one step's head.

Eager routers hand their tensors over and nothing is written here. Compiled code and CUDA graphs run none of our Python, so
they write: each layer has a view of the routes and a stamp. Their graphs hold these addresses, so they write to the live
buffer in every replay, not to a copy made while tracing. A stamp counts the calls and rows of its layer since
begin_forward: whatever bypasses the capture (a fused kernel, a layer that did not run or ran twice, a router that saw other
tokens) is found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.capture.errors import CaptureError
from megatron_router_replay.ids import index_dtype

CALL = 1 << 32
"""What one call adds to its layer's stamp, besides its number of rows."""

UNSEEN, MASKED = -1, -2
"""In place of a token id: the model's input_ids were not seen; its attention_mask hides the token."""


class RoutingBuffer:
    """The routes that compiled code writes in one forward, with stamps and token ids of that forward.

    Args:
        num_layers, max_num_tokens, topk: L, N, K.
        num_experts: experts in each layer; decides the dtype.
        device: where the routers run.
        dtype: uint8 or int16; None: the smaller that holds every id.

    Raises:
        CaptureError: dtype cannot hold the ids.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        max_num_tokens: int,
        topk: int,
        num_experts: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        fitting = index_dtype(num_experts)
        if dtype is None:
            dtype = fitting
        if dtype not in (fitting, torch.int16):
            raise CaptureError(
                f"cannot keep ids of num_experts={num_experts} in {dtype}: leave dtype out for {fitting}."
            )
        self.tensor = torch.zeros((num_layers, max_num_tokens, topk), dtype=dtype, device=device)
        self.views = tuple(self.tensor[i] for i in range(num_layers))
        # Stamps and token ids side by side go to the host in one copy.
        self.head = torch.zeros(num_layers + max_num_tokens, dtype=torch.int64, device=device)
        self.stamps, self.token_ids = self.head[:num_layers], self.head[num_layers:]
        self.stamp_views = tuple(self.stamps[i : i + 1] for i in range(num_layers))
        # Cold, a torch call takes 30 us and more of a decode step, however little it writes; a memoryview a fifth of that.
        self.host_head = host_memory(self.head) if device.type == "cpu" else None
        self._no_calls = host_memory(torch.zeros(num_layers, dtype=torch.int64))
        if device.type == "cuda":
            # Else CUDA graphs of torch.compile copy the tensor they mutate, or are skipped because of the mutation.
            for tensor in (self.tensor, *self.views, *self.stamp_views):
                torch._dynamo.mark_static_address(tensor)

    def clear_stamps(self) -> None:
        """Count the calls and rows of every layer from 0."""
        if self.host_head is not None:
            self.host_head[: len(self._no_calls)] = self._no_calls
        else:
            self.stamps.zero_()

    @property
    def max_num_tokens(self) -> int:
        return int(self.tensor.shape[1])


def host_memory(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor on the CPU."""
    array: Any = tensor.numpy()
    return memoryview(array)
