"""A folder of traces by step, run and rank."""

import os

import numpy as np
import pytest
import torch
import xxhash

from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.store import TraceStore, file, load_trace, save_trace
from megatron_router_replay.trace import RoutingTrace
from tests.unit.store.store_traces import assert_same, make_trace


def test_traces_come_back_by_step_run_and_rank(tmp_path):
    store = TraceStore(tmp_path / "new" / "traces", run="a")
    for seed, (step, rank) in enumerate([(12, 1), (np.uint8(3), 0), (12, 0), (torch.tensor(12), 1), (10**9, 0)]):
        path = store.save(make_trace(5, seed=seed), step=step, rank=rank)
        assert_same(load_trace(path), make_trace(5, seed=seed))
    assert str(path.relative_to(store.root)) == "step_1000000000/a.rank_00000.safetensors"
    assert os.listdir(path.parent) == [path.name]
    other = TraceStore(tmp_path / "new" / "traces")
    assert other.steps() == [3, 12, 10**9]
    assert other.runs(12) == ["a"]
    parts = other.parts(torch.tensor(12))
    assert list(parts) == [0, 1]
    assert_same(load_trace(parts[1]), make_trace(5, seed=3))  # the second trace of this rank replaced the first


def test_a_step_is_merged_from_all_ranks(tmp_path):
    store, trace = TraceStore(tmp_path, run="a"), make_trace(6)
    store.save(trace.select_layers([2, 7]), step=1, rank=0)
    store.save(trace.select_layers([3]), step=1, rank=1)
    assert_same(store.load_step(1), trace)
    half = RoutingTrace(topk_indices=[[[0, 1]], [[-1, -1]]], layer_numbers=(1,), num_experts=4)
    path = store.save(half, step=5, rank=7)
    with pytest.raises(TraceError, match=r"cannot merge step 5 of .*: 1 of 2 rows .* There are rank 7;"):
        store.load_step(5)
    assert store.load_step(5, allow_gaps=True).replay_mask.tolist() == [True, False]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=rf"^MRR501: cannot load {path}: "):
        store.load_step(5)


def test_a_step_that_a_resumed_run_saves_again_is_never_a_mixture(tmp_path):
    """A run saved two ranks in a step; another has saved one of them again, with routes of other weights."""
    old, new = make_trace(6, seed=0), make_trace(6, seed=1)
    first, second, reader = (TraceStore(tmp_path, run=run) for run in ("a", "b", None))
    for rank, layers in enumerate([(2, 3), (7,)]):
        first.save(old.select_layers(layers), step=5, rank=rank)
    assert_same(reader.load_step(5), old)
    with pytest.raises(StoreError, match=r"^MRR505: cannot find run 'b' in step 5 .*: runs \[a\] saved it"):
        second.load_step(5)
    second.save(new.select_layers((2, 3)), step=5, rank=0)
    for attempt in (reader.load_step, reader.parts):
        with pytest.raises(StoreError, match=r"^MRR505: cannot find one run in step 5 .*: runs \[a, b\] saved it"):
            attempt(5)
    assert reader.runs(5) == ["a", "b"]
    for chosen in (first.load_step(5), reader.load_step(5, run="a"), second.load_step(5, run="a")):
        assert_same(chosen, old)
    assert_same(second.load_step(5), new.select_layers((2, 3)))  # as far as it came, and no layer of the old run


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    with pytest.raises(StoreError, match=r"^MRR505: cannot find step 4 of .*nothing: it has steps \[\]"):
        TraceStore(tmp_path / "nothing").load_step(4)
    store = TraceStore(tmp_path, run="a")
    store.save(make_trace(), step=2)
    assert store.parts()[0].parent == store.folder(2)
    store.save(make_trace(), step=3)
    for step, attempt in ((None, "one step"), (4, "step 4")):
        with pytest.raises(StoreError, match=rf"^MRR505: cannot find {attempt} of .*: it has steps \[2, 3\]"):
            store.parts(step)


def test_files_of_other_names_are_left_out(tmp_path):
    store = TraceStore(tmp_path, run="a")
    path = store.save(make_trace(3), step=1)
    for name in ("a.rank_0.safetensors", "a.rank_000000.safetensors", ".a.tmp", "rank_00000.safetensors", "x"):
        (path.parent / name).touch()
    (tmp_path / "step_0000000001").mkdir()  # not as step 1 is written
    save_trace(make_trace(3), tmp_path / "step_0000000001" / path.name)
    (tmp_path / "step_000000002").mkdir()  # no file
    assert store.steps() == [1]
    assert store.parts(1) == {0: path}


