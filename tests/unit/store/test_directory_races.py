"""Threads and processes that save, replace, read and prune at the same time; disks that are full."""

import errno
import itertools
import os
import resource
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_router_replay import RoutingTrace
from megatron_router_replay.errors import StoreError
from megatron_router_replay.store import TraceStore, load_trace, save_trace
from tests.unit.store.store_traces import assert_same, make_trace

NUM_THREADS = 24


def numbered(number, num_tokens=3):
    """A trace that can be told from every other by its token ids."""
    return make_trace(num_tokens, token_ids=[number] * num_tokens)


def numbers_in(store, step):
    return sorted(int(store.load(part).token_ids[0]) for part in store.parts(step))


def test_threads_that_save_at_once_without_part_numbers_keep_all_parts(tmp_path):
    store = TraceStore(tmp_path, run="a")
    together = threading.Barrier(NUM_THREADS)

    def save(number):
        together.wait()
        for step in range(3):
            store.save(numbered(number), step=step)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(save, range(NUM_THREADS)))
    for step in range(3):
        assert numbers_in(store, step) == list(range(NUM_THREADS))
        assert [part.part for part in store.parts(step)] == list(range(NUM_THREADS))
        assert len(os.listdir(tmp_path / f"step_{step:09d}")) == NUM_THREADS


def in_children(count, work):
    """Run work(i) in `count` forked processes at once."""
    pids = []
    for i in range(count):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                torch.set_num_threads(1)  # a fork has none of the threads that torch may have started before
                work(i)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * count


def test_processes_that_save_at_once_as_the_same_rank_keep_all_parts(tmp_path):
    store, starts_at = TraceStore(tmp_path, run="a"), time.monotonic() + 0.5

    def save(process):
        time.sleep(max(0.0, starts_at - time.monotonic()))
        for number in range(3):
            store.save(numbered(10 * process + number), step=1)

    in_children(8, save)
    assert numbers_in(store, 1) == sorted(10 * process + number for process in range(8) for number in range(3))


def test_a_file_that_is_replaced_while_it_is_opened_is_read_whole(tmp_path):
    # Without the waits for the disk that a save makes: thousands of replacements, at every moment of opening.
    traces = [make_trace(3 + number, seed=number) for number in range(4)]
    spare = [save_trace(trace, tmp_path / f"{number}.safetensors") for number, trace in enumerate(traces)]
    path = save_trace(traces[0], tmp_path / "replaced.safetensors")

    def replace():
        for number in itertools.count():
            shutil.copyfile(spare[number % 4], tmp_path / "next")
            os.replace(tmp_path / "next", path)
            if os.getppid() != parent:
                os._exit(0)

    parent, child = os.getpid(), os.fork()
    if not child:
        replace()
    try:
        for _ in range(1000):
            found = load_trace(path)
            assert_same(found, traces[found.num_tokens - 3])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_step_that_is_read_while_it_is_replaced_is_of_one_moment_or_raises(tmp_path):
    # Both parts are replaced again and again, in turns by routes of two seeds: a mixture of them would be a fault.
    stop = threading.Event()
    traces = [make_trace(4, seed=seed, token_ids=[seed] * 4) for seed in range(2)]

    def save(seed):
        for rank, layers in enumerate([(2, 3), (7,)]):
            TraceStore(tmp_path, run=f"run {seed}").save(traces[seed].select_layers(layers), step=1, rank=rank, part=0)

    save(0)

    def replace():
        for number in itertools.count(1):
            save(number % 2)
            if stop.is_set():
                return

    writer = threading.Thread(target=replace)
    writer.start()
    read = 0
    try:
        for _ in range(200):
            try:
                trace = TraceStore(tmp_path).load_step(1)
            except StoreError as error:
                assert "replaced since it was listed" in str(error) or "run 0, run 1 saved it" in str(error)  # noqa: PT017
            else:
                assert_same(trace, traces[int(trace.token_ids[0])])
                read += 1
    finally:
        stop.set()
        writer.join()
    assert read


def test_two_that_prune_at_once_and_one_that_saves_do_not_disturb_each_other(tmp_path):
    store = TraceStore(tmp_path, run="a")
    for step in range(30):
        store.save(make_trace(2), step=step)
    with ThreadPoolExecutor(4) as pool:
        pruned = [pool.submit(TraceStore(tmp_path, run="a").prune, keep_last=10) for _ in range(3)]
        saved = pool.submit(lambda: [store.save(make_trace(2), step=step) for step in range(30, 35)])
        assert all(set(each.result()) <= set(range(25)) for each in pruned)
        saved.result()
    store.prune(keep_last=10)
    assert store.steps() == list(range(25, 35))
    assert sorted(os.listdir(tmp_path)) == [f"step_{step:09d}" for step in range(25, 35)]


def test_a_full_disk_leaves_the_old_part_and_nothing_else(tmp_path):
    # The kernel refuses to write beyond the limit, as it does on a full disk; here within the 16,384 rows of one part.
    store = TraceStore(tmp_path, run="a")
    old = numbered(1)
    store.save(old, step=1, part=0)

    def save_too_much(_):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        for part in (0, None):
            try:
                store.save(make_trace(20_000), step=1, part=part)
            except StoreError as error:
                assert "File too large" in str(error), error  # noqa: PT017
            else:
                raise AssertionError("the limit did not hold")

    in_children(1, save_too_much)
    assert os.listdir(tmp_path / "step_000000001") == ["rank_00000_part_00000.safetensors"]
    assert_same(store.load_step(1), old)


def test_a_file_system_without_hard_links_asks_for_part_numbers(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted")  # what FAT and some FUSE file systems answer

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match=r"no hard links .* part=\.\.\."):
        TraceStore(tmp_path, run="a").save(make_trace(3), step=1)
    assert os.listdir(tmp_path / "step_000000001") == []
    TraceStore(tmp_path, run="a").save(make_trace(3), step=1, part=0)


def test_a_link_that_was_made_though_it_is_said_to_have_failed_is_one_part(tmp_path, monkeypatch):
    real = os.link

    def link(source, target):
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")  # NFS, after a lost answer

    monkeypatch.setattr(os, "link", link)
    store = TraceStore(tmp_path, run="a")
    store.save(make_trace(3), step=1)
    assert [part.part for part in store.parts(1)] == [0]


def test_the_rank_is_taken_from_torch_distributed_else_it_is_0(tmp_path):
    def save(rank):
        torch.distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=rank, world_size=2)
        routes = [[[1, 2]]] if rank == 0 else [[[-1, -1]], [[1, 2]]]
        trace = RoutingTrace(topk_indices=routes, layer_numbers=(1,), num_experts=8)
        assert (
            TraceStore(tmp_path / "store", run="a").save(trace, step=3).name
            == f"rank_0000{rank}_part_00000.safetensors"
        )

    in_children(2, save)
    assert TraceStore(tmp_path / "store").load_step(3).topk_indices.tolist() == [[[1, 2]], [[1, 2]]]
    assert not torch.distributed.is_initialized()
    assert TraceStore(tmp_path, run="a").save(make_trace(2), step=1).name == "rank_00000_part_00000.safetensors"
