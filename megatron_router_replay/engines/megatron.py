"""Megatron-Core's own inference -> RoutingTrace.

`decode` reads a finished request (`DynamicInferenceRequest`, or its serialised dict) with `routing_indices`, a response of
the text generation server (completions, chat) or one of its choices with `moe_topk_indices`, or the array
[S - 1, MoE layers, topk]; `decode_batch` responses with several choices and lists of these. Dense layers are not in it.

The server sends `moe_topk_indices` as nested lists (0.17) or as `["ndarray", {"data": lists, "dtype": name}]` (0.18 and
later), with `prompt_token_ids` and `generation_token_ids` (chat; completions from 0.18 on). `prompt_moe_topk_indices` is the
first rows of the same array in 0.17; from 0.18 on the wrapper is cut instead of the array, so it is never read.
`usage.prompt_tokens` of several choices is the largest of their prompts.

A request that was suspended and resumed is served in parts, and merging them concatenates the routes of every part, each of
which starts at the first token again: it has more rows than S - 1 and is refused.

Source: Megatron-Core 0.16 to 0.19, core.inference.inference_request and text_generation_server endpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_router_replay.engines.front import Decoder
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.options import DecodeOptions
from megatron_router_replay.engines.payload import Source, as_array, short_repr
from megatron_router_replay.engines.reply import Reply, first_known, get_field, read_usage
from megatron_router_replay.engines.responses import Response, find_responses
from megatron_router_replay.engines.rows import RowLayout
from megatron_router_replay.engines.tokens import SampleTokens

_ENGINE = "Megatron"
_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


def _read(result: Any, *, batch: bool) -> list[Reply]:
    responses = find_responses(result, engine=_ENGINE)
    if responses is not None:
        return [reply for response in responses for reply in _of_response(response)]
    if batch and isinstance(result, (list, tuple)) and result and not _is_wrapped(result):
        replies = [reply for item in result for reply in _read(item, batch=False)]
        return [replace(reply, source=replace(reply.source, sample=f"request {i}")) for i, reply in enumerate(replies)]
    if isinstance(result, (list, tuple)) or hasattr(result, "__array__") or result is None:
        return [Reply(source=_source("the request"), routed_experts=_unwrapped(result, _source("the request")))]
    if get_field(result, "moe_topk_indices") is not None or get_field(result, "prompt_moe_topk_indices") is not None:
        return [_of_choice(result, _source("the choice", "moe_topk_indices"))]
    source = _source("the request")
    return [
        Reply(
            source=source,
            routed_experts=_unwrapped(get_field(result, "routing_indices"), source),
            prompt_token_ids=_unwrapped(get_field(result, "prompt_tokens"), source),
            output_token_ids=_unwrapped(get_field(result, "generated_tokens"), source),
        )
    ]


def _source(label: str, field: str = "routing_indices") -> Source:
    return Source(engine=_ENGINE, field=field, sample=label)


def _of_response(response: Response) -> list[Reply]:
    if len(response.chunks) > 1:
        raise _source(f"the stream{response.name}", "moe_topk_indices").error(
            "the server does not stream routes: send the request without stream."
        )
    source = _source("the response" + response.name, "moe_topk_indices")
    # n choices of one prompt are counted as one prompt, and of several prompts only the largest is.
    counts, usage = read_usage(
        response.chunks[0], source=source, num_choices=len(response.choices), largest_prompt=True
    )
    replies = [
        _of_choice(parts[0], _source(f"choice {i}{response.name}", "moe_topk_indices"))
        for i, parts in enumerate(response.choices)
    ]
    return [replace(reply, counts=counts, usage=usage) for reply in replies]


def _of_choice(choice: Any, source: Source) -> Reply:
    routes, prompt_routes = get_field(choice, "moe_topk_indices"), get_field(choice, "prompt_moe_topk_indices")
    if routes is None and prompt_routes is not None:
        raise source.error(
            "missing: there is prompt_moe_topk_indices alone, which has no routes of the generation, and from Megatron-Core "
            "0.18 on is cut from the array's wrapper instead of the array."
        )
    message = get_field(choice, "message")
    return Reply(
        source=source,
        routed_experts=_unwrapped(routes, source),
        prompt_token_ids=first_known(*(get_field(item, "prompt_token_ids") for item in (choice, message))),
        output_token_ids=first_known(*(get_field(item, "generation_token_ids") for item in (choice, message))),
    )


def _is_wrapped(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[0], str)


def _unwrapped(value: Any, source: Source) -> Any:
    """Return what `DynamicInferenceRequest.serialize` wrapped: ("tensor", lists) or ("ndarray", {data, dtype})."""
    if not _is_wrapped(value):
        return value
    kind, content = value
    if kind == "tensor":
        return content
    if kind != "ndarray" or not isinstance(content, Mapping) or not {"data", "dtype"} <= set(content):
        raise source.error(
            f"is wrapped as {short_repr(kind)}, expected 'tensor', or 'ndarray' with its data and dtype."
        )
    if not isinstance(content["dtype"], str) or content["dtype"] not in _DTYPES:
        raise source.error(f"is an ndarray of dtype {short_repr(content['dtype'])}, expected integers.")
    # The dtype is a promise about the data: ids beyond it mean that the payload was put together by something else.
    array, limits = as_array(content["data"], source=source), np.iinfo(content["dtype"])
    if array.size and not (limits.min <= int(array.min()) and int(array.max()) <= limits.max):
        raise source.error(f"holds ids that {content['dtype']}, its dtype, does not.")
    return array


def _rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    return RowLayout(
        parts=(as_array(reply.routed_experts, source=reply.source),),
        moe_columns=tuple(range(len(model.moe_layer_numbers))),
        explain_layers="Each pipeline stage records its own layers only: join them first.",
        explain_surplus=(
            "Are these the ids of this very request? Megatron sends no surplus rows; the parts of a request that was "
            "suspended are concatenated, each from its first token on: decode each part by itself."
        ),
    )


_DECODER = Decoder(
    name=_ENGINE,
    read=_read,
    rows=_rows,
    if_missing="Set moe_enable_routing_replay=True in the engine's config.",
)
decode = _DECODER.decode
decode_batch = _DECODER.decode_batch
