"""What went wrong in other implementations and is not shown by another test; each ran silently on wrong routes."""

import sys
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import (
    FULL,
    Case,
    as_map,
    build,
    moe_routers,
    random_routes,
    rows_seen,
    run,
    same,
    watched,
)


def trace_of(case: Case, config: Any) -> mrr.RoutingTrace:
    routes = random_routes(case.num_tokens, config.num_layers, config.moe_router_topk, config.num_moe_experts)
    layers = range(1, config.num_layers + 1)
    return mrr.RoutingTrace(topk_indices=routes, layer_numbers=layers, num_experts=config.num_moe_experts)


def dummies_in_the_global_list() -> bool:
    case = Case(layout=ParallelSizes(), config=FULL)
    config, chunks, microbatches = build(case)
    results = []
    for dummies in (0, 80):
        for _ in range(dummies):
            mrr.RouterReplay()
        with mrr.replay(chunks, trace_of(case, config)) as session:
            results.append(run(chunks, case, microbatches, session))
        mrr.RouterReplay.clear_global_router_replay_instances()
    return same(*results)


def test_orphans_of_rebuilt_models_in_the_global_list_change_nothing(workers_1):
    assert workers_1.run(dummies_in_the_global_list) == [True]


def frames_of_ours_with_replay_off() -> list[str]:
    """Names of our functions that run in a step after a session has ended."""
    case = Case(layout=ParallelSizes(), config=FULL, num_microbatches=1)
    config, chunks, microbatches = build(case)
    with mrr.replay(chunks, trace_of(case, config)) as session:
        run(chunks, case, microbatches, session)
    ours: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and "/megatron_router_replay/" in path and "/testing/" not in path:
            ours.append(f"{path}:{frame.f_code.co_name}")

    sys.setprofile(profile)
    try:
        run(chunks, case, microbatches)
    finally:
        sys.setprofile(None)
    return ours


def test_with_replay_off_none_of_our_code_runs(workers_1):
    assert workers_1.run(frames_of_ours_with_replay_off) == [[]]


def expert_load(recompute: dict[str, Any]) -> dict[str, list[float]]:
    config = recompute | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    case = Case(layout=ParallelSizes(), config=config)
    built, chunks, microbatches = build(case)
    trace = trace_of(case, built)
    with mrr.replay(chunks, trace) as session:
        run(chunks, case, microbatches, session)
    return {
        "counted": [router.local_tokens_per_expert.tolist() for router in moe_routers(chunks)],
        "replayed": [
            torch.bincount(trace.layer(layer).reshape(-1).long(), minlength=8).float().tolist() for layer in range(1, 5)
        ],
    }


@pytest.mark.parametrize("recompute", [{}, FULL], ids=["no recompute", "full recompute"])
def test_expert_load_is_counted_once_and_from_the_replayed_routes(recompute, workers_1):
    (load,) = workers_1.run(expert_load, recompute)
    assert load["counted"] == load["replayed"]


def recorded_micro_batches() -> dict[str, Any]:
    """All micro-batches are recorded, each once, the recompute not again; the routes are copies."""
    case = Case(layout=ParallelSizes(pp_size=2), config=FULL, num_microbatches=6)
    config, chunks, microbatches = build(case)
    with watched(chunks) as seen, mrr.record(chunks) as recording:
        run(chunks, case, microbatches, recording)
    trace = recording.trace()
    wrong = sum(
        int((as_map(trace.layer(layer)[rows_seen(case, microbatch)], 8) != routing_map).sum())
        for layer, maps in seen["forward"].items()
        for microbatch, routing_map in zip(microbatches, maps, strict=True)
    )
    return {"wrong": wrong, "rows": int(trace.replay_mask.sum()), "layers": trace.layer_numbers}


def test_a_recording_has_every_micro_batch_not_only_the_last(workers_2):
    assert workers_2.run(recorded_micro_batches) == [
        {"wrong": 0, "rows": 96, "layers": (1, 2)},
        {"wrong": 0, "rows": 96, "layers": (3, 4)},
    ]


def rows_recorded_twice() -> list[str]:
    case = Case(layout=ParallelSizes(), num_microbatches=2)
    _, (model,), microbatches = build(case)
    messages = []
    for same_tokens in (True, False):
        with mrr.record(model) as recording, torch.no_grad():
            for i in range(2):
                microbatch = microbatches[0 if same_tokens else i]
                recording.microbatch(microbatches[0]["routing_rows"])
                model(input_ids=microbatch["tokens"], position_ids=microbatch["position_ids"], attention_mask=None)
        try:
            messages.append(repr(recording.trace()))
        except mrr.RouterReplayError as error:
            messages.append(str(error))
    return messages


