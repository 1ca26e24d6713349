"""What several ranks must agree on: recordings of parts, shares judged together, errors on all or on none."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.testing.schedule import masked_mean_loss
from tests.functional.mcore.cases import (
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


def broadcast() -> None:
    rows = [torch.arange(3), torch.tensor([[4, -1]], dtype=torch.int32)] if dist.get_rank() == 0 else None
    received = mrr.mcore.broadcast_routing_rows(rows, src=0)
    if rows:
        rows[0].zero_()
    assert [(part.dtype, part.tolist()) for part in received] == [
        (torch.int64, [0, 1, 2]),
        (torch.int64, [[4, -1]]),
    ]
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
