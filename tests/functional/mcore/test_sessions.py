"""What a session touches, holds, counts and refuses to overlook."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes, build_tiny_gpt, tiny_gpt_config
from tests.functional.mcore.cases import (
    FULL,
    Case,
    as_map,
    build,
    left_over,
    moe_routers,
    random_routes,
    rows_seen,
    run,
    same,
    watched,
)

SINGLE = Case(layout=ParallelSizes(), config=FULL)


def random_trace(case: Case, config: Any, **options: Any) -> mrr.RoutingTrace:
    routes = random_routes(case.num_tokens, config.num_layers, config.moe_router_topk, config.num_moe_experts)
    layers = range(1, config.num_layers + 1)
    return mrr.RoutingTrace(topk_indices=routes, layer_numbers=layers, num_experts=config.num_moe_experts, **options)


def message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except mrr.RouterReplayError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def two_models() -> dict[str, Any]:
    """A policy under replay and a reference beside it."""
    config, policy, microbatches = build(SINGLE)
    reference = build_tiny_gpt(config, SINGLE.layout)
    before = run(reference, SINGLE, microbatches)
    with mrr.replay(policy, random_trace(SINGLE, config)) as session:
        replayed = run(policy, SINGLE, microbatches, session)
        beside = run(reference, SINGLE, microbatches)
        touched = left_over(reference)
    return {"same": same(before, beside), "replay differs": not same(before, replayed), "touched": touched}


def test_another_model_in_the_process_is_untouched(workers_1):
    assert workers_1.run(two_models) == [{"same": True, "replay differs": True, "touched": []}]


def exception_in_a_schedule() -> dict[str, Any]:
    config, chunks, microbatches = build(SINGLE)
    live = run(chunks, SINGLE, microbatches)
    trace = random_trace(SINGLE, config)
    calls = 0

    def fail_in_the_third(module: Any, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ArithmeticError("injected")

    handle = chunks[0].decoder.layers[1].register_forward_pre_hook(fail_in_the_third)
    hooks_before = len(chunks[0]._forward_hooks), len(chunks[0]._forward_pre_hooks)
    session = mrr.replay(chunks, trace)
    raised = None
    try:
        with session:
            run(chunks, SINGLE, microbatches, session)
    except ArithmeticError as error:
        raised = str(error)
    handle.remove()
    gc.collect()
    return {
        "raised": raised,
        "held": sum(len(router.replay_backward_list) for router in session._routers()),
        "router_replay": [router.router_replay for router in moe_routers(chunks)],
        "hooks": hooks_before == (len(chunks[0]._forward_hooks), len(chunks[0]._forward_pre_hooks)),
        "live again": same(live, run(chunks, SINGLE, microbatches)),
    }


def test_an_exception_in_the_middle_of_a_schedule_leaves_no_state(workers_1):
    (result,) = workers_1.run(exception_in_a_schedule)
    assert result == {
        "raised": "injected",
        "held": 0,
        "router_replay": [None] * 4,
        "hooks": True,
        "live again": True,
    }


def forward_only_then_train() -> dict[str, Any]:
    """Old log-probs first, then a training step, in one session: no recompute may meet the first pass's routes."""
    config, chunks, microbatches = build(SINGLE)
    trace = random_trace(SINGLE, config)
    with mrr.replay(chunks, trace, verify=True) as session:
        run(chunks, SINGLE, microbatches, session, forward_only=True)
        held = sum(len(router.replay_backward_list) for router in session._routers())
        in_flight = sum(len(chunk.ledger.unfinished) for chunk in session._chunks)
        backwards = microbatches[::-1]
        with watched(chunks) as seen:
            run(chunks, SINGLE, backwards, session)
    wrong = sum(
        int((routing_map != as_map(trace.layer(layer)[rows_seen(SINGLE, microbatch)], 8)).sum())
        for layer, maps in seen["recompute"].items()
        for microbatch, routing_map in zip(backwards, maps, strict=True)
    )
    return {"held": held, "in_flight": in_flight, "wrong": wrong, "verified_wrong": session.report.decisions_wrong}


def test_a_forward_only_pass_leaves_nothing_for_the_next_recompute(workers_1):
    assert workers_1.run(forward_only_then_train) == [{"held": 0, "in_flight": 0, "wrong": 0, "verified_wrong": 0}]


