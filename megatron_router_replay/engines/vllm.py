"""vLLM's routed experts -> RoutingTrace, for vLLM 0.14 and later started with `--enable-return-routed-experts`.

`decode` reads a RequestOutput or CompletionOutput, a response or choice parsed from JSON (completions, chat,
/inference/v1/generate), the chunks of a generate stream, the base64 string, the `.npy` bytes, or the array
[rows, layers, topk]; `decode_batch` those with several choices, and lists of them, as `LLM.generate` returns.

What the versions send (S tokens: P of the prompt, G generated; L hidden layers, Lm of them MoE; topk experts a token):

- 0.14 to 0.20: python objects only, `CompletionOutput.routed_experts` int32 [S - 1, L, topk].
- 0.21: `prompt_routed_experts` [P, Lm, topk] on the response and `routed_experts` [G - 1, or G with MTP, Lm, topk] on each
  choice, int16 or nested lists. Models with first_k_dense_replace have L columns, of which the first Lm are the MoE layers
  in order and the rest are zero.
- 0.22 and later: [S - 1 - start, L, topk], uint8 up to 256 experts, else uint16; over HTTP base64 of a `.npy` file. Dense
  layers are zero. Completions and chat streams never carry routes.
- 0.32: `weight_versions`, which weights sampled which part of the output.

What no check can see: ids of the right number that are not the engine's, where the reply has none of its own (a plain array;
completions and chat without return_token_ids), and a chunk of a generate stream that was replaced by a copy of its neighbour
or changed places with it, for its chunks carry neither a number nor a count.

Source: vLLM 0.14 to 0.32, and captures of 0.30.0 (tests/unit/data/engine_captures).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_router_replay.engines.front import Decoder
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.options import DecodeOptions
from megatron_router_replay.engines.payload import Array, Source, as_rows, as_token_ids, short_repr
from megatron_router_replay.engines.reply import Reply, first_known, get_field, read_usage, says, spans_count
from megatron_router_replay.engines.responses import (
    Response,
    check_bare_choices,
    is_response,
    read_response,
    read_responses,
)
from megatron_router_replay.engines.rows import RowLayout
from megatron_router_replay.engines.tokens import SampleTokens
from megatron_router_replay.engines.weights import read_spans

_ENGINE = "vLLM"


def _read(result: Any, *, batch: bool) -> list[Reply]:
    if isinstance(result, (list, tuple)) and result:
        if all(is_response(item) for item in result):
            responses = read_responses(result, engine=_ENGINE)
            return _numbered([reply for response in responses for reply in _of_response(response)], result)
        if all(isinstance(item, Mapping) or _is_choice(item) for item in result):
            check_bare_choices(result, engine=_ENGINE)
            return _numbered([_of_choice([item], None, i) for i, item in enumerate(result)], result)
        if batch:
            return _numbered([reply for item in result for reply in _read(item, batch=False)], result)
    if is_response(result):
        return _of_response(read_response(result, engine=_ENGINE))
    if isinstance(result, Mapping) or _is_choice(result):
        return [_of_choice([result], None, 0)]
    label = "the result" if result is None else "the array"
    return [Reply(source=Source(engine=_ENGINE, field="routed_experts", sample=label), routed_experts=result)]


def _is_choice(item: Any) -> bool:
    return hasattr(item, "routed_experts")


def _numbered(replies: list[Reply], result: Sequence[Any]) -> list[Reply]:
    """Name each sample by its place, where a list holds several."""
    if len(result) == 1 or len(replies) == 1:
        return replies
    return [
        replace(reply, source=replace(reply.source, sample=f"sample {i}, {reply.source.sample}"))
        for i, reply in enumerate(replies)
    ]


def _of_response(response: Response) -> list[Reply]:
    counted = next((c for c in reversed(response.chunks) if get_field(c, "usage") is not None), None)
    source = Source(engine=_ENGINE, field="the response", sample=response.name.removeprefix(" of "))
    counts, usage = read_usage(counted, source=source, num_choices=len(response.choices))
    replies = [_of_choice(parts, response, i) for i, parts in enumerate(response.choices)]
    return _prove_prompts([replace(r, counts=(*r.counts, *counts), usage=usage) for r in replies])


def _of_choice(parts: Sequence[Any], response: Response | None, index: int) -> Reply:
    """Return the reply of one choice: its parts are the chunks of a stream, or the whole choice."""
    chunks = () if response is None else response.chunks
    alone = response is not None and len(response.choices) == 1
    stated = get_field(parts[0], "index") if response is None else index
    label = f"choice {index if stated is None else stated}" + ("" if response is None else response.name)
    source = Source(engine=_ENGINE, field="routed_experts", sample=label)
    if any(get_field(part, "routed_experts") is not None for part in parts[:-1]):
        raise source.error("two chunks of the stream carry routes, expected only the last one.")
    holders = (*reversed(parts), *(reversed(chunks) if alone else ()))
    spans = read_spans(first_known(*(get_field(item, "weight_versions") for item in holders)), source=source)
    return Reply(
        source=source,
        routed_experts=get_field(parts[-1], "routed_experts"),
        prompt_routed_experts=first_known(*(get_field(item, "prompt_routed_experts") for item in (*parts, *chunks))),
        prompt_token_ids=first_known(*(get_field(item, "prompt_token_ids") for item in (*parts, *chunks))),
        output_token_ids=_joined_ids(parts, source),
        aborted=says(get_field(parts[-1], "finish_reason"), "abort"),
        counts=spans_count(spans),
        weight_spans=spans,
    )


def _joined_ids(parts: Sequence[Any], source: Source) -> Any:
    """Return the ids of the output; those of the chunks of a stream follow one another."""
    ids = [get_field(part, "token_ids") for part in parts]
    if len(ids) == 1 or all(value is None for value in ids):
        return ids[0]
    if get_field(parts[-1], "routed_experts") is None:
        return None  # a completions or chat stream, some of whose chunks have no ids and none has routes
    for i, value in enumerate(ids):
        if not isinstance(value, (list, tuple)):
            raise source.error(f"chunk {i} of the stream has token_ids {short_repr(value)}, expected a list of ids.")
    return [token for value in ids for token in value]


def _prove_prompts(replies: list[Reply]) -> list[Reply]:
    """Mark the choices whose prompt is that of the first one; only there do vLLM 0.21's prompt routes belong."""
    if len(replies) == 1 or all(reply.prompt_routed_experts is None for reply in replies):
        return replies
    if any(reply.prompt_token_ids is None for reply in replies):
        # n samples of one prompt look like one sample of n prompts.
        return [replace(reply, prompt_is_proven=False) for reply in replies]
    prompts = [as_token_ids(reply.prompt_token_ids, source=reply.source) for reply in replies]
    return [
        replace(reply, prompt_is_proven=np.array_equal(prompt, prompts[0])) for reply, prompt in zip(replies, prompts)
    ]


