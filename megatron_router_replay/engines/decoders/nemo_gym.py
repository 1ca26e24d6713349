"""NeMo Gym's text envelope, which NeMo-RL's vLLM workers put on each model call.

    nrlre1:<dtype>:<rows>x<layers>x<topk>:<base64>        int8, int16 or int32, little-endian, in C order

It is read of an item of a response's output (or of a message log) with `routed_experts`, `prompt_token_ids` and
`generation_token_ids`, or alone; nested lists too. Layers are all hidden ones, or the MoE layers alone. There are S rows, of
which the last is filler (-1 or experts 0, 1, ...), or S - 1. A row of -1 was not captured: it raises, or is live with
`missing="live"`.

Source: NVIDIA-NeMo/Gym token_id_capture.staging.routes and NVIDIA-NeMo/RL utils.routed_experts_codec, read; not run.
"""

from __future__ import annotations

import re

import numpy as np

from megatron_router_replay.checks import shown
from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.options import DecodeOptions
from megatron_router_replay.engines.payload import as_array, parse_tensor
from megatron_router_replay.engines.reader import FIELDS, ReplyReader
from megatron_router_replay.engines.registry import register
from megatron_router_replay.engines.reply import Reply
from megatron_router_replay.engines.rows import RowLayout, find_columns, most_ids
from megatron_router_replay.engines.tokens import SampleTokens

_ENVELOPE = re.compile(r"nrlre1:(int8|int16|int32):([0-9]{1,9})x([0-9]{1,6})x([0-9]{1,6}):")


def _rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    value, source, num_moe = reply["routed_experts"], reply.source, len(model.moe_layer_numbers)
    if isinstance(value, str):
        match = _ENVELOPE.match(value[:64])
        if match is None:
            raise source.error(
                f"MRR310: is the text {shown(value, 40)}, expected nrlre1:<int8|int16|int32>:<rows>x<layers>x<topk>:..."
            )
        tensor = {"data": value[match.end() :], "shape": [int(size) for size in match.groups()[1:]], "dtype": match[1]}
        array, _ = parse_tensor(tensor, source=source, max_bytes=4 * most_ids(model, tokens))
    else:
        array = as_array(value, source=source)
    is_compact = array.ndim == 3 and array.shape[1] == num_moe
    layout = RowLayout(parts=(array,), columns=tuple(range(num_moe)) if is_compact else None, last_row="padding")
    columns, _, num_columns = find_columns(layout, model)
    if array.ndim == 3 and array.shape[1] == num_columns and 0 < len(array) == tokens.num_tokens - options.start:
        last = array[-1, list(columns)]
        if not ((last == -1).all() or (last == np.arange(array.shape[2])).all()):
            raise source.error(
                f"MRR305: has a row for each of {tokens.num_tokens} tokens, and the last one is a route, {last[0].tolist()}: "
                "the token that was sampled last has none, so every row may be one too late."
            )
    return layout


nemo_gym = register(
    Decoder(
        name="nemo_gym",
        title="NeMo Gym",
        read=ReplyReader(engine="NeMo Gym", fields=FIELDS | {"output_token_ids": ("generation_token_ids",)}).read,
        rows=_rows,
        start="Start NeMo-RL with router replay, so that its vLLM workers return routed experts.",
        sends="Each model call has the text `nrlre1:<dtype>:<rows>x<layers>x<topk>:<base64>` and the ids of its tokens.",
        versions="the `nrlre1:` envelope of NeMo Gym and NeMo-RL",
        tested="written from the source of both sides",
    )
)
"""NeMo Gym; see the module."""
