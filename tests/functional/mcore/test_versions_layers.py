"""Layers of later versions: hybrid models, several MoE layers in an MTP block, and traces of another model than this one."""

import contextlib
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, TraceError
from megatron_router_replay.mcore import layer_numbers_of
from megatron_router_replay.mcore.layers import check_trace_layers
from megatron_router_replay.testing import ParallelSizes, build_tiny_hybrid, tiny_gpt_config
from tests.functional.mcore.cases import (
    FULL,
    MEGATRON,
    Case,
    as_map,
    build,
    random_routes,
    rows_seen,
    run,
    same,
    watched,
)

SINGLE, PP2 = ParallelSizes(), ParallelSizes(pp_size=2)
needs_hybrid = pytest.mark.skipif(MEGATRON < (0, 18), reason="Megatron-Core has no HybridModel before 0.18")


def hybrid(case: Case, pattern: str) -> tuple[Any, list[Any], list[dict[str, Any]]]:
    """Return (config, this rank's chunks, micro-batches with routing_rows) of a hybrid model."""
    _, _, microbatches = build(case)
    num_layers = len(pattern.split("/")[0].replace("|", ""))
    config = tiny_gpt_config(case.layout, **{**case.config, "num_layers": num_layers})
    return config, build_tiny_hybrid(config, case.layout, pattern), microbatches


def hybrid_replay(case: Case, pattern: str) -> dict[str, Any]:
    """Record a hybrid model, replay that, and replay routes that no router chose, in the numbers of a GPT model."""
    config, chunks, microbatches = hybrid(case, pattern)
    live = run(chunks, case, microbatches)
    with mrr.record(chunks, verify=True) as recording:
        recorded = run(chunks, case, microbatches, recording)
    trace = recording.trace(num_tokens=case.num_tokens)
    with mrr.replay(chunks, trace, verify=True) as session:
        replayed = run(chunks, case, microbatches, session)

    numbers = layer_numbers_of(chunks)
    routes = random_routes(case.num_tokens, len(numbers), config.moe_router_topk, config.num_moe_experts)
    other = mrr.RoutingTrace(topk_indices=routes, layer_numbers=numbers, num_experts=config.num_moe_experts)
    with watched(chunks) as seen, mrr.replay(chunks, other, verify=True) as session:
        run(chunks, case, microbatches, session)
    wrong = [
        int((routing_map != as_map(routes[rows_seen(case, microbatch), numbers.index(layer)], 8)).any(dim=1).sum())
        for maps_of_layer in seen.values()
        for layer, maps in maps_of_layer.items()
        for microbatch, routing_map in zip(microbatches, maps, strict=True)
    ]
    return {
        "numbers": numbers,
        "recorded layers": trace.layer_numbers,
        "record_is_live": same(live, recorded),
        "replay_is_live": same(live, replayed),
        "watched": {phase: sorted(maps) for phase, maps in seen.items()},
        "wrong": sum(wrong),
    }


@needs_hybrid
@pytest.mark.parametrize(
    ("recompute", "topk"),
    [({}, 2), ({}, 4), (FULL, 2), (FULL, 4)],
    ids=["none-2", "none-4", "full-2", "full-4"],
)
def test_a_gpt_model_that_became_a_hybrid_one_routes_in_layers_2_4_6(recompute, topk, workers_1):
    case = Case(layout=SINGLE, config=recompute | {"moe_router_topk": topk})
    (result,) = workers_1.run(hybrid_replay, case, "*E*E*E")
    assert result["numbers"] == result["recorded layers"] == (2, 4, 6)
    assert result["record_is_live"]
    assert result["replay_is_live"]
    assert result["watched"] == {"forward": [2, 4, 6], "recompute": [2, 4, 6] if recompute else []}
    assert result["wrong"] == 0


@needs_hybrid
@pytest.mark.parametrize("recompute", [{}, FULL], ids=["none", "full"])
def test_mamba_layers_count_as_layers_and_have_no_routes(recompute, workers_1):
    case = Case(layout=SINGLE, config=recompute | {"moe_router_topk": 4})
    (result,) = workers_1.run(hybrid_replay, case, "MEM*EME")
    assert result["numbers"] == result["recorded layers"] == (2, 5, 7)
    assert result["record_is_live"]
    assert result["replay_is_live"]
    assert result["watched"] == {"forward": [2, 5, 7], "recompute": [2, 5, 7] if recompute else []}
    assert result["wrong"] == 0


@needs_hybrid
def test_over_stages_mamba_layers_count_too(workers_2):
    first, second = workers_2.run(hybrid_replay, Case(layout=PP2), "MEM*|MEME")
    assert first["numbers"] == second["numbers"] == (2, 6, 8)
    assert (first["recorded layers"], second["recorded layers"]) == ((2,), (6, 8))
    assert first["wrong"] == second["wrong"] == 0


@needs_hybrid
def test_over_stages_every_rank_knows_the_layers_of_the_whole_hybrid_model(workers_2):
    first, second = workers_2.run(hybrid_replay, Case(layout=PP2, config=FULL), "*E*E|*EE")
    assert first["numbers"] == second["numbers"] == (2, 4, 6, 7)
    assert (first["recorded layers"], second["recorded layers"]) == ((2, 4), (6, 7))
    assert first["wrong"] == second["wrong"] == 0


