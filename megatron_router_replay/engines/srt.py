"""The replies of SGLang's runtime and of its JAX sibling: what `sglang` and `sglang_jax` share.

Both send `meta_info["routed_experts"]`, base64 of raw little-endian int32 [rows, all hidden layers, topk] in C order,
without a shape, so the model's config and the number of tokens must account for every byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_router_replay.engines.assemble import Allocate, SampleRows, build_trace
from megatron_router_replay.engines.model_info import ModelLike, ModelRoutingInfo, as_model_info
from megatron_router_replay.engines.payload import Array, Source, as_array, decode_base64, parse_int32
from megatron_router_replay.engines.tokens import SampleTokens, as_count, get_field, resolve_tokens
from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trace import RoutingTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """What differs between the two engines."""

    name: str
    routes_per_choice: bool
    """True: OpenAI endpoints send routes with each choice; False: once for the response, those of its first result."""
    ids_on_dense_layers: tuple[str, ...] = ()
    """Model types whose dense layers hold ids instead of filler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One generated sequence, whatever form the response has."""

    label: str
    routed_experts: Any
    output_ids: Any = None
    finish_reason: Any = None
    counted_prompt: int | None = None
    counted_output: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the caller of a decoder says of one sample."""

    token_ids: Any = None
    start: int = 0
    prompt_token_ids: Any = None
    num_tokens: int | None = None
    allow_surplus_rows: bool = False
    allow_constant_layers: bool = False
    weight_version: int | None = None
    sample_id: str | None = None


def decode_one(
    result: Any, runtime: Runtime, model: ModelLike, options: Options, allocate: Allocate | None = None
) -> RoutingTrace:
    """Return the trace of a response that holds one sample.

    Raises:
        PayloadError: it holds several, or see `decode` of the engine.
    """
    info = as_model_info(model)
    replies = read_replies(result, runtime, batch=False)
    if len(replies) != 1:
        raise PayloadError(f"{runtime.name}: the response holds {len(replies)} samples: use decode_batch.")
    return build_trace([_sample(replies[0], info, runtime, options)], model=info, allocate=allocate)


def decode_many(
    result: Any,
    runtime: Runtime,
    model: ModelLike,
    *,
    token_ids: Sequence[Any] | None,
    start: int | Sequence[int],
    prompt_token_ids: Sequence[Any] | None,
    num_tokens: Sequence[int] | None,
    sample_ids: Sequence[str] | None,
    allow_surplus_rows: bool,
    allow_constant_layers: bool,
    weight_version: int | None,
    allocate: Allocate | None = None,
) -> RoutingTrace:
    """Return one trace of all samples of a response; the sequences hold one value per sample.

    Raises:
        PayloadError: a sequence has another length than the samples, or see `decode_batch` of the engine.
    """
    info = as_model_info(model)
    replies = read_replies(result, runtime, batch=True)
    starts = [start] * len(replies) if isinstance(start, int) else start
    given: dict[str, Any] = {
        "token_ids": token_ids,
        "start": starts,
        "prompt_token_ids": prompt_token_ids,
        "num_tokens": num_tokens,
        "sample_id": sample_ids,
    }
    for name, values in given.items():
        if values is not None and len(values) != len(replies):
            raise PayloadError(f"{runtime.name}: {len(values)} {name} for {len(replies)} samples: give one a sample.")
    samples = [
        _sample(
            reply,
            info,
            runtime,
            Options(
                **{name: values[i] for name, values in given.items() if values is not None},
                allow_surplus_rows=allow_surplus_rows,
                allow_constant_layers=allow_constant_layers,
                weight_version=weight_version,
            ),
        )
        for i, reply in enumerate(replies)
    ]
    return build_trace(samples, model=info, allocate=allocate)


