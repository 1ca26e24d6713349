"""What several ranks must agree on: recordings of parts, shares judged together, errors on all or on none."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes, random_microbatches
from megatron_router_replay.testing.schedule import masked_mean_loss
from tests.functional.mcore.cases import (
    FULL,
    MOE,
    Case,
    build,
    model_inputs,
    random_trace,
    run,
    same,
    watched,
    wrong_replays,
)

DP2 = Case()  # two processes, tensor- and pipeline-parallel size 1
PP2 = Case(layout=ParallelSizes(pp_size=2))
ELSEWHERE = "rows that the trace knows nothing of"


def regrouped(case: Case) -> None:
    """Record, then replay the same rows in the other order, from this rank's part and from the gathered whole."""
    _, chunks, microbatches = build(case)
    with mrr.record(chunks) as recording:
        run(chunks, case, microbatches, recording)
    part, whole = recording.trace(), recording.gather()
    # Position i of the batch goes where position s - 1 - i was: under sequence parallelism to the other rank.
    for microbatch in microbatches:
        for name in ("tokens", "labels", "routing_rows"):
            microbatch[name] = microbatch[name].flip(1)
    if case.layout.tp_size == 2:
        with pytest.raises(mrr.RouterReplayError, match=ELSEWHERE), mrr.replay(chunks, part) as session:
            run(chunks, case, microbatches, session)
        mrr.close_sessions(chunks)
    with watched(chunks) as seen, mrr.replay(chunks, whole, min_replayed=1.0) as session:
        run(chunks, case, microbatches, session)
    assert (part.num_tokens, whole.num_tokens, bool(whole.replay_mask.all())) == (64, 64, True)
    assert whole.layer_numbers == (1, 2, 3, 4)
    assert wrong_replays(case, seen, whole, microbatches) == 0


@pytest.mark.parametrize("layout", [ParallelSizes(tp_size=2), ParallelSizes(cp_size=2)], ids=["tp2-sp", "cp2"])
def test_rows_that_another_rank_routed_raise_and_a_gathered_recording_replays(layout, on_ranks):
    on_ranks(2, regrouped, Case(layout=layout))


def data_parallel() -> None:
    """Each rank records its own half of the rows, and then trains on the other's."""
    _, chunks, own = build(DP2)
    microbatches = random_microbatches(DP2.num_microbatches, batch_size=DP2.batch_size, sequence_length=8)
    for microbatch, one in zip(microbatches, own):
        microbatch["routing_rows"] = one["routing_rows"]  # the batch of the whole job, the same on both ranks
    halves = [microbatches[:2], microbatches[2:]]
    case = Case(num_microbatches=2)
    with mrr.record(chunks) as recording:
        run(chunks, case, halves[dist.get_rank()], recording)
    part, whole = recording.trace(), recording.gather()
    theirs = halves[1 - dist.get_rank()]
    session = mrr.replay(chunks, part)
    with pytest.raises(mrr.RouterReplayError, match=ELSEWHERE):
        run(chunks, case, theirs, session)
    session.close(verify=False)
    with mrr.replay(chunks, whole, min_replayed=1.0) as session:
        run(chunks, case, theirs, session)
    assert (part.num_tokens, whole.num_tokens, session.report.rows_replayed) == (64, 64, 32)


def test_a_part_of_another_data_parallel_rank_raises(on_ranks):
    on_ranks(2, data_parallel)