def bytes_held(num_experts: int) -> dict[str, float]:
    """Bytes of routes a session holds per token and layer, queued and between forward and backward."""
    case = Case(layout=ParallelSizes(), config=FULL | {"num_moe_experts": num_experts}, num_microbatches=3)
    config, (model,), microbatches = build(case)
    live_last = torch.arange(case.num_tokens) % case.sequence_length != case.sequence_length - 1
    trace = random_trace(case, config, replay_mask=live_last)
    session = mrr.replay(model, trace)
    (chunk,) = session._chunks

    def held() -> float:
        storages: dict[int, int] = {}
        tensors = [tensor for router in chunk.routers for tensor in router.replay_backward_list]
        for microbatch in chunk.ledger.unfinished:
            tensors += microbatch.targets.layers
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values()) / (case.num_tokens * config.num_layers)

    for microbatch in microbatches:
        session.microbatch(microbatch["routing_rows"])
    queued = held()
    outputs = [
        model(input_ids=m["tokens"], position_ids=m["position_ids"], attention_mask=None, labels=m["labels"])
        for m in microbatches
    ]
    forwarded = held()
    for output in outputs:
        output.sum().backward()
    backwarded = held()
    session.close()
    return {"queued": queued, "forwarded": forwarded, "backwarded": backwarded, "topk": config.moe_router_topk}


@pytest.mark.parametrize(("num_experts", "bytes_an_id"), [(8, 1), (258, 2)])
def test_a_session_holds_topk_compact_ids_per_token_and_layer(num_experts, bytes_an_id, workers_1):
    (held,) = workers_1.run(bytes_held, num_experts)
    assert held["queued"] == held["forwarded"] == held["topk"] * bytes_an_id
    assert held["backwarded"] == 0


def accounting() -> dict[str, str]:
    """Everything that can go out of step, and what the session says of it."""
    config, chunks, microbatches = build(SINGLE)
    (model,) = chunks
    trace = random_trace(SINGLE, config)
    rows = microbatches[0]["routing_rows"]
    inputs = {key: microbatches[0][key] for key in ("position_ids", "labels")} | {"attention_mask": None}
    tokens = microbatches[0]["tokens"]

    def forward(times: int = 1) -> Any:
        return [model(input_ids=tokens, **inputs) for _ in range(times)]

    def queued_but_not_run() -> None:
        with mrr.replay(model, trace) as session:
            session.microbatch(rows)

    def run_but_not_queued() -> None:
        with mrr.replay(model, trace):
            forward()

    def run_twice_queued_once() -> None:
        with mrr.replay(model, trace) as session:
            session.microbatch(rows)
            forward(2)

    def too_few_rows() -> None:
        with mrr.replay(model, trace) as session:
            session.microbatch(rows[:, :-1])
            forward()

    def one_row() -> None:
        with mrr.replay(model, trace) as session:
            session.microbatch(rows[:1, :1])
            forward()

    def rows_outside() -> None:
        with mrr.replay(model, trace) as session:
            session.microbatch(rows + trace.num_tokens)

    def nothing_replayed() -> None:
        nothing = random_trace(SINGLE, config, replay_mask=torch.zeros(SINGLE.num_tokens, dtype=torch.bool))
        with mrr.replay(model, nothing) as session:
            session.microbatch(rows)
            forward()[0].sum().backward()

    def other_tokens() -> None:
        token_ids = torch.cat([microbatch["tokens"].reshape(-1) for microbatch in microbatches])
        with mrr.replay(model, random_trace(SINGLE, config, token_ids=token_ids)) as session:
            session.microbatch(rows, token_ids=tokens)  # these match
            forward()[0].sum().backward()
            session.microbatch(rows.flip(0), token_ids=tokens)  # b-major samples swapped: the same shape

    def another_model() -> None:
        with mrr.replay(model, trace) as session:
            session.microbatch(rows, torch.nn.Linear(1, 1))

    def two_sessions() -> None:
        with mrr.replay(model, trace), mrr.record(model):
            pass

    def closed() -> None:
        session = mrr.replay(model, trace)
        session.close()
        session.microbatch(rows)

    def float_rows() -> None:
        with mrr.replay(model, trace) as session:
            session.microbatch(rows.float())

    def recorded_rows_do_not_fit() -> None:
        with mrr.record(model) as recording:
            recording.microbatch(rows[:, :-1])
            forward()

    cases = [value for name, value in locals().items() if callable(value) and name not in ("forward", "model")]
    messages = {case.__name__: message_of(case) for case in cases}
    messages["left over"] = str([router.router_replay for router in moe_routers(chunks)])
    return messages


