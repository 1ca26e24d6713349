"""vLLM 0.21 and later, started with `--enable-return-routed-experts`.

S tokens are P of the prompt and G generated, L hidden layers, Lm of them MoE.

- 0.22 and later: [S - 1 - start, L, topk], uint8 up to 256 experts, else uint16; over HTTP (completions, chat,
  /inference/v1/generate and its stream) base64 of a `.npy` file. Dense layers are zero. Completions and chat streams never
  carry routes. Rows of a cached prefix are those of the request that filled the cache, or -1.
- 0.21: `prompt_routed_experts` [P, Lm, topk] on the response and `routed_experts` [G - 1, or G with MTP, Lm, topk] on each
  choice, int16 or nested lists. Models with first_k_dense_replace have L columns, of which the first Lm are the MoE layers
  in order and the rest are zero. One array alone is never read as 0.21's: `engines.array` names its layers.
- 0.32: `weight_versions`, the weights that sampled each part of the output; from 0.33 on, completions and chat have them only
  with `return_weight_versions`.
- prime-rl's server sends a dict of raw bytes (`payload.parse_tensor`) in the same place; verifiers keeps it in each step.

Not detectable: ids of the right number that are not the engine's, where the reply has none of its own (a plain array;
completions and chat without return_token_ids), and a chunk of a generate stream that was replaced by a copy of its neighbour
or changed places with it, because its chunks have neither a number nor a count.

Source: vLLM 0.21 to 0.33, and captures of 0.30.0 (tests/unit/data/engine_captures).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.payload import (
    NPY_MAGIC,
    Array,
    Source,
    as_array,
    decode_base64,
    is_tensor,
    parse_npy,
    parse_tensor,
)
from megatron_router_replay.engines.reader import FIELDS, Reply, RequestFields
from megatron_router_replay.engines.sample_rows import RowLayout, all_layers
from megatron_router_replay.engines.tokens import SampleTokens


def _rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens) -> RowLayout:
    """Return the array of a release; the second field is 0.21's alone."""
    if reply["prompt_routed_experts"] is not None:
        return _rows_of_0_21(reply, model, tokens)
    rows, start = _read(reply["routed_experts"], reply.source)
    return RowLayout(arrays=(rows,), layer_numbers=all_layers(model), start=start)


def _rows_of_0_21(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens) -> RowLayout:
    """Return the routes of the prompt and of the generation: the MoE layers, and zeros if there is a column a layer."""
    source = replace(reply.source, field="prompt_routed_experts")
    prompt, _ = _read(reply["prompt_routed_experts"], source)
    if tokens.num_prompt_tokens is None:
        raise source.error(
            f"MRR309: has {prompt.shape[0]} rows, and the number of prompt tokens is unknown: pass prompt_token_ids=..., or "
            "have the response return ids or counts."
        )
    if prompt.shape[0] != tokens.num_prompt_tokens:
        raise source.error(f"MRR305: has {prompt.shape[0]} rows for {tokens.num_prompt_tokens} prompt tokens.")
    parts = [prompt]
    if reply["routed_experts"] is not None:
        parts.append(_read(reply["routed_experts"], reply.source)[0])
    # No rows may have any shape: an empty list has none.
    parts = [part for part in parts if part.shape[0]]
    if len({part.shape[1:] for part in parts}) > 1:
        raise source.error(f"MRR306: prompt and generation differ in shape: {[list(part.shape) for part in parts]}.")
    numbers = model.moe_layer_numbers
    if any(part.ndim == 3 and part.shape[1] == model.num_layers for part in parts):
        numbers += tuple(number for number in all_layers(model) if number not in numbers)  # the columns of zeros
    # It always sends every row. With multi-token prediction the generation has a row for its last token as well: padding,
    # as far as is known.
    return RowLayout(arrays=parts, layer_numbers=numbers, last_row="padding", start=0)


def _read(value: Any, source: Source) -> tuple[Array, int | None]:
    """Return routes of any form, and the token of their first row where they state it."""
    if is_tensor(value):
        return parse_tensor(value, source=source)
    if isinstance(value, (bytearray, memoryview)):
        value = bytes(value)
    if isinstance(value, str) or (isinstance(value, bytes) and not value.startswith(NPY_MAGIC)):
        value = decode_base64(value, source=source)
    return parse_npy(value, source=source) if isinstance(value, bytes) else as_array(value, source=source), None


vllm = Decoder(
    title="vLLM",
    fields=FIELDS
    | {
        "prompt_routed_experts": ("prompt_routed_experts",),
        "prompt_token_ids": ("prompt_token_ids", "prompt_ids"),
        "output_token_ids": ("token_ids", "completion_ids"),
    },
    streams=True,
    rows=_rows,
    setup="Start vLLM with --enable-return-routed-experts. Completions and chat streams never carry routes (use stream=False "
    "or /inference/v1/generate), and vLLM's Rust front end sends them on /inference/v1/generate alone.",
    request_fields=RequestFields(
        token_ids='"return_token_ids": true',
        weight_versions='"return_weight_versions": true (completions and chat of vLLM 0.33)',
    ),
)
"""vLLM; see the module."""
