"""Megatron's schedules on several ranks: what ranks must agree on, rows beside a batch or prefetched, combined 1F1B."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_router_replay as mrr
from megatron_router_replay.mcore.batches.prefetch import prefetch_batches
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import (
    DRAWN,
    FULL,
    MOE,
    Case,
    alive_entries,
    build,
    left_over,
    model_inputs,
    moe_routers,
    random_trace,
    run,
    same,
    set_in_configs,
    watched,
    wrong_replays,
)
from tests.support.gradients import gradients
from tests.support.schedule import default_forward_step, masked_mean_loss, run_schedule

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
    with mrr.replay(chunks, trace, **DRAWN) as session:
        by_hand = run(chunks, case, microbatches, session)
    mrr.attach(chunks)

    def forward_step(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        output = model(**model_inputs(batch), routing_rows=batch["routing_rows"])
        return output, partial(masked_mean_loss, batch["loss_mask"])

    with mrr.replay(chunks, trace, **DRAWN, verify=True, min_replayed=1.0) as session:
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


def prefetched(case: Case, token_ids: bool) -> None:
    """A step with rows, and one with what was prefetched of them."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    _, chunks, microbatches = build(case)
    tokens = torch.cat([microbatch["tokens"].reshape(-1) for microbatch in microbatches])
    mask = torch.arange(case.num_tokens) % 5 != 3
    trace = random_trace(case, replay_mask=mask, token_ids=tokens if token_ids else None)
    for microbatch in microbatches:
        microbatch["routing_rows"][0, -1] = -1
    microbatches[2]["routing_rows"].fill_(-1)  # a micro-batch without a row at all
    with mrr.replay(chunks, trace, **DRAWN, verify=True) as session:
        plain = run(chunks, case, microbatches, session)

    seen: list[weakref.ref[torch.Tensor]] = []

    def queue(microbatch: dict[str, Any], model: Any) -> None:
        routes = microbatch["routing_rows"]
        seen.append(weakref.ref(routes.topk_indices))
        prefetching.microbatch(routes, model, token_ids=microbatch["tokens"] if token_ids else None)

    with mrr.replay(chunks, trace, **DRAWN, verify=True) as prefetching:
        # Iterators that the schedule never asks for more than its micro-batches, each with the layers of its chunk.
        layers = [[router.layer_number for router in moe_routers([chunk])] for chunk in chunks]
        iterators = [prefetch_batches(trace, microbatches, layer_numbers=numbers) for numbers in layers]
        for chunk in chunks:
            chunk.zero_grad(set_to_none=True)
        several = len(chunks) > 1
        losses = get_forward_backward_func()(
            forward_step_func=partial(default_forward_step, before_forward=queue),
            data_iterator=iterators if several else iterators[0],
            model=chunks if several else chunks[0],
            num_microbatches=case.num_microbatches,
            seq_length=case.sequence_length,
            micro_batch_size=case.batch_size,
            decoder_seq_length=case.sequence_length,
            forward_only=False,
        )
        assert same(plain, (losses, gradients(chunks)))
        gc.collect()
        assert [ref() for ref in seen] == [None] * case.num_microbatches * len(chunks)
    assert prefetching.report == session.report
    assert (session.report.decisions["wrong"], session.report.decisions["verified"] > 0) == (0, True)


def test_prefetched_rows_replay_as_rows_do_and_nothing_is_retained(megatron):
    prefetched(Case(config=FULL), True)


def test_every_virtual_stage_prefetches_its_own_layers(on_ranks):
    on_ranks(2, prefetched, Case(layout=ParallelSizes(pp_size=2, vp_size=2), config=FULL), False)


def trained_and_evaluated() -> None:
    """Training and then a log-prob pass in one session; then a step under a freeze."""
    case = Case(layout=ParallelSizes(ep_size=2), config=MOE, num_microbatches=3)
    _, chunks, microbatches = build(case)
    set_in_configs(
        chunks, overlap_moe_expert_parallel_comm=True
    )  # its own checks ask for bf16, which no kernel here has
    trace = random_trace(case)
    session: Any = None
    plans = 0

    def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        nonlocal plans
        batch = next(data_iterator)
        if session is not None:
            session.microbatch(batch["routing_rows"], model)
        plans += return_schedule_plan
        call = model.build_schedule_plan if return_schedule_plan else model
        return call(**model_inputs(batch)), partial(masked_mean_loss, batch["loss_mask"])

    with mrr.replay(chunks, trace, **DRAWN, verify=True) as opened:
        session = opened
        for forward_only in (False, True):
            with watched(chunks) as seen:
                run_schedule(chunks, case.layout, microbatches, forward_step=forward_step, forward_only=forward_only)
            assert len(seen["forward"]) == 4
            assert wrong_replays(case, seen, trace, microbatches) == 0
    session = None
    with mrr.freeze_recompute(chunks):
        run_schedule(chunks, case.layout, microbatches, forward_step=forward_step)
        assert alive_entries(chunks) == []
    assert (plans, left_over(chunks)) == (6, [])


def test_a_session_is_exact_under_combined_1f1b_and_a_freeze_keeps_nothing(on_ranks):
    on_ranks(2, trained_and_evaluated)
