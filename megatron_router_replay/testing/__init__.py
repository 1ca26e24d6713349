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

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
