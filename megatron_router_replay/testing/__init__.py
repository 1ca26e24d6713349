"""Megatron-Core on a CPU and tiny models, for our tests, the demo, and users' CI.

Nothing is imported before it is asked for, so importing this package loads neither Megatron-Core nor torch.
"""

from typing import TYPE_CHECKING

from megatron_router_replay.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_router_replay.testing.attention import SmallAttention, row_positions
    from megatron_router_replay.testing.cpu import megatron_on_cpu
    from megatron_router_replay.testing.global_parameters import merge_by_name, named_global_parameters
    from megatron_router_replay.testing.layout import ParallelSizes
    from megatron_router_replay.testing.megatron_state import reset_megatron_state
    from megatron_router_replay.testing.qwen3_moe import load_qwen3_moe, qwen3_moe_config
    from megatron_router_replay.testing.schedule import (
        default_forward_step,
        gradients,
        pack_microbatch,
        random_microbatches,
        run_schedule,
        split_microbatch,
    )
    from megatron_router_replay.testing.tiny_gpt import build_tiny_gpt, tiny_gpt_config
    from megatron_router_replay.testing.tiny_hybrid import build_tiny_hybrid
    from megatron_router_replay.testing.workers import GlooWorkers, WorkersError

__all__ = [
    "GlooWorkers",
    "ParallelSizes",
    "SmallAttention",
    "WorkersError",
    "build_tiny_gpt",
    "build_tiny_hybrid",
    "default_forward_step",
    "gradients",
    "load_qwen3_moe",
    "megatron_on_cpu",
    "merge_by_name",
    "named_global_parameters",
    "pack_microbatch",
    "qwen3_moe_config",
    "random_microbatches",
    "reset_megatron_state",
    "row_positions",
    "run_schedule",
    "split_microbatch",
    "tiny_gpt_config",
]

_HOME = {
    "attention": "SmallAttention row_positions",
    "cpu": "megatron_on_cpu",
    "global_parameters": "merge_by_name named_global_parameters",
    "layout": "ParallelSizes ParallelLayout",  # the second is its name until 0.2
    "megatron_state": "reset_megatron_state",
    "qwen3_moe": "load_qwen3_moe qwen3_moe_config",
    "schedule": "default_forward_step gradients pack_microbatch random_microbatches run_schedule split_microbatch",
    "tiny_gpt": "build_tiny_gpt tiny_gpt_config",
    "tiny_hybrid": "build_tiny_hybrid",
    "workers": "GlooWorkers WorkersError",
}
"""Module -> its public names."""

__getattr__, __dir__ = lazy_names(__name__, {name: module for module, names in _HOME.items() for name in names.split()})