def _rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    if reply.prompt_routed_experts is not None:
        return _split_rows(reply, model, tokens, options)
    rows = _read_rows(reply.routed_experts, reply.source, model, tokens, options)
    if options.version is not None and options.version.split(".")[:2] == ["0", "21"]:
        columns, filler = _compact_columns(rows, model, reply.source)
        return RowLayout(parts=(rows,), layer_columns=columns, filler_columns=filler)
    if rows.ndim == 3 and rows.shape[0] and rows.shape[1] == len(model.moe_layer_numbers) != model.num_layers:
        raise reply.source.error(
            f"has {rows.shape[1]} layers, as many as the model has MoE layers, not all {model.num_layers}: vLLM 0.21 "
            'sends these. Pass version="0.21" if it did.'
        )
    return RowLayout(parts=(rows,))


def _split_rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    """Join the prompt's and the generation's routes of vLLM 0.21."""
    source = replace(reply.source, field="prompt_routed_experts")
    if options.start:
        raise source.error(f"start={options.start}, but vLLM 0.21 always sends every row: decode with start=0.")
    if not reply.prompt_is_proven:
        raise source.error(
            "vLLM 0.21 sends the prompt's routes for the first prompt of a request only, and this choice is not proven "
            "to have that prompt. Send one prompt a request; return_token_ids=true lets choices prove theirs."
        )
    prompt = _read_rows(reply.prompt_routed_experts, source, model, tokens, options)
    if tokens.num_prompt_tokens is None:
        raise source.error(
            f"has {prompt.shape[0]} rows, and nothing says how many tokens the prompt has: pass prompt_token_ids=..., or "
            "have the response return ids or counts."
        )
    if prompt.shape[0] != tokens.num_prompt_tokens:
        raise source.error(f"has {prompt.shape[0]} rows for {tokens.num_prompt_tokens} prompt tokens.")
    parts = [prompt]
    if reply.routed_experts is not None:
        parts.append(_read_rows(reply.routed_experts, reply.source, model, tokens, options))
    parts = [part for part in parts if part.shape[0]]
    columns: tuple[tuple[int, int], ...] | None = None
    filler: tuple[int, ...] | None = None
    for part in parts:
        columns, filler = _compact_columns(part, model, source)
    if len({part.shape[1:] for part in parts}) > 1:
        raise source.error(f"prompt and generation differ in shape: {[list(part.shape) for part in parts]}.")
    # With multi-token prediction the generation has a row for its last token as well: padding, as far as is known.
    return RowLayout(parts=tuple(parts), layer_columns=columns, filler_columns=filler, may_have_last_row=True)


def _read_rows(
    value: Any, source: Source, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions
) -> Array:
    return as_rows(
        value,
        source=source,
        num_rows=tokens.num_tokens,
        num_columns=model.num_layers,
        width=model.topk + model.num_shared_experts,
        surplus_rows=options.allow_surplus_rows,
    )


def _compact_columns(
    rows: Array, model: ModelRoutingInfo, source: Source
) -> tuple[tuple[tuple[int, int], ...] | None, tuple[int, ...] | None]:
    """Return vLLM 0.21's columns: the MoE layers in order, and behind them zeros if there is a column for each layer."""
    numbers = model.moe_layer_numbers
    if rows.ndim != 3 or rows.shape[0] == 0:
        return None, None
    if rows.shape[1] not in (len(numbers), model.num_layers):
        raise source.error(
            f"has {rows.shape[1]} layers, vLLM 0.21 sends the {len(numbers)} MoE layers or, padded, all {model.num_layers}."
        )
    pairs = tuple((number, i) for i, number in enumerate(numbers))
    return pairs, tuple(range(len(numbers), rows.shape[1]))


_DECODER = Decoder(
    name=_ENGINE,
    read=_read,
    rows=_rows,
    if_missing=(
        "Start vLLM with --enable-return-routed-experts; completions and chat streams never carry it (use stream=False or "
        "/inference/v1/generate), nor does HTTP before 0.21."
    ),
    reads_version=True,
)
decode = _DECODER.decode
decode_batch = _DECODER.decode_batch
