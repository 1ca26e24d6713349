"""The engines that answer requests, each a `Decoder`: where its fields are, how its arrays are laid out, what it loses.

Every one reads its python objects, their dicts, responses and choices parsed from JSON, the chunks of a stream where it
streams routes, lists of these, and the array, text or bytes alone. In what follows S tokens are P of the prompt and G
generated, L hidden layers, Lm of them MoE; every array has S - 1 rows (less those before `start`) unless it says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_router_replay.checks import shown
from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.options import DecodeOptions
from megatron_router_replay.engines.payload import (
    MAX_NPY_HEADER,
    Array,
    Source,
    as_array,
    decode_base64,
    parse_npy,
    parse_raw,
)
from megatron_router_replay.engines.reader import ReplyReader
from megatron_router_replay.engines.reply import Reply
from megatron_router_replay.engines.row_check import RowCheck
from megatron_router_replay.engines.rows import RowLayout, most_ids
from megatron_router_replay.engines.tokens import SampleTokens


def _all_layers(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    return RowLayout(parts=(as_array(reply.routed_experts, source=reply.source),))


def _moe_layers(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    return replace(_all_layers(reply, model, tokens, options), columns=tuple(range(len(model.moe_layer_numbers))))


# vLLM


def _vllm_rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    num_moe = len(model.moe_layer_numbers)
    if reply.prompt_routed_experts is not None:
        layout = _compact(_joined_parts(reply, model, tokens, options), model)
        # With multi-token prediction the generation has a row for its last token as well: padding, as far as is known.
        return replace(layout, last_row="padding", may_end_early=True)
    rows = _read_npy(reply.routed_experts, reply.source, model, tokens, options)
    if options.version is not None and options.version.split(".")[:2] == ["0", "21"]:
        return _compact([rows], model)
    # Only the caller knows that an array is of vLLM 0.21: with a column for each layer it looks like one of a later release,
    # whose columns are of other layers.
    if rows.ndim == 3 and rows.shape[0] and rows.shape[1] == num_moe != model.num_layers:
        raise reply.source.error(
            f"MRR306: has {num_moe} layers, as many as the model has MoE layers, not all {model.num_layers}: vLLM 0.21 "
            'sends these. Pass version="0.21" if it did.'
        )
    return RowLayout(parts=(rows,))


def _joined_parts(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> list[Array]:
    """Return the prompt's and the generation's routes of vLLM 0.21."""
    source = replace(reply.source, field="prompt_routed_experts")
    if options.start:
        raise source.error(f"MRR305: start={options.start}, but vLLM 0.21 always sends every row: decode with start=0.")
    if not reply.prompt_is_proven:
        raise source.error(
            "MRR302: vLLM 0.21 sends the prompt's routes for the first prompt of a request only, and this choice is "
            "not proven to have that prompt. Send one prompt a request; return_token_ids=true lets choices prove theirs."
        )
    prompt = _read_npy(reply.prompt_routed_experts, source, model, tokens, options)
    if tokens.num_prompt_tokens is None:
        raise source.error(
            f"MRR309: has {prompt.shape[0]} rows, and nothing says how many tokens the prompt has: pass "
            "prompt_token_ids=..., or have the response return ids or counts."
        )
    if prompt.shape[0] != tokens.num_prompt_tokens:
        raise source.error(f"MRR305: has {prompt.shape[0]} rows for {tokens.num_prompt_tokens} prompt tokens.")
    parts = [prompt]
    if reply.routed_experts is not None:
        parts.append(_read_npy(reply.routed_experts, reply.source, model, tokens, options))
    # No rows may have any shape: an empty list has none.
    parts = [part for part in parts if part.shape[0]]
    if len({part.shape[1:] for part in parts}) > 1:
        raise source.error(f"MRR306: prompt and generation differ in shape: {[list(part.shape) for part in parts]}.")
    return parts


def _compact(parts: list[Array], model: ModelRoutingInfo) -> RowLayout:
    """Return vLLM 0.21's layout: the MoE layers in order, and behind them zeros if there is a column for each layer."""
    num_moe = len(model.moe_layer_numbers)
    is_padded = any(part.ndim == 3 and part.shape[1] == model.num_layers for part in parts)
    return RowLayout(
        parts=tuple(parts),
        columns=tuple(range(num_moe)),
        filler=tuple(range(num_moe, model.num_layers)) if is_padded else (),
        explain_layers=f"vLLM 0.21 sends the {num_moe} MoE layers or, padded, all {model.num_layers}.",
    )