def read_replies(result: Any, runtime: Runtime, *, batch: bool) -> list[Reply]:
    """Return the generated sequences of a response: of /generate (one, a list, a stream) or of an OpenAI endpoint.

    Raises:
        PayloadError: not a response, or one that has lost the routes of some of its results.
    """
    if isinstance(result, Mapping):
        return _of_openai([result], runtime) if "choices" in result else [_of_generate(result, 0)]
    if isinstance(result, (list, tuple)) and result:
        if all(isinstance(item, Mapping) for item in result):
            if all("choices" in item for item in result):
                return _of_openai(result, runtime)
            return _last_chunks(result)
        if batch:
            return [reply for item in result for reply in read_replies(item, runtime, batch=False)]
    return [Reply(label="the result", routed_experts=result)]


def _of_generate(item: Mapping[str, Any], position: int) -> Reply:
    meta = item.get("meta_info")
    routes = get_field(meta, "routed_experts")
    request = get_field(meta, "id")
    return Reply(
        label=f"sample {position}" + (f", request {str(request)[:60]}" if request else ""),
        routed_experts=item.get("routed_experts") if routes is None else routes,
        output_ids=item.get("output_ids"),
        finish_reason=get_field(meta, "finish_reason"),
        counted_prompt=as_count(get_field(meta, "prompt_tokens")),
        counted_output=as_count(get_field(meta, "completion_tokens")),
    )


def _last_chunks(items: Sequence[Mapping[str, Any]]) -> list[Reply]:
    """Return one reply per request: the results of a batch have ids of their own, the chunks of a stream share one."""
    requests: dict[Any, list[Mapping[str, Any]]] = {}
    for position, item in enumerate(items):
        request = get_field(item.get("meta_info"), "id")
        key = request if isinstance(request, str) else position
        requests.setdefault(key, []).append(item)
    replies = []
    for position, chunks in enumerate(requests.values()):
        reply = _of_generate(chunks[-1], position)
        if len(chunks) > 1:
            reply = replace(reply, output_ids=_streamed_ids(chunks, reply.counted_output))
        replies.append(reply)
    return replies


def _streamed_ids(chunks: Sequence[Mapping[str, Any]], count: int | None) -> list[Any] | None:
    """Return all output ids of a stream: the last chunk has them all, or each has its own (incremental streaming)."""
    lists = [ids for chunk in chunks if isinstance(ids := chunk.get("output_ids"), list)]
    if lists and len(lists[-1]) == count:
        return lists[-1]
    joined = [token for ids in lists for token in ids]
    return joined if len(joined) == count else None


def _of_openai(chunks: Sequence[Mapping[str, Any]], runtime: Runtime) -> list[Reply]:
    """Read a completions or chat response, or the chunks of its stream."""
    choices: dict[Any, Any] = {}
    for chunk in chunks:
        items = chunk["choices"]
        if not isinstance(items, (list, tuple)):
            raise PayloadError(
                f"{runtime.name}: the choices of a response are {type(items).__name__}, expected a list."
            )
        for position, item in enumerate(items):
            index = get_field(item, "index")
            choices[index if isinstance(index, int) else position] = item
    usage = next((chunk["usage"] for chunk in reversed(chunks) if isinstance(chunk.get("usage"), Mapping)), None)
    counted = {
        "counted_prompt": as_count(get_field(usage, "prompt_tokens")) if len(choices) == 1 else None,
        "counted_output": as_count(get_field(usage, "completion_tokens")) if len(choices) == 1 else None,
    }
    if runtime.routes_per_choice:
        return [
            Reply(
                label=f"choice {index}",
                routed_experts=_of_choice(item),
                finish_reason=get_field(item, "finish_reason"),
                **counted,
            )
            for index, item in choices.items()
        ]
    routes = [value for chunk in chunks if (value := get_field(chunk.get("sglext"), "routed_experts")) is not None]
    if len(choices) != 1 or len(routes) > 1:
        raise PayloadError(
            f"{runtime.name}: sglext.routed_experts of a response with {len(choices)} choices holds the routes of the "
            "first result only, the others are lost. Use /generate for n > 1 and for several prompts."
        )
    index, item = next(iter(choices.items()))
    return [
        Reply(
            label=f"choice {index}",
            routed_experts=routes[0] if routes else None,
            finish_reason=get_field(item, "finish_reason"),
            **counted,
        )
    ]


