"""Megatron's combined 1F1B (overlap_moe_expert_parallel_comm): plans of layers run without the chunk's own forward."""

from functools import partial
from typing import Any

import pytest

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes, run_schedule
from megatron_router_replay.testing.schedule import masked_mean_loss
from tests.functional.mcore.cases import (
    Case,
    as_map,
    build,
    left_over,
    random_routes,
    rows_seen,
    watched,
)

MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def trained_and_evaluated(recompute: dict[str, Any]) -> dict[str, Any]:
    """Training and then a log-prob pass in one session; then a step under a freeze."""
    case = Case(layout=ParallelSizes(ep_size=2), config=recompute, num_microbatches=3)
    config, chunks, microbatches = build(case)
    # Set afterwards: the config's own checks ask for bf16, and no kernel here has it.
    for module in chunks[0].modules():
        if hasattr(module, "config"):
            module.config.overlap_moe_expert_parallel_comm = True
    trace = mrr.RoutingTrace(
        topk_indices=random_routes(case.num_tokens, 4, 2, 8), layer_numbers=range(1, 5), num_experts=8
    )
    session: Any = None
    plans = 0

    def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        nonlocal plans
        batch = next(data_iterator)
        if session is not None:
            session.microbatch(batch["routing_rows"], model)
        inputs = dict(
            input_ids=batch["tokens"],
            position_ids=batch["position_ids"],
            attention_mask=None,
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
        plans += return_schedule_plan
        call = model.build_schedule_plan if return_schedule_plan else model
        return call(**inputs), partial(masked_mean_loss, batch["loss_mask"])

    with watched(chunks) as seen, mrr.replay(chunks, trace, verify=True) as opened:
        session = opened
        run_schedule(chunks, case.layout, microbatches, forward_step=forward_step)
        run_schedule(chunks, case.layout, microbatches, forward_step=forward_step, forward_only=True)
    wrong = sum(
        int((routing_map != as_map(trace.layer(layer)[rows_seen(case, microbatch)], 8)).any(dim=1).sum())
        for layer, maps in seen["forward"].items()
        for microbatch, routing_map in zip(microbatches * 2, maps, strict=True)
    )
    session = None
    with mrr.freeze_recompute(chunks) as freeze:
        run_schedule(chunks, case.layout, microbatches, forward_step=forward_step)
        held = sum(len(router.replay_backward_list) for router in freeze._routers())
    return {"wrong": wrong, "layers": len(seen["forward"]), "plans": plans, "held": held, "left": left_over(chunks)}


@pytest.mark.parametrize("recompute", [{}, MOE], ids=["no recompute", "moe"])
def test_a_session_is_exact_under_combined_1f1b_and_a_freeze_keeps_nothing(recompute, workers_2):
    for rank in workers_2.run(trained_and_evaluated, recompute):
        assert rank == {"wrong": 0, "layers": 4, "plans": 6, "held": 0, "left": []}
