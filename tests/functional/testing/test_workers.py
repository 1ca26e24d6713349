import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_router_replay.testing import GlooWorkers, WorkersError
from megatron_router_replay.testing.cpu import is_active


def rank_and_sum():
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_rank(), total, is_active(), torch.get_num_threads()


def process_id():
    return os.getpid()


def raise_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")
    dist.barrier()


def die_on_rank_0():
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_ever_on_rank_0():
    while dist.get_rank() == 0:
        time.sleep(0.05)


def return_what_cannot_be_pickled():
    return lambda: None


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


def leave_threads_behind():
    for _ in range(70):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def return_a_view(tensor):
    return {"view": tensor[1:], "device": tensor.device.type}


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_results_come_back_by_rank_from_one_process_group(workers_2):
    results = workers_2.run(rank_and_sum)
    assert results == [(0, torch.tensor([3.0]), True, 1), (1, torch.tensor([3.0]), True, 1)]


def test_the_pool_stays_for_the_next_run(workers_2):
    assert workers_2.run(process_id) == workers_2.run(process_id) == workers_2.process_ids


def test_a_case_finds_nothing_of_the_one_before(workers_2):
    first, second = workers_2.run(leave_state_behind), workers_2.run(leave_state_behind)
    assert first == second
    assert first[0][:4] == (False, False, {}, 0)


def test_tensors_travel_by_value_and_no_file_stays_open(workers_2):
    workers_2.run(return_a_view, torch.arange(3))
    before = open_files()
    for _ in range(5):
        for result in workers_2.run(return_a_view, torch.arange(3)):
            assert result["view"].tolist() == [1, 2]
            assert not result["view"].is_shared()
    assert open_files() == before


def test_workers_that_keep_many_threads_make_way_for_others():
    # Threads of process groups that outlive their case poll for ever, and would slow every later case.
    with GlooWorkers(2) as workers:
        before = workers.run(process_id)
        workers.run(leave_threads_behind)
        assert not set(before) & set(workers.run(process_id))


def test_every_failure_is_reported_and_followed_by_a_fresh_pool():
    with GlooWorkers(2) as workers:
        first = workers.run(process_id)
        start = time.monotonic()
        with pytest.raises(WorkersError, match=r"(?s)rank 0.*rank 1 raised:.*rank one is unhappy"):
            workers.run(raise_on_rank_1)
        assert time.monotonic() - start < 30
        assert all(is_gone(pid) for pid in first)

        second = workers.run(process_id)
        assert set(second).isdisjoint(first)
        with pytest.raises(WorkersError, match=r"(?s)rank 0 died \(exit code -9\)"):
            workers.run(die_on_rank_0)
        assert all(is_gone(pid) for pid in second)

        third = workers.run(process_id)
        with pytest.raises(WorkersError, match=r"(?s)rank 0 was still running.*in wait_for_ever_on_rank_0"):
            workers.run(wait_for_ever_on_rank_0, timeout_s=2.0)
        assert all(is_gone(pid) for pid in third)

        with pytest.raises(WorkersError, match="pickle"):
            workers.run(return_what_cannot_be_pickled)
        assert workers.process_ids == []
        fourth = workers.run(process_id)
    assert all(is_gone(pid) for pid in fourth)


def test_workers_in_the_middle_of_a_run_end_with_a_parent_that_was_killed(tmp_path):
    code = (
        "import os, signal, threading, time\n"
        "from megatron_router_replay.testing import GlooWorkers\n"
        "workers = GlooWorkers(2)\n"
        "workers.run(os.getpid)\n"
        "print(*workers.process_ids, flush=True)\n"
        "threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "workers.run(time.sleep, 100)\n"
    )
    # What is killed leaves its temporary folders behind. Not in tmp_path, too long for the path of a fork server's socket.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": folder}
        with open(tmp_path / "ids", "w") as file:  # not a pipe: waiting for its end would wait for the workers
            subprocess.run([sys.executable, "-c", code], env=environment, stdout=file, check=False)
        worker_ids = [int(word) for word in (tmp_path / "ids").read_text().split()]
        assert len(worker_ids) == 2
        deadline = time.monotonic() + 60
        while not all(is_gone(pid) for pid in worker_ids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert all(is_gone(pid) for pid in worker_ids)


def test_a_function_that_another_process_cannot_find_raises_at_once():
    workers = GlooWorkers(2)
    with pytest.raises(ValueError, match="top level"):
        workers.run(lambda: 1)
    assert workers.process_ids == []
