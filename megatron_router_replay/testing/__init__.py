"""Megatron-Core on a CPU and tiny models, for our tests, the demo, and users' CI.

Nothing is imported before it is asked for, so importing this package loads neither Megatron-Core nor torch.
"""

from typing import TYPE_CHECKING

from megatron_router_replay.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_router_replay.testing.cpu import megatron_on_cpu
    from megatron_router_replay.testing.layout import ParallelSizes
    from megatron_router_replay.testing.qwen3_moe import load_qwen3_moe
    from megatron_router_replay.testing.ranks import run_ranks
    from megatron_router_replay.testing.schedule import random_microbatches, run_schedule
    from megatron_router_replay.testing.tiny_gpt import build_tiny_gpt, tiny_gpt_config

__all__ = [
    "ParallelSizes",
    "build_tiny_gpt",
    "load_qwen3_moe",
    "megatron_on_cpu",
    "random_microbatches",
    "run_ranks",
    "run_schedule",
    "tiny_gpt_config",
]

_HOME = {
    "cpu": "megatron_on_cpu",
    "layout": "ParallelSizes",
    "qwen3_moe": "load_qwen3_moe",
    "ranks": "run_ranks",
    "schedule": "random_microbatches run_schedule",
    "tiny_gpt": "build_tiny_gpt tiny_gpt_config",
}
"""Module -> its public names."""

__getattr__, __dir__ = lazy_names(__name__, {name: module for module, names in _HOME.items() for name in names.split()})
