"""Many tests here ask the garbage collector what a session has left behind."""

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _quick_collections(imports_are_frozen: None) -> None:
    pass


@pytest.fixture(scope="module")
def one_rank():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
