"""Rows that are left live by choice, on Megatron-Core's routers: what they are routed to, frozen and counted.

The oracle reads what enters a router and what leaves it: the live choice is worked out from the logits by hand.
"""

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError
from megatron_router_replay.mcore.batches.prefetch import prefetch
from megatron_router_replay.trace import stale_rows
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
    kept = whole(**changes).keep(torch.arange(8) != NOT_KEPT)
    return kept.keep(~stale_rows(kept, max_age=1, trainer_version=3))


def check_forward(seen, live, trace):
    """Rows of a choice, and the one without a route, are live; all others have the trace's routes. In every layer."""
    for layer in (1, 2, 3):
        replayed = as_map(trace.layer(layer)[AT])
        assert torch.equal(seen[0, layer][0], torch.where(IS_LIVE.unsqueeze(1), live[layer][0], replayed))
        # Random routes: had the rows been replayed, it would be seen.
        assert bool((replayed[IS_LIVE] != live[layer][0][IS_LIVE]).any(dim=1).sum() >= 3)


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("around", [plain, reentrant, non_reentrant])
def test_rows_left_live_are_routed_live_counted_by_reason_and_frozen(around, prefetched):
    chunk, trace = Chunk(), chosen()
    chunk.around = around
    live = live_maps(chunk)
    with watched(chunk) as seen, mrr.replay(chunk, trace, verify=True) as session:
        rows = next(prefetch(trace, [ROWS])) if prefetched else ROWS
        session.microbatch(rows, trained=ROWS != NO_ROUTE)
        disturbed_backward(chunk, chunk(tokens()).sum())  # a recompute that chooses again chooses something else
    check_forward(seen, live, trace)
    assert flips(seen) == 0
    assert num_recomputed(seen) == (0 if around is plain else 3)
    report = session.report
    assert (report.rows_replayed, report.rows_live, report.rows_padding) == (4, 4, 0)
    assert (report.rows_left_out, report.rows_without_route) == (3, 1)
    assert report.replayed_share == 0.5
    assert (report.decisions["verified"], report.decisions["wrong"]) == (24 if around is plain else 48, 0)
    assert "  4  (1 without a route, 3 left out)" in str(report)


def test_trained_rows_may_be_live_by_choice_and_only_by_choice():
    chunk, trace = Chunk(), chosen()
    trained = torch.tensor([[1, 0, 0, 1], [1, 1, 1, 0]])  # rows 0, 3, 4, 5, 6; of these 0 is stale and 5 is not kept
    with mrr.replay(chunk, trace) as session:
        for flip in ([], [0]):
            session.microbatch(ROWS.flip(flip), trained=trained.flip(flip))
            chunk(tokens())
        with pytest.raises(LayoutError, match=r"a trained position has no route \(1 of them, the first is token 7 as"):
            session.microbatch(ROWS, trained=torch.ones(2, 4))
        # Padding is no choice: a position that has no row has none.
        with pytest.raises(LayoutError, match="a trained position has no route"):
            session.microbatch(torch.where(ROWS == 0, -1, ROWS), trained=trained)
    assert session.report.rows_left_out == 6


def one_step(trace, ids=None, **options):
    chunk = Chunk()
    with mrr.replay(chunk, trace, **options) as session:
        session.microbatch(ROWS)
        chunk(tokens() if ids is None else ids)
    return session.report


def test_rows_of_a_recording_that_were_left_out_are_known():
    # A recording of forwards without input_ids has no token id for a row, and a row of neither is another rank's.
    ids = torch.tensor([5, 5, 5, 5, 5, -1, 5, 5])
    assert one_step(chosen(token_ids=ids), torch.full((2, 4), 5)).rows_left_out == 3


def test_shares_count_what_was_left_live_as_not_replayed_and_say_why():
    report = one_step(chosen(), min_replayed=0.5, ask_every_layer=True)
    assert [unit.rows for unit in report.agreement.layers.values()] == [4, 4, 4]
    with pytest.raises(ReplayStateError, match=r"less than min_replayed=0\.51 \(3 were left out by trace\.keep"):
        one_step(chosen(), min_replayed=0.51)
    stale = whole().keep([False] * 8)
    with pytest.raises(ReplayStateError, match=r"none of 8 tokens was replayed on this rank: 7 were left out"):
        one_step(stale)
    report = one_step(stale, min_replayed=0)
    assert (report.rows_replayed, report.rows_left_out, report.replayed_share) == (0, 7, 0.0)


def test_what_was_left_live_by_choice_raises_no_alarm_of_lost_routes(caplog):
    one_step(chosen(replay_mask=None))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    one_step(chosen(replay_mask=torch.arange(8) < 4))  # rows 2 and 3 are replayed, rows 4 to 7 were lost
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "only 33.3 % of the tokens were replayed (2 of 6)" in warning.getMessage()
