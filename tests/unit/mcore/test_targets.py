"""One micro-batch's rows -> what the routers replay; the path that never waits for a GPU gives the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_router_replay import RoutingTrace

CPU = torch.device("cpu")


def trace(num_tokens, mask=None):
    routes = torch.rand(num_tokens, 2, 8, generator=torch.Generator().manual_seed(0)).argsort(dim=2)[:, :, :3]
    return RoutingTrace(topk_indices=routes, layer_numbers=[1, 2], num_experts=8, replay_mask=mask)


def build(the_trace, rows, **options):
    from megatron_router_replay.mcore.targets import build_targets, padding_ranks

    padding = rows < 0  # as a caller says who knows that these are padding
    ranks = padding_ranks(padding).t().reshape(-1)
    seen = rows.t().reshape(-1)
    return build_targets(the_trace, seen, padding=seen < 0, padding_rank=ranks, device=CPU, **options)


def by_token(targets):
    """[num_tokens, num_layers, topk]"""
    return torch.stack(targets.layers, dim=1)


def test_each_position_gets_its_rows_routes_and_padding_is_spread():
    the_trace = trace(4, torch.tensor([True, False, True, True]))
    targets = build(the_trace, torch.tensor([[3, -1, 0], [1, -1, -1]]))  # s-major: 3 1, -1 -1, 0 -1
    assert torch.equal(by_token(targets)[0], the_trace.topk_indices[3])
    assert torch.equal(by_token(targets)[4], the_trace.topk_indices[0])
    assert by_token(targets)[[2, 3, 5], 0].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 0]]
    assert by_token(targets)[[2, 3, 5], 1].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 0]]
    assert targets.live.tolist() == [1]
    assert targets.counts.tolist() == [2, 1, 3]
    assert targets.layers[0].dtype is torch.uint8


def test_without_live_rows_no_live_top_k_is_asked_for():
    rows = torch.tensor([[0, 1, -1]])
    assert build(trace(2), rows).live is None
    assert build(trace(2), rows, any_live=False, may_sync=False).live is None


@given(st.lists(st.integers(-1, 9), min_size=2, max_size=24), st.lists(st.booleans(), min_size=10, max_size=10))
def test_without_a_sync_the_result_is_the_same(rows, mask):
    the_trace = trace(10, torch.tensor(mask))
    batch = torch.tensor(rows[: len(rows) // 2 * 2]).view(2, -1)
    waiting, not_waiting = build(the_trace, batch), build(the_trace, batch, may_sync=False)
    assert torch.equal(by_token(waiting), by_token(not_waiting))
    assert torch.equal(waiting.counts, not_waiting.counts)
    positions = [] if waiting.live is None else waiting.live.tolist()
    assert not_waiting.live.nonzero().squeeze(1).tolist() == positions


def test_both_forms_of_live_rows_choose_the_same_experts():
    from types import SimpleNamespace

    from megatron_router_replay.mcore.router import choose_replayed
    from megatron_router_replay.mcore.selection import LiveTopk

    the_trace = trace(6, torch.tensor([True, False, True, True, False, True]))
    rows = torch.tensor([[5, 4, 3, -1, 1, 0]])
    scores = torch.rand(6, 8)
    router = SimpleNamespace(position=1, topk=3, live_comparison=None, margins=None)
    live = LiveTopk(scores, 3, None, None, lambda some, k, **groups: torch.topk(some, k, dim=1))
    chosen = [
        choose_replayed(router, SimpleNamespace(targets=build(the_trace, rows, may_sync=may_sync)), live)
        for may_sync in (True, False)
    ]
    assert torch.equal(*chosen)
    assert chosen[0][[1, 4]].tolist() == torch.topk(scores[[1, 4]], 3, dim=1).indices.tolist()
    assert torch.equal(chosen[0][[0, 2, 5]], the_trace.layer(2)[[5, 3, 0]])


def test_a_row_of_minus_one_is_live_unless_it_is_known_to_be_padding():
    from megatron_router_replay.mcore.targets import build_targets

    targets = build_targets(trace(4), torch.tensor([2, -1, 0, -1]), device=CPU, with_replayed=True)
    assert targets.live.tolist() == [1, 3]
    assert targets.replayed.tolist() == [True, False, True, False]
    assert targets.counts.tolist() == [2, 2, 0]


def test_a_trace_without_rows_serves_a_micro_batch_of_padding_alone():
    targets = build(trace(0), torch.tensor([[-1, -1, -1, -1]]))
    assert by_token(targets).tolist() == [[ids] * 2 for ids in ([0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3])]
    assert (targets.live, targets.replayed, targets.counts.tolist()) == (None, None, [0, 0, 4])


def test_rows_are_counted_where_none_is_live_and_none_is_padding():
    from megatron_router_replay.mcore.targets import build_targets

    assert build_targets(trace(2), torch.tensor([1, 0, 1]), device=CPU, any_live=False).counts.tolist() == [3, 0, 0]
    assert build(trace(2), torch.tensor([[0, 1, -1]]), any_live=False).counts.tolist() == [2, 0, 1]


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_choice_is_that_of_its_own_row(left_out):
    from megatron_router_replay.mcore.targets import build_targets, choices_of

    chosen = trace(3).keep([row != left_out for row in range(3)])
    rows = torch.tensor([2, -1, 0, 1, 0])
    assert choices_of(chosen, rows).tolist() == [int(row == left_out) for row in rows.tolist()]
    targets = build_targets(chosen, rows, device=CPU, trained=torch.tensor([True, True, True, False, False]))
    assert targets.live.tolist() == [position for position, row in enumerate(rows.tolist()) if row in (-1, left_out)]
    assert targets.left_live.tolist() == [2 if left_out == 0 else 1, 0, 0 if left_out == 1 else 1]
