"""What several ranks must agree on: recordings of parts, shares judged together, errors on all or on none."""

from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes, random_microbatches
from tests.functional.mcore.cases import Case, as_map, build, moe_routers, random_routes, rows_seen, run, same, watched

TP2 = Case(layout=ParallelSizes(tp_size=2))
DP2 = Case(layout=ParallelSizes(), num_microbatches=4)  # two processes, tensor- and pipeline-parallel size 1
CP2 = Case(layout=ParallelSizes(cp_size=2))
PP2 = Case(layout=ParallelSizes(pp_size=2))


def message_of(action: Any) -> str:
    try:
        action()
    except mrr.RouterReplayError as error:
        return str(error)
    return "nothing was raised"


def regrouped(case: Case) -> dict[str, Any]:
    """Record, then replay the same rows in the other order, from this rank's part and from the gathered whole."""
    _, chunks, microbatches = build(case)
    with mrr.record(chunks) as recording:
        live = run(chunks, case, microbatches, recording)
    part, whole = recording.trace(), recording.gather()
    # Position i of the batch goes where position s - 1 - i was: under sequence parallelism to the other rank.
    for microbatch in microbatches:
        for name in ("tokens", "labels", "routing_rows"):
            microbatch[name] = microbatch[name].flip(1)

    def from_part() -> None:
        with mrr.replay(chunks, part) as session:
            run(chunks, case, microbatches, session)

    message = message_of(from_part)
    mrr.close_sessions(chunks)
    with watched(chunks) as seen, mrr.replay(chunks, whole, min_replayed=1.0) as session:
        run(chunks, case, microbatches, session)
    wrong = sum(
        int((routing_map != as_map(whole.layer(layer)[rows_seen(case, microbatch)], 8)).any(dim=1).sum())
        for layer, maps in seen["forward"].items()
        for microbatch, routing_map in zip(microbatches, maps, strict=True)
    )
    return {
        "message": message,
        "lengths": (part.num_tokens, whole.num_tokens),
        "complete": bool(whole.replay_mask.all()),
        "layers": list(whole.layer_numbers),
        "wrong": wrong,
        "live": live[0] == [],
    }


@pytest.mark.parametrize("case", [TP2, CP2], ids=["tp2-sp", "cp2"])
def test_rows_that_another_rank_routed_raise_and_a_gathered_recording_replays_anywhere(case, workers_2):
    for rank in workers_2.run(regrouped, case):
        assert rank["lengths"] == (64, 64)
        assert rank["complete"]
        assert rank["layers"] == [1, 2, 3, 4]
        assert rank["wrong"] == 0
        if case is TP2:
            assert "rows that the trace knows nothing of" in rank["message"]


def data_parallel() -> dict[str, Any]:
    """Each rank records its own half of the rows, and then trains on the other's."""
    import torch.distributed as dist

    _, chunks, mine = build(DP2)
    microbatches = random_microbatches(DP2.num_microbatches, batch_size=DP2.batch_size, sequence_length=8)
    for microbatch, one in zip(microbatches, mine):
        microbatch["routing_rows"] = one["routing_rows"]  # the batch of the whole job, the same on both ranks
    halves = [microbatches[:2], microbatches[2:]]
    case = Case(layout=DP2.layout, num_microbatches=2)
    rank = dist.get_rank()
    with mrr.record(chunks) as recording:
        run(chunks, case, halves[rank], recording)
    part, whole = recording.trace(), recording.gather()

    def from_part() -> None:
        session = mrr.replay(chunks, part)
        try:
            run(chunks, case, halves[1 - rank], session)
        finally:
            session._detach()

    message = message_of(from_part)
    with mrr.replay(chunks, whole, min_replayed=1.0) as session:
        run(chunks, case, halves[1 - rank], session)
    return {
        "message": message,
        "lengths": (part.num_tokens, whole.num_tokens),
        "replayed": session.report.rows_replayed,
    }


def test_a_part_of_another_data_parallel_rank_raises(workers_2):
    for rank in workers_2.run(data_parallel):
        assert "rows that the trace knows nothing of" in rank["message"]
        assert rank["lengths"] == (64, 64)
        assert rank["replayed"] == 32


def judged(shares: tuple[float, float], min_replayed: float | None) -> str:
    """Each rank has routes for its own share of the tokens; the session is left on both."""
    import torch.distributed as dist

    config, chunks, microbatches = build(DP2)
    has_route = torch.arange(DP2.num_tokens) < shares[dist.get_rank()] * DP2.num_tokens
    trace = mrr.RoutingTrace(
        topk_indices=random_routes(DP2.num_tokens, 4, 2, 8),
        layer_numbers=range(1, 5),
        num_experts=8,
        replay_mask=has_route,
    )

    def replay() -> None:
        with mrr.replay(chunks, trace, min_replayed=min_replayed) as session:
            run(chunks, DP2, microbatches, session)

    return message_of(replay)


