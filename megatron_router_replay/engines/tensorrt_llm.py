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
from megatron_router_replay.engines.responses import Response, check_bare_choices, find_responses
from megatron_router_replay.engines.rows import RowLayout
from megatron_router_replay.engines.tokens import SampleTokens

_ENGINE = "TensorRT-LLM"


def _read(result: Any, *, batch: bool) -> list[Reply]:
    result = [_with_choices(item) for item in result] if isinstance(result, (list, tuple)) else _with_choices(result)
    responses = find_responses(result, engine=_ENGINE)
    if responses is not None:
        return [
            _of_output(parts, response, f"output {i}{response.name}")
            for response in responses
            for i, parts in enumerate(response.choices)
        ]
    if isinstance(result, list) and result:
        if all(_is_output(item) for item in result):
            check_bare_choices(result, engine=_ENGINE)
            return [_of_output([item], None, f"output {i}") for i, item in enumerate(result)]
        if batch:
            return [reply for item in result for reply in _read(item, batch=False)]
    if _is_output(result):
        return [_of_output([result], None, "the output")]
    return [Reply(source=_source("the array"), routed_experts=result)]


def _with_choices(item: Any) -> Any:
    """Return a dict's `outputs` under the name that they have in every other engine's response."""
    return {**item, "choices": item["outputs"]} if isinstance(item, dict) and "outputs" in item else item


def _is_output(item: Any) -> bool:
    return isinstance(item, dict) or hasattr(item, "routed_experts")


def _source(label: str) -> Source:
    return Source(engine=_ENGINE, field="routed_experts", sample=label)


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
    return RowLayout(
        parts=(as_array(reply.routed_experts, source=reply.source),),
        moe_columns=tuple(range(len(model.moe_layer_numbers))),
        explain_layers="TensorRT-LLM sends the MoE layers. Is this the config of the served model?",
    )


_DECODER = Decoder(
    name=_ENGINE,
    read=_read,
    rows=_rows,
    if_missing="Have the engine return routed experts with each request, and use a release that can.",
)
decode = _DECODER.decode
decode_batch = _DECODER.decode_batch