EXPECTED = {
    "queued_but_not_run": ["ReplayStateError", "micro-batch 0", "layer 1", "rank 0", "no forward used them"],
    "run_but_not_queued": ["ReplayStateError", "micro-batch 0", "layer 1", "0 micro-batches were queued"],
    "run_twice_queued_once": ["ReplayStateError", "micro-batch 1", "1 micro-batches were queued"],
    "too_few_rows": ["LayoutError", "input_ids [2, 8]", "[2, 7]"],
    "one_row": ["LayoutError", "input_ids [2, 8]", "[1, 1]"],
    "rows_outside": ["LayoutError", "0..63"],
    "nothing_replayed": ["ReplayStateError", "none of 16 tokens was replayed"],
    "other_tokens": ["LayoutError", "input_ids[0, 0]"],
    "another_model": ["LayoutError", "Linear"],
    "two_sessions": ["ReplayStateError", "layer 1", "another session", "test_sessions.py"],
    "closed": ["ReplayStateError", "closed"],
    "float_rows": ["LayoutError", "float32"],
    "recorded_rows_do_not_fit": ["LayoutError", "input_ids [2, 8]", "[2, 7]"],
}


def test_whatever_goes_out_of_step_raises_and_says_where(workers_1):
    (messages,) = workers_1.run(accounting)
    assert messages.pop("left over") == "[None, None, None, None]"
    assert messages.keys() == EXPECTED.keys()
    for name, parts in EXPECTED.items():
        for part in parts:
            assert part in messages[name], (name, messages[name])


def padding_and_live() -> dict[str, Any]:
    """Half of each micro-batch is padding, every third row is live."""
    case = Case(layout=ParallelSizes(tp_size=2), config=FULL)
    config, chunks, microbatches = build(case)
    mask = torch.arange(case.num_tokens) % 3 != 0
    trace = random_trace(case, config, replay_mask=mask)
    loads, wrong, live_differs = [], 0, 0
    with watched(chunks) as seen:
        run(chunks, case, microbatches)
    live_maps = seen["forward"]
    for microbatch in microbatches:
        microbatch["routing_rows"] = microbatch["routing_rows"].clone()
        microbatch["routing_rows"][:, 1::2] = -1
        microbatch["padding"] = microbatch["routing_rows"] < 0
    with watched(chunks) as seen, mrr.replay(chunks, trace, verify=True) as session:
        run(chunks, case, microbatches, session)
    for layer in (1, 4):
        for microbatch, routing_map, live in zip(microbatches, seen["forward"][layer], live_maps[layer], strict=True):
            rows = rows_seen(case, microbatch)
            loads.append(routing_map[rows < 0].sum(dim=0))
            replayed = (rows >= 0) & mask[rows.clamp(min=0)]
            target = as_map(trace.layer(layer)[rows.clamp(min=0)], 8)
            wrong += int((routing_map[replayed] != target[replayed]).sum())
            if layer == 1:  # behind it, other hidden states rightly give other live routes
                by_live = (rows >= 0) & ~replayed
                live_differs += int((routing_map[by_live] != live[by_live]).sum())
    report = session.report
    return {
        "pads_an_expert": torch.stack(loads).tolist(),
        "pads": int((rows < 0).sum()),
        "wrong": wrong,
        "live_differs": live_differs,
        "counts": (report.rows_replayed, report.rows_live, report.rows_padding),
        "verified_wrong": report.decisions_wrong,
    }


