import json
import os
import signal
import time

import numpy as np
import pytest
import torch

from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.store import TraceStore, load_trace, save_trace
from megatron_router_replay.trace import concat_traces
from tests.unit.store.store_traces import assert_same, full_trace, make_trace


def test_parts_come_back_by_step_rank_and_part(tmp_path):
    store = TraceStore(tmp_path / "traces")
    saved = {}
    for number, (step, rank) in enumerate([(12, 1), (3, 0), (12, 0), (12, 0)]):
        saved[step, rank, number] = make_trace(5, seed=number)
        store.save(saved[step, rank, number], step=step, rank=rank)
    listed = list(TraceStore(tmp_path / "traces"))
    assert [(part.step, part.rank, part.part) for part in listed] == [(3, 0, 0), (12, 0, 0), (12, 0, 1), (12, 1, 0)]
    for part, key in zip(listed, [(3, 0, 1), (12, 0, 2), (12, 0, 3), (12, 1, 0)]):
        assert_same(store.load(part), saved[key])
        assert_same(
            store.load(part, rows=slice(1, 3), layer_numbers=[3]), saved[key].select_layers([3]).slice_rows(1, 3)
        )
    assert store.steps() == [3, 12]
    assert (listed[0].num_tokens, listed[0].layer_numbers) == (5, (2, 3, 7))


def test_the_folder_is_as_its_specification_says(tmp_path):
    before = time.time_ns()
    TraceStore(tmp_path, run="job 7").save(make_trace(5), step=12, rank=3)
    folder = tmp_path / "step_000000012"
    assert os.listdir(folder) == ["rank_00003_part_00000.safetensors"]
    content = (folder / "rank_00003_part_00000.safetensors").read_bytes()
    fields = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header = json.loads(fields["__metadata__"]["megatron_router_replay.trace"])
    saved_by = header.pop("saved_by")
    assert header == {
        "version": 2,
        "num_tokens": 5,
        "topk": 2,
        "num_experts": 8,
        "layer_numbers": [2, 3, 7],
        "block_rows": 4096,
        "has_token_ids": False,
        "has_weight_version": False,
        "sequence_lengths": None,
        "sample_ids": None,
    }
    assert 0 < saved_by.pop("process_start_ns") < before < saved_by.pop("saved_ns") < time.time_ns()
    assert saved_by == {"step": 12, "rank": 3, "run": "job 7", "world_size": None}


def test_a_part_can_be_read_as_any_trace_file(tmp_path):
    path = TraceStore(tmp_path).save(full_trace(5), step=1)
    assert_same(load_trace(path), full_trace(5))


def test_parts_that_version_0_1_wrote_are_read(tmp_path):
    # The same names, a manifest beside them, and files that do not say who saved them.
    folder = tmp_path / "step_000000012"
    folder.mkdir()
    save_trace(make_trace(5), folder / "rank_00001_part_00000.safetensors")
    (folder / "rank_00001.json").write_text("{}")
    assert [(part.step, part.rank, part.part, part.num_tokens) for part in TraceStore(tmp_path)] == [(12, 1, 0, 5)]
    assert_same(TraceStore(tmp_path).load_step(12, allow_gaps=True), make_trace(5))


def test_a_step_is_merged_from_all_ranks(tmp_path):
    store, trace = TraceStore(tmp_path), make_trace(6)
    store.save(trace.select_layers([2, 7]), step=1, rank=0)
    store.save(trace.select_layers([3]), step=1, rank=1)
    assert_same(store.load_step(1), trace)
    store.save(concat_traces([make_trace(6), make_trace(1)]).select_layers([3]), step=1, rank=2)
    with pytest.raises(TraceError, match="1 rows were recorded in some layers"):
        store.load_step(1)
    assert store.load_step(1, allow_gaps=True).replay_mask.tolist() == [True] * 6 + [False]