def _read_npy(
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


vllm = Decoder(
    name="vLLM",
    read=ReplyReader(engine="vLLM").read,
    rows=_vllm_rows,
    if_missing=(
        "Start vLLM with --enable-return-routed-experts; completions and chat streams never carry it (use stream=False or "
        "/inference/v1/generate), nor does HTTP before 0.21."
    ),
    reads_version=True,
)
"""vLLM 0.14 and later, started with `--enable-return-routed-experts`.

- 0.14 to 0.20: python objects only, `CompletionOutput.routed_experts` int32 [S - 1, L, topk].
- 0.21: `prompt_routed_experts` [P, Lm, topk] on the response and `routed_experts` [G - 1, or G with MTP, Lm, topk] on each
  choice, int16 or nested lists. Models with first_k_dense_replace have L columns, of which the first Lm are the MoE layers
  in order and the rest are zero.
- 0.22 and later: [S - 1 - start, L, topk], uint8 up to 256 experts, else uint16; over HTTP (completions, chat,
  /inference/v1/generate and its stream) base64 of a `.npy` file. Dense layers are zero. Completions and chat streams never
  carry routes.
- 0.32: `weight_versions`, which weights sampled which part of the output.

What no check can see: ids of the right number that are not the engine's, where the reply has none of its own (a plain array;
completions and chat without return_token_ids), and a chunk of a generate stream that was replaced by a copy of its neighbour
or changed places with it, for its chunks carry neither a number nor a count.

Source: vLLM 0.14 to 0.32, and captures of 0.30.0 (tests/unit/data/engine_captures).
"""


# SGLang and its JAX sibling

_DTYPES = {"int32": 4, "uint16": 2, "uint8": 1}
"""What the wire may hold, and its bytes: a reply that does not say it is int32."""


def _raw_rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    """Return the rows [rows, all hidden layers, topk] of a base64 string, of the raw bytes or of an array."""
    value, source, columns = reply.routed_experts, reply.source, model.num_layers
    dtype = "int32" if reply.raw_dtype is None else reply.raw_dtype
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise source.error(f"MRR310: routed_experts_dtype is {shown(dtype)}, expected one of {', '.join(_DTYPES)}.")
    if isinstance(value, str):
        value = decode_base64(value, source=source, max_bytes=4 * most_ids(model, tokens, options))
    if isinstance(value, (bytes, bytearray, memoryview)):
        raw, expected = bytes(value), max(tokens.num_tokens - options.start - 1, 0)
        if len(raw) != expected * columns * model.topk * _DTYPES[dtype]:
            _explain_size(len(raw), expected, dtype, model, reply)
        array = parse_raw(raw, dtype=dtype, source=source, num_columns=columns, topk=model.topk)
    else:
        array = as_array(value, source=source)
        # What a caller decoded from base64 by himself has no shape.
        if array.ndim == 1 and array.size % (columns * model.topk) == 0:
            array = array.reshape(-1, columns, model.topk)
    return RowLayout(parts=(array,))


def _sglang_rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    # qwen3_moe ignores mlp_only_layers and sends ids on that dense layer.
    filler = () if model.model_type == "qwen3_moe" else None
    return replace(_raw_rows(reply, model, tokens, options), filler=filler)


def _explain_size(size: int, expected: int, dtype: str, model: ModelRoutingInfo, reply: Reply) -> None:
    """Raise if the size fits a well-known mistake; else leave it to the check of the rows."""
    layers, moe, topk, shared = model.num_layers, len(model.moe_layer_numbers), model.topk, model.num_shared_experts
    mistakes = []
    if shared:
        what = f"of {topk + shared} experts a token: the model's topk is {topk}, and the {shared} shared experts, which are"
        mistakes.append((layers, topk + shared, dtype, f"{what} not routed, are appended."))
    if moe != layers:
        what = f"of {moe} layers: the MoE layers only, expected all {layers} hidden layers."
        mistakes.append((moe, topk, dtype, f"{what} Is this the config of the served model?"))
    if not reply.counts and dtype == "int32":  # a whole reply says which dtype it sends; a bare string does not
        for narrow in ("uint16", "uint8"):
            what = f"of {narrow}, and nothing says so: pass the whole reply, whose meta_info has routed_experts_dtype."
            mistakes.append((layers, topk, narrow, what))
    for rows in filter(None, (expected, expected + 1)):
        for columns, width, item, what in mistakes:
            if size == rows * columns * width * _DTYPES[item]:
                raise reply.source.error(f"MRR306: {size} bytes are {rows} rows {what}")


GENERATE = ReplyReader(
    engine="SGLang",
    output_ids=("output_ids",),
    counts=(("prompt_tokens", "prompt"), ("completion_tokens", "output")),
    stream="states",
    first_only=True,
)
"""How SGLang's /generate replies, streamed too."""

_ASK = "Start the server with --enable-return-routed-experts and send return_routed_experts=true with each request."

sglang = Decoder(name="SGLang", read=GENERATE.read, rows=_sglang_rows, if_missing=_ASK)
"""SGLang, started with `--enable-return-routed-experts`.

- /generate: `meta_info["routed_experts"]` of each result, base64 of raw little-endian int32 [S - 1 - start, L, topk] in C
  order (pull request 31219: or of the uint8 or uint16 that `routed_experts_dtype` names), without a shape, so the model's
  config and the number of tokens must account for every byte. A stream has it in its last chunk; its chunks state the number
  of output tokens so far, and `output_ids` are all of them or, with incremental streaming, the new ones. A request of several
  samples streams them with an `index`. Whole results are never taken for chunks, also if they share a request id.
- OpenAI endpoints: `sglext.routed_experts` of the response, of its first result only. A response with several choices is
  refused: the routes of the others are lost.
- Dense layers are zero, but for qwen3_moe, which ignores `mlp_only_layers` and sends ids there; they are dropped.

What no check can see: ids of the right number that are not the engine's, where the reply has none (OpenAI endpoints, a bare
string). /generate states the numbers of prompt and output tokens apart, so ids without BOS are seen there.

Source: SGLang 0.5.7 to 0.5.23, and captures of 0.5.23 (tests/unit/data/engine_captures).
"""

sglang_jax = Decoder(
    name="sglang-jax",
    read=replace(GENERATE, engine="sglang-jax", first_only=False).read,
    rows=_raw_rows,
    if_missing=_ASK,
)
"""sglang-jax: as SGLang, but for completions, which have routes with each choice, and dense layers, which are -1.

Source: sglang-jax at commit cddbf6f, and its captures (tests/unit/data/engine_captures).
"""


# Megatron-Core's own inference

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


def _unwrapped(value: Any, source: Source) -> Any:
    """Return what `DynamicInferenceRequest.serialize` wrapped: ("tensor", lists) or ("ndarray", {data, dtype})."""
    if not (isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[0], str)):
        return value
    kind, content = value
    if kind == "tensor":
        return content
    if kind != "ndarray" or not isinstance(content, Mapping) or not {"data", "dtype"} <= set(content):
        raise source.error(
            f"MRR310: is wrapped as {shown(kind)}, expected 'tensor', or 'ndarray' with its data and dtype."
        )
    if not isinstance(content["dtype"], str) or content["dtype"] not in _INTEGERS:
        raise source.error(f"MRR310: is an ndarray of dtype {shown(content['dtype'])}, expected integers.")
    # The dtype is a promise about the data: ids beyond it mean that the payload was put together by something else.
    array, limits = as_array(content["data"], source=source), np.iinfo(content["dtype"])
    if array.size and not (limits.min <= int(array.min()) and int(array.max()) <= limits.max):
        raise source.error(f"MRR310: holds ids that {content['dtype']}, its dtype, does not.")
    return array


