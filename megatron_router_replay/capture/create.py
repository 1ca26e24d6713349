"""create_capturer: a model -> the capturer that watches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megatron_router_replay.capture.active import ActiveCapturer
from megatron_router_replay.capture.disabled import DisabledCapturer
from megatron_router_replay.capture.errors import CaptureError
from megatron_router_replay.capture.interface import RoutedExpertsCapturer
from megatron_router_replay.capture.routers import RouterSite, find_router_sites


def create_capturer(
    model: nn.Module | None = None,
    *,
    enable: bool = True,
    max_num_tokens: int = 8192,
    routers: Sequence[RouterSite] | None = None,
    num_layers: int | None = None,
    tp_rank: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> RoutedExpertsCapturer:
    """Return a capturer for a model, or with enable=False one that does nothing.

    Create it before torch.compile first runs the model, and before CUDA graphs are recorded.

    Args:
        model: a transformers or Megatron-Core model; its routers are found by themselves, and the input_ids that it runs are
            compared with what is announced.
        max_num_tokens: the most token slots of one forward, padding included: batch times prompt length.
        routers: the sites of any other model, instead of those found in `model`.
        num_layers: all layers, dense ones included; default: the model config's, else the last layer_number.
        tp_rank: every tensor-parallel rank has a buffer, so that their graphs are the same; rank 0 publishes.
        device: default: that of the first router's parameters.
        dtype: of the buffer and host arrays, torch.uint8 or torch.int16; default: the smaller that fits.

    Raises:
        CaptureError: a router cannot be captured, or the layers differ in num_experts or topk.
    """
    if not enable:
        return DisabledCapturer()
    if routers is None:
        if model is None:
            raise CaptureError("nothing to capture: pass the model, or routers=[RouterSite(...)].")
        routers = find_router_sites(model)
    sites = sorted(routers, key=lambda site: site.layer_number)
    if num_layers is None:
        num_layers = _num_layers(model, sites)
    return ActiveCapturer(
        sites,
        model=model,
        num_layers=num_layers,
        max_num_tokens=max_num_tokens,
        publishes=tp_rank == 0,
        device=device,
        dtype=dtype,
    )


def _num_layers(model: nn.Module | None, sites: Sequence[RouterSite]) -> int:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("num_hidden_layers", "num_layers"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return max((site.layer_number for site in sites), default=0)