def test_saving_a_part_again_replaces_it(tmp_path):
    store = TraceStore(tmp_path)
    store.save(make_trace(3), step=1, part=0)
    store.save(make_trace(4), step=1, part=1)
    store.save(make_trace(5, seed=1), step=1, part=0)
    assert [(part.part, part.num_tokens) for part in store] == [(0, 5), (1, 4)]
    assert_same(store.load(store.parts(1)[0]), make_trace(5, seed=1))


def save_and_be_killed(store, trace, *, part, survive):
    """Save in a process of its own that kill -9 ends before its `survive`-th call into the disk; False if it was."""
    process = os.fork()
    if process == 0:
        calls = 0

        def dying(real):
            def call(*args, **options):
                nonlocal calls
                calls += 1
                if calls == survive:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **options)

            return call

        try:
            for name in ("open", "fsync", "replace", "link", "unlink"):
                setattr(os, name, dying(getattr(os, name)))
            store.save(trace, step=1, rank=0, part=part)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status == 0


@pytest.mark.parametrize("part", [None, 2, 1], ids=["the next part", "a new part", "a part that is replaced"])
def test_a_process_killed_anywhere_in_a_save_loses_that_part_only(tmp_path, part):
    survive, done = 0, False
    while not done:
        survive += 1
        store = TraceStore(tmp_path / str(survive))
        store.save(make_trace(3), step=1, rank=0)
        store.save(make_trace(4), step=1, rank=0)
        done = save_and_be_killed(store, make_trace(50), part=part, survive=survive)

        found = {entry.part: store.load(entry) for entry in store}
        written = found.pop(2 if part is None else part, None)
        assert_same(found.pop(0), make_trace(3))
        if part != 1:
            assert_same(found.pop(1), make_trace(4))
        assert not found
        # A part that is replaced is there at every moment, the old one or the new one.
        assert written is None or written.num_tokens == 50 or (part == 1 and written.num_tokens == 4)
        assert written is not None or (not done and part != 1)
        # The run that resumes saves the part again, and everything is there.
        number = 2 if part is None else part
        store.save(make_trace(50), step=1, rank=0, part=number)
        assert_same(store.load(store.parts(1)[number]), make_trace(50))
    assert survive > 8


def test_pruning_keeps_the_last_steps_or_those_from_a_step_on(tmp_path):
    store = TraceStore(tmp_path)
    for step in (1, 5, 9, 13):
        store.save(make_trace(2), step=step)
    assert store.prune(before=5) == [1]
    assert store.prune(keep_last=2) == [5]
    assert store.prune(keep_last=2) == []
    assert store.steps() == [9, 13]
    assert sorted(os.listdir(tmp_path)) == ["step_000000009", "step_000000013"]
    assert store.prune(keep_last=0) == [9, 13]
    assert list(store) == []


def test_pruning_also_removes_what_an_interrupted_pruning_left(tmp_path):
    (tmp_path / ".pruned_0123").mkdir()
    (tmp_path / ".pruned_0123" / "x").touch()
    TraceStore(tmp_path).prune(keep_last=1)
    assert os.listdir(tmp_path) == []


def test_an_empty_store_has_no_steps(tmp_path):
    assert TraceStore(tmp_path / "nothing").steps() == []
    assert TraceStore(tmp_path / "nothing").prune(keep_last=1) == []
    with pytest.raises(StoreError, match="step_000000004"):
        TraceStore(tmp_path).parts(4)


def test_a_file_of_another_step_or_rank_is_refused(tmp_path):
    store = TraceStore(tmp_path)
    one, other = store.save(make_trace(3), step=1), store.save(make_trace(4), step=2)
    one.write_bytes(other.read_bytes())
    with pytest.raises(StoreError, match=r"step_000000001.*saved as step 2, rank 0\. Was it copied"):
        store.parts(1)
    os.rename(other, other.with_name("rank_00007_part_00000.safetensors"))
    with pytest.raises(StoreError, match=r"rank_00007.*saved as step 2, rank 0\. Was it copied"):
        store.load_step(2)


