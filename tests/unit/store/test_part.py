"""Which parts of a step belong to one run."""

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest

from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.store import TraceStore
from megatron_router_replay.store.part import (
    PROCESS_START_NS,
    UNKNOWN_SAVE,
    Runs,
    SavedBy,
    StoredPart,
    distributed_rank,
)
from tests.unit.store.store_traces import assert_same, make_trace


def part(rank, number=0, *, started, saved, run=None, world_size=None):
    saved_by = SavedBy(step=1, rank=rank, run=run, process_start_ns=started, saved_ns=saved, world_size=world_size)
    return StoredPart(
        step=1, rank=rank, part=number, num_tokens=3, layer_numbers=(1,), path=Path("x"), saved_by=saved_by
    )


def split(*parts):
    runs = Runs.of(parts)
    return [(p.rank, p.part) for p in runs.latest], [(p.rank, p.part) for p in runs.earlier], runs.certain


def test_processes_that_ran_at_the_same_time_are_one_run():
    # Rank 1 started after rank 0, and before rank 0 saved.
    assert split(part(0, started=10, saved=50), part(1, started=40, saved=45)) == ([(0, 0), (1, 0)], [], True)


def test_under_torch_distributed_a_part_saved_before_a_rank_started_is_of_an_earlier_run():
    old = [part(rank, started=10, saved=50, world_size=2) for rank in (0, 1)]
    new = part(0, 1, started=60, saved=90, world_size=2)
    assert split(*old, new) == ([(0, 1)], [(0, 0), (1, 0)], True)
    with pytest.raises(StoreError, match=r"latest run has not saved the parts of ranks 1, which an earlier run had"):
        Runs.of([*old, new]).check(1)
    Runs.of([*old, new, part(1, 1, started=61, saved=91, world_size=2)]).check(1)


def test_a_process_that_a_dead_run_left_behind_belongs_to_that_run_however_late_it_saves():
    # Rank 1 of the old run hung, and saved after the new run had started.
    old = part(0, started=10, saved=50, world_size=2)
    late = part(1, started=11, saved=95, world_size=2)
    new = part(0, 1, started=60, saved=90, world_size=2)
    assert split(old, late, new) == ([(0, 1)], [(0, 0), (1, 0)], True)
    with pytest.raises(StoreError, match="parts of ranks 1,"):
        Runs.of([old, late, new]).check(1)


def test_parts_saved_at_one_moment_or_in_the_moment_a_process_started_are_one_run():
    assert split(part(0, started=10, saved=50), part(1, started=50, saved=50)) == ([(0, 0), (1, 0)], [], True)
    assert split(part(0, started=10, saved=49), part(1, started=50, saved=50))[1] == [(0, 0)]


def test_a_process_that_started_when_an_older_part_was_saved_is_as_old():
    parts = [part(0, started=10, saved=50), part(1, started=50, saved=95), part(2, started=60, saved=90)]
    assert split(*parts) == ([(2, 0)], [(0, 0), (1, 0)], False)
    parts[1] = part(1, started=51, saved=95)
    assert split(*parts) == ([(1, 0), (2, 0)], [(0, 0)], False)


def test_parts_that_do_not_say_who_saved_them_are_of_one_run_older_than_any_other():
    unknown = [dataclasses.replace(part(rank, started=1, saved=1), saved_by=UNKNOWN_SAVE) for rank in (0, 1)]
    assert split(*unknown) == ([(0, 0), (1, 0)], [], True)
    assert split(*unknown, part(2, started=1, saved=1)) == ([(2, 0)], [(0, 0), (1, 0)], False)


def test_a_run_resumed_on_fewer_ranks_need_not_save_those_it_does_not_have():
    old = [part(rank, started=10, saved=50, world_size=4) for rank in range(4)]
    new = [part(rank, 1, started=60, saved=90, world_size=2) for rank in range(2)]
    Runs.of([*old, *new]).check(1)
    assert Runs.of([*old, *new]).absent_ranks() == []
    assert Runs.of([*old, new[0]]).absent_ranks() == [1]


def test_without_torch_distributed_processes_one_after_the_other_are_told_apart_by_nobody():
    # Two scripts of one run, or a run and its resumption? To guess would lose parts or mix them.
    parts = [part(0, started=10, saved=50), part(0, 1, started=60, saved=90)]
    assert split(*parts) == ([(0, 1)], [(0, 0)], False)
    with pytest.raises(
        StoreError, match=r"may be of two runs\. rank 0 part 0 had been .* saved rank 0 part 1\. Give all"
    ):
        Runs.of(parts).check(1)


