"""Megatron-Core on a CPU, in any parallel layout: for this package's demo and for users' CI.

Importing the package loads neither Megatron-Core nor torch.
"""

from typing import TYPE_CHECKING

from megatron_router_replay.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_router_replay.testing.cpu import megatron_on_cpu
    from megatron_router_replay.testing.layout import ParallelSizes
    from megatron_router_replay.testing.packed_attention import PackedAttention
    from megatron_router_replay.testing.qwen3_moe import load_qwen3_moe
    from megatron_router_replay.testing.ranks import run_ranks

__all__ = ["PackedAttention", "ParallelSizes", "load_qwen3_moe", "megatron_on_cpu", "run_ranks"]

_MODULES = {
    "PackedAttention": "packed_attention",
    "ParallelSizes": "layout",
    "load_qwen3_moe": "qwen3_moe",
    "megatron_on_cpu": "cpu",
    "run_ranks": "ranks",
}

_OWN_MODEL = "build a GPTModel of your own under megatron_on_cpu(), or load_qwen3_moe(checkpoint, layout)."
_OWN_STEP = "call megatron.core.pipeline_parallel.get_forward_backward_func() with a forward_step of your own."
_WITHDRAWN = {
    "build_tiny_gpt": _OWN_MODEL,
    "tiny_gpt_config": _OWN_MODEL,
    "run_schedule": _OWN_STEP,
    "random_microbatches": _OWN_STEP,
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES, withdrawn=_WITHDRAWN)
