"""SGLang, started with `--enable-return-routed-experts`.

- /generate: `meta_info["routed_experts"]` of each result, base64 of raw little-endian int32 [S - 1 - start, L, topk] in C
  order, without a shape, so the model's config and the number of tokens must account for every byte. slime's SGLang states
  start in `meta_info["routed_experts_start_len"]`. A stream has its routes in the last chunk; its chunks state the number of
  output tokens so far, and `output_ids` are all of them or, with incremental streaming, the new ones. A request of several
  samples streams them with an `index`, and returns a list of results without stream.
- OpenAI endpoints: `sglext.routed_experts` of the response, of its first result only, so several choices are refused. With
  `return_meta_info` (not streamed) routes are in each choice's `meta_info`, and all choices are read.
- Ids of /generate: `return_logprob` with `logprob_start_len` 0 brings the prompt's in `meta_info["input_token_logprobs"]`,
  [log-prob, id, text] a token, with 0 for an image's placeholder and for the last id of the vocabulary.
- Ids of OpenAI endpoints: `return_token_ids` brings `prompt_token_ids` and `response_token_ids` (completions: `token_ids`)
  with each choice, `return_input_ids_in_sglext` and `return_output_ids_in_sglext` bring `sglext.input_ids` and
  `sglext.output_ids`, a list a choice, in a stream's last chunk, too. All that a reply has must agree.
- Chat with Kimi K3 states three prompt tokens less than the model ran, in `usage` and `meta_info`: the generation stub.
- Dense layers are zero, but for qwen3_moe, which ignores `mlp_only_layers` and sends ids there; they are dropped.

Not detectable: ids of the right number that are not the engine's, where the reply has none (/generate states the numbers of
prompt and output tokens apart, so ids without BOS raise there); and a config with more layers and a lower topk, or the
reverse, whose product is the same.

Source: SGLang 0.5.7 to 0.5.23, captures of 0.5.23 (tests/unit/data/engine_captures), and serving_chat.py of September 2026
(_build_chat_response, _generate_chat_stream, _reported_prompt_tokens), read; of the log-probs' ids, commit 004ec010,
scheduler_output_processor_mixin.py (_process_input_token_logprobs), read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.options import DecodeOptions
from megatron_router_replay.engines.payload import as_array, as_token_ids, parse_routes, read_start
from megatron_router_replay.engines.reader import FIELDS, Reply, RequestFields
from megatron_router_replay.engines.sample_rows import RowLayout, all_layers
from megatron_router_replay.engines.tokens import SampleTokens

_OPENAI_IDS = '"return_token_ids": true (OpenAI endpoints)'
_GENERATE_IDS = '"return_logprob": true and "logprob_start_len": 0'

_KIMI_STUB = 3
"""Tokens before each answer of Kimi K3 that its chat endpoint does not count."""


def raw_rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens) -> RowLayout:
    """Return ids without a shape as rows of all hidden layers, with the start that the reply states."""
    value, source = reply["routed_experts"], reply.source
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        raw = value if isinstance(value, str) else bytes(value)
        rows = parse_routes(raw, source=source, num_columns=model.num_layers, topk=model.topk)
    else:
        rows = as_array(value, source=source)
    start = read_start(reply["start"], "routed_experts_start_len", source)
    return RowLayout(arrays=(rows,), layer_numbers=all_layers(model), start=start)


def _rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens) -> RowLayout:
    # qwen3_moe ignores mlp_only_layers and sends ids on that dense layer.
    return replace(raw_rows(reply, model, tokens), ids_in_dense_layers=model.model_type == "qwen3_moe")


def with_generate(reply: Reply, model: ModelRoutingInfo, options: DecodeOptions) -> Reply:
    """Return a reply of /generate with the prompt's ids, which come with log-probs; any reply with its endpoint's advice."""
    reason = reply["finish_reason"]
    if reason is None:  # rows alone
        return reply
    is_generate = isinstance(reason, Mapping)  # OpenAI endpoints have a word
    advice = reply.request_fields._replace(token_ids=_GENERATE_IDS if is_generate else _OPENAI_IDS)
    reply = replace(reply, request_fields=advice)
    if not is_generate:
        return reply
    entries = reply["input_logprobs"]
    stated = [count.value for count in reply.counts if count.kind == "prompt"]
    # Fewer are of a part of the prompt: logprob_start_len is the prompt's end, if it is not sent.
    if reply["prompt_token_ids"] is not None or not isinstance(entries, (list, tuple)) or [len(entries)] != stated[:1]:
        return reply
    if not all(isinstance(entry, (list, tuple)) and len(entry) > 1 for entry in entries):
        raise reply.source.error("MRR309: input_token_logprobs must have [log-prob, id, text] for each token.")
    ids = as_token_ids([entry[1] for entry in entries], source=reply.source)
    known = options.token_ids if options.prompt_token_ids is None else options.prompt_token_ids
    if known is not None and (ids == 0).any():  # SGLang writes 0 for some ids, see the module
        known = as_token_ids(known, source=reply.source)[: len(ids)]
        ids = np.where(ids == 0, known, ids) if len(known) == len(ids) else ids
    return replace(reply, fields={**reply.fields, "prompt_token_ids": ids})


def _complete(reply: Reply, model: ModelRoutingInfo, options: DecodeOptions) -> Reply:
    return with_generate(_with_stub(reply, model), model, options)


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
        "finish_reason": ("finish_reason",),
        "input_logprobs": ("input_token_logprobs",),
    },
    counts={"prompt_tokens": "prompt", "completion_tokens": "output"},
    streams=True,
    choices_advice="Use /generate, or send return_meta_info=true to the chat endpoint, which brings routes with each choice.",
    rows=_rows,
    complete=_complete,
    setup="Start the server with --enable-return-routed-experts and send return_routed_experts=true with each request. "
    "SGLang's Rust server (SGLANG_RUST_SERVER=1) carries no routes: start it without.",
    request_fields=RequestFields(token_ids=f"{_OPENAI_IDS}, or {_GENERATE_IDS} (/generate)"),
)
"""SGLang; see the module."""
