"""Fixtures that all tests share: pools of gloo workers, started by the first test that runs something in them."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from megatron_router_replay.testing import GlooWorkers

# Before torch is loaded. Its tensors are tiny here, and idle OpenMP threads that spin take the processor from the workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("any machine", deadline=None)  # a busy machine is no reason to fail
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def no_routers_of_other_tests() -> None:
    """Empty the process-wide lists of RouterReplay, ours and Megatron's: they hold on to the routers of earlier tests."""
    for module in ("megatron_router_replay.router_replay", "megatron.core.transformer.moe.router_replay"):
        if loaded := sys.modules.get(module):
            loaded.RouterReplay.clear_global_router_replay_instances()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Seed torch: what a test draws without a generator of its own does not depend on the tests before it."""
    import torch  # not above: it reads OMP_NUM_THREADS once

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def workers_1() -> Iterator[GlooWorkers]:
    with GlooWorkers(1) as workers:
        yield workers


@pytest.fixture(scope="session")
def workers_2() -> Iterator[GlooWorkers]:
    with GlooWorkers(2) as workers:
        yield workers


@pytest.fixture(scope="session")
def workers_4() -> Iterator[GlooWorkers]:
    with GlooWorkers(4) as workers:
        yield workers


@pytest.fixture(scope="session")
def checkpoints_dir() -> Path:
    """Tiny Hugging Face checkpoints: qwen3moe (layer 1 of 4 is dense) and qwen3moe_sparse."""
    return Path(__file__).parent / "data" / "checkpoints"
