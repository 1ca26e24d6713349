"""StaticTargets on a CPU: graphs of make_fx, which run no Python again and read the same storages, as CUDA graphs do."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch.fx.experimental.proxy_tensor import make_fx

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError, TraceError
from megatron_router_replay.mcore.static import StaticTargets
from tests.unit.mcore.balanced_chunk import not_compiled
from tests.unit.mcore.tiny_chunk import EXPERTS, HIDDEN, TOPK, as_map, random_trace

__all__ = ["not_compiled"]

UNFILLED = EXPERTS  # no expert has this id
ROWS = torch.arange(8)


@pytest.fixture(autouse=True)
def nested_traces():
    # Megatron-Core compiles one function of its router.
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        yield


def targets_for(num_layers=3, **options):
    sizes = {"num_slots": 2, "num_tokens": 8, "num_experts": EXPERTS, "topk": TOPK}
    return StaticTargets(layer_numbers=range(1, num_layers + 1), **{**sizes, **options})


def hidden(seed):
    return torch.randn(4, 2, HIDDEN, generator=torch.Generator().manual_seed(seed))


def capture(static, slot, logits, **options):
    """A graph of Megatron-Core's routing function that reads this slot: logits -> (probabilities, map)."""
    reader = static.router(slot, 1)
    static.fill(slot, random_trace(20, 1), ROWS)  # make_fx runs what it captures
    return make_fx(lambda leaf: topk_routing_with_score_function(leaf, TOPK, router_replay=reader, **options))(logits)


def all_unfilled(static):
    parts = [static.targets] if static.used is None else [static.targets, static.used]
    return all(bool((part == UNFILLED).all()) for part in parts)


def test_a_slot_holds_the_routes_of_its_rows_and_spreads_padding_over_all_experts():
    static = targets_for(live_rows=True)
    trace = random_trace(20, replay_mask=torch.arange(20) != 6)
    rows = torch.tensor([7, -1, 6, -1, -1, 19, 0, -1], dtype=torch.int32)
    padding = torch.tensor([False, True, False, False, True, False, False, True])
    static.fill(1, trace, rows, padding=padding)
    assert (static.targets[0] == UNFILLED).all()
    for position, layer in enumerate((1, 2, 3)):
        filled = static.targets[1, position]
        for place, row in ((0, 7), (5, 19), (6, 0)):
            assert filled[place].tolist() == trace.layer(layer)[row].tolist()
        assert filled[padding].tolist() == [[0, 1], [2, 3], [4, 5]]
    # Row 6 has no route, and position 3 no row: the live router decides both.
    assert static.live.tolist() == [[False] * 8, [False, False, True, True, False, False, False, False]]
    static.clear(1)
    assert all_unfilled(static)
    assert not static.live.any()


def test_rows_of_a_trace_without_tokens_are_live_or_padding():
    static, empty = targets_for(live_rows=True), random_trace(0)
    static.fill(0, empty, torch.full((8,), -1), padding=torch.arange(8) < 7)
    assert static.live[0].tolist() == [False] * 7 + [True]


@pytest.mark.parametrize("row", [0, 7])
def test_a_position_that_is_padding_has_no_row(row):
    static = targets_for()
    with pytest.raises(LayoutError, match="cannot fill slot 0: a position that is padding has a routing row"):
        static.fill(0, random_trace(8), ROWS, padding=ROWS == row)
    assert all_unfilled(static)


def test_padding_needs_no_live_rows():
    static = targets_for()
    static.fill(0, random_trace(8), torch.tensor([0, 1, 2, 3, 4, 5, 6, -1]), padding=ROWS == 7)
    assert static.targets[0, 0, 7].tolist() == [0, 1]


@pytest.mark.parametrize("sizes", [{"num_slots": 0}, {"num_tokens": 0}, {"topk": 0}, {"num_layers": 0}])
def test_sizes_of_zero_are_refused(sizes):
    with pytest.raises(LayoutError, match="cannot make static targets of"):
        targets_for(**sizes)
    smallest = targets_for(num_slots=1, num_tokens=1, topk=1, num_layers=1)
    assert smallest.targets.shape == (1, 1, 1, 1)
    assert (smallest.used, smallest.live) == (None, None), "memory that was not asked for"


def test_a_slot_takes_its_own_layer_of_a_trace_by_number():
    trace = random_trace(8, 3)
    static = StaticTargets(num_slots=1, num_tokens=8, layer_numbers=[2], num_experts=EXPERTS, topk=TOPK)
    static.fill(0, trace, ROWS)
    assert static.targets[0, 0].tolist() == trace.layer(2).tolist()


def test_a_graph_that_runs_again_without_new_routes_raises_and_repeats_nothing():
    static, logits = targets_for(1), torch.randn(8, EXPERTS)
    graph = capture(static, 0, logits)
    with pytest.raises(RuntimeError, match="slot 0, layer 1: not filled since its last run"):
        graph(logits)
    static.fill(0, random_trace(20, 1), ROWS)
    graph(logits)
    with pytest.raises(RuntimeError, match="not filled"):
        graph(logits)