def test_a_step_under_another_name_is_refused(tmp_path):
    store = TraceStore(tmp_path)
    store.save(make_trace(3), step=1)
    os.rename(tmp_path / "step_000000001", tmp_path / "step_000000002")
    with pytest.raises(StoreError, match="saved as step 1, rank 0"):
        store.parts(2)


def test_a_part_that_was_removed_or_replaced_since_it_was_listed_is_refused(tmp_path):
    store = TraceStore(tmp_path)
    path = store.save(make_trace(3), step=1, part=0)
    listed = store.parts(1)[0]
    store.save(make_trace(3, seed=1), step=1, part=0)
    with pytest.raises(StoreError, match="was replaced since it was listed"):
        store.load(listed)
    path.unlink()
    with pytest.raises(StoreError, match="No such file"):
        store.load(listed)


def test_a_damaged_part_is_named(tmp_path):
    store = TraceStore(tmp_path)
    path = store.save(make_trace(3), step=1)
    path.write_bytes(path.read_bytes()[:-1])
    for attempt in (lambda: store.parts(1), lambda: store.load_step(1), lambda: store.prune(keep_last=0)):
        with pytest.raises(StoreError, match=r"rank_00000_part_00000\.safetensors"):
            attempt()


def test_other_names_in_the_folders_are_not_parts(tmp_path):
    store = TraceStore(tmp_path)
    path = store.save(make_trace(3), step=1)
    for name in ("rank_0_part_0.safetensors", "rank_000000_part_00000.safetensors", ".a.tmp", "rank_00000.json", "x"):
        (path.parent / name).touch()
    (tmp_path / "step_0000000001").mkdir()  # not as step 1 is written
    (tmp_path / "step_0000000001" / path.name).touch()
    (tmp_path / "step_000000002").mkdir()  # no part
    assert store.steps() == [1]
    assert len(list(store)) == 1


LARGE = [10**9, 10**15, 1_763_777_777_000_000_000, 2**63 - 1]


@pytest.mark.parametrize("number", [*LARGE, np.int64(12), np.uint8(255), np.int64(2**62), torch.tensor(7)])
def test_numbers_of_any_size_and_type_are_listed_loaded_and_pruned(tmp_path, number):
    store = TraceStore(tmp_path)
    for rank in (0, number):
        store.save(make_trace(3), step=number, rank=rank, part=number)
    assert store.steps() == [int(number)]
    assert [(p.step, p.rank, p.part) for p in store] == [(int(number), rank, int(number)) for rank in (0, int(number))]
    assert_same(store.load_step(number), make_trace(3))
    assert store.prune(before=int(number)) == []
    assert store.prune(keep_last=0) == [int(number)]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["step", "rank", "part"])
@pytest.mark.parametrize("number", [-1, np.int64(-5), 2**63, 10**30, 1.0, "3", None], ids=repr)
def test_other_numbers_are_refused_and_nothing_is_written(tmp_path, name, number):
    if number is None and name != "step":
        return  # the default
    numbers = {"step": 1, "rank": 0, "part": 0} | {name: number}
    with pytest.raises(StoreError, match=rf"{name}.*must (be an integer|lie in 0\.\.9223372036854775807)"):
        TraceStore(tmp_path).save(make_trace(3), **numbers)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("options", [{}, {"keep_last": 1, "before": 2}, {"keep_last": -1}])
def test_what_to_prune_must_be_clear(tmp_path, options):
    with pytest.raises(StoreError, match="give one of"):
        TraceStore(tmp_path).prune(**options)


def test_pruning_keeps_what_was_saved_last_whatever_its_number(tmp_path):
    # A run came to step 200, was resumed at 100, and its disk may hold two steps.
    store = TraceStore(tmp_path)
    for step in (199, 200, 101, 102):
        store.save(make_trace(2), step=step)
    assert store.prune(keep_last=2) == [199, 200]
    assert store.steps() == [101, 102]
    store.save(make_trace(2), step=103)
    store.save(make_trace(2), step=101, rank=1)  # one part of it is fresher than all of 102
    assert store.prune(keep_last=2) == [102]
