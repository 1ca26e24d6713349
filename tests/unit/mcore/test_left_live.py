"""Rows that are left live by choice, on Megatron-Core's routers: what they are routed to, frozen and counted.

The oracle reads what enters a router and what leaves it: the live choice is worked out from the logits by hand.
"""

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError
from megatron_router_replay.transport.prefetching import prefetch
from tests.unit.mcore.left_live_trace import AT, CHOICES, NO_ROUTE, by_hand, chosen, whole
from tests.unit.mcore.tiny_chunk import (
    ROWS,
    Chunk,
    as_map,
    disturb,
    flips,
    non_reentrant,
    num_recomputed,
    plain,
    reentrant,
    tokens,
    watched,
)


def check_forward(seen, live, trace):
    """Rows of a choice, and the one without a route, are live; all others have the trace's routes. In every layer."""
    is_live = torch.tensor([CHOICES[row] > 0 or row == NO_ROUTE for row in AT])
    for layer in (1, 2, 3):
        expected = torch.where(is_live.unsqueeze(1), live[layer][0], as_map(trace.layer(layer)[AT]))
        assert torch.equal(seen[0, layer][0], expected)
        replayed = as_map(trace.layer(layer)[AT])
        # Random routes: had the rows been replayed, it would be seen.
        assert bool((replayed[is_live] != live[layer][0][is_live]).any(dim=1).sum() >= 3)


@pytest.mark.parametrize("around", [plain, reentrant, non_reentrant])
def test_rows_left_live_are_routed_live_counted_by_reason_and_frozen(around):
    chunk, trace = Chunk(), chosen()
    chunk.around = around
    with watched(chunk) as seen, by_hand(chunk) as live, mrr.replay(chunk, trace, verify=True) as session:
        session.microbatch(ROWS)
        logits = chunk(tokens())
        disturb(chunk)  # a recompute that chooses again chooses something else
        logits.square().mean().backward()
    check_forward(seen, live, trace)
    assert flips(seen) == 0
    assert num_recomputed(seen) == (0 if around is plain else 3)
    report = session.report
    assert (report.rows_replayed, report.rows_live, report.rows_padding) == (4, 4, 0)
    assert (report.rows_not_kept, report.rows_stale, report.rows_without_route) == (1, 2, 1)
    assert report.replayed_share == 0.5
    assert (report.decisions_verified, report.decisions_wrong) == (24 if around is plain else 48, 0)
    assert report.rows_trained_live is None
    assert "  4  (1 without a route, 1 not kept, 2 too old)" in str(report)
    metrics = report.metrics()
    assert [metrics[f"router_replay/rows_{n}"] for n in ("live", "not_kept", "stale", "without_route")] == [4, 1, 2, 1]
    assert {"rows_not_kept": 1, "rows_stale": 2, "rows_without_route": 1}.items() <= report.to_dict().items()


def test_a_choice_of_nothing_is_the_trace_itself():
    for trace in (whole(), whole().keep([True] * 8), whole().limit_age(2, trainer_version=3, stale="live")):
        chunk = Chunk()
        with watched(chunk) as seen, mrr.replay(chunk, trace) as session:
            session.microbatch(ROWS)
            chunk(tokens())
        assert torch.equal(seen[0, 2][0][:-1], as_map(trace.layer(2)[AT[:-1]]))
        assert (session.report.rows_replayed, session.report.rows_not_kept, session.report.rows_stale) == (7, 0, 0)
        assert "tokens routed live     1\n" in str(session.report)


def test_prefetched_routes_know_the_choice():
    chunk, trace = Chunk(), chosen()
    with watched(chunk) as seen, by_hand(chunk) as live, mrr.replay(chunk, trace, verify=True) as session:
        (routes,) = prefetch(trace, [ROWS])
        session.microbatch(routes, trained=torch.ones(2, 4) * (ROWS != NO_ROUTE))
        chunk(tokens())
    check_forward(seen, live, trace)
    assert (session.report.rows_not_kept, session.report.rows_stale, session.report.rows_trained_live) == (1, 2, 3)


