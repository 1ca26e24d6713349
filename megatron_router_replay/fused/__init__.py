"""fused: the routing function behind the selection, in one pass forward and backward, for experts chosen already.

    route: (logits [num_tokens, num_experts], topk_indices [num_tokens, topk]) -> (routing_probs, routing_map), both dense

`reference.py` is plain torch, for any device; `launch.py` and `kernels.py` are the same in Triton, for CUDA. None imports
megatron, and triton is imported by the first call that uses it.

How exact it is. With exact=True, against Megatron-Core's unfused path with the same experts in the same order (0.16.1, on
a CPU, fp32, bf16 and fp16), torch's probabilities, map and gradients are bit-identical for both softmaxes, scaled or not. So
they are for sigmoid, where the numbers of elements divide by torch's vector width; elsewhere torch's vector loop and its
scalar rest may round an element's sigmoid differently, by one unit in the last place. Without exact the softmax over the
chosen experts is faster and rounds in another order: 1e-6 in fp32. So does Triton, which keeps every rounding to the logits'
dtype but sums in another order. A forward and its recompute use the same kernel, hence the same bits.

Sessions do not use it: with moe_router_fusion=True they run Megatron-Core's own unfused function. A forward whose recompute
goes through `route` has to go through it as well.
"""

from megatron_router_replay.fused.route import route
from megatron_router_replay.fused.score import selection_scores

__all__ = ["route", "selection_scores"]
