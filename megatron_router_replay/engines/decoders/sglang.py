"""SGLang, started with `--enable-return-routed-experts`.

- /generate: `meta_info["routed_experts"]` of each result, base64 of raw little-endian int32 [S - 1 - start, L, topk] in C
  order (pull request 31219: or of the uint8 or uint16 that `routed_experts_dtype` names), without a shape, so the model's
  config and the number of tokens must account for every byte. A stream has it in its last chunk; its chunks state the number
  of output tokens so far, and `output_ids` are all of them or, with incremental streaming, the new ones. A request of several
  samples streams them with an `index`. Whole results are never taken for chunks, also if they share a request id.
- OpenAI endpoints: `sglext.routed_experts` of the response, of its first result only, so several choices are refused. With
  `return_meta_info` (not streamed) routes are in each choice's `meta_info`, and all choices are read.
- Ids: `return_token_ids` brings `prompt_token_ids` and `response_token_ids` (completions: `token_ids`) with each choice,
  `return_input_ids_in_sglext` and `return_output_ids_in_sglext` bring `sglext.input_ids` and `sglext.output_ids`, a list a
  choice, in a stream's last chunk, too. All that a reply has must agree.
- Chat with Kimi K3 states three prompt tokens less than the model ran, in `usage` and `meta_info`: the generation stub.
- Dense layers are zero, but for qwen3_moe, which ignores `mlp_only_layers` and sends ids there; they are dropped.

What no check can see: ids of the right number that are not the engine's, where the reply has none. /generate states the
numbers of prompt and output tokens apart, so ids without BOS are seen there.

Source: SGLang 0.5.7 to 0.5.23, captures of 0.5.23 (tests/unit/data/engine_captures), and serving_chat.py of September 2026
(_build_chat_response, _generate_chat_stream, _reported_prompt_tokens), read.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_router_replay.checks import shown
from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.options import DecodeOptions
from megatron_router_replay.engines.payload import as_array, decode_base64, parse_raw
from megatron_router_replay.engines.reader import FIELDS, ReplyReader
from megatron_router_replay.engines.registry import register
from megatron_router_replay.engines.reply import Reply, StatedCount, Usage
from megatron_router_replay.engines.rows import RowLayout, most_ids
from megatron_router_replay.engines.tokens import SampleTokens

_DTYPES = {"int32": 4, "uint16": 2, "uint8": 1}
"""What the wire may hold, and its bytes: a reply that does not say it is int32."""

_KIMI_STUB = 3
"""Tokens in front of each answer of Kimi K3 that its chat endpoint does not count."""


def raw_rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    """Return the rows [rows, all hidden layers, topk] of a base64 string, of the raw bytes or of an array."""
    value, source, columns = reply["routed_experts"], reply.source, model.num_layers
    dtype = "int32" if reply["dtype"] is None else reply["dtype"]
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
    return replace(raw_rows(reply, model, tokens, options), filler=filler)


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


def _with_stub(replies: list[Reply], model: ModelRoutingInfo) -> list[Reply]:
    """Return replies of Kimi K3's chat endpoint with the three prompt tokens that it does not count."""
    if model.model_type != "kimi_k3":
        return replies

    def corrected(counts: tuple[StatedCount, ...]) -> tuple[StatedCount, ...]:
        return tuple(c if c.kind == "output" else c._replace(value=c.value + _KIMI_STUB) for c in counts)

    # The replies of one response share the object, which is how its counts are told from another response's.
    usages: dict[int, Usage] = {}
    for reply in replies:
        if reply.usage is not None and id(reply.usage) not in usages:
            usages[id(reply.usage)] = replace(reply.usage, counts=corrected(reply.usage.counts))
    return [
        replace(
            reply,
            counts=corrected(reply.counts),
            usage=None if reply.usage is None else usages[id(reply.usage)],
        )
        if reply["chat"] is not None
        else reply
        for reply in replies
    ]


READER = ReplyReader(
    engine="SGLang",
    fields=FIELDS
    | {
        "prompt_token_ids": ("prompt_token_ids", "input_ids"),
        "output_token_ids": ("output_ids", "response_token_ids", "token_ids"),
        "dtype": ("routed_experts_dtype",),
        "chat": ("message", "delta"),
    },
    inside=("meta_info", "sglext", "metadata"),
    listed=("output_ids",),
    counts=(("prompt_tokens", "prompt"), ("completion_tokens", "output")),
    stream="counted",
    keep_all="Use /generate, or ask the chat endpoint for return_meta_info=true, which brings routes with each choice.",
)
"""How SGLang replies."""

START = "Start the server with --enable-return-routed-experts and send return_routed_experts=true with each request."

sglang = register(
    Decoder(
        name="sglang",
        title="SGLang",
        read=READER.read,
        rows=_sglang_rows,
        counted=_with_stub,
        start=START,
        request="""\
POST /generate
{"text": "The capital of France is", "sampling_params": {"max_new_tokens": 16}, "return_logprob": true,
 "return_routed_experts": true}

POST /v1/chat/completions
{"model": "MODEL", "messages": [...], "n": 4, "return_routed_experts": true, "return_meta_info": true,
 "return_token_ids": true}""",
        sends="`meta_info.routed_experts` of each result or choice, base64 of raw int32 over all layers; without "
        "`return_meta_info` the OpenAI endpoints send the first choice's alone. A stream has routes in its last chunk: use "
        "`return_output_ids_in_sglext` there for the ids. `routed_experts_start_len` leaves rows out: give it as `start`.",
        versions="0.5.7 to 0.5.23; ids and meta_info of the OpenAI endpoints as of September 2026",
        tested="0.5.23 run: Python and HTTP; others written",
    )
)
"""SGLang; see the module."""
