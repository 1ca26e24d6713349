"""Whose token each row of a forward is, for every shape of a batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_router_replay.capture import CaptureError, token_positions
from megatron_router_replay.capture.steps import StepPlan, as_positions, iterate_runs


def runs(request_ids, positions, *, query_lengths=None, sequence_first=False):
    found = iterate_runs(
        request_ids, as_positions(positions), query_lengths=query_lengths, sequence_first=sequence_first
    )
    return [(name, list(range(slots.start, slots.stop, slots.step)), position) for name, slots, position in found]


def test_padded_batches():
    assert runs("ab", [[-1, 0, 1], [0, -1, -1]]) == [("a", [1, 2], 0), ("b", [3], 0)]
    assert runs(["a", None, "b"], [[4, 5], [7, 8], [0, 1]]) == [("a", [0, 1], 4), ("b", [4, 5], 0)]
    assert runs("ab", [7, 3]) == runs("ab", [[7], [3]]) == [("a", [0], 7), ("b", [1], 3)]
    assert runs("ab", [-1, 3]) == [("b", [1], 3)]


def test_sequence_first_batches_have_the_slots_of_a_request_a_batch_apart():
    assert runs("ab", [[0, 5], [1, 6], [2, -1]], sequence_first=True) == [("a", [0, 2, 4], 0), ("b", [1, 3], 5)]


def test_packed_batches():
    assert runs("abc", [0, 1, 2, -1, 9], query_lengths=[3, 0, 2]) == [("a", [0, 1, 2], 0), ("c", [4], 9)]
    assert runs([], [], query_lengths=[]) == []


def test_positions_that_jump_are_several_runs():
    assert runs("a", [[3, 4, 0, 1, 1]]) == [("a", [0, 1], 3), ("a", [2, 3], 0), ("a", [4], 1)]


def test_positions_below_minus_one_are_refused():
    with pytest.raises(CaptureError, match="a position is -2"):
        runs("a", [[-2, -1, 0]])


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
def test_masks_of_any_kind(kind):
    mask = kind([[0, 1, 1], [1, 0, 0]])
    assert token_positions(mask).tolist() == [[-1, 0, 1], [0, -1, -1]]


@settings(deadline=None)
@given(st.data(), st.sampled_from(["batch", "sequence_first", "packed"]))
def test_runs_name_exactly_the_tokens_that_are_there(data, shape):
    batch, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    table = [
        data.draw(st.lists(st.integers(-1, 4), min_size=length, max_size=length), label=f"row {row}")
        for row in range(batch)
    ]
    names = [data.draw(st.sampled_from([row, None])) for row in range(batch)]
    by_request = {
        (name, position, row * length + i if shape != "sequence_first" else i * batch + row)
        for row, name in enumerate(names)
        for i, position in enumerate(table[row])
        if name is not None and position >= 0
    }
    if shape == "packed":
        found = runs(names, [p for row in table for p in row], query_lengths=[length] * batch)
    elif shape == "sequence_first":
        found = runs(names, [list(column) for column in zip(*table)], sequence_first=True)
    else:
        found = runs(names, table)
    pairs = [(name, position + i, slot) for name, slots, position in found for i, slot in enumerate(slots)]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == by_request


def test_a_plan_holds_for_its_own_next_step_alone_however_many_came_before():
    ids, first = ["a", None, "b"], np.array([7, -1, 0])
    plan = StepPlan(ids, first, query_lengths=None, sequence_first=False, find=lambda request_id: None)
    for step in range(100):
        now = np.array([7 + step, -1, step])
        assert plan.holds_for(ids, now)
        assert plan.holds_for(ids, now)  # a forward that was cancelled comes again
        assert not plan.holds_for(ids, now + np.array([1, 0, 1]))
        assert not plan.holds_for(ids, now + np.array([0, 0, 1]))
        assert not plan.holds_for(["a", "b", None], now)
        assert plan.advance() == step
        assert not plan.holds_for(ids, now)
