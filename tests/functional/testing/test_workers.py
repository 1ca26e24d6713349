"""The pool that other tests run in: results by rank, each case alone, a rank that fails or hangs named with its stack."""

import os

import pytest
import torch
import torch.distributed as dist

from megatron_router_replay.testing.cpu import is_active
from tests.functional.testing.failing import die, on_rank_1, raise_error, wait_for_ever
from tests.support.workers import GlooWorkers, WorkersError


def rank_and_sum():
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return os.getpid(), dist.get_rank(), total, is_active(), torch.get_num_threads()


def leave_state_behind():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
    from megatron.core.transformer.moe.router_replay import RouterReplay

    from megatron_router_replay.testing import ParallelSizes

    found = (
        parallel_state.model_parallel_is_initialized(),
        get_cuda_rng_tracker().is_initialized(),
        dict(get_moe_layer_wise_logging_tracker()),
        len(RouterReplay.global_router_replay_instances),
        torch.initial_seed(),
        torch.rand(1).item(),
    )
    ParallelSizes(tp_size=2).initialize()
    get_moe_layer_wise_logging_tracker()["load_balancing_loss"] = {}
    RouterReplay.global_router_replay_instances.append(None)
    return found


def test_results_come_back_by_rank_from_processes_that_stay(workers_2):
    results = workers_2.run(rank_and_sum)
    assert [result[1:] for result in results] == [(rank, torch.tensor([3.0]), True, 1) for rank in range(2)]
    assert [result[0] for result in workers_2.run(rank_and_sum)] == [result[0] for result in results]


def test_a_case_finds_nothing_of_the_one_before(workers_2):
    first, second = workers_2.run(leave_state_behind), workers_2.run(leave_state_behind)
    assert first == second
    assert first[0][:4] == (False, False, {}, 0)


@pytest.mark.parametrize(
    ("how", "message", "timeout_s"),
    [
        (raise_error, r"(?s)rank 0.*rank 1 raised:.*rank one is unhappy", 60.0),
        (die, r"(?s)rank 1 died \(exit code 3\)", 60.0),
        (wait_for_ever, r"(?s)rank 1 was still running.*in wait_for_ever", 2.0),
    ],
)
def test_a_rank_that_fails_is_named_and_its_pool_ended(how, message, timeout_s):
    with GlooWorkers(2) as workers:
        with pytest.raises(WorkersError, match=message):
            workers.run(on_rank_1, how, timeout_s=timeout_s)
        assert workers.process_ids == []
