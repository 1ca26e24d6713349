"""compare_positions: what it counts, by hand; and what it refuses."""

from __future__ import annotations

import pytest
import torch

from megatron_router_replay.errors import TraceError
from megatron_router_replay.indexer import PositionTrace, compare_positions
from tests.unit.indexer.choices import choose

OWN = [0, 1, 2, 3, 4, 5, 6, -1]


def make(chosen, own=OWN, layers=(2, 5)):
    return PositionTrace.from_positions(chosen, positions_in_sample=own, layer_numbers=layers, topk=chosen.shape[2])


def chosen(seed=0):
    positions = choose([max(position, 0) for position in OWN], num_layers=2, topk=4, seed=seed)
    positions[7] = -1
    return positions


def test_a_trace_does_not_differ_from_itself():
    diff = compare_positions(make(chosen()), make(chosen().flip(2)))
    assert not diff
    assert diff.rows_compared == 3
    assert diff.agreement_by_layer.tolist() == diff.overlap_by_layer.tolist() == [1, 1]
    assert diff.first_by_layer == (None, None)


@pytest.mark.parametrize("block", [1, 8, 1 << 22])
def test_sets_are_counted_by_hand(monkeypatch, block):
    monkeypatch.setattr("megatron_router_replay.indexer.compare._BLOCK", block)
    a, b = chosen(), chosen()
    for positions, keys in ((a, [0, 1, 2, 3]), (b, [3, 4, 5, 2])):
        positions[5:7, 1] = torch.tensor(keys)
    b[6, 1] = torch.tensor([6, 5, 4, 0])
    diff = compare_positions(make(a), make(b))
    assert diff
    assert diff.agreement_by_layer.tolist() == [1, pytest.approx(1 / 3)]
    assert diff.overlap_by_layer.tolist() == [1, pytest.approx((1 + 2 / 4 + 1 / 4) / 3)]
    assert diff.first_by_layer == (None, 5)
    assert str(diff).splitlines() == [
        "3 rows with more than 4 candidates compared; 0 rows only in a, 0 only in b",
        "  layer  same set  overlap  first row that differs",
        "      2   100.00%  100.00%                       -",
        "      5    33.33%   58.33%                       5",
    ]
    b[6] = a[6]
    assert compare_positions(make(a), make(b)).first_by_layer == (None, 5)


def test_rows_that_one_trace_does_not_know_are_counted():
    positions = chosen()
    positions[4:6] = -1
    diff = compare_positions(make(chosen()), make(positions, own=[0, 1, 2, 3, -1, -1, 6, -1]))
    assert diff
    assert (diff.rows_compared, diff.rows_only_a, diff.rows_only_b) == (1, 2, 0)
    nothing = compare_positions(make(chosen()[:2], own=OWN[:2]), make(chosen()[:2], own=OWN[:2]))
    assert not nothing
    assert "      2         -        -                       -" in str(nothing)


def test_traces_of_other_batches_or_models_are_not_compared():
    a = make(chosen())
    with pytest.raises(TraceError, match="MRR107: cannot compare a trace with layer_numbers="):
        compare_positions(a, make(chosen(), layers=(2, 6)))
    for other in (make(chosen()[:7], own=OWN[:7]), make(chosen().roll(1, 0), own=OWN[-1:] + OWN[:-1])):
        with pytest.raises(TraceError, match=r"MRR107: cannot compare traces of 8 and . tokens"):
            compare_positions(a, other)
