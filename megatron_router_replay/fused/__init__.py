"""fused: the routing function behind the selection, in one pass forward and backward, for experts chosen already.

    route: (logits [num_tokens, num_experts], topk_indices [num_tokens, topk]) -> (routing_probs, routing_map), both dense
    probe: Megatron-Core's own routing function -> whether `route` is equal to it on this device, and where it rounds

`reference.py` is plain torch, for any device; `launch.py` and `kernels.py` are the same in Triton, for CUDA, and have not run
on a GPU. None imports megatron, and triton is imported by the first call that uses it. Nothing else needs this package to be
right: whoever takes `route` in place of Megatron-Core's function asks `probe` first, on the device and dtype of the run.

How exact it is. With exact=True and the rounding of the version (`Rounding.EARLY` in Megatron-Core 0.16 and 0.17, LATE in
0.18), on a CPU in fp32, bf16 and fp16, torch's probabilities, map and gradients are bit-identical to Megatron-Core's
unfused path with the same experts in the same order for both softmaxes, scaled or not. So they are for sigmoid and
sqrtsoftplus, where the numbers of elements divide by torch's vector width; elsewhere torch's vector loop and its scalar
rest may round an element's value differently, by one unit in the last place. Without exact the softmax over the chosen
experts is faster and rounds in another order: 1e-6 in fp32. So does Triton, which keeps every rounding to the logits' dtype
but sums in another order. A forward and its recompute use the same kernel, hence the same bits; a forward whose recompute
goes through `route` has to go through it as well.
"""

from megatron_router_replay.fused.probing import Probe, probe
from megatron_router_replay.fused.routing import route
from megatron_router_replay.fused.score import Rounding

__all__ = ["Probe", "Rounding", "probe", "route"]
