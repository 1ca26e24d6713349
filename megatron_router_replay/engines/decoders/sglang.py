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

What no check can see: ids of the right number that are not the engine's, where the reply has none (/generate
states the numbers of prompt and output tokens apart, so ids without BOS are seen there); and a config with more layers and a
lower topk, or the reverse, whose product is the same.

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
from megatron_router_replay.engines.reply import Reply
from megatron_router_replay.engines.rows import MAX_SURPLUS_ROWS, RowLayout, most_ids
from megatron_router_replay.engines.tokens import SampleTokens

_DTYPES = ("int32", "uint16", "uint8")
"""What the wire may hold: a reply that does not say it is int32."""

_KIMI_STUB = 3
"""Tokens in front of each answer of Kimi K3 that its chat endpoint does not count."""


def raw_rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    """Return the rows [rows, all hidden layers, topk] of a base64 string, of the raw bytes or of an array."""
    value, source = reply["routed_experts"], reply.source
    dtype = "int32" if reply["dtype"] is None else reply["dtype"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise source.error(f"MRR310: routed_experts_dtype is {shown(dtype)}, expected one of {', '.join(_DTYPES)}.")
    if isinstance(value, str):
        value = decode_base64(value, source=source, max_bytes=4 * most_ids(model, tokens))
    if isinstance(value, (bytes, bytearray, memoryview)):
        array = parse_raw(bytes(value), dtype=dtype, source=source, num_columns=model.num_layers, topk=model.topk)
        surplus = _explain_surplus(array.size // model.topk, model.num_layers, tokens.num_tokens - 1 - options.start)
    else:
        array, surplus = as_array(value, source=source), ""
    return RowLayout(
        parts=(array,),
        explain_surplus=surplus,
        explain_lost="Narrow ids need routed_experts_dtype of the reply's meta_info: pass the whole reply. Rows of the MoE "
        "layers alone are not read: all hidden layers are expected.",
    )


def _explain_surplus(num_routes: int, num_layers: int, num_rows: int) -> str:
    """Return why more than num_rows rows are refused: bytes without a shape fit a different number of layers as well."""
    legal = range(max(num_rows, 1), num_rows + MAX_SURPLUS_ROWS + 1)
    others = {num_routes // rows for rows in legal if num_routes % rows == 0} - {num_layers}
    return (
        f"Its bytes have no shape, and {min(others)} layers fit them as well as the config's {num_layers}: surplus rows "
        "cannot be told from layers. Is the model's config the served one?"
        if others
        else ""
    )


def _sglang_rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    # qwen3_moe ignores mlp_only_layers and sends ids on that dense layer.
    filler = () if model.model_type == "qwen3_moe" else None
    return replace(raw_rows(reply, model, tokens, options), filler=filler)


def _with_stub(reply: Reply, model: ModelRoutingInfo) -> Reply:
    """Return a reply of Kimi K3's chat endpoint with the three prompt tokens that it does not count."""
    if model.model_type != "kimi_k3" or reply["chat"] is None:
        return reply
    counts = (c if c.kind == "output" else c._replace(value=c.value + _KIMI_STUB) for c in reply.counts)
    return replace(reply, counts=tuple(counts))


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
        sends="`meta_info.routed_experts` of each result or choice is base64 of raw int32 and has all layers. Without "
        "`return_meta_info`, the OpenAI endpoints send only the first choice's. A stream has its routes in the last chunk; "
        "`return_output_ids_in_sglext` adds the ids. If you set `routed_experts_start_len`, pass it to `decode` as `start`.",
        versions="0.5.7 to 0.5.23; ids and meta_info of the OpenAI endpoints as of September 2026",
        tested="0.5.23 run: Python and HTTP; others written",
    )
)
"""SGLang; see the module."""
