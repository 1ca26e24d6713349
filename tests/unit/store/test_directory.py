"""A folder of parts by step, rank and part, and the runs that saved them."""

import json
import os
import signal

import numpy as np
import pytest
import torch

from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.store import TraceStore, load_trace, save_trace
from megatron_router_replay.trace import RoutingTrace, concat_traces
from tests.unit.store.store_traces import assert_same, full_trace, make_trace


def test_parts_come_back_by_step_rank_and_part(tmp_path):
    store = TraceStore(tmp_path / "traces", run="a")
    saved = {}
    for number, (step, rank) in enumerate([(12, 1), (3, 0), (12, 0), (12, 0)]):
        saved[step, rank, number] = make_trace(5, seed=number)
        store.save(saved[step, rank, number], step=step, rank=rank)
    listed = list(TraceStore(tmp_path / "traces"))
    assert [(part.step, part.rank, part.part) for part in listed] == [(3, 0, 0), (12, 0, 0), (12, 0, 1), (12, 1, 0)]
    for part, key in zip(listed, [(3, 0, 1), (12, 0, 2), (12, 0, 3), (12, 1, 0)]):
        assert_same(store.load(part), saved[key])
        assert_same(store.load(part, rows=slice(1, 3), layer_numbers=[3]), saved[key].select_layers([3])[1:3])
    assert store.steps() == [3, 12]
    assert (listed[0].num_tokens, listed[0].layer_numbers) == (5, (2, 3, 7))


def test_the_folder_is_as_its_specification_says(tmp_path):
    TraceStore(tmp_path, run="job 7").save(make_trace(5), step=12, rank=3)
    folder = tmp_path / "step_000000012"
    assert os.listdir(folder) == ["rank_00003_part_00000.safetensors"]
    content = (folder / "rank_00003_part_00000.safetensors").read_bytes()
    fields = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header = json.loads(fields["__metadata__"]["megatron_router_replay.trace"])
    assert header == {
        "version": 3,
        "saved_by": {"step": 12, "rank": 3, "run": "job 7"},
        "num_tokens": 5,
        "topk": 2,
        "num_experts": 8,
        "layer_numbers": [2, 3, 7],
        "block_rows": 16384,
        "has_token_ids": False,
        "has_weight_version": False,
        "sequence_lengths": None,
        "sample_ids": None,
    }


def test_a_part_can_be_read_as_any_trace_file(tmp_path):
    path = TraceStore(tmp_path, run="a").save(full_trace(5), step=1)
    assert_same(load_trace(path), full_trace(5))


def test_a_step_is_merged_from_all_ranks(tmp_path):
    store, trace = TraceStore(tmp_path, run="a"), make_trace(6)
    store.save(trace.select_layers([2, 7]), step=1, rank=0)
    store.save(trace.select_layers([3]), step=1, rank=1)
    assert_same(store.load_step(1), trace)
    store.save(concat_traces([make_trace(6), make_trace(1)]).select_layers([3]), step=1, rank=2)
    with pytest.raises(TraceError, match="1 rows were recorded in some layers"):
        store.load_step(1)
    assert store.load_step(1, allow_gaps=True).replay_mask.tolist() == [True] * 6 + [False]


def test_saving_a_part_again_replaces_it(tmp_path):
    store = TraceStore(tmp_path, run="a")
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
        store = TraceStore(tmp_path / str(survive), run="a")
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


def test_pruning_keeps_the_steps_that_were_saved_last(tmp_path):
    store = TraceStore(tmp_path, run="a")
    for step in (1, 5, 9, 13):
        store.save(make_trace(2), step=step)
    assert store.prune(keep_last=9) == []
    assert store.prune(keep_last=2) == [1, 5]
    assert sorted(os.listdir(tmp_path)) == ["step_000000009", "step_000000013"]
    for wrong in (-1, 1.0, True):
        with pytest.raises(StoreError, match=r"keep_last=.* must be an integer"):
            store.prune(keep_last=wrong)
    assert store.prune(keep_last=0) == [9, 13]
    assert list(store) == []