def _of_choice(item: Any) -> Any:
    for holder in (item, get_field(item, "meta_info"), get_field(item, "sglext")):
        routes = get_field(holder, "routed_experts")
        if routes is not None:
            return routes
    return None


def _sample(reply: Reply, model: ModelRoutingInfo, runtime: Runtime, options: Options) -> SampleRows:
    source = Source(engine=runtime.name, field="routed_experts", sample=reply.label)
    start = options.start
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise source.error(f"start={start!r} must be an integer of 0 or more.")
    tokens = resolve_tokens(
        source=source,
        token_ids=options.token_ids,
        given_prompt=options.prompt_token_ids,
        sent_output=reply.output_ids,
        num_tokens=options.num_tokens,
        counted_prompt=reply.counted_prompt,
        counted_output=reply.counted_output,
    )
    reason = reply.finish_reason.get("type") if isinstance(reply.finish_reason, Mapping) else reply.finish_reason
    nothing_generated = tokens.num_prompt_tokens == tokens.num_tokens
    aborted = reason == "abort" and nothing_generated
    if reply.routed_experts is None and not aborted:
        raise source.error(
            "missing, though the model has MoE layers: it would train on live routes. Start the server with "
            "--enable-return-routed-experts and send return_routed_experts=true with each request."
        )
    rows = None
    if reply.routed_experts is not None:
        rows = _rows(reply.routed_experts, model, tokens, source, options)
    return SampleRows(
        source=source,
        parts=() if rows is None else (rows,),
        num_tokens=tokens.num_tokens,
        num_prompt_tokens=tokens.num_prompt_tokens,
        token_ids=tokens.token_ids,
        start=start,
        last_token_routed=nothing_generated,
        filler_columns=() if model.model_type in runtime.ids_on_dense_layers else None,
        allow_surplus_rows=options.allow_surplus_rows,
        allow_constant_layers=options.allow_constant_layers,
        may_be_empty=aborted,
        weight_version=options.weight_version,
        sample_id=options.sample_id,
    )


def _rows(value: Any, model: ModelRoutingInfo, tokens: SampleTokens, source: Source, options: Options) -> Array:
    """Return [rows, all hidden layers, topk] of a base64 string, of the raw bytes or of an array."""
    columns, topk = model.num_layers, model.topk
    if isinstance(value, str):
        slack = 65536 if options.allow_surplus_rows else 4096
        most = (tokens.num_tokens + slack) * columns * (topk + model.num_shared_experts) * 4
        value = decode_base64(value, source=source, max_bytes=most)
    if isinstance(value, (bytes, bytearray, memoryview)):
        raw = bytes(value)
        expected = (max(tokens.num_tokens - options.start - 1, 0), tokens.num_tokens - options.start)
        if len(raw) not in [count * columns * topk * 4 for count in expected]:
            _explain_size(len(raw), expected, model, source)
        return parse_int32(raw, source=source, num_columns=columns, topk=topk)
    array = as_array(value, source=source)
    if array.ndim == 1 and array.size % (columns * topk) == 0:
        array = array.reshape(-1, columns, topk)
    return array


def _explain_size(size: int, expected: Sequence[int], model: ModelRoutingInfo, source: Source) -> None:
    """Raise if the size fits a well-known mistake; else leave it to the check of the rows."""
    wide, moe = model.topk + model.num_shared_experts, len(model.moe_layer_numbers)
    for count in expected:
        if count > 0 and wide != model.topk and size == count * model.num_layers * wide * 4:
            raise source.error(
                f"{size} bytes are {count} rows of {wide} experts a token: the model's topk is {model.topk}, and the "
                f"{model.num_shared_experts} shared experts, which are not routed, are appended."
            )
        if count > 0 and moe != model.num_layers and size == count * moe * model.topk * 4:
            raise source.error(
                f"{size} bytes are {count} rows of {moe} layers: the MoE layers only, expected all {model.num_layers} "
                "hidden layers. Is this the config of the served model?"
            )
