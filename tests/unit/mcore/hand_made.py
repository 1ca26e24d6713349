"""Models of Megatron-Core's classes with nothing inside: which layer a router is in is all that can be asked of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn


def bare(cls: Any, **attributes: Any) -> Any:
    """Return a module of this class that was never built."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def moe(number: int | None) -> Any:
    """Return a layer that routes."""
    return bare(TransformerLayer, layer_number=number, router=bare(TopKRouter, layer_number=number))


def dense(number: int) -> Any:
    return bare(TransformerLayer, layer_number=number)


def mtp(number: int, *layers: Any, name: str = "mtp_model_layer") -> Any:
    """Return a multi-token-prediction layer: around one transformer layer, or around a stack of several."""
    inner = layers[0] if len(layers) == 1 else bare(nn.Module, layers=nn.ModuleList(layers))
    return bare(MultiTokenPredictionLayer, layer_number=number, **{name: inner})


def model(*layers: Any, mtp_layers: tuple[Any, ...] = (), pattern: str | None = None, **config: Any) -> nn.Module:
    """Return a chunk with these layers in its decoder; the config is one of experts, where nothing else is said."""
    whole = bare(nn.Module, decoder=bare(nn.Module, layers=nn.ModuleList(layers)), mtp=nn.ModuleList(mtp_layers))
    whole.config = SimpleNamespace(
        **{"num_layers": len(layers), "num_moe_experts": 8, "moe_router_topk": 2, "moe_layer_freq": 1} | config
    )
    if pattern is not None:
        whole.hybrid_layer_pattern = pattern
    return whole
