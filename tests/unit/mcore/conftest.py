"""Many tests here ask the garbage collector for objects that a session left."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.support.workers import GlooWorkers


@pytest.fixture(autouse=True)
def _quick_collections(imports_are_frozen: None) -> None:
    pass


@pytest.fixture(scope="module")
def one_rank():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def gpu_worker() -> Iterator[GlooWorkers]:
    """A process for programs on the GPU made of software, which wants one that has run no backward yet."""
    with GlooWorkers(1) as workers:
        yield workers
