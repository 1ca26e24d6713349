"""An attached model inside everything that wraps models: the forward step is `output = model(**batch)`, replay on or off."""

from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL, Case, as_map, build, moe_routers, random_routes, rows_seen, watched


def bfloat16(model: Any, config: Any) -> Any:
    from megatron.core.transformer.module import Float16Module

    return Float16Module(config, model.bfloat16())


def data_parallel(model: Any, config: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
    return DistributedDataParallel(config, options, model)


def compiled(model: Any, config: Any) -> Any:
    return torch.compile(model, backend="eager")


WRAPPERS = {
    "plain": [],
    "Float16Module": [bfloat16],
    "DistributedDataParallel": [data_parallel],
    "both": [bfloat16, data_parallel],
    "torch.compile": [compiled],
    "torch.compile of both": [bfloat16, data_parallel, compiled],
}


def through(wrappers: list[Any], inside: bool) -> dict[str, Any]:
    """Forwards and backwards by `model(**batch)` alone, the model attached inside or outside of its wrappers."""
    torch._dynamo.reset()
    half = {"bf16": True, "params_dtype": torch.bfloat16} if bfloat16 in wrappers else {}
    case = Case(layout=ParallelSizes(), config={"num_layers": 2, **FULL, **half}, num_microbatches=2)
    config, (inner,), microbatches = build(case)
    model = inner
    if inside:
        mrr.attach(inner)
    for wrap in wrappers:
        model = wrap(model, config)
    if not inside:
        mrr.attach(model)
    trace = mrr.RoutingTrace(topk_indices=random_routes(case.num_tokens, 2, 2, 8), layer_numbers=(1, 2), num_experts=8)

    def step() -> list[float]:
        losses = []
        for microbatch in microbatches:
            batch = {
                "input_ids": microbatch["tokens"],
                "position_ids": microbatch["position_ids"],
                "attention_mask": None,
                "labels": microbatch["labels"],
                "routing_rows": microbatch["routing_rows"],
                "routing_padding": None,
                "routing_trained": microbatch["loss_mask"],
            }
            output = model(**batch)
            output.float().mean().backward()
            losses.append(float(output.float().mean()))
        return losses

    off = step()
    with watched([inner]) as seen, mrr.replay(model, trace, verify=True, min_replayed=1.0) as session:
        on = step()
    wrong = [
        int((routing_map != as_map(trace.layer(layer)[rows_seen(case, microbatch)], 8)).any(dim=1).sum())
        for phase in seen.values()
        for layer, maps in phase.items()
        for microbatch, routing_map in zip(microbatches, maps, strict=True)
    ]
    return {
        "wrong": sum(wrong),
        "maps": len(wrong),
        "replayed": session.report.rows_replayed,
        "changed": on != off,
        "off_again": step() == off,
        "routers": len(moe_routers([inner])),
    }


@pytest.mark.parametrize("inside", [True, False], ids=["attached, then wrapped", "wrapped, then attached"])
def test_an_attached_model_is_called_through_any_wrapper(inside, workers_1):
    for name, wrappers in WRAPPERS.items():
        (result,) = workers_1.run(through, wrappers, inside)
        # Two routers, two micro-batches, forward and recompute of each.
        assert result == {
            "wrong": 0,
            "maps": 8,
            "replayed": 32,
            "changed": True,
            "off_again": True,
            "routers": 2,
        }, name