def mtp_of_several_layers(pattern: str, num_layers: int) -> dict[str, Any]:
    """Replay an MTP block of several MoE layers with random routes; which routes does each of its routers use?"""
    from megatron.core.transformer.moe.router import TopKRouter

    case = Case(layout=SINGLE, config={"mtp_num_layers": num_layers}, num_microbatches=1)
    config, (model,), microbatches = hybrid(case, pattern)
    explained = [(router.layer_number, router.is_mtp) for router in mrr.explain(model)]
    numbers = [number for number, _ in explained]
    routes = random_routes(case.num_tokens, len(numbers), config.moe_router_topk, config.num_moe_experts)
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=numbers, num_experts=config.num_moe_experts)
    maps: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(lambda m, a, output, name=name: maps.__setitem__(name, output[1].clone()))
    with mrr.replay(model, trace, mtp=True, verify=True) as session:
        run([model], case, microbatches, session)
    targets = {n: as_map(routes[rows_seen(case, microbatches[0]), i], 8) for i, n in enumerate(numbers)}
    used = {
        name: [number for number, target in targets.items() if torch.equal(routing_map, target)]
        for name, routing_map in maps.items()
    }
    return {"explained": explained, "used": used, "of the decoder": layer_numbers_of(model)}


@needs_hybrid
def test_each_moe_layer_of_an_mtp_block_has_its_own_number(workers_1):
    (result,) = workers_1.run(mtp_of_several_layers, "*E*E/*EE/*EE", 2)
    # Four decoder layers; then attention 5, experts 6 and 7 of the first MTP layer, 8 to 10 of the second.
    assert result["explained"] == [(2, False), (4, False), (6, True), (7, True), (9, True), (10, True)]
    assert result["used"] == {
        "decoder.layers.1.mlp.router": [2],
        "decoder.layers.3.mlp.router": [4],
        "mtp.layers.0.mtp_model_layer.layers.1.mlp.router": [6],
        "mtp.layers.0.mtp_model_layer.layers.2.mlp.router": [7],
        "mtp.layers.1.mtp_model_layer.layers.1.mlp.router": [9],
        "mtp.layers.1.mtp_model_layer.layers.2.mlp.router": [10],
    }
    assert result["of the decoder"] == (2, 4)


def message(action: Any) -> str:
    try:
        action()
    except mrr.RouterReplayError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def repeated_mtp_layer() -> dict[str, str]:
    case = Case(layout=SINGLE, config={"mtp_num_layers": 2, "mtp_use_repeated_layer": True})
    _, chunks, _ = build(case)
    (refused,) = [str(router) for router in mrr.explain(chunks) if not router.replayable]
    return {"freeze": message(lambda: mrr.freeze_recompute(chunks)), "explained": refused}


@pytest.mark.skipif(MEGATRON < (0, 17), reason="Megatron-Core has no mtp_use_repeated_layer before 0.17")
def test_an_mtp_layer_that_runs_twice_a_forward_is_refused_by_the_name_of_its_field(workers_1):
    (messages,) = workers_1.run(repeated_mtp_layer)
    assert messages["freeze"].startswith("UnsupportedRouterError")
    assert all("mtp_use_repeated_layer=True with mtp_num_layers=2" in text for text in messages.values())


def layer_numbers(case: Case, pattern: str | None = None) -> tuple[int, ...]:
    chunks = build(case)[1] if pattern is None else hybrid(case, pattern)[1]
    return layer_numbers_of(chunks)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (1, 2, 3, 4)),
        ({"moe_layer_freq": 2}, (1, 3)),
        ({"moe_layer_freq": [0, 1, 0, 1]}, (2, 4)),
        ({"moe_layer_freq": [0, 0, 1, 1]}, (3, 4)),  # a stage without MoE layers
        ({"num_layers_in_first_pipeline_stage": 3, "moe_layer_freq": [0, 1, 1, 1]}, (2, 3, 4)),
    ],
)
def test_every_rank_knows_which_layers_of_the_whole_gpt_model_route(config, expected, workers_2):
    assert workers_2.run(layer_numbers, Case(layout=PP2, config=config)) == [expected, expected]


def built_from_another_spec() -> str:
    _, (model,), _ = build(Case(layout=SINGLE))
    model.config.moe_layer_freq = [1, 1, 0, 1]
    return message(lambda: layer_numbers_of(model))


def test_a_model_that_does_not_follow_its_config_is_not_guessed(workers_1):
    (text,) = workers_1.run(built_from_another_spec)
    assert text.startswith("LayoutError: the model says that its layers [1, 2, 4] route, but of this rank's layers")
    assert "these do: [1, 2, 3, 4]" in text


def test_a_module_without_a_config_has_no_layers_to_tell():
    with pytest.raises(LayoutError, match="Linear has no config that says which of its layers route"):
        layer_numbers_of(torch.nn.Linear(2, 2))


