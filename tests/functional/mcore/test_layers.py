"""Every router gets its own layer: identity comes from the modules, never from counts."""

import contextlib
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import (
    FULL,
    MTP_RECOMPUTE,
    Case,
    as_map,
    build,
    random_routes,
    record_and_replay,
    rows_seen,
    run,
)

PP2 = ParallelSizes(pp_size=2)

CASES = {
    "dense first": (Case(layout=ParallelSizes(), config={"moe_layer_freq": [0, 1, 1, 1]} | FULL), [[2, 3, 4]]),
    "every second": (Case(layout=ParallelSizes(), config={"moe_layer_freq": 2}), [[1, 3]]),
    "list over pp2": (Case(layout=PP2, config={"moe_layer_freq": [1, 0, 1, 1]} | FULL), [[1], [3, 4]]),
    "uneven split": (Case(layout=PP2, config={"num_layers_in_first_pipeline_stage": 1}), [[1], [2, 3, 4]]),
    "uneven split, dense first": (
        Case(layout=PP2, config={"num_layers_in_first_pipeline_stage": 3, "moe_layer_freq": [0, 1, 0, 1]} | FULL),
        [[2], [4]],
    ),
    "a stage without MoE layers": (Case(layout=PP2, config={"moe_layer_freq": [0, 0, 1, 1]} | FULL), [[], [3, 4]]),
    "interleaved, a chunk without MoE layers": (
        Case(layout=ParallelSizes(pp_size=2, vp_size=2), config={"moe_layer_freq": [0, 1, 1, 1]} | FULL),
        [[3], [2, 4]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_router_records_and_replays_its_own_layer(name, request):
    case, layers_of_rank = CASES[name]
    workers = request.getfixturevalue(f"workers_{case.layout.world_size}")
    for result, layers in zip(workers.run(record_and_replay, case), layers_of_rank, strict=True):
        assert result["layers"] == result["trace_layers"] == layers
        assert result["record_is_live"]
        assert result["replay_is_live"]
        assert result["wrong"] == {"forward": 0, "recompute": 0}
        assert result["forwards"] == dict.fromkeys(layers, case.num_microbatches)


def with_mtp(mtp: bool) -> dict[str, Any]:
    """Replay random routes of decoder and MTP layers; which routes does the MTP router use?"""
    from megatron.core.transformer.moe.router import TopKRouter

    case = Case(
        layout=ParallelSizes(), config={"mtp_num_layers": 1, "num_layers": 2} | MTP_RECOMPUTE, num_microbatches=1
    )
    config, (model,), microbatches = build(case)
    (mtp_router,) = [
        module for name, module in model.named_modules() if isinstance(module, TopKRouter) and name.startswith("mtp")
    ]
    maps: list[torch.Tensor] = []
    mtp_router.register_forward_hook(lambda module, args, output: maps.append(output[1].clone()))
    run([model], case, microbatches)
    live = maps[0]
    maps.clear()
    routes = random_routes(case.num_tokens, 3, config.moe_router_topk, config.num_moe_experts)
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=[1, 2, 3], num_experts=config.num_moe_experts)
    with mrr.replay(model, trace, mtp=mtp, verify=True) as session:
        run([model], case, microbatches, session)
    targets = [as_map(routes[rows_seen(case, microbatches[0]), i], config.num_moe_experts) for i in range(3)]
    with mrr.record(model, mtp=True) as recording:
        run([model], case, microbatches, recording)
    return {
        "explained": [(router.layer_number, router.is_mtp) for router in mrr.explain(model)],
        "routes used": [[i + 1 for i in range(3) if torch.equal(used, targets[i])] for used in maps[: len(maps) // 2]],
        "live share": float((maps[0] == live).all(dim=1).float().mean()),
        "recorded layers": recording.trace().layer_numbers,
    }


def one_dense_layer_and_one_mtp_router() -> dict[str, Any]:
    """As many routers as decoder layers, by coincidence: counting would shift every router by one."""
    from megatron.core.transformer.moe.router import TopKRouter

    config = {"mtp_num_layers": 1, "num_layers": 3, "moe_layer_freq": [0, 1, 1]} | MTP_RECOMPUTE
    case = Case(layout=ParallelSizes(), config=config, num_microbatches=1)
    built, (model,), microbatches = build(case)
    routes = random_routes(case.num_tokens, 2, built.moe_router_topk, built.num_moe_experts)
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=[2, 3], num_experts=built.num_moe_experts)
    used: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(lambda m, a, output, name=name: used.__setitem__(name, output[1].clone()))
    with mrr.replay(model, trace) as session:
        run([model], case, microbatches, session)
    rows = rows_seen(case, microbatches[0])
    targets = {layer: as_map(trace.layer(layer)[rows], built.num_moe_experts) for layer in (2, 3)}
    return {
        name: [layer for layer, target in targets.items() if torch.equal(routing_map, target)]
        for name, routing_map in used.items()
    }


def test_one_dense_layer_and_one_mtp_router_shift_nothing(workers_1):
    (used,) = workers_1.run(one_dense_layer_and_one_mtp_router)
    assert used.pop("decoder.layers.1.mlp.router") == [2]
    assert used.pop("decoder.layers.2.mlp.router") == [3]
    ((name, of_mtp),) = used.items()
    assert name.startswith("mtp")
    assert of_mtp == []


def test_an_mtp_router_stays_live_and_takes_no_decoder_routes(workers_1):
    (result,) = workers_1.run(with_mtp, False)
    assert result["explained"] == [(1, False), (2, False), (3, True)]
    assert all(used == [] for used in result["routes used"])


def test_an_mtp_router_is_replayed_as_the_layer_behind_the_last_when_asked(workers_1):
    (result,) = workers_1.run(with_mtp, True)
    assert result["routes used"]
    assert all(used == [3] for used in result["routes used"])
    assert result["recorded layers"] == (1, 2, 3)


def noisy_mtp_recomputes(kind: str) -> dict[str, Any]:
    """Replay or record decoder layers alone, while logits differ in recomputes; which experts do MTP recomputes use?"""
    from megatron.core.transformer.moe.router import TopKRouter

    case = Case(
        layout=ParallelSizes(), config={"mtp_num_layers": 1, "num_layers": 2} | MTP_RECOMPUTE, num_microbatches=2
    )
    config, (model,), microbatches = build(case)
    ((_, router),) = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, TopKRouter) and name.startswith("mtp")
    ]
    gating, maps = router.gating, {"forward": [], "recompute": []}

    def in_recompute() -> bool:
        return torch._C._current_graph_task_id() != -1

    def noisy(hidden: torch.Tensor) -> torch.Tensor:
        logits = gating(hidden)
        return logits.flip(-1) if in_recompute() else logits

    def hook(module: Any, args: Any, output: Any) -> None:
        maps["recompute" if in_recompute() else "forward"].append(output[1].clone())

    router.gating = noisy
    router.register_forward_hook(hook)
    routes = random_routes(case.num_tokens, 2, config.moe_router_topk, config.num_moe_experts)
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=[1, 2], num_experts=config.num_moe_experts)
    with contextlib.ExitStack() as stack:
        if kind.startswith("freeze"):
            stack.enter_context(mrr.freeze_recompute(model))
        session = stack.enter_context(
            mrr.record(model, verify=True) if kind.endswith("record") else mrr.replay(model, trace, verify=True)
        )
        run([model], case, microbatches, session)
    return {
        "layers": session.trace().layer_numbers if kind.endswith("record") else trace.layer_numbers,
        "recomputes": len(maps["recompute"]),
        "flips": sum(int((a != b).any(dim=1).sum()) for a, b in zip(maps["forward"], maps["recompute"], strict=True)),
    }


@pytest.mark.parametrize("kind", ["record", "replay", "freeze and record", "freeze and replay"])
def test_an_mtp_router_that_stays_live_is_frozen_in_recomputes(kind, workers_1):
    (result,) = workers_1.run(noisy_mtp_recomputes, kind)
    assert result == {"layers": (1, 2), "recomputes": 2, "flips": 0}
