"""The device buffer that routers write to: [num_layers, max_num_tokens, topk], allocated once and never moved.

Each router module keeps its contiguous [max_num_tokens, topk] view as a plain attribute. CUDA graphs and compiled code
hold the address of that view, so they write to the live buffer in every replay, not to a copy made while tracing.

Before each forward the rows it will use are filled with a value that is no expert's id. Whatever bypasses the capture (a
fused kernel, a layer that did not run, a router that saw other tokens) leaves it there and is found.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_router_replay.capture.errors import CaptureError

ROUTES_ATTRIBUTE = "routed_experts_out"
"""Name of the attribute of a router module (or MoE layer) that holds its view of the buffer."""


def write_routes(module: nn.Module, topk_indices: Tensor) -> None:
    """Write one layer's routes to its view of the buffer; the seam, directly after expert selection, before dispatch.

    Costs one attribute check where nothing is captured. Call it from your own MoE layer, or let a hook do it.

    Args:
        module: the module that a RouterSite named.
        topk_indices: [..., topk], any integer dtype; the leading axes are the tokens in the order of the batch.
    """
    out = getattr(module, ROUTES_ATTRIBUTE, None)
    if out is not None:
        rows = topk_indices if topk_indices.dim() == 2 else topk_indices.flatten(0, -2)
        # A larger forward is none that begin_forward announced (that one raises): training on the same model, say.
        if rows.shape[0] <= out.shape[0]:
            out[: rows.shape[0]].copy_(rows)


class RoutingBuffer:
    """The routes of one forward on the device of the model.

    Args:
        num_layers, max_num_tokens, topk: L, N, K.
        num_experts: experts in each layer; decides the dtype.
        device: where the routers run.
        dtype: uint8 or int16; None: uint8 where it can hold an id and the unwritten mark, up to 255 experts.

    Raises:
        CaptureError: dtype cannot hold the ids and the mark.
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
        if dtype is None:
            dtype = torch.uint8 if num_experts <= 255 else torch.int16
        limits = {torch.uint8: 255, torch.int16: 32768}
        if dtype not in limits or num_experts > limits[dtype]:
            raise CaptureError(
                f"cannot keep ids of num_experts={num_experts} in {dtype}: use torch.uint8 up to 255 experts (255 marks "
                "what no router wrote) or torch.int16 up to 32768."
            )
        self.unwritten = 255 if dtype is torch.uint8 else -1
        self.tensor = torch.full((num_layers, max_num_tokens, topk), self.unwritten, dtype=dtype, device=device)
        self.views = tuple(self.tensor[i] for i in range(num_layers))
        if device.type == "cuda":
            # Else CUDA graphs of torch.compile copy the tensor they mutate, or are skipped because of the mutation.
            for tensor in (self.tensor, *self.views):
                torch._dynamo.mark_static_address(tensor)

    @property
    def max_num_tokens(self) -> int:
        return int(self.tensor.shape[1])

    def clear(self, num_tokens: int) -> None:
        """Mark the first `num_tokens` rows of every layer as unwritten."""
        self.tensor[:, :num_tokens].fill_(self.unwritten)

    def attach(self, module: nn.Module, layer_index: int) -> None:
        """Give a module its view.

        Raises:
            CaptureError: another capturer's view is attached to it.
        """
        if getattr(module, ROUTES_ATTRIBUTE, None) is not None:
            raise CaptureError(
                f"layer {layer_index}'s {type(module).__name__} is captured already: close() the other capturer first."
            )
        setattr(module, ROUTES_ATTRIBUTE, self.views[layer_index])

    def detach(self, module: nn.Module) -> None:
        """Take the view away again."""
        if hasattr(module, ROUTES_ATTRIBUTE):
            delattr(module, ROUTES_ATTRIBUTE)
