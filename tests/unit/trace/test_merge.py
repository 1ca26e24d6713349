"""Parts of ranks, merged to one trace."""

import dataclasses

import pytest
import torch

from megatron_router_replay.errors import TraceError
from megatron_router_replay.layout import rows_for_router, split_context_parallel
from megatron_router_replay.trace import RoutingTrace, join
from megatron_router_replay.trace.merge import merge_traces
from tests.unit.store.store_traces import assert_same, assert_valid, make_trace


def part_of(trace, rows, layer_numbers, *, num_tokens=None):
    """What a rank records that routed `rows` in `layer_numbers`; its trace ends behind its last row, or num_tokens."""
    rows = torch.as_tensor(rows, dtype=torch.int64)
    rows = rows[rows >= 0]
    length = max(rows.tolist(), default=-1) + 1 if num_tokens is None else num_tokens
    mask = torch.zeros(length, dtype=torch.bool)
    mask[rows] = True
    part = trace.select_layers(layer_numbers).gather_rows(slice(length))
    known = None
    if part.token_ids is not None:
        known = torch.where(mask, part.token_ids, -1)
    return RoutingTrace(
        topk_indices=part.topk_indices,
        layer_numbers=part.layer_numbers,
        num_experts=part.num_experts,
        replay_mask=mask,
        token_ids=known,
    )


LAYERS = (2, 3, 5, 8)
LAYOUTS = {
    "one rank": {},
    "PP2": {"stages": [(2, 3), (5, 8)]},
    "PP2 x VPP2": {"stages": [(2, 5), (3, 8)]},
    "TP2 with sequence parallelism": {"tp_size": 2},
    "TP2 without sequence parallelism": {"tp_size": 2, "sequence_parallel": False},
    "CP2 zigzag": {"cp_size": 2},
    "TP2 x PP2 x VPP2": {"tp_size": 2, "stages": [(2, 5), (3, 8)]},
    "TP2 x CP2 x PP4, one stage without a layer": {"tp_size": 2, "cp_size": 2, "stages": [(2, 3), (), (5,), (8,)]},
    "DP2": {"dp_size": 2},
}


def recorded_parts(trace, *, stages=(LAYERS,), tp_size=1, cp_size=1, dp_size=1, sequence_parallel=True):
    """The parts of all ranks of a run over two sequences of 8, of which the last two tokens are padding."""
    rows = torch.arange(trace.num_tokens + 2).view(2, 8)
    rows = torch.where(rows < trace.num_tokens, rows, -1)
    for dp_rank in range(dp_size):
        mine = rows.chunk(dp_size)[dp_rank]
        for cp_rank in range(cp_size):
            local = split_context_parallel(mine, cp_rank=cp_rank, cp_size=cp_size)
            for tp_rank in range(tp_size):
                seen = rows_for_router(
                    local, tp_rank=tp_rank, tp_size=tp_size, sequence_parallel=sequence_parallel and tp_size > 1
                )
                for layers in stages:
                    yield part_of(trace, seen, layers)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_of_any_layout_make_the_same_trace(layout):
    trace = make_trace(14, layer_numbers=LAYERS, token_ids=torch.arange(14))
    parts = list(recorded_parts(trace, **LAYOUTS[layout]))
    assert_same(merge_traces(parts), trace)
    assert_same(merge_traces(parts[::-1]), trace)


def test_the_first_order_of_a_row_wins():
    one = RoutingTrace(topk_indices=[[[2, 0]]], layer_numbers=(1,), num_experts=4)
    other = RoutingTrace(topk_indices=[[[0, 2]]], layer_numbers=(1,), num_experts=4)
    assert merge_traces([one, other]).topk_indices.tolist() == [[[2, 0]]]
    assert merge_traces([other, one]).topk_indices.tolist() == [[[0, 2]]]


def test_another_set_of_experts_for_the_same_token_names_parts_row_and_layer(monkeypatch):
    monkeypatch.setattr(join, "_BLOCK_BYTES", 5 * 4 * 2)  # blocks of five rows
    trace = make_trace(20, layer_numbers=LAYERS)
    wrong = trace.topk_indices.clone()
    wrong[17, 2, 0] = min({0, 1, 2} - set(trace.topk_indices[17, 2].tolist()))  # one expert of two
    other = RoutingTrace(topk_indices=wrong, layer_numbers=LAYERS, num_experts=8)
    # Part 0 ends before row 17.
    parts = [part_of(trace, [0, 13], LAYERS, num_tokens=17), trace, trace, part_of(other, range(20), (5, 8))]
    with pytest.raises(
        TraceError, match=r"part 1 and part 3 disagree on row 17, layer 5: .* \(1 such rows in layers \[5\]\)"
    ):
        merge_traces(parts)


