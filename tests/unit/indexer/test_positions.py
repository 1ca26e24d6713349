"""PositionTrace: what goes in comes out as a set, what no indexer can have chosen is refused, and codes are small."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_router_replay.errors import TraceError
from megatron_router_replay.indexer import PositionTrace
from megatron_router_replay.indexer.codes import code_words, low_bits
from megatron_router_replay.indexer.merge import merge_positions, place_positions
from tests.unit.indexer.choices import ascending, choose

LAYERS = (2, 5)


def make(own, *, topk=4, seed=0, layers=LAYERS):
    chosen = choose(own, num_layers=len(layers), topk=topk, seed=seed)
    return chosen, PositionTrace.from_positions(chosen, positions_in_sample=own, layer_numbers=layers, topk=topk)


@given(
    own=st.lists(st.one_of(st.integers(-1, 40), st.integers(-1, 5000)), max_size=12),
    topk=st.integers(1, 19),
    seed=st.integers(0, 99),
)
def test_every_choice_comes_back_in_ascending_order(own, topk, seed):
    chosen, trace = make(own, topk=topk, seed=seed)
    known = torch.tensor([row for row, position in enumerate(own) if position >= 0], dtype=torch.int64)
    assert torch.equal(trace.rows(known, LAYERS), ascending(chosen)[known])
    # In any order, some rows twice, layers in the order asked for.
    order = torch.cat([known.flip(0), known[:2]])
    assert torch.equal(trace.rows(order, (5, 2)), ascending(chosen)[order][:, [1, 0]])


def test_codes_are_these_words():
    # Position 7 of 8 candidates: one bit a candidate. Position 16, of 4 keys: 17 // 4 = 4, so 2 low bits.
    chosen = [[[7, 0, 2, 3]], [[16, 9, 2, 3]]]
    trace = PositionTrace.from_positions(chosen, positions_in_sample=[7, 16], layer_numbers=[1], topk=4)
    first = 0b1000_1101
    # 2, 3, 9, 16 are 4 * (0, 0, 2, 4) + (2, 3, 1, 0): planes of bit 0 and bit 1, then bits 0, 1, 2 + 2, 4 + 3.
    second = 0b0110 | 0b0011 << 8 | 0b1001_0011 << 16
    assert trace.codes.tolist() == [first, second]


def test_a_choice_of_all_candidates_is_not_stored():
    own = [0, 1, 2, 3, -1, 3]
    chosen, trace = make(own)
    assert trace.codes.numel() == 0
    assert trace.rows(torch.tensor([1, 3]), [5]).tolist() == [[[0, 1, -1, -1]], [[0, 1, 2, 3]]]
    assert make([3, 4])[1].codes.numel() == 2, "the fifth candidate makes it a choice, one word a layer"


@pytest.mark.parametrize(
    ("position", "keys", "problem"),
    [
        (6, [0, 1, 2, 7], "chose [0, 1, 2, 7] (0 to 7): a key lies outside 0..6, the token and those before it"),
        (6, [0, 1, 2, 2**32 + 3], "a key lies outside 0..6"),
        (6, [0, 1, 2, -2], "a key lies outside 0..6"),
        (6, [5, 1, 2, 5], "chose [1, 2, 5, 5] (1 to 5): a key is named twice"),
        (6, [5, 1, 2, -1], "it names 3 keys where it must name 4"),
        (2, [0, 1, -1, -1], "it names 2 keys where it must name 3"),
        (2, [0, 1, 1, -1], "a key is named twice"),
        (2, [0, 1, 2, 2], "it names 4 keys where it must name 3"),
        (2, [0, 1, 3, -1], "a key lies outside 0..2"),
        (-1, [0, -1, -1, -1], "a key lies outside the sample: the token is not known"),
    ],
)
def test_what_no_indexer_can_have_chosen_is_refused(position, keys, problem):
    own = [3, 3, position]
    chosen = choose([3, 3, max(position, 0)], num_layers=2, topk=4).long()
    chosen[2, 0] = -1 if position < 0 else chosen[2, 0]
    chosen[2, 1] = torch.tensor(keys)
    with pytest.raises(TraceError, match="MRR113: row 2, layer 5, position") as caught:
        PositionTrace.from_positions(chosen, positions_in_sample=own, layer_numbers=LAYERS, topk=4)
    assert problem in str(caught.value)
    assert "(1 such choices, layers [5])" in str(caught.value)


def test_blocks_do_not_show(monkeypatch):
    own = [*range(-1, 90), *range(70)]
    chosen, trace = make(own, topk=3)
    monkeypatch.setattr("megatron_router_replay.indexer.codes._BLOCK", 10)
    monkeypatch.setattr("megatron_router_replay.indexer.positions._BLOCK", 24)
    assert make(own, topk=3)[1] == trace
    rows = torch.tensor([row for row, position in enumerate(own) if position >= 0])
    assert torch.equal(trace.rows(rows, LAYERS), ascending(chosen)[rows])
    chosen[93, 0, 0] = 5000
    with pytest.raises(TraceError, match="row 93, layer 2, position 2 "):
        PositionTrace.from_positions(chosen, positions_in_sample=own, layer_numbers=LAYERS, topk=3)


def test_traces_are_concatenated_and_compare_by_value():
    (first, a), (second, b) = make([*range(20), -1]), make([*range(9, 30)], seed=1)
    joined = PositionTrace.concatenate([a, b])
    own = [*range(20), -1, *range(9, 30)]
    assert joined.positions_in_sample.tolist() == own
    assert len(joined) == joined.num_tokens == 42
    assert torch.equal(joined.rows(torch.arange(21, 42), LAYERS), ascending(second))
    again = PositionTrace.from_positions(
        torch.cat([first, second]).flip(2).numpy(), positions_in_sample=np.array(own), layer_numbers=LAYERS, topk=4
    )
    assert again == joined == pickle.loads(pickle.dumps(joined))
    assert joined != a
    assert a != "a"
    rows = torch.randperm(42, generator=torch.Generator().manual_seed(0))
    parts = [place_positions(a, rows[:21], 42), place_positions(b, rows[21:], 42)]
    merged = merge_positions(parts)
    assert merged.positions_in_sample[rows].tolist() == own
    assert torch.equal(merged.rows(rows[21:], LAYERS), ascending(second))
    with pytest.raises(TraceError, match="was recorded twice, with different positions"):
        merge_positions([*parts, place_positions(b, rows[:21], 42)])
    assert repr(joined).startswith("PositionTrace(42 tokens (41 known, 37 stored), layers [2, 5], top-4, ")
    empty = PositionTrace.concatenate([make([])[1], make([])[1]])
    assert empty.num_tokens == 0
    assert empty.rows(torch.empty(0, dtype=torch.int64), LAYERS).shape == (0, 2, 4)


def test_a_trace_that_was_changed_in_place_raises():
    own = torch.tensor([9, 10, 11]).add_(1)
    chosen, trace = make(own)
    copies = copy.deepcopy(trace), pickle.loads(pickle.dumps(trace))
    trace.codes[0] = trace.codes[1]
    changed = pytest.raises(TraceError, match="MRR110: codes of the positions were changed in place")
    for read in (
        lambda: trace.rows(torch.tensor([0]), LAYERS),
        lambda: PositionTrace.concatenate([copies[0], trace]),
        lambda: pickle.dumps(trace),
    ):
        with changed:
            read()
    for each in copies:
        assert torch.equal(each.rows(torch.arange(3), LAYERS), ascending(chosen))
        each.positions_in_sample[2] = -1
        with pytest.raises(TraceError, match="MRR110: positions_in_sample of the positions were changed"):
            each.rows(torch.tensor([0]), LAYERS)


def test_traces_of_other_models_are_not_concatenated():
    trace = make([9])[1]
    with pytest.raises(TraceError, match=re.escape("MRR107: cannot concatenate trace 1 with topk=5 and topk=4")):
        PositionTrace.concatenate([trace, make([9], topk=5)[1]])
    with pytest.raises(TraceError, match="MRR107: cannot concatenate trace 1 with layer_numbers="):
        PositionTrace.concatenate([trace, make([9], layers=(2, 6))[1]])
    for wrong in ([], [trace, None]):
        with pytest.raises(TraceError, match=r"MRR107: .*give a list of PositionTraces"):
            PositionTrace.concatenate(wrong)


@pytest.mark.parametrize(
    ("rows", "layers", "problem"),
    [
        ([0, -1], LAYERS, "MRR106: cannot take rows -1..0 of a trace of 3 tokens"),
        ([3], LAYERS, "MRR106: cannot take rows 3..3"),
        ([[0]], LAYERS, "MRR106: cannot take shape [1, 1]"),
        ([0, 1, 1], LAYERS, "MRR106: cannot take row 1 (2 of 3 such rows): nothing is known of it"),
        ([0], [3], "MRR104: the trace has no indexer in layer_number 3; it has [2, 5]"),
    ],
)
def test_rows_and_layers_that_are_not_there_are_refused(rows, layers, problem):
    trace = make([7, -1, 8])[1]
    with pytest.raises(TraceError, match=re.escape(problem)):
        trace.rows(torch.tensor(rows), layers)


def test_damaged_codes_are_noticed():
    _, trace = make([40] * 3)
    for damage in (0, -1, 0b1111 | 0b1111_0000_0000_0000):
        codes = trace.codes.clone()
        codes[1] = damage
        broken = PositionTrace(positions_in_sample=[40] * 3, layer_numbers=LAYERS, topk=4, codes=codes)
        with pytest.raises(TraceError, match="MRR110: the codes of the trace are damaged"):
            broken.rows(torch.tensor([0]), [5])
        assert torch.equal(broken.rows(torch.tensor([1]), [2]), trace.rows(torch.tensor([1]), [2]))


def test_values_of_another_kind_are_refused():
    chosen, trace = make([9, 9])

    def remake(positions=chosen, **changes):
        values = {"positions_in_sample": [9, 9], "layer_numbers": LAYERS, "topk": 4} | changes
        return PositionTrace.from_positions(positions, **values)

    for problem, attempt in {
        "MRR102: positions must be [2 tokens, 2 layers, topk=5], got shape [2, 2, 4]": lambda: remake(topk=5),
        "MRR101: positions must hold integers": lambda: remake(chosen.float()),
        "MRR102: positions_in_sample must be [num_tokens], got shape []": lambda: remake(positions_in_sample=9),
        "MRR101: positions_in_sample holds -2": lambda: remake(positions_in_sample=[9, -2]),
        "MRR101: topk=0 must be": lambda: remake(topk=0),
        "MRR104: layer_numbers must increase": lambda: remake(layer_numbers=(5, 2)),
        "MRR102: codes must be [4] int64 on the CPU": lambda: PositionTrace(
            positions_in_sample=[9, 9], layer_numbers=LAYERS, topk=4, codes=trace.codes[1:]
        ),
    }.items():
        with pytest.raises(TraceError, match=re.escape(problem)):
            attempt()


@pytest.mark.parametrize(
    ("position", "topk", "low", "num_bytes"),
    [
        (2047, 2048, 0, 0),
        (2048, 2048, 0, 264),
        (8190, 2048, 0, 1024),
        (8191, 2048, 2, 1024),
        (32767, 2048, 4, 1536),
        (131071, 2048, 6, 2048),
        (32767, 512, 6, 512),
    ],
)
def test_a_choice_takes_an_eighth_to_a_quarter_of_int32(position, topk, low, num_bytes):
    own = np.array([position])
    assert (low_bits(own, topk).item(), code_words(own, topk).item() * 8) == (low, num_bytes)