def test_trained_rows_may_be_live_by_choice_and_only_by_choice():
    chunk, trace = Chunk(), chosen()
    trained = torch.tensor([[1, 0, 0, 1], [1, 1, 1, 0]])  # rows 0, 3, 4, 5, 6; of these 0 is stale and 5 not kept
    with mrr.replay(chunk, trace) as session:
        session.microbatch(ROWS, trained=trained)
        chunk(tokens())
        session.microbatch(ROWS.flip(0), trained=trained.flip(0))
        chunk(tokens())
        with pytest.raises(LayoutError, match=r"a trained position has no route \(1 of them, the first is token 7 as"):
            session.microbatch(ROWS, trained=torch.ones(2, 4))
    assert session.report.rows_trained_live == 4
    assert "1 not kept" not in str(session.report)
    assert "2 not kept, 4 too old; trained, of the last two: 4)" in str(session.report)
    # Padding is no choice: a position that has no row has none.
    with pytest.raises(LayoutError, match="a trained position has no route"), mrr.replay(chunk, trace) as session:
        session.microbatch(torch.where(ROWS == 0, -1, ROWS), trained=trained)


def test_where_nothing_was_left_live_by_choice_no_trained_row_was():
    chunk = Chunk()
    with mrr.replay(chunk, whole()) as session:
        session.microbatch(ROWS, trained=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]) * (ROWS != NO_ROUTE))
        chunk(tokens())
    report = session.report
    assert (report.rows_not_kept, report.rows_stale, report.rows_trained_live) == (0, 0, 0)


def test_rows_of_a_recording_that_were_left_out_are_known():
    # A recording of forwards without input_ids has no token id for a row, and a row of neither is another rank's.
    ids = torch.tensor([5, 5, 5, 5, 5, -1, 5, 5])
    chunk, trace = Chunk(), chosen(token_ids=ids)
    with mrr.replay(chunk, trace) as session:
        session.microbatch(ROWS)
        chunk(torch.full((2, 4), 5))
    assert session.report.rows_not_kept == 1


def one_step(trace, **options):
    chunk = Chunk(num_layers=3)
    with mrr.replay(chunk, trace, **options) as session:
        session.microbatch(ROWS)
        chunk(tokens())
    return session.report


def test_shares_count_what_was_left_live_as_not_replayed_and_say_why():
    assert one_step(chosen(), min_replayed=0.5).rows_replayed == 4
    with pytest.raises(
        ReplayStateError, match=r"50\.0000% of 8 .* min_replayed=0\.51 \(live by choice: 1 not kept, 2 older"
    ):
        one_step(chosen(), min_replayed=0.51)


def test_a_step_that_replays_nothing_raises_unless_that_was_asked_for():
    stale = whole().limit_age(0, trainer_version=9, stale="live")  # a counter of steps, not of weight versions
    for options in ({}, {"min_replayed": 0.1}):
        with pytest.raises(ReplayStateError, match=r"none of 8 tokens was replayed on this rank: 7 older than max_age"):
            one_step(stale, **options)
    with pytest.raises(ReplayStateError, match="8 not kept"):
        one_step(whole(replay_mask=None).keep([False] * 8))
    report = one_step(stale, min_replayed=0)
    assert (report.rows_replayed, report.rows_stale, report.replayed_share) == (0, 7, 0.0)
    # Lost routes are no choice, whatever share is asked for.
    with pytest.raises(ReplayStateError, match="Were the routes lost on the way"):
        one_step(whole(replay_mask=[False] * 8), min_replayed=0)


def test_what_was_left_live_by_choice_raises_no_alarm_of_lost_routes(caplog):
    one_step(chosen(replay_mask=None))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    one_step(chosen(replay_mask=torch.arange(8) < 4))  # rows 2 and 3 are replayed, rows 4 to 7 were lost
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "only 33.3 % of the tokens were replayed (2 of 6)" in warning.getMessage()


def test_the_comparison_with_the_live_router_leaves_these_rows_out():
    report = one_step(chosen(), compare_live=True)
    assert report.live.rows.tolist() == [4, 4, 4]


def test_a_failed_forward_counts_nothing():
    chunk, trace = Chunk(), chosen()
    with mrr.replay(chunk, trace) as session:
        session.microbatch(ROWS)
        chunk.fail_at = 1
        with pytest.raises(ArithmeticError):
            chunk(tokens())
        session.microbatch(ROWS)
        chunk(tokens())
    assert (session.report.rows_replayed, session.report.rows_not_kept, session.report.rows_stale) == (4, 1, 2)