def test_a_row_recorded_twice_with_other_routes_raises(workers_1):
    ((once, differing),) = workers_1.run(rows_recorded_twice)
    assert "16 tokens (16 with a route)" in once
    assert "routed twice, to different experts" in differing


def wrapped_models() -> list[Any]:
    """Megatron's own wrappers: Float16Module and DistributedDataParallel, passed as the schedule has them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    case = Case(layout=ParallelSizes(), config=FULL | {"bf16": True, "params_dtype": torch.bfloat16})
    config, (model,), microbatches = build(case)
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
    wrapped = DistributedDataParallel(config, ddp_config, Float16Module(config, model.bfloat16()))
    trace = trace_of(case, config)
    wrong = 0
    from megatron_router_replay.testing import run_schedule

    with watched([model]) as seen, mrr.replay([wrapped], trace, verify=True) as session:
        run_schedule(
            [wrapped],
            case.layout,
            microbatches,
            before_forward=lambda microbatch, model: session.microbatch(microbatch["routing_rows"], model),
        )
    for phase in seen.values():
        for layer, maps in phase.items():
            for microbatch, routing_map in zip(microbatches, maps, strict=True):
                wrong += int((as_map(trace.layer(layer)[rows_seen(case, microbatch)], 8) != routing_map).sum())
    return [wrong, session.report.recomputes, session.report.decisions_wrong]


def test_models_wrapped_by_megatron_are_replayed_in_bf16(workers_1):
    assert workers_1.run(wrapped_models) == [[0, 16, 0]]


def old_policy_routes() -> dict[str, Any]:
    """R2: routes of the old policy's forward-only pass, replayed in the training step behind a weight update."""
    case = Case(layout=ParallelSizes(pp_size=2), config=FULL)
    _, chunks, microbatches = build(case)
    with mrr.record(chunks) as recording:
        run(chunks, case, microbatches, recording, forward_only=True)
    held = sum(len(router.replay_backward_list) for router in recording._routers())
    trace = recording.trace()
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if "router" in name:
                    parameter.add_(0.1 * torch.randn(parameter.shape))
    with watched(chunks) as seen:
        run(chunks, case, microbatches)
    drifted = used = 0
    for layer, maps in seen["forward"].items():
        for microbatch, routing_map in zip(microbatches, maps, strict=True):
            drifted += int((routing_map != as_map(trace.layer(layer)[rows_seen(case, microbatch)], 8)).sum())
    with watched(chunks) as seen, mrr.replay(chunks, trace) as session:
        run(chunks, case, microbatches, session)
    for layer, maps in seen["forward"].items():
        for microbatch, routing_map in zip(microbatches, maps, strict=True):
            used += int((routing_map != as_map(trace.layer(layer)[rows_seen(case, microbatch)], 8)).sum())
    return {"held": held, "drifted": drifted > 0, "differ": used, "share": session.report.replayed_share}


def test_routes_of_a_forward_only_pass_are_replayed_behind_a_weight_update(workers_2):
    assert workers_2.run(old_policy_routes) == [{"held": 0, "drifted": True, "differ": 0, "share": 1.0}] * 2


def nested_in_a_freeze() -> dict[str, Any]:
    """A replayed step in the middle of a run under freeze_recompute."""
    case = Case(layout=ParallelSizes(), config=FULL)
    config, chunks, microbatches = build(case)
    live = run(chunks, case, microbatches)
    freeze = mrr.freeze_recompute(chunks)
    before = run(chunks, case, microbatches)
    with mrr.replay(chunks, trace_of(case, config), verify=True) as session:
        replayed = run(chunks, case, microbatches, session)
    after = run(chunks, case, microbatches)
    freeze.close()
    return {
        "before": same(live, before),
        "after": same(live, after),
        "replayed": not same(live, replayed),
        "recomputes": (freeze.report.recomputes, session.report.recomputes),
    }


def test_replay_may_run_inside_a_freeze(workers_1):
    assert workers_1.run(nested_in_a_freeze) == [
        {"before": True, "after": True, "replayed": True, "recomputes": (32, 16)}
    ]


def broadcast_rows() -> list[list[int]]:
    import torch.distributed as dist

    from megatron_router_replay.mcore import broadcast_routing_rows

    rows = [torch.arange(3), torch.tensor([[4, -1]])] if dist.get_rank() == 0 else None
    return [part.tolist() for part in broadcast_routing_rows(rows, src=0)]


def test_stages_that_load_no_data_get_the_rows_of_all_micro_batches(workers_2):
    assert workers_2.run(broadcast_rows) == [[[0, 1, 2], [[4, -1]]]] * 2