def checked_traces(case: Case, pattern: str | None, traces: list[tuple[list[int], bool]]) -> list[str]:
    """What is said of traces of these layers, given (layer numbers, mtp)."""
    chunks = build(case)[1] if pattern is None else hybrid(case, pattern)[1]
    return [message(lambda given=given, mtp=mtp: check_trace_layers(given, chunks, mtp=mtp)) for given, mtp in traces]


FINE = "nothing was raised"


def test_a_trace_of_a_deeper_model_is_refused(workers_1):
    case = Case(layout=SINGLE, config={"num_layers": 3})
    (said,) = workers_1.run(
        checked_traces, case, None, [([1, 2, 3], False), ([1, 2, 3, 7], False), ([1, 2, 3, 4], False)]
    )
    assert said[0] == FINE
    assert (
        said[1] == "TraceError: the trace has routes for layer 7, but the model has 3 layers: it is of a deeper model."
    )
    assert "layer 4, but the model has 3 layers" in said[2]


def test_routes_of_mtp_layers_are_of_this_model_and_those_behind_are_not(workers_1):
    case = Case(layout=SINGLE, config={"num_layers": 3, "mtp_num_layers": 1})
    traces = [([1, 2, 3, 4], False), ([1, 2, 3, 4], True), ([1, 2, 3], True), ([1, 2, 3, 5], False)]
    (said,) = workers_1.run(checked_traces, case, None, traces)
    assert said[:2] == [FINE, FINE]
    assert said[2].startswith("TraceError: MTP layer 4")
    assert "layer 5, but the model has 3 layers and 1 in its MTP block" in said[3]


def test_a_stage_takes_the_whole_models_trace_and_refuses_a_deeper_one(workers_2):
    case = Case(layout=PP2, config={"moe_layer_freq": [0, 0, 1, 1]})
    first, second = workers_2.run(checked_traces, case, None, [([3, 4], False), ([3, 4, 5], False)])
    assert first[0] == second[0] == FINE
    assert first[1] == second[1]
    assert "layer 5, but the model has 4 layers" in first[1]


def test_a_trace_without_a_layer_or_with_a_dense_one_is_refused(workers_1):
    case = Case(layout=SINGLE, config={"moe_layer_freq": [0, 1, 0, 1]})
    traces = [([2, 4], False), ([2], False), ([1, 2, 4], False), ([1, 3], False), ([1, 2], False)]
    (said,) = workers_1.run(checked_traces, case, None, traces)
    assert said[0] == FINE
    assert "layer 4 (decoder.layers.3.mlp.router) has no routes: the trace has layers [2]" in said[1]
    assert "renumber" not in said[1]
    assert "routes for layer 1, but that layer of the model is dense" in said[2]
    # As many as the model has: they may be counted in another way, and the message says what to do then.
    for text in said[3:]:
        assert "The model routes in as many layers, [2, 4]" in text
        assert "trace.renumber(dict(zip(trace.layer_numbers, mcore.layer_numbers_of(model))))" in text


@needs_hybrid
def test_routes_for_a_mamba_layer_are_refused(workers_1):
    traces = [([2, 5, 7], False), ([1, 2, 5, 7], False), ([1, 2, 3], False)]
    (said,) = workers_1.run(checked_traces, Case(layout=SINGLE), "MEM*EME", traces)
    assert said[0] == FINE
    assert "routes for layer 1, but that layer of the model is dense" in said[1]
    assert "The model routes in as many layers, [2, 5, 7]" in said[2]


@needs_hybrid
def test_the_message_for_a_migrated_model_says_how_to_renumber(workers_1):
    (said,) = workers_1.run(checked_traces, Case(layout=SINGLE), "*E*E*E", [([2, 4, 6], False), ([1, 2, 3], False)])
    assert said[0] == FINE
    assert "layer 4 (decoder.layers.3.mlp.router) has no routes: the trace has layers [1, 2, 3]" in said[1]
    assert "The model routes in as many layers, [2, 4, 6]" in said[1]


def replay_a_deeper_trace() -> str:
    case = Case(layout=SINGLE, config={"num_layers": 3})
    config, chunks, _ = build(case)
    routes = random_routes(8, 4, config.moe_router_topk, config.num_moe_experts)
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=[1, 2, 3, 7], num_experts=config.num_moe_experts)
    with contextlib.suppress(TraceError):
        mrr.replay(chunks, trace)._detach()
        return "replayed"
    return "refused"


def test_a_replay_session_refuses_a_trace_of_a_deeper_model(workers_1):
    assert workers_1.run(replay_a_deeper_trace) == ["refused"]


def routers_of_different_width() -> str:
    _, (model,), _ = build(Case(layout=SINGLE))
    model.decoder.layers[2].mlp.router.topk = 3
    return message(lambda: mrr.freeze_recompute(model))


def test_layers_of_different_topk_are_refused_by_name(workers_1):
    (text,) = workers_1.run(routers_of_different_width)
    assert text.startswith("UnsupportedRouterError")
    assert "layer 3 (decoder.layers.2.mlp.router): topk=3, but layer 1 (decoder.layers.0.mlp.router) has 2" in text
