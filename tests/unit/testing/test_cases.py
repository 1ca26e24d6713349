"""A case on ranks of Megatron-Core leaves no threads in its process."""

import os
import time

import torch

from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL
from tests.support.one_rank import only_rank
from tests.trainers import small_model


def train_once():
    with only_rank():
        (chunk,) = small_model.build(ParallelSizes(), **FULL)
        tokens = torch.arange(8)[None]
        chunk(tokens, tokens, None, labels=tokens).sum().backward()
        return num_threads()


def num_threads():
    return len(os.listdir("/proc/self/task"))


def test_the_groups_of_a_case_that_trained_leave_no_threads():
    """They poll: those of a thousand tests take the processor from every later one."""
    train_once()
    before = num_threads()
    assert train_once() > before + 20, "a group has three"
    deadline = time.monotonic() + 20  # the system lists threads for a moment after their end
    while num_threads() > before + 2:  # other tests' threads may come and go
        assert time.monotonic() < deadline, num_threads() - before
        time.sleep(0.05)
