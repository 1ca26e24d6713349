"""Rows whose routes were taken away, on Megatron-Core's routers: what they are routed to, frozen and counted.

The oracle reads what enters a router and what leaves it: the live choice is worked out from the logits by hand.
"""

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError
from tests.unit.mcore.tiny_chunk import (
    EXPERTS,
    ROWS,
    Chunk,
    as_map,
    disturbed_backward,
    flips,
    live_maps,
    non_reentrant,
    num_recomputed,
    plain,
    random_routes,
    reentrant,
    tokens,
    watched,
)

AT = [0, 4, 1, 5, 2, 6, 3, 7]  # the row of each position of a router, s-major
NO_ROUTE, STALE, NOT_KEPT = 7, (0, 1), 5
IS_LIVE = torch.tensor([row in (NO_ROUTE, *STALE, NOT_KEPT) for row in AT])


def whole(**changes):
    values = {"weight_version": [1, 1, 2, 3, 3, 3, 3, 3], "replay_mask": torch.arange(8) != NO_ROUTE}
    return mrr.RoutingTrace(
        topk_indices=random_routes(8), layer_numbers=(1, 2, 3), num_experts=EXPERTS, **(values | changes)
    )


def chosen(**changes):
    trace = whole(**changes).without_routes(torch.arange(8) == NOT_KEPT)
    return trace.without_routes(trace.weight_version < 2)  # as docs/options.md has it, of trainer_version=3, max_age=1


def check_forward(seen, live, trace):
    """Rows of a choice, and the one without a route, are live; all others have the trace's routes. In every layer."""
    for layer in (1, 2, 3):
        replayed = as_map(trace.layer(layer)[AT])
        assert torch.equal(seen[0, layer][0], torch.where(IS_LIVE.unsqueeze(1), live[layer][0], replayed))
        # Random routes: had the rows been replayed, it would be seen.
        assert bool((replayed[IS_LIVE] != live[layer][0][IS_LIVE]).any(dim=1).sum() >= 3)


@pytest.mark.parametrize("around", [plain, reentrant, non_reentrant])
def test_rows_left_live_are_routed_live_counted_by_reason_and_frozen(around):
    chunk, trace = Chunk(), chosen()
    chunk.around = around
    live = live_maps(chunk)
    with watched(chunk) as seen, mrr.replay(chunk, trace, verify=True) as session:
        session.microbatch(ROWS)
        disturbed_backward(chunk, chunk(tokens()).sum())  # a recompute that chooses again chooses something else
    check_forward(seen, live, trace)
    assert flips(seen) == 0
    assert num_recomputed(seen) == (0 if around is plain else 3)
    report = session.report
    assert (report.rows_replayed, report.rows_live, report.rows_padding) == (4, 4, 0)
    assert report.replayed_share == 0.5
    assert (report.decisions["verified"], report.decisions["wrong"]) == (24 if around is plain else 48, 0)


def test_a_trained_row_without_a_route_raises_whoever_took_it_away():
    chunk, trace = Chunk(), chosen()
    with mrr.replay(chunk, trace) as session:
        session.microbatch(ROWS, trained=~torch.isin(ROWS, torch.tensor([*STALE, NOT_KEPT, NO_ROUTE])))
        chunk(tokens())
        with pytest.raises(LayoutError, match=r"a trained position has no route \(1 of them, the first is token 3 as"):
            session.microbatch(ROWS, trained=ROWS == NOT_KEPT)


def one_step(trace, ids=None, **options):
    chunk = Chunk()
    with mrr.replay(chunk, trace, **options) as session:
        session.microbatch(ROWS)
        chunk(tokens() if ids is None else ids)
    return session.report


def test_shares_count_rows_without_routes_as_not_replayed():
    report = one_step(chosen(), min_replayed=0.5, ask_every_layer=True)
    assert [unit.rows for unit in report.agreement.layers.values()] == [4, 4, 4]
    with pytest.raises(ReplayStateError, match=r"less than min_replayed=0\.51"):
        one_step(chosen(), min_replayed=0.51)
    with pytest.raises(ReplayStateError, match=r"none of 8 tokens was replayed on this rank; .*trace\.without_routes"):
        one_step(whole().without_routes([True] * 8), min_replayed=0)
