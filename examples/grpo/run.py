"""Start a run's processes, and its engine where that is a server."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace

from examples.grpo.loop import Metrics, train
from examples.grpo.settings import Settings
from examples.grpo.vllm_engine import VllmServer
from examples.grpo.weights import random_hf_weights, save_hf_checkpoint
from megatron_router_replay.testing import GlooWorkers


def run(settings: Settings, *, dp: int = 1, timeout_s: float = 24 * 3600.0) -> list[Metrics]:
    """Train in processes of this machine and return every step's metrics.

    On GPUs `torchrun` starts the processes instead; each calls `train(settings)` after init_process_group.

    Args:
        dp: data-parallel copies of the layout's smallest number of processes.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if settings.engine == "vllm" and not settings.vllm_url:
            # Here, not on rank 0: a rank that is killed cannot stop it.
            server = stack.enter_context(start_vllm(settings))
            settings = replace(settings, vllm_url=server.url)
        workers = stack.enter_context(GlooWorkers(settings.layout.world_size * dp, seed=settings.seed))
        metrics: list[Metrics] = workers.run(train, settings, timeout_s=timeout_s)[0]
    return metrics


def start_vllm(settings: Settings) -> VllmServer:
    """Return a server of the run's initial weights, on a free port."""
    folder = settings.out / "engine"
    save_hf_checkpoint(folder, random_hf_weights(settings.seed))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return VllmServer(folder, port=port)
