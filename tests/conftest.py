"""Fixtures that all tests share: Megatron-Core in the tests' own process, and pools of gloo workers."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.support.workers import GlooWorkers

if TYPE_CHECKING:
    from tests.support.one_rank import OneRank

# Before torch is loaded. Its tensors are tiny here, and idle OpenMP threads that spin take the processor from the workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch looks up the name of each address that a store connects to, 127.0.0.1 too, and a nameserver that gets a dozen
# questions at once may drop some; each would wait 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
settings.register_profile("any machine", deadline=None)  # a busy machine is no reason to fail
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def no_routers_of_other_tests() -> None:
    """Empty the process-wide list of RouterReplay: it holds on to the routers of earlier tests."""
    if loaded := sys.modules.get("megatron.core.transformer.moe.router_replay"):
        loaded.RouterReplay.clear_global_router_replay_instances()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Seed torch: what a test draws without a generator of its own does not depend on the tests before it."""
    import torch  # not above: it reads OMP_NUM_THREADS once

    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_are_frozen() -> None:
    """Set apart from garbage collection what was there before this module: tests collect thousands of times."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Give back what was set apart: native modules tell at length of objects that the interpreter's end does not free."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def imports_are_frozen() -> None:
    """Set Megatron-Core and torch apart: a collection takes 0.3 s to look through them."""
    import megatron.core.transformer.moe.router  # noqa: F401  # not above: it loads torch

    gc.collect()
    gc.freeze()


@pytest.fixture
def megatron(imports_are_frozen: None) -> Iterator[None]:
    """Make the test the only rank of a gloo group, with Megatron-Core on a CPU."""
    from tests.support.one_rank import only_rank  # not above: it loads torch

    with only_rank():
        yield


@pytest.fixture(scope="session")
def on_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Return a function that runs `fn(*args)` on so many ranks, where it asserts, and returns the results by rank."""

    def run(num_ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        results: list[Any] = request.getfixturevalue(f"workers_{num_ranks}").run(fn, *args)
        return results

    return run


@pytest.fixture(scope="session")
def workers_1(imports_are_frozen: None) -> "OneRank":
    from tests.support.one_rank import OneRank  # not above: it loads torch

    return OneRank()


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