def _megatron_rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    return replace(
        _moe_layers(reply, model, tokens, options),
        explain_layers="Each pipeline stage records its own layers only: join them first.",
        explain_surplus="Are these the ids of this very request? Megatron sends no surplus rows; the parts of a request that "
        "was suspended are concatenated, each from its first token on: decode each part by itself.",
    )


megatron = Decoder(
    name="Megatron",
    read=ReplyReader(
        engine="Megatron",
        routes=("routing_indices", "moe_topk_indices"),
        prompt_ids=("prompt_token_ids", "prompt_tokens"),
        output_ids=("generation_token_ids", "generated_tokens"),
        stream=None,
        largest_prompt=True,
        unwrap=_unwrapped,
    ).read,
    rows=_megatron_rows,
    if_missing="Set moe_enable_routing_replay=True in the engine's config; prompt_moe_topk_indices alone has no routes of "
    "the generation.",
)
"""Megatron-Core's own inference: [S - 1, Lm, topk], without dense layers.

- A finished request (`DynamicInferenceRequest`, or its serialised dict): `routing_indices`.
- The text generation server (completions, chat): `moe_topk_indices` with each choice, as nested lists (0.17) or as
  `["ndarray", {"data": lists, "dtype": name}]` (0.18 and later), with `prompt_token_ids` and `generation_token_ids` (chat;
  completions from 0.18 on). `prompt_moe_topk_indices` is the first rows of the same array in 0.17; from 0.18 on the wrapper
  is cut instead of the array, so it is never read. `usage.prompt_tokens` of several choices is the largest of their prompts.

A request that was suspended and resumed is served in parts, and merging them concatenates the routes of every part, each of
which starts at the first token again: it has more rows than S - 1 and is refused.

Source: Megatron-Core 0.16 to 0.19, core.inference.inference_request and text_generation_server endpoints.
"""


# Engines that took vLLM's fields


def _tensorrt_rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    layout = _moe_layers(reply, model, tokens, options)
    return replace(layout, explain_layers="TensorRT-LLM sends the MoE layers. Is this the config of the served model?")