def test_pruning_also_removes_what_an_interrupted_pruning_left(tmp_path):
    (tmp_path / ".pruned_0123").mkdir()
    (tmp_path / ".pruned_0123" / "x").touch()
    TraceStore(tmp_path, run="a").prune(keep_last=1)
    assert os.listdir(tmp_path) == []


def test_an_empty_store_has_no_steps(tmp_path):
    assert TraceStore(tmp_path / "nothing").steps() == []
    assert TraceStore(tmp_path / "nothing").prune(keep_last=1) == []
    with pytest.raises(StoreError, match=r"cannot load step 4 of .*nothing: it has no part; there is no such folder\."):
        TraceStore(tmp_path / "nothing").load_step(4)
    with pytest.raises(StoreError, match=r"cannot load step 4 of .*: it has no part; the folder has steps \[\]\."):
        TraceStore(tmp_path).parts(4)
    for step in range(1, 4):
        TraceStore(tmp_path, run="a").save(make_trace(), step=step)
    with pytest.raises(
        StoreError, match=r"cannot load step 4 of .*: it has no part; the folder has steps \[1, 2, 3\]\."
    ):
        TraceStore(tmp_path).load_step(4)


def test_a_file_of_another_step_or_rank_is_refused(tmp_path):
    store = TraceStore(tmp_path, run="a")
    one, other = store.save(make_trace(3), step=1), store.save(make_trace(4), step=2)
    one.write_bytes(other.read_bytes())
    with pytest.raises(StoreError, match=r"step_000000001.*saved as step 2, rank 0\. Was it copied"):
        store.parts(1)
    save_trace(make_trace(3), one)
    with pytest.raises(StoreError, match=r"saved as no part of a store\. Was it copied"):
        store.parts(1)
    os.rename(other, other.with_name("rank_00007_part_00000.safetensors"))
    with pytest.raises(StoreError, match=r"rank_00007.*saved as step 2, rank 0\. Was it copied"):
        store.load_step(2)


def test_a_part_that_was_removed_or_replaced_since_it_was_listed_is_refused(tmp_path):
    store = TraceStore(tmp_path, run="a")
    path = store.save(make_trace(3), step=1, part=0)
    listed = store.parts(1)[0]
    store.save(make_trace(3, seed=1), step=1, part=0)
    with pytest.raises(StoreError, match="was replaced since it was listed"):
        store.load(listed)
    path.unlink()
    with pytest.raises(StoreError, match="No such file"):
        store.load(listed)


def test_a_damaged_part_is_named(tmp_path):
    store = TraceStore(tmp_path, run="a")
    path = store.save(make_trace(3), step=1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"cannot list .*rank_00000_part_00000\.safetensors: .* truncated"):
        store.load_step(1)
    assert store.prune(keep_last=0) == [1]


def test_other_names_in_the_folders_are_not_parts(tmp_path):
    store = TraceStore(tmp_path, run="a")
    path = store.save(make_trace(3), step=1)
    for name in ("rank_0_part_0.safetensors", "rank_000000_part_00000.safetensors", ".a.tmp", "rank_00000.json", "x"):
        (path.parent / name).touch()
    (tmp_path / "step_0000000001").mkdir()  # not as step 1 is written
    (tmp_path / "step_0000000001" / path.name).touch()
    (tmp_path / "step_000000002").mkdir()  # no part
    assert store.steps() == [1]
    assert len(list(store)) == 1


@pytest.mark.parametrize("number", [1, 10**9, 2**63 - 1, np.uint8(255), np.int64(2**62), torch.tensor(7)])
def test_numbers_of_any_size_and_type_are_listed_loaded_and_pruned(tmp_path, number):
    store = TraceStore(tmp_path, run="a")
    for rank in (0, number):
        store.save(make_trace(3), step=number, rank=rank, part=number)
    assert store.steps() == [int(number)]
    assert [(p.step, p.rank, p.part) for p in store] == [(int(number), rank, int(number)) for rank in (0, int(number))]
    assert_same(store.load_step(number), make_trace(3))
    assert store.prune(keep_last=0) == [int(number)]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["step", "rank", "part"])