@pytest.mark.parametrize(
    ("run", "given", "message"),
    [
        ("a", {"step": -1}, r"^MRR101: step=.* must be an integer of 0 or more"),
        ("a", {"step": 1, "rank": True}, r"^MRR101: rank=.* must be an integer of 0 or more"),
        (None, {"step": 1}, r"^MRR505: a store that saves needs the name of its run"),
        *(
            (run, {"step": 1}, r"^MRR505: run=.* must be 1 to 100 letters")
            for run in ("", "x" * 101, "a/b", "..", "a\n")
        ),
    ],
)
def test_names_and_numbers_that_no_file_can_have_are_refused_and_nothing_is_written(tmp_path, run, given, message):
    with pytest.raises((StoreError, TraceError), match=message):
        TraceStore(tmp_path, run=run).save(make_trace(3), **{"rank": 0} | given)
    assert os.listdir(tmp_path) == []
    assert TraceStore(tmp_path, run="x" * 100).save(make_trace(), step=1).exists()


def part_of(trace, first, stop):
    """The part of a rank that routed rows first..stop - 1, and knows nothing of the others."""
    known = torch.zeros(trace.num_tokens, dtype=torch.bool)
    known[first:stop] = True
    values = {
        "token_ids": torch.where(known, trace.token_ids, -1),
        "weight_version": torch.where(known, trace.weight_version, -1),
    }
    return trace._with(replay_mask=trace.replay_mask & known, **values)


def test_a_part_is_saved_with_its_known_rows_alone_and_comes_back_as_it_was(tmp_path):
    store = TraceStore(tmp_path, run="a")
    per_token = {"token_ids": torch.arange(800) % 90, "weight_version": torch.arange(800) // 70}
    trace = make_trace(800, sequence_lengths=[300, 500], **per_token)
    paths = [store.save(part_of(trace, 100 * i, 100 * i + 100), step=1, rank=i) for i in range(8)]
    for i, path in enumerate(paths):
        part = part_of(trace, 100 * i, 100 * i + 100)
        loaded = load_trace(path)
        assert loaded == part
        # Rows without a route have distinct ids, also those that were not saved.
        RoutingTrace(
            topk_indices=loaded.topk_indices, layer_numbers=loaded.layer_numbers, num_experts=loaded.num_experts
        )
        assert load_trace(path, samples=slice(1, 2), layer_numbers=[7]) == part[1].select_layers([7])
    row_bytes = trace.topk_indices[0].nbytes + 1 + 4 + 4
    sizes = [path.stat().st_size for path in paths]
    assert max(sizes) < 100 * (row_bytes + 4) + 1200, "the rows, their numbers and a header"
    assert store.load_step(1) == trace
    whole = store.save(trace, step=2, rank=0)
    assert whole.read_bytes() == save_trace(trace, tmp_path / "x").read_bytes()


@pytest.mark.parametrize("rows", [[1, 1, 5], [5, 2, 1], [1, 2, 8], [-1, 2, 3]])
def test_numbers_of_rows_that_no_part_can_have_raise(tmp_path, monkeypatch, rows):
    store = TraceStore(tmp_path, run="a")
    monkeypatch.setattr(file, "known_rows", lambda trace: torch.tensor([0, 1, 2]))
    path = store.save(make_trace(8), step=1, rank=0)
    content = path.read_bytes()
    numbers = np.array([[0, 1, 2], rows], "<i4")
    sums = [xxhash.xxh3_64_hexdigest(each.tobytes()).encode() for each in numbers]
    path.write_bytes(content.replace(numbers[0].tobytes(), numbers[1].tobytes()).replace(*sums))
    with pytest.raises(StoreError, match=r"MRR503: cannot load .* rows are no increasing numbers below 8"):
        load_trace(path)


def test_a_changed_number_of_a_row_raises(tmp_path):
    path = TraceStore(tmp_path, run="a").save(
        part_of(make_trace(80, token_ids=range(80), weight_version=0), 7, 11), step=1, rank=0
    )
    content = path.read_bytes()
    path.write_bytes(content.replace(np.arange(7, 11, dtype="<i4").tobytes(), np.arange(8, 12, dtype="<i4").tobytes()))
    with pytest.raises(StoreError, match=r"MRR503: cannot load .* the checksum of rows is wrong"):
        load_trace(path)