def test_a_slot_that_waits_for_its_run_takes_no_other_routes():
    static, trace, rows = targets_for(1), random_trace(20, 1), ROWS
    static.fill(0, trace, rows)
    static.fill(1, trace, rows)
    with pytest.raises(ReplayStateError, match="slot 0 is filled"):
        static.fill(0, trace, rows)
    static.clear(0)
    static.fill(0, trace, rows)


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_that_does_not_exist_raises(slot):
    static = targets_for(1)
    for use in (static.clear, lambda slot: static.router(slot, 1), lambda slot: static.fill(slot, None, None)):
        with pytest.raises(ReplayStateError, match=f"no slot {slot}, only 0..1"):
            use(slot)


@pytest.mark.parametrize(
    ("trace", "rows", "error", "said"),
    [
        (random_trace(20), torch.arange(7), LayoutError, r"must be \[8\] integers, got \[7\]"),
        (random_trace(20), ROWS.view(2, 4), LayoutError, r"got \[2, 4\]"),
        (random_trace(20), torch.arange(8.0), LayoutError, "float32"),
        (random_trace(20), ROWS + 13, LayoutError, "outside the trace's rows"),
        (random_trace(20), ROWS - 2, LayoutError, "outside the trace's rows"),
        (random_trace(20, replay_mask=torch.arange(20) != 5), ROWS, LayoutError, "live_rows=True"),
        (random_trace(20).select_layers([2, 3]), ROWS, TraceError, "no layer_number 1"),
    ],
)
def test_what_cannot_be_replayed_is_refused_and_leaves_the_slot_unfilled(trace, rows, error, said):
    static = targets_for(1)
    with pytest.raises(error, match=said):
        static.fill(0, trace, rows)
    assert (static.targets == EXPERTS).all()


def test_a_trace_of_other_experts_is_refused():
    trace = mrr.RoutingTrace(topk_indices=[[[0, 1]]] * 8, layer_numbers=[1], num_experts=4)
    with pytest.raises(TraceError, match="top-2 of 4 experts, the static targets top-2 of 8"):
        targets_for(1).fill(0, trace, ROWS)


@pytest.mark.parametrize(("shape", "said"), [((7, 8), "routes 7 tokens"), ((8, 9), "has 9 experts, not 8")])
def test_a_router_of_other_shapes_raises_when_it_is_captured(shape, said):
    with pytest.raises(ReplayStateError, match=said):
        capture(targets_for(1), 0, torch.randn(shape))


def test_256_experts_leave_room_for_the_mark_of_an_unfilled_slot():
    one = {"num_slots": 1, "num_tokens": 1, "topk": 1}
    for num_experts, dtype in ((255, torch.uint8), (256, torch.int16)):
        static = targets_for(1, num_experts=num_experts, **one)
        assert static.targets.tolist() == [[[[num_experts]]]]
        assert static.targets.dtype is dtype
        # Of one token and one expert too: what is filled is told from what is not.
        last = mrr.RoutingTrace(topk_indices=[[[num_experts - 1]]], layer_numbers=[1], num_experts=num_experts)
        static.fill(0, last, torch.tensor([0]))
        assert static.targets.tolist() == [[[[num_experts - 1]]]]
        assert static.router(0, 1).get_replay_topk(torch.zeros(1, num_experts), 1)[1].tolist() == [[num_experts - 1]]
        with pytest.raises(ReplayStateError, match="slot 0 is filled"):
            static.fill(0, last, torch.tensor([0]))


@pytest.mark.parametrize("groups", [{}, {"num_groups": 4, "group_topk": 2}])
def test_rows_without_a_route_and_paddings_are_told_apart_in_every_run(groups):
    static, logits = targets_for(1, live_rows=True), torch.randn(8, EXPERTS)
    graph = capture(static, 0, logits, **groups)
    trace = random_trace(20, 1, replay_mask=torch.arange(20) % 3 != 0)
    for rows in ([0, 1, 2, 3, 4, 5, -1, -1], [6, 7, 8, -1, -1, -1, -1, 9]):
        rows = torch.tensor(rows)
        padding = rows < 0
        padding[-2] = False  # the last but one has no route, and is not known to be padding
        static.fill(0, trace, rows, padding=padding)
        logits = torch.randn(8, EXPERTS)
        routing_map = graph(logits)[1]
        live = ((rows >= 0) & (rows % 3 == 0)) | ((rows < 0) & ~padding)
        routed = (rows >= 0) & ~live
        assert torch.equal(routing_map[routed], as_map(trace.layer(1)[rows[routed]]))
        if not groups:
            assert torch.equal(routing_map[live], as_map(logits.topk(TOPK).indices[live]))
        assert (routing_map.sum(dim=1) == TOPK).all()
        # Paddings take all experts in turn.
        assert routing_map[padding].sum(dim=0).max() == 1


def test_a_slot_whose_recompute_has_not_run_takes_no_other_routes():
    static, logits = targets_for(1, recompute=True), torch.randn(8, EXPERTS)
    capture(static, 0, logits)
    with pytest.raises(ReplayStateError, match="slot 0 is filled: its forward or its recompute has not run"):
        static.fill(0, random_trace(20, 1), ROWS)