@pytest.mark.parametrize("number", [-1, np.int64(-5), 2**63, 1.0, "3", True, None], ids=repr)
def test_other_numbers_are_refused_and_nothing_is_written(tmp_path, name, number):
    if number is None and name != "step":
        return  # the default
    numbers = {"step": 1, "rank": 0, "part": 0} | {name: number}
    with pytest.raises(StoreError, match=rf"{name}=.* must be an integer in 0\.\.9223372036854775807"):
        TraceStore(tmp_path, run="a").save(make_trace(3), **numbers)
    assert os.listdir(tmp_path) == []


def test_pruning_keeps_what_was_saved_last_whatever_its_number(tmp_path):
    # A run came to step 200, was resumed at 100, and its disk may hold two steps.
    store = TraceStore(tmp_path, run="a")
    for step in (199, 200, 101, 102):
        store.save(make_trace(2), step=step)
    assert store.prune(keep_last=2) == [199, 200]
    assert store.steps() == [101, 102]
    store.save(make_trace(2), step=103)
    store.save(make_trace(2), step=101, rank=1)  # one part of it is fresher than all of 102
    assert store.prune(keep_last=2) == [102]


@pytest.mark.parametrize("run", [None, "", "x" * 201, 7])
def test_a_run_that_saves_needs_a_name_of_some_length(tmp_path, run):
    with pytest.raises(
        StoreError, match=r"a run's name must be a text of 1 to 200 .* TraceStore\(root, run='job-17'\)"
    ):
        TraceStore(tmp_path, run=run).save(make_trace(), step=1)
    assert os.listdir(tmp_path) == []
    TraceStore(tmp_path, run="x" * 200).save(make_trace(), step=1)
    assert TraceStore(tmp_path).load_step(1).num_tokens == 7


def test_a_step_that_a_resumed_run_saves_anew_is_never_a_mixture(tmp_path):
    """A run saved two ranks in a step; another has saved one of them anew, with routes of other weights."""
    old, new = make_trace(6, seed=0), make_trace(6, seed=1)
    first, second = TraceStore(tmp_path, run="a"), TraceStore(tmp_path, run="b")
    for rank, layers in enumerate([(2, 3), (7,)]):
        first.save(old.select_layers(layers), step=5, rank=rank)
    second.save(new.select_layers((2, 3)), step=5, rank=0)
    for attempt in (second.load_step, second.parts):
        with pytest.raises(StoreError, match=r"cannot load step 5 .*: runs a, b saved it\. Name the one"):
            attempt(5)
    assert [(p.rank, p.part, p.run) for p in second] == [(0, 0, "a"), (0, 1, "b"), (1, 0, "a")]
    assert_same(second.load_step(5, run="a"), old)
    assert_same(
        second.load_step(5, run="b"), new.select_layers((2, 3))
    )  # as far as it came, and no layer of the old run
    with pytest.raises(StoreError, match="it has no part of run 'c', of a, b"):
        second.load_step(5, run="c")
    # Under the numbers of the old run's parts the new one takes their place.
    for rank, layers in enumerate([(2, 3), (7,)]):
        TraceStore(tmp_path, run="c").save(new.select_layers(layers), step=5, rank=rank, part=0)
    assert [(p.rank, p.part, p.run) for p in second] == [(0, 0, "c"), (0, 1, "b"), (1, 0, "c")]


def test_what_a_merge_misses_is_said_with_step_run_ranks_and_parts(tmp_path):
    store = TraceStore(tmp_path, run="a")
    half = RoutingTrace(topk_indices=[[[0, 1]], [[-1, -1]]], layer_numbers=(1,), num_experts=4)
    store.save(half, step=5)
    with pytest.raises(TraceError, match=r"cannot merge step 5 of run 'a': 1 of 2 rows .* There are rank 0 part 0;"):
        store.load_step(5)
    assert store.load_step(5, allow_gaps=True).replay_mask.tolist() == [True, False]
