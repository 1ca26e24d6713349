"""Megatron-Core's own inference: [S - 1, Lm, topk], without dense layers.

- A finished request (`DynamicInferenceRequest`, or its serialised dict): `routing_indices`. Since 0.19 the dict has
  `prompt_length` in place of the prompt, unless the client requests `return_prompt_tokens`: pass `prompt_token_ids`.
- The text generation server (completions, chat): `moe_topk_indices` with each choice, as nested lists (0.17) or as
  `["ndarray", {"data": lists, "dtype": name}]` (0.18 and later), with `prompt_token_ids` and `generation_token_ids` (chat;
  completions from 0.18 on). `prompt_moe_topk_indices` is the first rows of the same array in 0.17; from 0.18 on the wrapper
  is cut instead of the array, so it is never read.

Refused: a request that was suspended and resumed, because merging its parts concatenates the routes of every part, each from
the first token on (0.17; later versions send None), so decode each part alone; a request of 0.17 whose prefix was cached,
because its rows begin after the prefix (decode it with `start`); a request without routes, which chunked prefill of 0.18 and
0.19 causes now and then.

Source: Megatron-Core 0.17 to 0.19, core.inference.inference_request and text_generation_server endpoints; the dynamic engine
of 0.17.1, 0.18.2 and 0.19.2 run on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_router_replay.checks import shown
from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.payload import INTEGERS, Source, as_array
from megatron_router_replay.engines.reader import Reply
from megatron_router_replay.engines.sample_rows import RowLayout
from megatron_router_replay.engines.tokens import SampleTokens


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
    if not isinstance(content["dtype"], str) or content["dtype"] not in INTEGERS:
        raise source.error(f"MRR310: is an ndarray of dtype {shown(content['dtype'])}, expected integers.")
    # The dtype is a promise about the data: ids beyond it mean that the payload was put together by something else. And ids
    # that were cast to a narrow dtype before they were sent must be seen to be of it.
    array, limits = as_array(content["data"], source=source), np.iinfo(content["dtype"])
    if array.size and not (limits.min <= int(array.min()) and int(array.max()) <= limits.max):
        raise source.error(f"MRR310: has ids that {content['dtype']}, its dtype, cannot represent.")
    return array.astype(content["dtype"])


def _rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens) -> RowLayout:
    array = as_array(reply["routed_experts"], source=reply.source)
    return RowLayout(arrays=(array,), layer_numbers=model.moe_layer_numbers)


megatron = Decoder(
    title="Megatron",
    fields={
        "routed_experts": ("routing_indices", "moe_topk_indices"),
        "prompt_token_ids": ("prompt_token_ids", "prompt_tokens"),
        "output_token_ids": ("generation_token_ids", "generated_tokens"),
    },
    counts={"prompt_length": "prompt"},
    unwrap=_unwrapped,
    rows=_rows,
    setup="Set moe_enable_routing_replay=True in the engine's config; prompt_moe_topk_indices alone has no routes of the "
    "generation.",
)
"""Megatron-Core's inference; see the module."""
