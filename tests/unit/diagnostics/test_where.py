"""The parts of the search for facts, each on numbers that can be counted by hand."""

import numpy as np
import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.diagnostics.counting import Counter
from megatron_router_replay.diagnostics.evidence import ReadRows, _spread, set_numbers
from megatron_router_replay.diagnostics.source import open_source
from megatron_router_replay.diagnostics.where import best_runs, expert_names, run_keys
from megatron_router_replay.tables import number_words, percent
from tests.unit.store.store_traces import make_trace


def best_run(weights, segment=None):
    weights = np.array(weights, dtype=float)[:, None]
    segment = np.zeros(len(weights), dtype=int) if segment is None else np.array(segment)
    return tuple(float(value[0]) for value in best_runs(weights, segment))


@pytest.mark.parametrize(
    ("weights", "best"),
    [
        ([1, 1, -5, 2, 2], (4, 3, 4)),
        ([3, 1, -2, 2, -9, 1], (4, 0, 1)),  # the shorter of two equal runs
        ([0, 0, 2, 0, 1, 0], (3, 2, 4)),  # rows that say nothing stay outside of the ends
        ([-1, -2], (-1, 0, 0)),
    ],
)
def test_the_best_run_is_the_one_with_the_greatest_sum(weights, best):
    assert best_run(weights) == best


def test_a_run_never_goes_over_rows_that_were_left_out():
    assert best_run([2, 2, 3, 1], [0, 0, 1, 1]) == (4, 0, 1)
    assert best_run([2, 2, 3, 4], [5, 5, 9, 9]) == (7, 2, 3)


@pytest.mark.parametrize("rows", [1, -64, 65, 700])
def test_a_shift_of_one_layer_is_found_however_far_it_is(rows):
    a = make_trace(2000, layer_numbers=(1, 2), topk=2, num_experts=16)
    b = a.topk_indices.clone()
    b[:, 1] = b[:, 1].roll(rows, 0)
    fact = mrr.diff_traces(a, a._with(topk_indices=b)).facts[0]
    assert (fact.kind, fact.offset) == ("row", -rows)


@pytest.mark.parametrize(("rows", "said"), [(5, []), (6, [(100, 105)])])
def test_fewer_than_six_rows_are_no_fact(rows, said):
    a = make_trace(300, layer_numbers=tuple(range(1, 9)), topk=4, num_experts=32)
    b = a.topk_indices.clone()
    b[100 : 100 + rows] = a.topk_indices[101 : 101 + rows]
    assert [fact.rows for fact in mrr.diff_traces(a, a._with(topk_indices=b)).facts] == said


def test_pieces_are_spread_over_all_of_them():
    sizes = np.full(10, 4)
    assert _spread(np.arange(10), sizes, 40).tolist() == list(range(10))
    assert _spread(np.arange(10), sizes, 39).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    assert _spread(np.arange(10), sizes, 8).tolist() == [0, 9]
    assert _spread(np.array([], dtype=int), sizes, 8).tolist() == []


def test_keys_tell_the_layers_and_the_rows_that_they_are_made_of():
    sets = np.array([[1, 1], [2, 2], [1, 3], [2, 4]], dtype=np.uint64)
    keys = run_keys(sets, 2)
    assert keys[0, 0] == keys[2, 0]
    assert keys[0, 1] != keys[2, 1]  # other sets
    assert keys[0, 0] != keys[0, 1]  # the same sets in another layer
    assert keys[0, 0] != run_keys(sets[[0, 2]], 2)[0, 0]  # the row behind it differs


def test_names_of_experts_are_those_that_stand_where_they_stood():
    a = np.array([[0, 1], [2, 3], [1, 2], [0, 3]] * 10)
    exchanged = np.array([1, 0, 2, 3])[a]
    assert expert_names(a, exchanged, 4).tolist() == [1, 0, 2, 3]
    assert expert_names(a, a, 4) is None
    # An expert that stands in every row stands in nobody's place.
    assert expert_names(a, np.full_like(a, 3), 4) is None
    assert expert_names(a[:4], exchanged[:4], 4) is None


def test_rows_are_read_in_any_order_and_rows_that_are_not_there_have_no_route():
    trace = make_trace(100, layer_numbers=(1,), topk=2, num_experts=8, replay_mask=torch.arange(100) != 7)
    rows = ReadRows(open_source(trace))
    ids, routed = rows.read(np.array([3, -1, 100, 7, 99]))
    assert routed.tolist() == [True, False, False, False, True]
    assert ids[[0, 4]].tolist() == trace.topk_indices[[3, 99]].tolist()
    ids, routed = rows.read(np.array([50, 3]))
    assert ids.tolist() == trace.topk_indices[[50, 3]].tolist()
    numbers = np.arange(1, 9, dtype=np.uint64) << np.uint64(8)
    assert set_numbers(ids, np.array([True, False]), numbers, nothing=5)[:, 0].tolist() == [
        256 * (2 + int(trace.topk_indices[50].sum())),
        5,
    ]


def test_names_of_experts_are_counted_and_said():
    a = make_trace(600, layer_numbers=(2, 3), topk=2, num_experts=16)
    other = ((a.topk_indices.long() + 8) % 16).to(torch.uint8)
    other[0] = a.topk_indices[0]
    (fact,) = mrr.diff_traces(a, a._with(topk_indices=other)).facts
    assert str(fact) == (
        "b names each expert by its id plus 8 (modulo 16), in all layers: so named, 1,198 of 1,200 decisions "
        "are near those of a."
    )


def test_a_pass_counts_rows_of_one_trace_by_sample():
    mask = torch.arange(10) != 3
    a = make_trace(10, sequence_lengths=[4, 6], replay_mask=mask)
    counts = Counter(open_source(a), open_source(make_trace(10)))
    counts.add(0, 10)
    assert counts.by_sample("only_a").tolist() == [0, 0]
    assert counts.by_sample("only_b").tolist() == [1, 0]


def test_per_cent_have_one_format_and_what_is_not_all_does_not_round_to_it():
    shares = (0, 1e-6, 0.01842, 0.99999, 1)
    assert [percent(value) for value in shares] == ["0.00 %", "< 0.01 %", "1.84 %", "> 99.99 %", "100.00 %"]


def test_numbers_are_written_as_runs():
    assert number_words([2, 3, 4, 9, 1]) == "2..4, 9, 1"
    assert number_words(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, ..."
    assert number_words([]) == "none"
