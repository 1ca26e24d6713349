"""Megatron's combined 1F1B (overlap_moe_expert_parallel_comm): plans of layers run without the chunk's own forward."""

from functools import partial
from typing import Any

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes, run_schedule
from megatron_router_replay.testing.schedule import masked_mean_loss
from tests.functional.mcore.cases import (
    MOE,
    Case,
    alive_entries,
    build,
    left_over,
    model_inputs,
    random_trace,
    set_in_configs,
    watched,
    wrong_replays,
)


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

    with mrr.replay(chunks, trace, verify=True) as opened:
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
