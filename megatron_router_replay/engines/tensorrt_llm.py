"""TensorRT-LLM's routed experts -> RoutingTrace, for the releases that return them (its pull request 18397).

`decode` reads a RequestOutput or CompletionOutput of the LLM API, a dict with the same fields, or the array
[S - 1, MoE layers, topk]; `decode_batch` several outputs, and lists of these, as `LLM.generate` returns.

`CompletionOutput.routed_experts` has the MoE layers only, in order, and logical ids, also under expert load balancing.
Its HTTP server was not seen to send them; its strings are refused, for their encoding would be a guess.

Source: TensorRT-LLM's RFC 17778 and pull request 18397 as described there; written from these, not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_router_replay.engines.front import Decoder
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.options import DecodeOptions
from megatron_router_replay.engines.payload import Source, as_array
from megatron_router_replay.engines.reply import Reply, first_known, get_field, says
from megatron_router_replay.engines.responses import (
    Response,
    check_bare_choices,
    is_response,
    read_response,
    read_responses,
)
from megatron_router_replay.engines.rows import RowLayout
from megatron_router_replay.engines.tokens import SampleTokens

_ENGINE = "TensorRT-LLM"


def _read(result: Any, *, batch: bool) -> list[Reply]:
    if isinstance(result, dict) and "outputs" in result:
        result = {**result, "choices": result["outputs"]}
    if isinstance(result, (list, tuple)) and result:
        result = [
            {**item, "choices": item["outputs"]} if isinstance(item, dict) and "outputs" in item else item
            for item in result
        ]
        if all(is_response(item) for item in result):
            responses = read_responses(result, engine=_ENGINE)
            return [reply for response in responses for reply in _of_response(response)]
        if all(isinstance(item, dict) or hasattr(item, "routed_experts") for item in result):
            check_bare_choices(result, engine=_ENGINE)
            return [_of_output([item], None, f"output {i}") for i, item in enumerate(result)]
        if batch:
            return [reply for item in result for reply in _read(item, batch=False)]
    if is_response(result):
        return _of_response(read_response(result, engine=_ENGINE))
    if isinstance(result, dict) or hasattr(result, "routed_experts"):
        return [_of_output([result], None, "the output")]
    return [Reply(source=_source("the array"), routed_experts=result)]


def _source(label: str) -> Source:
    return Source(engine=_ENGINE, field="routed_experts", sample=label)


def _of_response(response: Response) -> list[Reply]:
    return [_of_output(parts, response, f"output {i}{response.name}") for i, parts in enumerate(response.choices)]


def _of_output(parts: Sequence[Any], response: Response | None, label: str) -> Reply:
    # The chunks of a stream hold all tokens so far, so the last one holds them all.
    last, chunks = parts[-1], () if response is None else response.chunks
    return Reply(
        source=_source(label),
        routed_experts=get_field(last, "routed_experts"),
        prompt_token_ids=first_known(*(get_field(item, "prompt_token_ids") for item in (last, *chunks))),
        output_token_ids=get_field(last, "token_ids"),
        aborted=says(get_field(last, "finish_reason"), "cancelled"),
    )


def _rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    pairs = tuple((number, i) for i, number in enumerate(model.moe_layer_numbers))
    rows = as_array(reply.routed_experts, source=reply.source)
    if rows.ndim == 3 and rows.shape[0] and rows.shape[1] != len(pairs):
        raise reply.source.error(
            f"has {rows.shape[1]} layers, the model has {len(pairs)} MoE layers, which are what TensorRT-LLM sends. "
            "Is this the config of the served model?"
        )
    return RowLayout(parts=(rows,), layer_columns=pairs, filler_columns=())


_DECODER = Decoder(
    name=_ENGINE,
    read=_read,
    rows=_rows,
    if_missing="Have the engine return routed experts with each request, and use a release that can.",
)
decode = _DECODER.decode
decode_batch = _DECODER.decode_batch