def _lmdeploy_rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    return replace(_all_layers(reply, model, tokens, options), filler=())  # dense columns are memory that nobody wrote


tensorrt_llm = Decoder(
    name="TensorRT-LLM",
    read=ReplyReader(engine="TensorRT-LLM", abort="cancelled", stream="all").read,
    rows=_tensorrt_rows,
    if_missing="Have the engine return routed experts with each request, and use a release that can.",
)
"""TensorRT-LLM's LLM API with its pull request 18397 (merged): `CompletionOutput.routed_experts` [S - 1, Lm, topk].

Ids are logical, also under expert load balancing; rows of a cached prefix are those of the request that filled it. The chunks
of a stream hold all tokens so far. Its HTTP server was not seen to send routes: strings are refused, for their encoding would
be a guess.

Source: TensorRT-LLM's RFC 17778 and the merged pull request 18397, read; not run.
"""

lmdeploy = Decoder(
    name="LMDeploy",
    read=ReplyReader(engine="LMDeploy", counts=(("input_token_len", "prompt"), ("generate_token_len", "output"))).read,
    rows=_lmdeploy_rows,
    if_missing="Start the engine with enable_return_routed_experts=True and ask with return_routed_experts=True.",
)
"""LMDeploy's PyTorch engine with `enable_return_routed_experts`: a Response of the pipeline, uint16 [S - 1, L, topk].

A Response has the ids of its output and counts its prompt, so it needs `prompt_token_ids`. A dense layer's columns are memory
that nobody wrote, so they are not looked at. The HTTP server sends a reference into Ray's store, base64 of a pickle, which is
refused: fetch the array in the process that asked.

Source: LMDeploy pull requests 4090 and 4737, and its messages and model agent, read; not run.
"""

# NeMo Gym

_ENVELOPE = re.compile(r"nrlre1:(int8|int16|int32):([0-9]{1,9})x([0-9]{1,6})x([0-9]{1,6}):")


def _gym_rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    value, source, num_moe = reply.routed_experts, reply.source, len(model.moe_layer_numbers)
    if isinstance(value, str):
        match = _ENVELOPE.match(value[:64])
        if match is None:
            raise source.error(
                f"MRR310: is the text {shown(value, 40)}, expected nrlre1:<int8|int16|int32>:<rows>x<layers>x<topk>:..."
            )
        rows, layers, topk = (int(size) for size in match.groups()[1:])
        if not layers or not topk:
            raise source.error(f"MRR310: states {rows}x{layers}x{topk}, which are no routes.")
        raw = decode_base64(value[match.end() :], source=source, max_bytes=4 * most_ids(model, tokens, options))
        array = parse_raw(raw, dtype=match[1], source=source, num_columns=layers, topk=topk)
        if len(array) != rows:
            raise source.error(f"MRR310: states {rows} rows and holds {len(array)}: was it cut?")
    else:
        array = as_array(value, source=source)
    is_compact = array.ndim == 3 and array.shape[1] == num_moe != model.num_layers
    columns = tuple(range(num_moe)) if is_compact else tuple(number - 1 for number in model.moe_layer_numbers)
    if array.ndim == 3 and 0 < len(array) == tokens.num_tokens - options.start and array.shape[1] > columns[-1]:
        check = RowCheck(layer_numbers=model.moe_layer_numbers, num_experts=model.num_experts, topk=model.topk)
        last = array[-1:, list(columns)]
        if not check.is_filler(last).all():
            raise source.error(
                f"MRR305: has a row for each of {tokens.num_tokens} tokens, and the last one is a route, "
                f"{last[0, 0].tolist()}: the token that was sampled last has none, so every row may be one too late."
            )
    return RowLayout(parts=(array,), columns=columns if is_compact else None, last_row="padding")


nemo_gym = Decoder(
    name="NeMo Gym",
    read=ReplyReader(engine="NeMo Gym", output_ids=("generation_token_ids",)).read,
    rows=_gym_rows,
    if_missing="Start NeMo-RL with router replay, so that its vLLM workers return routed experts.",
)
"""NeMo Gym's text envelope, which NeMo-RL's vLLM workers put on each model call.

    nrlre1:<dtype>:<rows>x<layers>x<topk>:<base64>        int8, int16 or int32, little-endian, in C order

It is read of an item of a response's output (or of a message log) with `routed_experts`, `prompt_token_ids` and
`generation_token_ids`, or alone; nested lists too. Layers are all hidden ones, or the MoE layers alone. There are S rows, of
which the last is filler (-1 or experts 0, 1, ...), or S - 1. A row of -1 was not captured: it raises, or is live with
`missing="live"`.

Source: NVIDIA-NeMo/Gym token_id_capture.staging.routes and NVIDIA-NeMo/RL utils.routed_experts_codec, read; not run.
"""