def judged(shares: tuple[float, float], min_replayed: float | None, too_many_on_rank_1: bool) -> str:
    """Each rank has routes for its own share of the tokens; the session is left on both."""
    _, chunks, microbatches = build(DP2)
    has_route = torch.arange(DP2.num_tokens) < shares[dist.get_rank()] * DP2.num_tokens
    try:
        with mrr.replay(chunks, random_trace(DP2, replay_mask=has_route), min_replayed=min_replayed) as session:
            run(chunks, DP2, microbatches, session)
            if too_many_on_rank_1 and dist.get_rank() == 1:
                session.microbatch(microbatches[0]["routing_rows"])
    except mrr.RouterReplayError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("shares", "min_replayed", "said"),
    [
        ((0.0, 1.0), None, "nothing was raised"),  # one rank alone has none: that is for the group to judge
        ((0.0, 0.0), None, "none of 128 tokens was replayed on 2 ranks"),
        ((0.5, 1.0), 0.9, "of 128 tokens were replayed on 2 ranks, less than min_replayed=0.9"),
    ],
)
def test_shares_are_judged_over_all_ranks_together(shares, min_replayed, said, on_ranks):
    first, second = on_ranks(2, judged, shares, min_replayed, False)
    assert first == second
    assert said in first


def test_what_is_wrong_on_one_rank_raises_on_all(on_ranks):
    first, second = on_ranks(2, judged, (1.0, 1.0), None, True)
    assert "rank 0 is in order, but ranks [1] are not" in first
    assert "routes were queued, but no forward used them" in second


def reports_reduced() -> list[dict[str, Any]]:
    _, chunks, microbatches = build(PP2)
    with mrr.freeze_recompute(chunks), mrr.record(chunks, verify=True) as recording:
        run(chunks, PP2, microbatches, recording)
    return [recording.report.to_dict(), recording.report.reduce().to_dict()]


def test_a_reduced_report_is_the_sum_and_the_same_everywhere(on_ranks):
    (one, summed), (other, summed_there) = on_ranks(2, reports_reduced)
    assert summed == summed_there
    for name in ("routers", "forwards", "tokens", "decisions_verified", "decisions_wrong"):
        assert summed[name] == one[name] + other[name]


def compared_with_live() -> tuple[list[int], int]:
    case = Case(layout=ParallelSizes(tp_size=2), config=FULL, num_microbatches=2)
    _, chunks, microbatches = build(case)
    with mrr.replay(chunks, random_trace(case), compare_live=True) as session:
        run(chunks, case, microbatches, session)
    report = session.live_report(dist.group.WORLD)
    return report.rows.tolist(), report.tokens


def test_what_tensor_parallel_ranks_compare_adds_up(on_ranks):
    assert on_ranks(2, compared_with_live) == [([32] * 4, 32)] * 2


def broadcast() -> None:
    rows = [torch.arange(3), torch.tensor([[4, -1]])] if dist.get_rank() == 0 else None
    received = mrr.mcore.broadcast_routing_rows(rows, src=0)
    assert [part.tolist() for part in received] == [[0, 1, 2], [[4, -1]]]
    with pytest.raises(mrr.RouterReplayError, match="was given none"):
        mrr.mcore.broadcast_routing_rows(None if rows else [torch.arange(3)], src=0)


def test_stages_that_load_no_data_get_the_rows_or_raise_together(on_ranks):
    on_ranks(2, broadcast)


def attached_schedule(case: Case) -> None:
    """A schedule whose forward step knows of no session, on an attached model, beside one that queues by hand."""
    _, chunks, microbatches = build(case)
    trace = random_trace(case)
    with mrr.replay(chunks, trace) as session:
        by_hand = run(chunks, case, microbatches, session)
    mrr.attach(chunks)

    def forward_step(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        output = model(**model_inputs(batch), routing_rows=batch["routing_rows"])
        return output, partial(masked_mean_loss, batch["loss_mask"])

    with mrr.replay(chunks, trace, verify=True, min_replayed=1.0) as session:
        attached = run(chunks, case, microbatches, forward_step=forward_step)
    assert same(by_hand, attached)
    assert not same(attached, run(chunks, case, microbatches, forward_step=forward_step))


@pytest.mark.parametrize(
    "layout",
    [ParallelSizes(pp_size=2, vp_size=2), ParallelSizes(tp_size=2), ParallelSizes(cp_size=2)],
    ids=["pp2-vpp2", "tp2-sp", "cp2"],
)
def test_an_attached_model_in_a_schedule_is_exact(layout, on_ranks):
    on_ranks(2, attached_schedule, Case(layout=layout, config=MOE))
