"""fused: the routing function behind the selection, in one pass forward and backward, for experts chosen already.

    route: (logits [num_tokens, num_experts], topk_indices [num_tokens, topk]) -> (routing_probs, routing_map), both dense

`reference.py` is plain torch, for any device; `launch.py` and `kernels.py` are the same in Triton, for CUDA. None imports
megatron, and triton is imported by the first call that uses it.

How exact it is. Against Megatron-Core's unfused path with the same experts in the same order (0.16.1, on a CPU, fp32, bf16
and fp16), torch's probabilities, map and gradients are bit-identical for both softmaxes, scaled or not. So they are for
sigmoid, where the numbers of elements divide by torch's vector width; elsewhere torch's vector loop and its scalar rest may
round an element's sigmoid differently, by one unit in the last place. Triton keeps every rounding to the logits' dtype but
sums in another order: 1e-6 in fp32. A forward and its recompute use the same kernel, hence the same bits.

How it is to be hooked. `megatron.core.transformer.moe.router.topk_routing_with_score_function`, the name that
`TopKRouter.routing` calls, is replaced while a session is active and put back after it. The replacement lets the session
choose the indices, live top-k included, and returns `route(...)` of them instead of calling on; calls of routers outside of
the session go to the original. That happens before `fused=True` could turn to Transformer Engine, so `moe_router_fusion=True`
is replayed like any other router; and it needs no `router_replay` argument, which Megatron-Core 0.14 and 0.15 lack (there, a
pre-hook on the router says whose call it is). A forward whose recompute goes through `route` has to go through it as well.
"""

from megatron_router_replay.fused.route import route

__all__ = ["route"]