def test_runs_with_names_are_told_apart_by_them_whenever_they_ran():
    old, new = (part(0, i, started=10 + i, saved=50 + i, run=name) for i, name in enumerate("ab"))
    assert split(old, new) == ([(0, 1)], [(0, 0)], True)
    late = part(1, started=99, saved=100, run="a")
    assert split(old, late) == ([(0, 0), (1, 0)], [], True)
    assert split(part(3, started=1, saved=100), new) == ([(0, 1)], [(3, 0)], True)


def test_a_part_says_who_saved_it_in_json_and_back():
    saved = SavedBy.now(step=3, rank=1, run="ü")
    assert SavedBy.from_json(json.loads(json.dumps(saved.to_json()))) == saved
    assert saved.process_start_ns == PROCESS_START_NS < saved.saved_ns <= time.time_ns()


@pytest.mark.parametrize(
    "change", [{"run": 1}, {"step": True}, {"rank": None}, {"world_size": "2"}, {"saved_ns": 1 << 64}]
)
def test_a_forged_one_is_refused(change):
    with pytest.raises(TraceError, match=next(iter(change))):
        SavedBy.from_json(SavedBy.now(step=3, rank=1, run=None).to_json() | change)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the start of a process is read from /proc")
def test_the_process_started_longer_ago_than_it_computed_and_after_the_machine():
    age_ns = time.time_ns() - PROCESS_START_NS
    # What was loaded before this module, torch above all, took this thread seconds; the kernel counts in 10 ms.
    assert age_ns > time.thread_time_ns() - 50e6
    assert age_ns < time.clock_gettime_ns(time.CLOCK_BOOTTIME) - 1e9


def test_without_torch_distributed_there_is_rank_0_alone():
    assert distributed_rank() == (0, None)


def resume(tmp_path):
    """A run saved two ranks in a step; another has saved one of them anew, with routes of other weights."""
    old, new = make_trace(6, seed=0), make_trace(6, seed=1)
    first, second = TraceStore(tmp_path, run="a"), TraceStore(tmp_path, run="b")
    for rank, layers in enumerate([(2, 3), (7,)]):
        first.save(old.select_layers(layers), step=5, rank=rank)
    second.save(new.select_layers((2, 3)), step=5, rank=0)
    return old, new, second


def test_a_step_that_a_resumed_run_saves_anew_is_never_a_mixture(tmp_path):
    old, new, second = resume(tmp_path)
    for attempt in (second.load_step, second.parts):
        with pytest.raises(StoreError, match="has not saved the parts of ranks 1"):
            attempt(5)
    assert [(p.rank, p.saved_by.run) for p in second] == [(0, "a"), (0, "b"), (1, "a")]
    assert_same(second.load_step(5, run="a"), old)
    # Without rank 1 of the new run there are two layers, and no layer of the old run.
    assert_same(second.load_step(5, allow_gaps=True), new.select_layers((2, 3)))
    second.save(new.select_layers((7,)), step=5, rank=1)
    assert_same(second.load_step(5), new)
    assert_same(TraceStore(tmp_path).load_step(5), new)
    assert [(p.rank, p.saved_by.run) for p in second.parts(5)] == [(0, "b"), (1, "b")]
    assert [(p.rank, p.saved_by.run) for p in second.parts(5, run="a")] == [(0, "a"), (1, "a")]
    with pytest.raises(StoreError, match="no part of run 'c'"):
        second.load_step(5, run="c")


def test_absent_ranks_are_named_where_rows_are_missing(tmp_path):
    trace = make_trace(6, token_ids=range(6))
    store = TraceStore(tmp_path, run="a")
    unknown = dataclasses.replace(trace, replay_mask=[True] * 3 + [False] * 3, token_ids=[0, 1, 2, -1, -1, -1])
    store.save(unknown, step=5, rank=0)
    with pytest.raises(TraceError, match=r"cannot merge step 5: 3 of 6 rows are in no part.*There are rank 0 part 0;"):
        store.load_step(5)
    assert store.load_step(5, allow_gaps=True).replay_mask.tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize("run", ["", "x" * 201, 7])
def test_a_run_needs_a_name_of_some_length(tmp_path, run):
    with pytest.raises(StoreError, match="name must be a text"):
        TraceStore(tmp_path, run=run)
