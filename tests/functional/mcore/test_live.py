"""compare_live: the live router beside the replayed routes; a wrong capture is named, a right one is not."""

from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL, Case, build, run, same


def compare(case: Case, fault: str, every: bool | int) -> dict[str, Any]:
    """Replay what was recorded, after a fault was planted, and compare with the live router."""
    _, chunks, microbatches = build(case)
    live_run = run(chunks, case, microbatches)
    with mrr.record(chunks) as recording:
        run(chunks, case, microbatches, recording)
    trace = recording.trace(num_tokens=case.num_tokens)
    layer = trace.layer_numbers[-1]
    routes = trace.topk_indices.clone()
    if fault == "a layer of another token":
        routes[:, -1] = routes[torch.randperm(len(routes), generator=torch.Generator().manual_seed(0)), -1]
    elif fault == "a constant layer":
        routes[:, -1] = torch.tensor([0, 1], dtype=routes.dtype)
    damaged = mrr.RoutingTrace(
        topk_indices=routes, layer_numbers=trace.layer_numbers, num_experts=8, replay_mask=trace.replay_mask
    )
    with mrr.replay(chunks, damaged, compare_live=every) as session:
        replayed = run(chunks, case, microbatches, session)
    live = session.report.live
    assert live is not None
    return {
        "layer": layer,
        "rows": live.rows.tolist(),
        "agreement": live.agreement_by_layer.tolist(),
        "findings": [(finding.kind, finding.layer_numbers) for finding in live.findings],
        "metrics": session.report.metrics(),
        "printed": str(session.report),
        "same": same(live_run, replayed),
    }


CASE = Case(layout=ParallelSizes(), config=FULL, num_microbatches=4, sequence_length=32)
PP2 = Case(layout=ParallelSizes(pp_size=2), config=FULL, num_microbatches=4, sequence_length=32)


def test_the_models_own_routes_agree_everywhere_and_comparing_changes_nothing(workers_1):
    (result,) = workers_1.run(compare, CASE, "", True)
    assert result["rows"] == [256] * 4  # forwards only: recomputes are not counted again
    assert result["agreement"] == [1.0] * 4
    assert result["findings"] == []
    assert result["same"]
    assert result["metrics"]["router_replay/live/agreement"] == 1.0
    assert "256 agree in every layer" in result["printed"]


@pytest.mark.parametrize(
    ("fault", "kind"), [("a layer of another token", "layer_outlier"), ("a constant layer", "layer_constant")]
)
def test_a_wrong_capture_is_named_with_its_layer(fault, kind, workers_1):
    (result,) = workers_1.run(compare, CASE, fault, True)
    assert result["findings"] == [(kind, (4,))]
    assert result["agreement"][:3] == [1.0] * 3
    assert result["metrics"]["router_replay/live/layers_wrong"] == 1.0


def test_every_nth_micro_batch_is_enough(workers_2):
    results = workers_2.run(compare, PP2, "a layer of another token", 2)
    assert [result["rows"] for result in results] == [[128, 128], [128, 128]]
    assert [result["findings"] for result in results] == [[("layer_outlier", (2,))], [("layer_outlier", (4,))]]


def reduced() -> tuple[list[int], int]:
    import torch.distributed as dist

    case = Case(layout=ParallelSizes(tp_size=2), config=FULL, num_microbatches=2)
    config, chunks, microbatches = build(case)
    routes = torch.rand(case.num_tokens, 4, 8, generator=torch.Generator().manual_seed(2)).argsort(dim=2)[:, :, :2]
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=range(1, 5), num_experts=8)
    with mrr.replay(chunks, trace, compare_live=True) as session:
        run(chunks, case, microbatches, session)
    report = session.live_report(dist.group.WORLD)
    return report.rows.tolist(), report.tokens


def test_tensor_parallel_ranks_add_up(workers_2):
    assert workers_2.run(reduced) == [([32] * 4, 32)] * 2
