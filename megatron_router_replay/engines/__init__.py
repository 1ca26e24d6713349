"""What inference engines return -> RoutingTrace: one module per engine, none of which imports its engine.

For example `vllm.decode(output, model="path/of/the/checkpoint")` for one sample, `sglang.decode_batch(response,
model=info, token_ids=ids)` for several. `RoutingSegments` joins the turns of a conversation and resumed generations.
"""

from megatron_router_replay.engines import array, megatron, sglang, sglang_jax, transformers, vllm
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.segments import RoutingSegments

__all__ = [
    "ModelRoutingInfo",
    "RoutingSegments",
    "array",
    "megatron",
    "sglang",
    "sglang_jax",
    "transformers",
    "vllm",
]
