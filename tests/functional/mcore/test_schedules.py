"""Combined 1F1B, whose forwards are schedule plans; the other schedules are those of `test_layouts` and `test_follow`."""

from functools import partial
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import (
    DRAWN,
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
from tests.support.schedule import masked_mean_loss, run_schedule


def trained_and_evaluated(follows: bool) -> None:
    """Training and then a log-prob pass in one session, of rows by hand or found by tokens; then a step under a freeze."""
    case = Case(layout=ParallelSizes(ep_size=2), config=MOE, num_microbatches=3)
    _, chunks, microbatches = build(case)
    set_in_configs(
        chunks, overlap_moe_expert_parallel_comm=True
    )  # its own checks ask for bf16, which no kernel here has
    tokens = torch.cat([microbatch["tokens"].reshape(-1) for microbatch in microbatches])
    lengths = [case.sequence_length] * (case.num_tokens // case.sequence_length)
    samples = {"token_ids": tokens, "sequence_lengths": lengths} if follows else {}
    trace = random_trace(case, **samples)
    session: Any = None
    plans = 0

    def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        nonlocal plans
        batch = next(data_iterator)
        if session is not None and not follows:
            session.microbatch(batch["rows"], model)
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


@pytest.mark.parametrize("follows", [False, True])
def test_a_session_is_exact_under_combined_1f1b_and_a_freeze_keeps_nothing(follows, on_ranks):
    on_ranks(2, trained_and_evaluated, follows)
