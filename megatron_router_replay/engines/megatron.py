"""Megatron-Core's own inference (`DynamicInferenceRequest.routing_indices`) -> RoutingTrace.

`routing_indices` is [S - 1, MoE layers, topk], accumulated over the steps of the request; dense layers are not in it.
The tokens are `prompt_tokens` and `generated_tokens` of the request.

Source: Megatron-Core 0.16, megatron.core.inference.inference_request and contexts.routing_metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_router_replay.engines.assemble import SampleRows, build_trace
from megatron_router_replay.engines.model_info import ModelLike, ModelRoutingInfo, as_model_info
from megatron_router_replay.engines.payload import Source, as_array
from megatron_router_replay.engines.tokens import get_field, resolve_tokens
from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trace import RoutingTrace


def decode(
    result: Any,
    *,
    model: ModelLike,
    token_ids: Any = None,
    start: int = 0,
    num_tokens: int | None = None,
    allow_surplus_rows: bool = False,
    allow_constant_layers: bool = False,
    weight_version: int | None = None,
    sample_id: str | None = None,
) -> RoutingTrace:
    """Return the routes of one request: S rows for its S tokens, the last one without a route.

    Args:
        result: a finished request (object or dict) with `routing_indices`, or that array [rows, MoE layers, topk].
        model: ModelRoutingInfo, or the Hugging Face config as a dict or path.
        token_ids: prompt and output, [S]; compared with those of the request.
        start: rows that are not in the array.
        num_tokens: S, where ids are not known.
        allow_surplus_rows: drop rows behind the last token.
        allow_constant_layers: believe a layer that sends all tokens to the same experts.
        weight_version, sample_id: stored in the trace.

    Raises:
        PayloadError: routes are missing, do not fit the tokens or the model, or are damaged.
    """
    info = as_model_info(model)
    sample = _sample(
        result,
        info,
        label="the request",
        token_ids=token_ids,
        start=start,
        num_tokens=num_tokens,
        allow_surplus_rows=allow_surplus_rows,
        allow_constant_layers=allow_constant_layers,
        weight_version=weight_version,
        sample_id=sample_id,
    )
    return build_trace([sample], model=info)


def decode_batch(
    results: Sequence[Any],
    *,
    model: ModelLike,
    token_ids: Sequence[Any] | None = None,
    allow_surplus_rows: bool = False,
    allow_constant_layers: bool = False,
    weight_version: int | None = None,
    sample_ids: Sequence[str] | None = None,
) -> RoutingTrace:
    """Return the routes of several requests behind one another; arguments as for `decode`, lists with one per request.

    Raises:
        PayloadError: as for `decode`; a list has another length than `results`.
    """
    info = as_model_info(model)
    if not isinstance(results, (list, tuple)) or not results:
        raise PayloadError(
            f"Megatron: decode_batch takes a list of requests, got {type(results).__name__} without any."
        )
    for name, values in (("token_ids", token_ids), ("sample_ids", sample_ids)):
        if values is not None and len(values) != len(results):
            raise PayloadError(f"Megatron: {len(values)} {name} for {len(results)} requests: give one a request.")
    samples = [
        _sample(
            result,
            info,
            label=f"request {i}",
            token_ids=None if token_ids is None else token_ids[i],
            start=0,
            num_tokens=None,
            allow_surplus_rows=allow_surplus_rows,
            allow_constant_layers=allow_constant_layers,
            weight_version=weight_version,
            sample_id=None if sample_ids is None else sample_ids[i],
        )
        for i, result in enumerate(results)
    ]
    return build_trace(samples, model=info)


def _sample(
    result: Any,
    model: ModelRoutingInfo,
    *,
    label: str,
    token_ids: Any,
    start: int,
    num_tokens: int | None,
    allow_surplus_rows: bool,
    allow_constant_layers: bool,
    weight_version: int | None,
    sample_id: str | None,
) -> SampleRows:
    source = Source(engine="Megatron", field="routing_indices", sample=label)
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise source.error(f"start={start!r} must be an integer of 0 or more.")
    is_array = isinstance(result, (list, tuple)) or hasattr(result, "__array__")
    routes = result if is_array else get_field(result, "routing_indices")
    output = None if is_array else get_field(result, "generated_tokens")
    tokens = resolve_tokens(
        source=source,
        token_ids=token_ids,
        sent_prompt=None if is_array else get_field(result, "prompt_tokens"),
        sent_output=output,
        num_tokens=num_tokens,
    )
    if routes is None:
        raise source.error(
            "missing, though the model has MoE layers: it would train on live routes. "
            "Set moe_enable_routing_replay=True in the engine's config."
        )
    pairs = tuple((number, i) for i, number in enumerate(model.moe_layer_numbers))
    rows = as_array(routes, source=source)
    if rows.ndim == 3 and rows.shape[0] and rows.shape[1] != len(pairs):
        raise source.error(
            f"has {rows.shape[1]} layers, the model has {len(pairs)} MoE layers. "
            "Each pipeline stage records its own layers only: join them first."
        )
    return SampleRows(
        source=source,
        parts=(rows,),
        num_tokens=tokens.num_tokens,
        num_prompt_tokens=tokens.num_prompt_tokens,
        token_ids=tokens.token_ids,
        start=start,
        last_token_routed=tokens.num_prompt_tokens == tokens.num_tokens,
        layer_columns=pairs,
        filler_columns=(),
        allow_surplus_rows=allow_surplus_rows,
        allow_constant_layers=allow_constant_layers,
        weight_version=weight_version,
        sample_id=sample_id,
    )
