"""What inference engines return -> RoutingTrace: one module per engine, none of which imports its engine.

trace = engines.vllm.decode(output, model="path/of/the/checkpoint")
trace = engines.sglang.decode(response, model=info, token_ids=prompt + output)
"""

from megatron_router_replay.engines import vllm
from megatron_router_replay.engines.model_info import ModelRoutingInfo

__all__ = ["ModelRoutingInfo", "vllm"]
