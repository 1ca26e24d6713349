"""Start a run's processes."""

from __future__ import annotations

from examples.grpo.loop import Metrics, train
from examples.grpo.settings import Settings
from megatron_router_replay.testing import run_ranks


def run(settings: Settings, *, dp: int = 1, timeout_s: float = 24 * 3600.0) -> list[Metrics]:
    """Train in processes of this machine and return every step's metrics.

    On GPUs `torchrun` starts the processes instead; each calls `train(settings)` after init_process_group.

    Args:
        dp: data-parallel copies of the layout's smallest number of processes.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    ranks = run_ranks(settings.layout.world_size * dp, train, settings, seed=settings.seed, timeout_s=timeout_s)
    metrics: list[Metrics] = ranks[0]
    return metrics
