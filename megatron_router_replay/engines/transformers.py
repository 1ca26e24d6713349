"""What forward hooks on the routers of a `transformers` model saw -> RoutingTrace.

A hook on every module whose class name ends in `TopKRouter` or `TopkRouter` gets `(logits, scores, indices)`:

    seen = {}
    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            layer_number = int(name.split("layers.")[1].split(".")[0]) + 1
            module.register_forward_hook(lambda m, args, out, n=layer_number: seen.__setitem__(n, out))
    model(input_ids)
    trace = decode(seen, model=model.config.to_dict(), token_ids=input_ids[0])

A forward of all S tokens has a row for the last one too. Top-k of `output_router_logits` is not used: it is the
routing of some models only (ENGINES: Qwen3-MoE, Mixtral, gpt-oss).

Source: transformers 5.23, MixtralTopKRouter, Qwen3MoeTopKRouter, DeepseekV3TopkRouter, GptOssTopKRouter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_router_replay.engines.assemble import SampleRows, build_trace
from megatron_router_replay.engines.model_info import ModelLike, as_model_info
from megatron_router_replay.engines.payload import Array, Source, as_array
from megatron_router_replay.engines.tokens import resolve_tokens
from megatron_router_replay.trace import RoutingTrace


def decode(
    result: Mapping[int, Any],
    *,
    model: ModelLike,
    token_ids: Any = None,
    start: int = 0,
    num_tokens: int | None = None,
    allow_constant_layers: bool = False,
    weight_version: int | None = None,
    sample_id: str | None = None,
) -> RoutingTrace:
    """Return the routes of one sample of a forward over its S tokens, or over all but the last.

    Args:
        result: by layer_number (from 1), what the hook of that layer saw: the router's output tuple, or its indices
            [tokens, topk] or [1, tokens, topk]. A list of several is joined, as `generate` with a cache makes them.
        model: ModelRoutingInfo, or the Hugging Face config as a dict, object or path.
        token_ids: [S].
        start: the token that the first row belongs to.
        num_tokens: S, where ids are not known.
        others: as for the engines.

    Returns:
        [S, MoE layers, topk] with sequence_lengths (S,).

    Raises:
        PayloadError: a MoE layer was not seen, layers differ in rows, or the routes do not fit tokens or model.
    """
    info = as_model_info(model)
    source = Source(engine="transformers", field="router indices")
    if not isinstance(result, Mapping):
        raise source.error(f"expected a dict by layer_number, got {type(result).__name__}.")
    missing = [number for number in info.moe_layer_numbers if number not in result]
    surplus = [number for number in result if number not in info.moe_layer_numbers]
    if missing or surplus:
        raise source.error(
            f"seen on layers {list(result)}, the model's MoE layers are {list(info.moe_layer_numbers)}: missing {missing}, "
            f"unexpected {surplus}. Layer numbers count from 1."
        )
    layers = [_indices(result[number], number, source) for number in info.moe_layer_numbers]
    shapes = {layer.shape for layer in layers}
    if len(shapes) > 1:
        raise source.error(f"layers differ in shape: {sorted(shapes)}.")
    tokens = resolve_tokens(source=source, token_ids=token_ids, num_tokens=num_tokens)
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise source.error(f"start={start!r} must be an integer of 0 or more.")
    sample = SampleRows(
        source=source,
        parts=(np.stack(layers, axis=1),),
        num_tokens=tokens.num_tokens,
        token_ids=tokens.token_ids,
        start=start,
        last_token_routed=True,
        layer_columns=tuple((number, i) for i, number in enumerate(info.moe_layer_numbers)),
        filler_columns=(),
        allow_constant_layers=allow_constant_layers,
        weight_version=weight_version,
        sample_id=sample_id,
    )
    return build_trace([sample], model=info)


def _indices(seen: Any, layer_number: int, source: Source) -> Array:
    if isinstance(seen, Sequence) and not isinstance(seen, (str, bytes)) and len(seen) and _is_output(seen[0]):
        parts = [_indices(item, layer_number, source) for item in seen]
        if len({part.shape[1] for part in parts}) > 1:
            raise source.error(f"the forwards of layer_number {layer_number} differ in topk.")
        return np.concatenate(parts)
    if _is_output(seen):
        seen = seen[2]
    array = as_array(seen, source=source)
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2:
        raise source.error(
            f"layer_number {layer_number} has shape {list(array.shape)}, expected [tokens, topk] of one sample."
        )
    return array


def _is_output(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 3 and all(hasattr(part, "shape") for part in item)
