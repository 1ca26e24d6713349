"""SGLang's replies -> PositionTrace.

Started with `--enable-return-indexer-topk` and asked with `return_indexer_topk=true`, SGLang's /generate sends in
`meta_info["indexer_topk"]` base64 of int32 [S - 1, layers, topk] in C order, without a shape. S counts prompt and output
tokens, and the last one never ran. A cached prefix has the rows of the request that filled the cache: the same positions.

- Layers are all hidden layers in order. A layer that shares an earlier layer's choice has a copy of it. Some forks send only
  the layers with an indexer of their own, which the number of bytes tells.
- Values are positions in the request, from 0, in no order, -1 behind them, if SGLang runs with SGLANG_DSA_FUSE_TOPK=0. By
  default a fused kernel returns slots of the KV cache, or positions in the prefilled batch, and these are sent.
- A prefill below SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD runs no indexer and writes no rows: set it to 0.
- The capture needs CUDA and attention without tensor parallelism.

What no check can see: slots of the cache that all lie in 0..p, each once. The first rows must name all of 0..p, which slots
do not, so this takes a prompt that was prefilled alone and a cache that was empty.

Source: SGLang's main branch in autumn 2026, srt.state_capturer.indexer_topk and base, layers.attention.dsa.dsa_topk_backend,
model_config.get_num_indexer_layers, pull request 24392 and its test; read, not run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_router_replay.checks import as_integer
from megatron_router_replay.engines.options import DecodeOptions, TokenIds
from megatron_router_replay.engines.payload import Array, Source, as_array, decode_base64
from megatron_router_replay.engines.reply import refuse_non_reply
from megatron_router_replay.engines.servers import GENERATE
from megatron_router_replay.engines.tokens import resolve_tokens
from megatron_router_replay.errors import TraceError
from megatron_router_replay.indexer.positions import PositionTrace
from megatron_router_replay.trace.values import as_layer_numbers

_READER = replace(GENERATE, routes=("indexer_topk",))


def decode_indexer_topk(
    result: Any,
    *,
    num_layers: int,
    layer_numbers: Iterable[int],
    topk: int,
    token_ids: TokenIds | None = None,
    num_tokens: int | None = None,
) -> PositionTrace:
    """Return the positions that SGLang's indexers chose for one sample.

    The trace has S rows for the S tokens of prompt and output; the last one is not known.

    Args:
        result: a result of /generate, the chunks of its stream, the base64 text or an array alone.
        num_layers: hidden layers of the model, `num_hidden_layers`.
        layer_numbers: Megatron's layer_number (from 1) of each layer that has an indexer of its own: those that are "full" in
            `indexer_types`, or all.
        topk: `index_topk`.
        token_ids: prompt and output, [S]; compared with the ids and counts of the reply.
        num_tokens: S, for a result that says nothing of its tokens.

    Raises:
        PayloadError: the field is missing, damaged, or does not fit the tokens or the model; a layer that shares differs from
            the one it shares with; the values are no positions that an indexer can have chosen.
    """
    refuse_non_reply(result, "SGLang")
    replies = _READER.read(result, batch=False)
    reply, source = replies[0], replies[0].source
    numbers, topk = as_layer_numbers(layer_numbers), as_integer("topk", topk, least=1)
    num_layers = as_integer("num_layers", num_layers, least=max(numbers, default=1))
    if len(replies) != 1:
        raise source.error(f"MRR312: the result holds {len(replies)} samples: decode each one, and concatenate them.")
    if reply.routed_experts is None:
        raise source.error(
            "MRR302: missing. Start the server with --enable-return-indexer-topk and SGLANG_DSA_FUSE_TOPK=0, and send "
            "return_indexer_topk=true with each request."
        )
    tokens = resolve_tokens(reply, DecodeOptions(token_ids=token_ids, num_tokens=num_tokens)).num_tokens
    # The token that was sampled last was never fed back, so it attended to nothing.
    rows = max(tokens - 1, 0)
    chosen = _read(reply.routed_experts, source, (rows, num_layers, topk), len(numbers))
    if chosen.shape[1] != len(numbers):
        _check_shared(chosen, source, numbers)
        chosen = chosen[:, [number - 1 for number in numbers]]
    last = np.full((tokens - rows, len(numbers), topk), -1, np.int32)
    parts = [(chosen, np.arange(rows)), (last, np.full(len(last), -1))]
    try:
        return PositionTrace.concatenate(
            [
                PositionTrace.from_positions(part, positions_in_sample=queries, layer_numbers=numbers, topk=topk)
                for part, queries in parts
            ]
        )
    except TraceError as error:
        raise source.error(
            f"MRR113: {error} Run SGLang with SGLANG_DSA_FUSE_TOPK=0, because its fused kernel returns slots of the KV "
            "cache, and with SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD=0."
        ) from error


def _read(value: Any, source: Source, shape: tuple[int, int, int], indexer_layers: int) -> Array:
    """Return [rows, layers, topk]; the layers are all of `shape`, or only those with an indexer of their own."""
    rows, num_layers, topk = shape
    if isinstance(value, str):
        # Room for one row more, so that the message below says how many there are.
        value = decode_base64(value, source=source, max_bytes=4 * (rows + 1) * num_layers * topk)
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = np.frombuffer(value, "<i4" if len(value) % 4 == 0 else "S1").reshape(-1)
    array = np.asarray(value) if isinstance(value, np.ndarray) else as_array(value, source=source)
    for layers in (num_layers, indexer_layers):
        is_shaped = array.shape == (rows, layers, topk) or (array.ndim == 1 and array.size == rows * layers * topk)
        if is_shaped and array.dtype.kind in "iu":
            return array.reshape(rows, layers, topk)
    raise source.error(
        f"MRR306: holds {array.size} values of {array.dtype} in the shape {list(array.shape)}, expected {rows} rows x "
        f"{num_layers} layers x top-{topk} ({array.size / (num_layers * topk):.3f} such rows): one for each token but the "
        "last. Are the token ids and the sizes of the model those of this reply?"
    )


def _check_shared(chosen: Array, source: Source, layer_numbers: tuple[int, ...]) -> None:
    for number in range(1, chosen.shape[1] + 1):
        shared = max((other for other in layer_numbers if other <= number), default=number)
        differing = (chosen[:, number - 1] != chosen[:, shared - 1]).any(axis=1)
        if differing.any():
            raise source.error(
                f"MRR306: layer {number} shares the choice of layer {shared}, and differs from it in {int(differing.sum())} "
                f"of {len(chosen)} rows, the first is row {int(differing.argmax())}. Are layer_numbers those of the served "
                "model, with its index_topk_freq?"
            )
