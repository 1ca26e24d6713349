"""Replies of inference engines -> RoutingTrace, without importing an engine.

An engine is a file in `decoders/` and a line below: `mrr.engines.vllm`, `sglang`, `sglang_jax` and `megatron`. Each has
`decode` for one sample and `decode_batch` for several, with the same options (`DecodeOptions`), as in
`vllm.decode(reply, model="the/checkpoint")` or `sglang.decode_batch(replies, model=info, prompt_token_ids=ids)`. `array`
decodes any array with named axes. `RoutingSegments` joins the turns of a conversation and resumed generations,
`join_prefill_decode` the replies of two servers to one request.

The way of a reply, which `decoder` goes:

    result  -- reader, by the engine's table of fields ---------->  Reply           its routes, ids, counts and versions
    Reply   -- tokens, compared with the caller's options ------->  SampleTokens    how many tokens, which, of which weights
    Reply   -- decoders/ENGINE, by the formats of payload ------->  RowLayout       arrays, with the layer of each column
    layout  -- rows counts them, row_check reads each of them --->  RoutingTrace

Importing this package loads no decoder: a session needs a model's layers, and nothing else from here.
"""

from typing import TYPE_CHECKING

from megatron_router_replay.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_router_replay.engines import array
    from megatron_router_replay.engines.decoders.megatron import megatron
    from megatron_router_replay.engines.decoders.sglang import sglang
    from megatron_router_replay.engines.decoders.sglang_jax import sglang_jax
    from megatron_router_replay.engines.decoders.vllm import vllm
    from megatron_router_replay.engines.model_info import ModelRoutingInfo
    from megatron_router_replay.engines.options import DecodeOptions
    from megatron_router_replay.engines.routing_segments import RoutingSegments, join_prefill_decode

__all__ = [
    "DecodeOptions",
    "ModelRoutingInfo",
    "RoutingSegments",
    "array",
    "join_prefill_decode",
    "megatron",
    "sglang",
    "sglang_jax",
    "vllm",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "DecodeOptions": "options",
        "ModelRoutingInfo": "model_info",
        "RoutingSegments": "routing_segments",
        "array": "array",
        "join_prefill_decode": "routing_segments",
        "megatron": "decoders.megatron",
        "sglang": "decoders.sglang",
        "sglang_jax": "decoders.sglang_jax",
        "vllm": "decoders.vllm",
    },
)
