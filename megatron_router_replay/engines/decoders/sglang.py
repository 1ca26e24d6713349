"""SGLang, started with `--enable-return-routed-experts`.

- /generate: `meta_info["routed_experts"]` of each result, base64 of raw little-endian int32 [S - 1 - start, L, topk] in C
  order, without a shape, so the model's config and the number of tokens must account for every byte. slime's SGLang states
  start in `meta_info["routed_experts_start_len"]`. A stream has its routes in the last chunk; its chunks state the number of
  output tokens so far, and `output_ids` are all of them or, with incremental streaming, the new ones. A request of several
  samples streams them with an `index`, and returns a list of results without stream.
- OpenAI endpoints: `sglext.routed_experts` of the response, of its first result only, so several choices are refused. With
  `return_meta_info` (not streamed) routes are in each choice's `meta_info`, and all choices are read.
- Ids: `return_token_ids` brings `prompt_token_ids` and `response_token_ids` (completions: `token_ids`) with each choice,
  `return_input_ids_in_sglext` and `return_output_ids_in_sglext` bring `sglext.input_ids` and `sglext.output_ids`, a list a
  choice, in a stream's last chunk, too. All that a reply has must agree.
- Chat with Kimi K3 states three prompt tokens less than the model ran, in `usage` and `meta_info`: the generation stub.
- Dense layers are zero, but for qwen3_moe, which ignores `mlp_only_layers` and sends ids there; they are dropped.

Not detectable: ids of the right number that are not the engine's, where the reply has none (/generate states the numbers of
prompt and output tokens apart, so ids without BOS raise there); and a config with more layers and a lower topk, or the
reverse, whose product is the same.

Source: SGLang 0.5.7 to 0.5.23, captures of 0.5.23 (tests/unit/data/engine_captures), and serving_chat.py of September 2026
(_build_chat_response, _generate_chat_stream, _reported_prompt_tokens), read.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.payload import as_array, decode_base64, parse_int32, read_start
from megatron_router_replay.engines.reader import FIELDS, Reply, RequestFields
from megatron_router_replay.engines.sample_rows import RowLayout, all_layers
from megatron_router_replay.engines.tokens import SampleTokens

_KIMI_STUB = 3
"""Tokens before each answer of Kimi K3 that its chat endpoint does not count."""


def raw_rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens) -> RowLayout:
    """Return ids without a shape as rows of all hidden layers, with the start that the reply states."""
    value, source = reply["routed_experts"], reply.source
    if isinstance(value, str):
        value = decode_base64(value, source=source)
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = parse_int32(bytes(value), source=source, num_columns=model.num_layers, topk=model.topk)
    array, start = as_array(value, source=source), read_start(reply["start"], "routed_experts_start_len", source)
    return RowLayout(arrays=(array,), layer_numbers=all_layers(model), start=start)


def _rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens) -> RowLayout:
    # qwen3_moe ignores mlp_only_layers and sends ids on that dense layer.
    return replace(raw_rows(reply, model, tokens), ids_in_dense_layers=model.model_type == "qwen3_moe")


def _with_stub(reply: Reply, model: ModelRoutingInfo) -> Reply:
    """Return a reply of Kimi K3's chat endpoint with the three prompt tokens that it does not count."""
    if model.model_type != "kimi_k3" or reply["chat"] is None:
        return reply
    counts = (c if c.kind == "output" else c._replace(value=c.value + _KIMI_STUB) for c in reply.counts)
    return replace(reply, counts=tuple(counts))


sglang = Decoder(
    title="SGLang",
    fields=FIELDS
    | {
        "prompt_token_ids": ("prompt_token_ids", "input_ids"),
        "output_token_ids": ("output_ids", "response_token_ids", "token_ids"),
        "start": ("routed_experts_start_len",),
        "chat": ("message", "delta"),
    },
    counts={"prompt_tokens": "prompt", "completion_tokens": "output"},
    streams=True,
    choices_advice="Use /generate, or send return_meta_info=true to the chat endpoint, which brings routes with each choice.",
    rows=_rows,
    fix_counts=_with_stub,
    setup="Start the server with --enable-return-routed-experts and send return_routed_experts=true with each request. "
    "SGLang's Rust server (SGLANG_RUST_SERVER=1) carries no routes: start it without.",
    request_fields=RequestFields(token_ids='"return_token_ids": true (OpenAI endpoints)'),
)
"""SGLang; see the module."""
