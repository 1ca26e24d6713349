"""run_ranks(): a function as every rank of new processes; what goes wrong in one of them is raised here."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.testing import run_ranks
from megatron_router_replay.testing.cpu import is_active


def on_rank_1(how):
    if dist.get_rank() == 1:
        how()
    dist.barrier()


def raise_error():
    raise ValueError("rank one is unhappy")


def die():
    os._exit(3)


def wait_for_ever():
    time.sleep(600)


def rank_and_sum(numbers):
    total = numbers * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return dist.get_rank(), total, torch.rand(1).item(), is_active(), torch.get_num_threads()


def test_every_rank_runs_the_function_and_returns_its_result():
    numbers = torch.tensor([1.0, 2.0])
    first, second = run_ranks(2, rank_and_sum, numbers, seed=5)
    torch.manual_seed(5)
    drawn = torch.rand(1).item()
    for rank, (number, total, seeded, on_cpu, num_threads) in enumerate([first, second]):
        assert (number, total.tolist(), seeded, on_cpu, num_threads) == (rank, [3.0, 6.0], drawn, True, 1)
    assert numbers.tolist() == [1.0, 2.0]
    assert not numbers.is_shared()


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [(raise_error, ProcessRaisedException, "rank one is unhappy"), (die, ProcessExitedException, "exit code 3")],
)
def test_a_rank_that_raises_or_dies_ends_the_others(how, error, words):
    with pytest.raises(error, match=words):
        run_ranks(2, on_rank_1, how)


def test_ranks_that_do_not_end_in_time_are_ended():
    with pytest.raises(RouterReplayError, match="on_rank_1 did not end on 2 ranks within 2 s"):
        run_ranks(2, on_rank_1, wait_for_ever, timeout_s=2.0)
