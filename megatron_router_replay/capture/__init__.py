"""Record which experts a PyTorch MoE uses while it generates -> CapturedRoutes of each request, in every public shape.

For engines that do not offer it: `transformers`, a loop of your own, Megatron inference. One forward's routes go

    router -> device buffer [layers, tokens, topk] -> pinned staging (own stream) -> per-request host arrays -> CapturedRoutes

A sampling loop tells the capturer whose tokens each forward holds, and takes the routes when a request ends:

    capturer = RoutedExpertsCapturer.create(model, enable=True, max_num_tokens=4096)
    capturer.add_request("a", num_prompt_tokens=len(prompt))
    with capturer.forward(["a"], token_positions(attention_mask)):     # prefill; then one token a step: forward(["a"], [7])
        model(...)
    captured = capturer.finish("a", token_ids=prompt + output)         # .trace(), .split(), .base64_int32()

Source: the design of vLLM 0.21's routed experts replay and of SGLang's capturer; the code is our own.
"""

from megatron_router_replay.capture.buffer import write_routes
from megatron_router_replay.capture.capturer import RoutedExpertsCapturer
from megatron_router_replay.capture.errors import CaptureError
from megatron_router_replay.capture.output import CapturedRoutes, vllm_response
from megatron_router_replay.capture.routers import RouterSite, find_router_sites
from megatron_router_replay.capture.steps import token_positions

__all__ = [
    "CaptureError",
    "CapturedRoutes",
    "RoutedExpertsCapturer",
    "RouterSite",
    "find_router_sites",
    "token_positions",
    "vllm_response",
    "write_routes",
]
