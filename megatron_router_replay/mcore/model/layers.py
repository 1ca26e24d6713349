"""The layers of a model: their number, and those that route; the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.errors import LayoutError, TraceError
from megatron_router_replay.mcore.model.find import (
    WalkedChunk,
    as_chunks,
    check_has_experts,
    main_pattern,
    mtp_pattern,
    num_decoder_layers,
    walk,
)
from megatron_router_replay.mcore.model.support import is_hashed


def layer_numbers_of(model_chunks: nn.Module | Sequence[nn.Module]) -> tuple[int, ...]:
    """Return the layer numbers of the whole model's MoE layers, in order. All ranks get the same; MTP layers are left out.

    An engine that counts blocks of attention and experts calls the first MoE layer of a pattern `*E*E` layer 1, Megatron's
    HybridModel calls it layer 2. `trace.renumber(dict(zip(trace.layer_numbers, layer_numbers_of(model), strict=True)))` gives
    a trace the model's numbers.

    Args:
        model_chunks: the model or its chunks on this rank, wrapped or not.

    Raises:
        LayoutError: the model has no config of Megatron-Core, or the routers of this rank are in different layers than the
            config states.

    Source: Megatron-Core 0.16.1 to 0.19.2, HybridModel (MambaModel before 0.18): the symbols of its pattern, E routes; all
    other models, gpt_layer_specs.get_gpt_decoder_layer_specs: moe_layer_freq.
    """
    return _layer_numbers([walk(chunk) for chunk in as_chunks(model_chunks)])


def _layer_numbers(walks: Sequence[WalkedChunk]) -> tuple[int, ...]:
    numbers = _moe_layers(walks[0].model)
    # The config is compared with the built layers, because a spec of the user's own may not follow it.
    here = {found.layer_number for walked in walks for found in walked.routers if not found.is_mtp}
    built = {number for walked in walks for number in _decoder_layers(walked)}
    if here != built & set(numbers):
        raise LayoutError(
            f"MRR411: by its config, the model's layers {list(numbers)} route, but of this rank's layers {sorted(built)} "
            f"these do: {sorted(here)}. It was built from a spec that does not follow its config; name its layers yourself."
        )
    return numbers


def routing_info(model_chunks: nn.Module | Sequence[nn.Module]) -> ModelRoutingInfo:
    """Read what routes depend on from a Megatron-Core model, on any of its ranks.

    Args:
        model_chunks: the model or its chunks on this rank, wrapped or not; of any pipeline stage.

    Raises:
        LayoutError: as `layer_numbers_of`; or the model has no experts.
    """
    walks = [walk(chunk) for chunk in as_chunks(model_chunks)]
    check_has_experts(walks)
    model = walks[0].model
    config: Any = model.config
    return ModelRoutingInfo(
        num_layers=num_decoder_layers(model),
        moe_layer_numbers=_layer_numbers(walks),
        num_experts=config.num_moe_experts,
        topk=config.moe_router_topk,
    )


def check_trace_layers(layer_numbers: Sequence[int], walks: Sequence[WalkedChunk]) -> None:
    """Raise unless a trace's layers can be those of the model: routes for each of its routers, none for anything else.

    Multi-token-prediction layers, and layers that a table of token ids routes, need none; the trace may have them.

    Args:
        layer_numbers: of the trace.
        walks: the chunks on this rank.

    Raises:
        TraceError: a router of this rank has no routes, a layer of this rank with routes is dense, or there are routes for a
            layer after the model's last one.
    """
    model = walks[0].model
    trace_layers = set(layer_numbers)
    routers = [found for walked in walks for found in walked.routers]
    for found in routers:
        needs_routes = not (found.is_mtp or is_hashed(found.router))
        if needs_routes and found.layer_number not in trace_layers:
            raise TraceError(
                f"MRR405: {found} has no routes: the trace has layers {sorted(trace_layers)}. Layer numbers are Megatron's, "
                f"from 1, and count dense layers too.{_how_to_renumber(layer_numbers, walks)}"
            )
    decoder = num_decoder_layers(model)
    elsewhere = trace_layers - {found.layer_number for found in routers}  # on another pipeline stage, or nowhere
    built = {number for walked in walks for number in _decoder_layers(walked)}
    dense = sorted(elsewhere & built)
    if dense:
        raise TraceError(
            f"MRR405: the trace has routes for layer {dense[0]}, but that layer of the model is dense: it is of "
            f"another model, or its layers are shifted.{_how_to_renumber(layer_numbers, walks)}"
        )
    # After the decoder's numbers come those of the multi-token-prediction block, as `find_routers` counts them.
    config: Any = getattr(model, "config", None)
    last = decoder + (getattr(config, "mtp_num_layers", None) or 0) * len(mtp_pattern(model) or "1")
    beyond = sorted(number for number in trace_layers if number > last)
    if beyond:
        raise TraceError(
            f"MRR405: the trace has routes for layer {beyond[0]}, but the model has {decoder} layers"
            f"{f' and {last - decoder} in its MTP block' if last > decoder else ''}: it is of a deeper model."
        )


def _how_to_renumber(layer_numbers: Sequence[int], walks: Sequence[WalkedChunk]) -> str:
    """Return what to do if trace and model have equally many MoE layers and number them differently; else nothing."""
    try:
        numbers = _layer_numbers(walks)
    except LayoutError:
        return ""
    if len(numbers) != len(layer_numbers) or tuple(layer_numbers) == numbers:
        return ""
    return (
        f" The model routes in as many layers, {list(numbers)}: if they are the trace's in order, as in a GPT model that "
        "became a HybridModel, use trace.renumber(dict(zip(trace.layer_numbers, mcore.layer_numbers_of(model))))."
    )


def _moe_layers(model: nn.Module) -> tuple[int, ...]:
    pattern = main_pattern(model)
    if pattern is not None:
        return tuple(i + 1 for i, symbol in enumerate(pattern) if symbol == "E")
    config: Any = getattr(model, "config", None)
    frequency, num_layers = getattr(config, "moe_layer_freq", None), getattr(config, "num_layers", None)
    if frequency is None or num_layers is None:
        raise LayoutError(f"MRR411: {type(model).__name__} has no config that lists the layers that route.")
    if config.num_moe_experts is None:
        return ()
    routes = [i % frequency == 0 for i in range(num_layers)] if isinstance(frequency, int) else frequency
    return tuple(i + 1 for i, is_moe in enumerate(routes) if is_moe)


def _decoder_layers(walked: WalkedChunk) -> set[int]:
    """Return the numbers of the layers that this rank has, of any kind, without MTP layers and layers of a vision tower."""
    # A hybrid model's other kinds of layers, Mamba's for one, are no TransformerLayer.
    layers: list[Any] = [*getattr(getattr(walked.model, "decoder", None), "layers", ())]
    size = _decoder_size(walked.model)
    layers += [
        each.module
        for each in walked.modules
        if isinstance(each.module, TransformerLayer) and each.mtp_layer is None and _decoder_size(each.module) == size
    ]
    return {layer.layer_number for layer in layers if hasattr(layer, "layer_number")}


def _decoder_size(module: Any) -> tuple[Any, ...]:
    """Return (layers, hidden size) of a config, which all layers of a decoder share, dense ones too.

    The layers of a vision tower count from 1 as well; its config has its own sizes.

    Source: Megatron-Bridge 067f987d, qwen_vl.modelling_qwen3_vl.transformer_config.get_vision_model_config.
    """
    config = getattr(module, "config", None)
    return getattr(config, "num_layers", None), getattr(config, "hidden_size", None)