def test_a_row_missing_in_some_layers_names_layers_and_rows():
    trace = make_trace(6, layer_numbers=(1, 2, 3))
    parts = [part_of(trace, range(6), (1, 2)), part_of(trace, [0, 1, 4, 5], (3,))]
    with pytest.raises(
        TraceError, match=r"2 rows .* missing by layer: \{3: 2\}; .* \[2, 3\]\. Parts with these layers: part 1;"
    ):
        merge_traces(parts)
    merged = merge_traces(parts, allow_gaps=True)
    assert merged.replay_mask.tolist() == [True, True, False, False, True, True]
    assert_valid(merged)


def test_an_empty_sample_has_no_last_row():
    """Its part is shorter than the batch, whose last row no part has."""
    trace = make_trace(6)
    short = dataclasses.replace(part_of(trace, [0, 1, 2], (2, 3, 7), num_tokens=4), sequence_lengths=(0, 4))
    longer = part_of(trace, [4], (2, 3, 7), num_tokens=6)
    with pytest.raises(TraceError, match=r"1 of 6 rows are in no part, .* the first are \[5\]"):
        merge_traces([short, longer])


def test_rows_that_no_part_knows_are_missing_not_live():
    trace = make_trace(6)
    part = part_of(trace, [0, 3], (2, 3, 7), num_tokens=6)
    with pytest.raises(
        TraceError, match=r"4 of 6 rows are in no part, .* the first are \[1, 2, 4, 5\]\. There are part 0;"
    ):
        merge_traces([part])
    merged = merge_traces([part], allow_gaps=True)
    assert merged.replay_mask.tolist() == [True, False, False, True, False, False]
    assert_valid(merged)


def test_a_row_whose_token_is_known_may_be_live():
    # Row 1 was routed live: a part holds its token and no route. Token id 0 is a token; -1 is none.
    one = RoutingTrace(topk_indices=[[[0, 1]], [[-1, -1]]], layer_numbers=(1,), num_experts=4, token_ids=[5, 0])
    assert merge_traces([one]).replay_mask.tolist() == [True, False]
    unknown = RoutingTrace(topk_indices=[[[0, 1]], [[-1, -1]]], layer_numbers=(1,), num_experts=4, token_ids=[5, -1])
    with pytest.raises(TraceError, match=r"1 of 2 rows"):
        merge_traces([unknown])
    assert merge_traces([unknown, one]).replay_mask.tolist() == [True, False]


def test_the_last_row_of_a_sample_may_be_live_and_no_other():
    # Samples of 2, 0, 3 and 1 tokens as an engine sends them: the last sampled token has no route.
    routes = [[[0, 1]], [[-1, -1]], [[2, 3]], [[1, 2]], [[-1, -1]], [[-1, -1]]]
    common = {"topk_indices": routes, "layer_numbers": (1,), "num_experts": 4, "sequence_lengths": (2, 0, 3, 1)}
    engine = RoutingTrace(**common)
    assert merge_traces([engine]).replay_mask.tolist() == [True, False, True, True, False, False]
    with pytest.raises(TraceError, match=r"1 of 6 rows .* \[3\]"):
        merge_traces([RoutingTrace(**common, replay_mask=[True, True, True, False, True, True])])


def test_stages_without_moe_layers_miss_nothing_and_add_their_token_ids():
    dense = RoutingTrace(topk_indices=torch.empty(3, 0, 1, dtype=torch.uint8), layer_numbers=(), num_experts=1)
    assert merge_traces([dense, dense]).num_tokens == 3
    assert merge_traces([dense]).num_experts == 1
    dense = dataclasses.replace(dense, token_ids=[7, 8, 9])
    merged = merge_traces([dense, make_trace(3)])
    assert torch.equal(merged.topk_indices, make_trace(3).topk_indices)
    assert merged.token_ids.tolist() == [7, 8, 9]


