"""Record which experts a PyTorch MoE uses while it generates -> CapturedRoutes of each request, in every public shape.

For engines that do not offer it: `transformers`, a loop of your own, Megatron inference. One forward's routes go

    routers' own ids (compiled code: a live buffer) -> one copy for all layers -> log of steps on the host (own stream)
        -> per-request arrays -> CapturedRoutes

A sampling loop tells the capturer whose tokens each forward holds, and takes the routes when a request ends:

    capturer = create_capturer(model, enable=True, max_num_tokens=4096)
    capturer.add_request("a", num_prompt_tokens=len(prompt))
    with capturer.forward(["a"], token_positions(attention_mask)):     # prefill; then one token a step: forward(["a"], [7])
        model(...)
    captured = capturer.finish("a", token_ids=prompt + output)         # .trace(), .split(), .base64_int32()

What is announced is compared with what runs: the number of tokens and of calls at every router, the shape of input_ids, their
attention_mask, and at the end every token that the model ran with the finished sequence. A left-padded batch announced as if
it were not, rows that nobody announced, a second forward, or a batch that was reordered (beam search) raise CaptureError.

Source: the design of vLLM 0.21's routed experts replay and of SGLang's capturer; the code is our own.
"""

from megatron_router_replay.capture.create import create_capturer
from megatron_router_replay.capture.errors import CaptureError
from megatron_router_replay.capture.interface import RoutedExpertsCapturer
from megatron_router_replay.capture.output import CapturedRoutes, vllm_response
from megatron_router_replay.capture.routers import RouterSite, find_router_sites
from megatron_router_replay.capture.seam import write_routes
from megatron_router_replay.capture.steps import token_positions

__all__ = [
    "CaptureError",
    "CapturedRoutes",
    "RoutedExpertsCapturer",
    "RouterSite",
    "create_capturer",
    "find_router_sites",
    "token_positions",
    "vllm_response",
    "write_routes",
]
