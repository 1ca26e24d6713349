import json
import os
import signal
import zlib

import pytest
import torch

from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.store import TraceStore
from megatron_router_replay.store import directory as directory_module
from megatron_router_replay.trace import concat_traces
from tests.unit.store.store_traces import assert_same, make_trace


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
    TraceStore(tmp_path).save(make_trace(5), step=12, rank=3)
    folder = tmp_path / "step_000000012"
    assert sorted(os.listdir(folder)) == ["rank_00003.json", "rank_00003_part_00000.safetensors"]
    manifest = {
        "format": "megatron_router_replay.manifest",
        "version": 1,
        "step": 12,
        "rank": 3,
        "parts": [{"part": 0, "num_tokens": 5, "layer_numbers": [2, 3, 7]}],
    }
    canonical = (
        b'{"format":"megatron_router_replay.manifest","parts":[{"layer_numbers":[2,3,7],"num_tokens":5,"part":0}],'
        b'"rank":3,"step":12,"version":1}'
    )
    assert json.loads((folder / "rank_00003.json").read_text()) == manifest | {"crc32": zlib.crc32(canonical)}


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
    """Save in a process of its own that kill -9 ends before its `survive`-th os.open, fsync or replace; False if it was."""
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
            for name in ("open", "fsync", "replace"):
                setattr(os, name, dying(getattr(os, name)))
            store.save(trace, step=1, rank=0, part=part)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status == 0


@pytest.mark.parametrize("part", [2, 1], ids=["a new part", "a part that is replaced"])
def test_a_process_killed_anywhere_in_a_save_loses_that_part_only(tmp_path, part):
    survive, done = 0, False
    while not done:
        survive += 1
        store = TraceStore(tmp_path / str(survive))
        store.save(make_trace(3), step=1, rank=0)
        store.save(make_trace(4), step=1, rank=0)
        done = save_and_be_killed(store, make_trace(50), part=part, survive=survive)

        found = {entry.part: store.load(entry) for entry in store}
        written = found.pop(part, None)
        assert_same(found.pop(0), make_trace(3))
        if part == 2:
            assert_same(found.pop(1), make_trace(4))
        assert not found
        assert written is None or written.num_tokens == 50 or (part == 1 and written.num_tokens == 4)
        assert written is not None or not done
        # The run that resumes saves the part again, and everything is there.
        store.save(make_trace(50), step=1, rank=0, part=part)
        assert_same(store.load(store.parts(1)[part]), make_trace(50))
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


def test_a_missing_or_foreign_file_that_the_manifest_names_raises(tmp_path):
    store = TraceStore(tmp_path)
    one, other = store.save(make_trace(3), step=1), store.save(make_trace(4), step=2)
    one.write_bytes(other.read_bytes())
    with pytest.raises(StoreError, match=r"4 tokens .* its manifest says 3"):
        store.load_step(1)
    one.unlink()
    with pytest.raises(StoreError, match="No such file"):
        store.load_step(1)


def test_every_altered_byte_of_a_manifest_is_found(tmp_path):
    store = TraceStore(tmp_path)
    store.save(make_trace(3), step=1)
    path = tmp_path / "step_000000001" / "rank_00000.json"
    good = path.read_bytes()
    for position in range(len(good)):
        for damaged in (good[:position], good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :]):
            path.write_bytes(damaged)
            try:
                parts = store.parts(1)
            except StoreError as error:
                assert "rank_00000.json" in str(error)  # noqa: PT017
            else:
                assert [part.num_tokens for part in parts] == [3]


def test_a_manifest_of_another_step_is_refused(tmp_path):
    store = TraceStore(tmp_path)
    store.save(make_trace(3), step=1)
    os.rename(tmp_path / "step_000000001", tmp_path / "step_000000002")
    with pytest.raises(StoreError, match="not the manifest of step 2, rank 0"):
        store.parts(2)


@pytest.mark.parametrize("entry", [{"part": -1}, {"part": "../x"}, {"layer_numbers": [1.5]}, {"num_tokens": None}])
def test_a_forged_manifest_is_refused(tmp_path, entry):
    store = TraceStore(tmp_path)
    store.save(make_trace(3), step=1)
    good = {"part": 0, "num_tokens": 3, "layer_numbers": [2, 3, 7]}
    directory_module._write_manifest(tmp_path / "step_000000001" / "rank_00000.json", 1, 0, [good | entry])
    with pytest.raises(StoreError, match="no manifest"):
        store.parts(1)


@pytest.mark.parametrize("options", [{}, {"keep_last": 1, "before": 2}, {"keep_last": -1}])
def test_what_to_prune_must_be_clear(tmp_path, options):
    with pytest.raises(StoreError, match="give one of"):
        TraceStore(tmp_path).prune(**options)


@pytest.mark.parametrize("options", [{"step": -1}, {"step": 1, "rank": -1}, {"step": 1, "part": -1}])
def test_negative_numbers_are_refused(tmp_path, options):
    with pytest.raises(StoreError, match="from 0, please"):
        TraceStore(tmp_path).save(make_trace(), **options)


def test_ranks_write_at_the_same_time_without_a_lock(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    store = TraceStore(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda rank: [store.save(make_trace(3), step=s, rank=rank) for s in range(3)], range(8)))
    assert len(list(store)) == 24
    assert all(torch.equal(store.load(part).topk_indices, make_trace(3).topk_indices) for part in store)