def test_rows_without_a_route_are_spread_over_all_experts():
    part = RoutingTrace(topk_indices=[[[3, 1]], [[-1, -1]]], layer_numbers=(1,), num_experts=4)
    late = RoutingTrace(topk_indices=[[[-1, -1]]] * 4 + [[[2, 0]]], layer_numbers=(1,), num_experts=4)
    gap = RoutingTrace(
        topk_indices=[[[0, 1]], [[1, 2]]] + [[[-1, -1]]] * 2 + [[[0, 3]]], layer_numbers=(2,), num_experts=4
    )
    merged = merge_traces([part, late, gap], allow_gaps=True)
    assert merged.replay_mask.tolist() == [True, False, False, False, True]
    assert merged.layer(1).tolist() == [[3, 1], [2, 3], [0, 1], [2, 3], [2, 0]]
    assert merged.layer(2).tolist() == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 3]]


@pytest.mark.parametrize("name", ["token_ids", "weight_version"])
def test_tokens_and_weight_versions_are_compared(name):
    one = make_trace(3, **{name: torch.tensor([4, 5, -1])})
    merged = merge_traces([one, make_trace(3, **{name: torch.tensor([-1, 5, 6])})])
    assert getattr(merged, name).tolist() == [4, 5, 6]
    with pytest.raises(TraceError, match=f"part 1 has {name}=9 in row 1, an earlier part 5"):
        merge_traces([one, make_trace(3, **{name: torch.tensor([4, 9, 6])})])


def test_parts_of_other_models_or_batches_raise():
    with pytest.raises(TraceError, match="cannot merge no traces"):
        merge_traces([])
    with pytest.raises(TraceError, match=r"cannot merge str \(number 1\): each must be a RoutingTrace"):
        merge_traces([make_trace(), "x"])
    with pytest.raises(TraceError, match="part 1 with num_experts=16"):
        merge_traces([make_trace(), make_trace(num_experts=16)])
    with pytest.raises(TraceError, match="part 1 with topk=3"):
        merge_traces([make_trace(), make_trace(topk=3)])
    with pytest.raises(TraceError, match="different sequence_lengths"):
        merge_traces([make_trace(sequence_lengths=(7,)), make_trace(sequence_lengths=(3, 4))])
    one, other = (make_trace(sequence_lengths=(7,), sample_ids=(name,)) for name in "ab")
    with pytest.raises(TraceError, match="different sample_ids"):
        merge_traces([one, other])


def test_names_of_fewer_parts_drop_no_part():
    trace = make_trace(layer_numbers=LAYERS)
    half = trace.num_tokens // 2
    parts = [
        part_of(trace, rows, LAYERS, num_tokens=trace.num_tokens)
        for rows in (range(half), range(half, trace.num_tokens))
    ]
    for names in (["rank 0"], ["rank 0", "rank 1", "rank 2"]):
        with pytest.raises(TraceError, match=f"MRR107: cannot merge 2 parts with {len(names)} names"):
            merge_traces(parts, names=names)


def test_blocks_of_rows_do_not_show(monkeypatch):
    trace = make_trace(50, layer_numbers=LAYERS, token_ids=torch.arange(50))
    rows = [range(0, 48, 2), range(1, 50, 2)]  # row 48 is missing
    parts = [*(part_of(trace, some, (2, 5)) for some in rows), trace.select_layers((3, 8))]
    whole = merge_traces(parts, allow_gaps=True)
    monkeypatch.setattr(join, "_BLOCK_BYTES", 7 * 8)
    assert_same(merge_traces(parts, allow_gaps=True), whole)
    assert whole.replay_mask.tolist() == [True] * 48 + [False, True]
    assert_valid(whole)
    with pytest.raises(TraceError, match=r"1 rows .*\{2: 1, 5: 1\}.* \[48\]"):
        merge_traces(parts)
    lost = [part_of(make_trace(50, layer_numbers=LAYERS), some, LAYERS) for some in rows]
    with pytest.raises(TraceError, match=r"1 of 50 rows are in no part.* the first are \[48\]"):
        merge_traces(lost)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_without_a_route_has_distinct_experts_wherever_it_is(row):
    mask = torch.arange(3) != row
    part = RoutingTrace(
        topk_indices=[[[6, 7]]] * 3, layer_numbers=[1], num_experts=8, replay_mask=mask, token_ids=[5, 6, 7]
    )
    part = part._with(topk_indices=torch.zeros_like(part.topk_indices).masked_fill(mask.view(-1, 1, 1), 1))
    joined = merge_traces([part])
    assert len(set(joined.topk_indices[row, 0].tolist())) == 2