def test_padding_spreads_over_all_experts_and_live_rows_route_live(workers_2):
    results = workers_2.run(padding_and_live)
    for result in results:
        assert result["wrong"] == result["live_differs"] == result["verified_wrong"] == 0
        for load in result["pads_an_expert"]:
            assert sum(load) == result["pads"] * 2
            assert max(load) <= -(-result["pads"] * 2 // 8) + 1
    # Over both tensor-parallel ranks together the load is even, too: 8 pads x 2 experts over 8 experts.
    for one, other in zip(*(result["pads_an_expert"] for result in results)):
        assert [a + b for a, b in zip(one, other)] == [2] * 8
    replayed, live, padding = (sum(counts) for counts in zip(*(result["counts"] for result in results)))
    assert (replayed + live, padding) == (32, 32)
    assert live == sum(row % 3 == 0 for row in range(64) if row % 2 == 0)


def refused(config: dict[str, Any]) -> str:
    layout = ParallelSizes()
    layout.initialize()
    fields = {name: value for name, value in config.items() if name != "set_after_building"}
    (model,) = build_tiny_gpt(tiny_gpt_config(layout, **fields), layout)
    for name, value in config.get("set_after_building", {}).items():
        setattr(model.config, name, value)
    messages = {message_of(lambda start=start: start(model).close()) for start in (mrr.record, mrr.freeze_recompute)}
    assert len(messages) == 1
    reasons = {router.reason for router in mrr.explain(model)}
    (message,) = messages
    assert all(reason in message for reason in reasons)
    return message


DROP = {"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "aux_loss"}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"set_after_building": {"moe_router_fusion": True, "moe_router_load_balancing_type": "sinkhorn"}},
            "moe_router_load_balancing_type='sinkhorn'",
        ),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type='sinkhorn'"),
        (
            {"set_after_building": {"moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"]}},
            "moe_router_load_balancing_type='quantile_balancing'",
        ),
        ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing=True"),
        (DROP | {"moe_token_drop_policy": "probs"}, "moe_token_drop_policy='probs'"),
        ({"set_after_building": {"cuda_graph_impl": "local", "cuda_graph_scope": []}}, "cuda_graph_impl='local'"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_the_name_of_its_field(config, said, workers_1):
    (message,) = workers_1.run(refused, config)
    assert "UnsupportedRouterError" in message
    assert said in message
    assert "layer 1 (decoder.layers.0.mlp.router)" in message


@pytest.mark.parametrize(
    "config",
    [
        DROP | {"moe_token_drop_policy": "position"},
        DROP | {"moe_token_drop_policy": "probs", "moe_expert_capacity_factor": 4.0},
        {"set_after_building": {"moe_router_fusion": True}},
    ],
)
def test_what_is_exact_is_not_refused(config, workers_1):
    assert workers_1.run(refused, config) == ["nothing was raised"]


def unknown_routers() -> dict[str, str]:
    from megatron.core.transformer.moe.router import TopKRouter

    class Overriding(TopKRouter):
        def routing(self, logits: Any, padding_mask: Any = None) -> Any:
            return super().routing(logits, padding_mask)

    _, (model,), _ = build(SINGLE)
    layer = model.decoder.layers[2].mlp
    messages = {}
    for name, router in (("subclass", layer.router), ("foreign", torch.nn.Linear(64, 8))):
        if name == "subclass":
            router.__class__ = Overriding
        else:
            router.layer_number = 3
            layer.router = router
        messages[name] = message_of(lambda: mrr.freeze_recompute(model))
    layer.router = moe_routers([model])[0]
    layer.router.__class__ = TopKRouter
    is_hash = layer.router
    is_hash.is_hash_layer = True
    messages["hash"] = message_of(lambda: mrr.freeze_recompute(model))
    return messages


def test_a_router_class_that_is_not_known_is_refused(workers_1):
    (messages,) = workers_1.run(unknown_routers)
    assert "overrides TopKRouter.routing" in messages["subclass"]
    assert "Linear is not a TopKRouter" in messages["foreign"]
    assert "layer 3" in messages["foreign"]
    assert "moe_n_hash_layers" in messages["hash"]


def traces_of_another_model() -> dict[str, str]:
    config, (model,), _ = build(Case(layout=ParallelSizes(), config={"moe_layer_freq": [0, 1, 1, 1]}))
    routes = random_routes(4, 4, 2, 8)

    def replay(indices: torch.Tensor, layers: list[int], num_experts: int) -> str:
        trace = mrr.RoutingTrace(topk_indices=indices, layer_numbers=layers, num_experts=num_experts)
        return message_of(lambda: mrr.replay(model, trace).close())

    return {
        "more experts": replay(routes[:, :3], [2, 3, 4], 16),
        "other topk": replay(random_routes(4, 3, 3, 8), [2, 3, 4], 8),
        "a layer is missing": replay(routes[:, :2], [2, 3], 8),
        "a dense layer has routes": replay(routes, [1, 2, 3, 4], 8),
        "exact": replay(routes[:, :3], [2, 3, 4], 8),
    }


def test_a_trace_of_another_model_is_refused(workers_1):
    (messages,) = workers_1.run(traces_of_another_model)
    assert "num_experts=8, the trace 16" in messages["more experts"]
    assert "topk=2, the trace 3" in messages["other topk"]
    assert "layer 4 (decoder.layers.3.mlp.router) has no routes" in messages["a layer is missing"]
    assert "layer 1, but that layer of the model is dense" in messages["a dense layer has routes"]
    assert messages["exact"] == "nothing was raised"