@pytest.mark.parametrize(
    ("shares", "min_replayed", "said"),
    [
        ((0.0, 1.0), None, "nothing was raised"),  # one rank alone has none: that is for the group to judge
        ((0.0, 0.0), None, "none of 128 tokens was replayed on 2 ranks"),
        ((0.9, 1.0), 0.9, "nothing was raised"),
        ((0.5, 1.0), 0.9, "of 128 tokens were replayed on 2 ranks, less than min_replayed=0.9"),
    ],
)
def test_shares_are_judged_over_all_ranks_together(shares, min_replayed, said, workers_2):
    first, second = workers_2.run(judged, shares, min_replayed)
    assert first == second
    assert said in first


def one_rank_at_fault() -> str:
    import torch.distributed as dist

    _, chunks, microbatches = build(DP2)
    trace = mrr.RoutingTrace(
        topk_indices=random_routes(DP2.num_tokens, 4, 2, 8), layer_numbers=range(1, 5), num_experts=8
    )

    def replay() -> None:
        with mrr.replay(chunks, trace) as session:
            run(chunks, DP2, microbatches, session)
            if dist.get_rank() == 1:
                session.microbatch(microbatches[0]["routing_rows"])

    return message_of(replay)


def test_what_is_wrong_on_one_rank_raises_on_all(workers_2):
    first, second = workers_2.run(one_rank_at_fault)
    assert "rank 0 is in order, but ranks [1] are not" in first
    assert "routes were queued, but no forward used them" in second


def reports_reduced() -> list[dict[str, Any]]:
    _, chunks, microbatches = build(PP2)
    with mrr.freeze_recompute(chunks), mrr.record(chunks, verify=True) as recording:
        run(chunks, PP2, microbatches, recording)
    report = recording.report
    return [report.to_dict(), report.reduce().to_dict()]


def test_a_reduced_report_is_the_sum_and_the_same_everywhere(workers_2):
    (one, summed), (other, summed_there) = workers_2.run(reports_reduced)
    assert summed == summed_there
    assert summed["ranks"] == 2
    for name in ("routers", "forwards", "tokens", "decisions_verified", "decisions_wrong"):
        assert summed[name] == one[name] + other[name]
    assert summed["recompute_flips"] is None


def nothing_to_broadcast() -> str:
    import torch.distributed as dist

    DP2.layout.initialize()
    rows = None if dist.get_rank() == 0 else [torch.arange(3)]
    return message_of(lambda: mrr.mcore.broadcast_routing_rows(rows, src=0))


def test_a_broadcast_without_rows_raises_on_all_ranks(workers_2):
    messages = workers_2.run(nothing_to_broadcast)
    assert ["was given none" in message for message in messages] == [True, True]


def attached_schedule(case: Case) -> bool:
    """A schedule whose forward step knows of no session, on an attached model, beside one that queues by hand."""
    from functools import partial

    from megatron_router_replay.testing.schedule import masked_mean_loss

    config, chunks, microbatches = build(case)
    layers = sorted({i + 1 for i in range(config.num_layers)})
    trace = mrr.RoutingTrace(
        topk_indices=random_routes(case.num_tokens, len(layers), 2, 8), layer_numbers=layers, num_experts=8
    )
    with mrr.replay(chunks, trace) as session:
        by_hand = run(chunks, case, microbatches, session)
    mrr.attach(chunks)

    def forward_step(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        output = model(
            input_ids=batch["tokens"],
            position_ids=batch["position_ids"],
            attention_mask=None,
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            routing_rows=batch["routing_rows"],
        )
        return output, partial(masked_mean_loss, batch["loss_mask"])

    with mrr.replay(chunks, trace, verify=True, min_replayed=1.0) as session:
        attached = run(chunks, case, microbatches, forward_step=forward_step)
    off = run(chunks, case, microbatches, forward_step=forward_step)
    return same(by_hand, attached) and (not by_hand[0] or not same(attached, off)) and bool(moe_routers(chunks))


@pytest.mark.parametrize(
    "layout",
    [ParallelSizes(), ParallelSizes(pp_size=2, vp_size=2), ParallelSizes(tp_size=2), ParallelSizes(cp_size=2)],
    ids=["single", "pp2-vpp2", "tp2-sp", "cp2"],
)
def test_an_attached_model_in_a_schedule_is_exact(layout, request):
    case = Case(layout=layout, config={"recompute_granularity": "selective", "recompute_modules": ["moe"]})
    assert all(request.getfixturevalue(f"workers_{layout.world_size}").run(attached_schedule, case))
