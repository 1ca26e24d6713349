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
from itertools import chain
from typing import Any

import numpy as np

from megatron_router_replay.engines.front import Decoder
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.options import DecodeOptions
from megatron_router_replay.engines.payload import (
    MAX_NPY_HEADER,
    Array,
    Source,
    as_array,
    as_token_ids,
    decode_base64,
    parse_npy,
    short_repr,
)
from megatron_router_replay.engines.reply import Reply, first_known, get_field, read_usage, says
from megatron_router_replay.engines.responses import Response, check_bare_choices, find_responses
from megatron_router_replay.engines.rows import RowLayout, most_ids
from megatron_router_replay.engines.tokens import SampleTokens
from megatron_router_replay.engines.weights import read_spans

_ENGINE = "vLLM"


def _read(result: Any, *, batch: bool) -> list[Reply]:
    responses = find_responses(result, engine=_ENGINE)
    if responses is not None:
        return _numbered([_of_response(response) for response in responses])
    if isinstance(result, (list, tuple)) and result:
        if all(_is_choice(item) for item in result):
            check_bare_choices(result, engine=_ENGINE)
            return _numbered([[_of_choice([item], None, i)] for i, item in enumerate(result)])
        if batch:
            return _numbered([_read(item, batch=False) for item in result])
    if _is_choice(result):
        return [_of_choice([result], None, 0)]
    label = "the result" if result is None else "the array"
    return [Reply(source=Source(engine=_ENGINE, field="routed_experts", sample=label), routed_experts=result)]


def _is_choice(item: Any) -> bool:
    return isinstance(item, Mapping) or hasattr(item, "routed_experts")


def _numbered(results: list[list[Reply]]) -> list[Reply]:
    """Return the replies of all results; of several, each is named by its place as well."""
    if len(results) == 1:
        return results[0]
    return [
        replace(reply, source=replace(reply.source, sample=f"sample {i}, {reply.source.sample}"))
        for i, reply in enumerate(chain.from_iterable(results))
    ]


def _of_response(response: Response) -> list[Reply]:
    # A stream states its usage in the last chunk, or in none.
    counted = next((c for c in reversed(response.chunks) if get_field(c, "usage") is not None), None)
    source = Source(engine=_ENGINE, field="the response", sample=response.name.removeprefix(" of "))
    counts, usage = read_usage(counted, source=source, num_choices=len(response.choices))
    replies = [_of_choice(parts, response, i) for i, parts in enumerate(response.choices)]
    return _prove_prompts([replace(reply, counts=counts, usage=usage) for reply in replies])


def _of_choice(parts: Sequence[Any], response: Response | None, index: int) -> Reply:
    """Return the reply of one choice: its parts are the chunks of a stream, or the whole choice."""
    chunks = () if response is None else response.chunks
    alone = response is not None and len(response.choices) == 1
    stated = get_field(parts[0], "index") if response is None else index
    label = f"choice {index if stated is None else stated}" + ("" if response is None else response.name)
    source = Source(engine=_ENGINE, field="routed_experts", sample=label)
    if any(get_field(part, "routed_experts") is not None for part in parts[:-1]):
        raise source.error("two chunks of the stream carry routes, expected only the last one.")
    # The last chunk has the spans of all the output. Those of a response with several choices could be of any of them.
    holders = (*reversed(parts), *(reversed(chunks) if alone else ()))
    spans = read_spans(first_known(*(get_field(item, "weight_versions") for item in holders)), source=source)
    return Reply(
        source=source,
        routed_experts=get_field(parts[-1], "routed_experts"),
        prompt_routed_experts=first_known(*(get_field(item, "prompt_routed_experts") for item in (*parts, *chunks))),
        prompt_token_ids=first_known(*(get_field(item, "prompt_token_ids") for item in (*parts, *chunks))),
        output_token_ids=_joined_ids(parts, source),
        aborted=says(get_field(parts[-1], "finish_reason"), "abort"),
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
        # n samples of one prompt look like one sample of each of n prompts.
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
        return _compact_layout((rows,), model)
    # Only the caller knows that an array is of vLLM 0.21: with a column for each layer it looks like one of a later release,
    # whose columns are of other layers.
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
    # No rows may have any shape: an empty list has none.
    parts = [part for part in parts if part.shape[0]]
    if len({part.shape[1:] for part in parts}) > 1:
        raise source.error(f"prompt and generation differ in shape: {[list(part.shape) for part in parts]}.")
    # With multi-token prediction the generation has a row for its last token as well: padding, as far as is known.
    return replace(_compact_layout(tuple(parts), model), may_have_last_row=True)


def _read_rows(
    value: Any, source: Source, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions
) -> Array:
    """Return the routes in any of vLLM's forms: base64 of a `.npy` file, its bytes, nested lists or an array."""
    if isinstance(value, (bytearray, memoryview)):
        value = bytes(value)
    if isinstance(value, str) or (isinstance(value, bytes) and not value.startswith(b"\x93")):
        # 8 bytes an id is the widest dtype there is.
        most = 8 * most_ids(model, tokens, options) + MAX_NPY_HEADER
        value = decode_base64(value, source=source, max_bytes=most)
    return parse_npy(value, source=source) if isinstance(value, bytes) else as_array(value, source=source)


def _compact_layout(parts: tuple[Array, ...], model: ModelRoutingInfo) -> RowLayout:
    """Return vLLM 0.21's layout: the MoE layers in order, and behind them zeros if there is a column for each layer."""
    num_moe = len(model.moe_layer_numbers)
    is_padded = any(part.ndim == 3 and part.shape[1] == model.num_layers for part in parts)
    return RowLayout(
        parts=parts,
        moe_columns=tuple(range(num_moe)),
        filler_columns=tuple(range(num_moe, model.num_layers)) if is_padded else (),
        explain_layers=f"vLLM 0.21 sends the {num_moe} MoE layers or, padded, all {model.num_layers}.",
    )


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
