"""What forward hooks on the routers of a `transformers` model saw -> RoutingTrace.

A hook on every module whose class name ends in `TopKRouter` or `TopkRouter` gets `(logits, scores, indices)`:

    seen = {}
    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            layer_number = int(name.split("layers.")[1].split(".")[0]) + 1
            module.register_forward_hook(lambda m, args, out, n=layer_number: seen.__setitem__(n, out))
    model(input_ids)
    trace = engines.transformers.decode(seen, model=model.config.to_dict(), token_ids=input_ids[0])

A forward of all S tokens has a row for the last one too. Top-k of `output_router_logits` is not used: it is the
routing of some models only (ENGINES: Qwen3-MoE, Mixtral, gpt-oss).

`decode` takes such a dict by layer_number (from 1), `decode_batch` a list of them, one a sample. A value is the router's
output tuple, its indices [tokens, topk] or [1, tokens, topk], or a list of several, which are joined, as `generate` with a
cache makes them.

Source: transformers 5.23, MixtralTopKRouter, Qwen3MoeTopKRouter, DeepseekV3TopkRouter, GptOssTopKRouter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.options import DecodeOptions
from megatron_router_replay.engines.payload import Array, Source, as_array
from megatron_router_replay.engines.registry import register
from megatron_router_replay.engines.reply import Reply
from megatron_router_replay.engines.rows import RowLayout
from megatron_router_replay.engines.tokens import SampleTokens
from megatron_router_replay.errors import listed


def _read(result: Any, *, batch: bool) -> list[Reply]:
    samples = result if batch and isinstance(result, (list, tuple)) else [result]
    names = [f"sample {i}" if len(samples) > 1 else "" for i in range(len(samples))]
    source = Source(engine="transformers", field="router indices")
    return [
        Reply(source=replace(source, sample=name), fields={"routed_experts": item})
        for name, item in zip(names, samples)
    ]


def _rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    seen, source = reply["routed_experts"], reply.source
    if not isinstance(seen, Mapping):
        raise source.error(f"MRR310: expected a dict by layer_number, got {type(seen).__name__}.")
    missing = [number for number in model.moe_layer_numbers if number not in seen]
    surplus = [number for number in seen if number not in model.moe_layer_numbers]
    if missing or surplus:
        raise source.error(
            f"MRR306: seen on layers {list(seen)}, the model's MoE layers are {list(model.moe_layer_numbers)}: missing "
            f"{missing}, unexpected {surplus}. Layer numbers count from 1."
        )
    if tokens.num_prompt_tokens:
        _check_forwards(seen[model.moe_layer_numbers[0]], tokens.num_prompt_tokens, source)
    layers = [_indices(seen[number], number, source) for number in model.moe_layer_numbers]
    shapes = {layer.shape for layer in layers}
    if len(shapes) > 1:
        raise source.error(f"MRR306: layers differ in shape: {sorted(shapes)}.")
    return RowLayout(
        parts=(np.stack(layers, axis=1),),
        columns=tuple(range(len(layers))),
        last_row="route",
    )


def _check_forwards(seen: Any, num_prompt_tokens: int, source: Source) -> None:
    """Raise unless one of several forwards ends with the prompt: `generate` samples there, also if it prefills in parts."""
    if not _is_list_of_forwards(seen) or len(seen) < 2:
        return
    sizes = [len(_indices(item, 0, source)) for item in seen]
    if num_prompt_tokens not in accumulate(sizes):
        raise source.error(
            f"MRR305: has forwards of {listed(sizes)} rows, none of which ends with the prompt's {num_prompt_tokens} "
            "tokens: is there a row too much in front, or a forward of something else?"
        )


def _indices(seen: Any, layer_number: int, source: Source) -> Array:
    # A list is of several forwards, as `generate` with a cache makes them; nested lists of ids are one forward.
    if _is_list_of_forwards(seen):
        parts = [_indices(item, layer_number, source) for item in seen]
        if len({part.shape[1] for part in parts}) > 1:
            raise source.error(f"MRR306: the forwards of layer_number {layer_number} differ in topk.")
        return np.concatenate(parts)
    if _is_output(seen):
        seen = seen[2]
    array = as_array(seen, source=source)
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2:
        raise source.error(
            f"MRR306: layer_number {layer_number} has shape {list(array.shape)}, expected [tokens, topk] of one sample."
        )
    return array


def _is_list_of_forwards(seen: Any) -> bool:
    """Return whether these are outputs or indices of several forwards; [[[...]]] of ids is one."""
    return isinstance(seen, (list, tuple)) and not _is_output(seen) and len(seen) > 0 and (
        _is_output(seen[0]) or getattr(seen[0], "ndim", 0) >= 2
    )  # fmt: skip


def _is_output(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 3 and all(hasattr(part, "shape") for part in item)


transformers = register(
    Decoder(
        name="transformers",
        title="transformers",
        read=_read,
        rows=_rows,
        start="Register forward hooks on the routers before the forward.",
        request="""\
module.register_forward_hook(lambda m, args, out, n=layer_number: seen.__setitem__(n, out))""",
        sends="`decode` takes a dict: for each layer number, what its router returned, or a list of it for several forwards.",
        versions="5.x, modules whose class name ends in TopKRouter",
        tested="5.23 run: Qwen3-MoE, Mixtral, gpt-oss",
        reads_files=False,
    )
)
"""Forward hooks on the routers of a `transformers` model; see the module."""
