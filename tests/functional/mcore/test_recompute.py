"""Recomputes use the experts of their forward, whatever happens to the logits in between."""

import contextlib
import gc
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL, Case, build, left_over, moe_routers, random_routes, run, watched

FULL_2 = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def add_noise_in_recompute(chunks: list[Any], scale: float) -> None:
    """Let every router see other logits in a recompute than in its forward."""
    generator = torch.Generator().manual_seed(11)
    for router in moe_routers(chunks):

        def noisy(hidden: torch.Tensor, gating: Any = router.gating) -> torch.Tensor:
            logits = gating(hidden)
            if torch._C._current_graph_task_id() != -1:
                logits = logits + scale * torch.randn(logits.shape, generator=generator)
            return logits

        router.gating = noisy


def flips_under_noise(case: Case, kind: str) -> dict[str, Any]:
    """Run one step with noisy recomputes; count recomputed decisions that differ from their forward's."""
    config, chunks, microbatches = build(case)
    add_noise_in_recompute(chunks, scale=2.0)
    session: Any = None
    if kind == "freeze":
        session = mrr.freeze_recompute(chunks, verify=True)
    elif kind == "record":
        session = mrr.record(chunks, verify=True)
    elif kind == "replay with live rows":
        routes = random_routes(case.num_tokens, config.num_layers, config.moe_router_topk, config.num_moe_experts)
        trace = mrr.RoutingTrace(
            topk_indices=routes,
            layer_numbers=range(1, config.num_layers + 1),
            num_experts=config.num_moe_experts,
            replay_mask=torch.arange(case.num_tokens) % 2 == 0,
        )
        session = mrr.replay(chunks, trace, verify=True)
    with watched(chunks) as seen:
        run(chunks, case, microbatches, session if kind not in ("off", "freeze") else None)
    held = 0
    if session is not None:
        held = sum(len(router.replay_backward_list) for router in session._routers())
        session.close()
    flips = compared = 0
    for layer, recomputed in seen["recompute"].items():
        for forward, recompute in zip(seen["forward"][layer], recomputed, strict=True):
            compared += len(forward)
            flips += int((forward != recompute).any(dim=1).sum())
    report = None if session is None else session.report
    return {
        "flips": flips,
        "compared": compared,
        "live": 0 if report is None else report.rows_live,
        "verified_wrong": None if report is None else report.decisions_wrong,
        "held_after_the_step": held,
    }


CASES = {
    "single-full": Case(layout=ParallelSizes(), config=FULL),
    "single-two-layers-a-checkpoint": Case(layout=ParallelSizes(), config=FULL_2),
    "pp2-full": Case(layout=ParallelSizes(pp_size=2), config=FULL),
    "pp2-vpp2-moe": Case(layout=ParallelSizes(pp_size=2, vp_size=2), config=MOE),
    "tp2-full": Case(layout=ParallelSizes(tp_size=2), config=FULL),
    "single-full-fused": Case(layout=ParallelSizes(), config=FULL, fused=True),
    "pp2-vpp2-moe-fused": Case(layout=ParallelSizes(pp_size=2, vp_size=2), config=MOE, fused=True),
}


@pytest.mark.parametrize("kind", ["freeze", "record", "replay with live rows"])
@pytest.mark.parametrize("name", CASES)
def test_noise_between_forward_and_recompute_flips_nothing(name, kind, request):
    case = CASES[name]
    workers = request.getfixturevalue(f"workers_{case.layout.world_size}")
    for rank in workers.run(flips_under_noise, case, kind):
        assert rank["compared"] > 0
        assert rank["flips"] == 0
        assert rank["verified_wrong"] == 0
        assert rank["held_after_the_step"] == 0
        assert (rank["live"] > 0) == (kind != "freeze")


@pytest.mark.parametrize("name", ["single-full", "pp2-full", "pp2-vpp2-moe"])
def test_without_a_session_the_same_noise_flips_routes(name, request):
    case = CASES[name]
    workers = request.getfixturevalue(f"workers_{case.layout.world_size}")
    assert all(rank["flips"] > 0 for rank in workers.run(flips_under_noise, case, "off"))


def backward_orders(order: str) -> dict[str, int]:
    """Two or three forwards of a checkpointed model, then their backwards in an order no schedule has."""
    case = Case(layout=ParallelSizes(), config=FULL, num_microbatches=3)
    config, (model,), microbatches = build(case)
    add_noise_in_recompute([model], scale=2.0)
    routes = random_routes(case.num_tokens, config.num_layers, config.moe_router_topk, config.num_moe_experts)
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=range(1, 5), num_experts=config.num_moe_experts)
    with watched([model]) as seen, mrr.replay(model, trace) as session:
        losses = []
        for microbatch in microbatches:
            session.microbatch(microbatch["routing_rows"])
            # Without labels: the backward of Megatron's cross entropy works in place and cannot run twice.
            logits = model(input_ids=microbatch["tokens"], position_ids=microbatch["position_ids"], attention_mask=None)
            losses.append(logits.square().sum())
        if order == "one backward for all":
            torch.stack(losses).sum().backward()
            expected = [2, 1, 0]  # autograd runs the youngest nodes first
        elif order == "last first":
            expected = [2, 0, 1]
            for i in expected:
                losses[i].backward()
        else:
            assert order == "twice through one graph"
            expected = [0, 0, 1, 2]
            losses[0].backward(retain_graph=True)
            for i in (0, 1, 2):
                losses[i].backward()
    wrong = 0
    for layer, recomputed in seen["recompute"].items():
        for i, recompute in zip(expected, recomputed, strict=True):
            wrong += int((recompute != seen["forward"][layer][i]).any(dim=1).sum())
    return {"wrong": wrong, "layers": len(seen["recompute"])}


@pytest.mark.parametrize("order", ["one backward for all", "last first", "twice through one graph"])
def test_any_order_of_backwards_finds_its_own_micro_batch(order, workers_1):
    assert workers_1.run(backward_orders, order) == [{"wrong": 0, "layers": 4}]


def whole_run_under_freeze() -> dict[str, Any]:
    """Training steps, evaluations, a dropped graph and a failed forward, under one freeze_recompute."""
    case = Case(layout=ParallelSizes(), config=FULL)
    config, (model,), microbatches = build(case)
    add_noise_in_recompute([model], scale=2.0)
    freeze = mrr.freeze_recompute(model, count_flips=True)

    def held() -> int:
        return sum(len(router.replay_backward_list) for router in freeze._routers())

    after = {}
    run([model], case, microbatches)
    after["a training step"] = held()
    run([model], case, microbatches, forward_only=True)
    after["an evaluation"] = held()
    inputs = {key: microbatches[0][key] for key in ("position_ids", "labels")}
    output = model(input_ids=microbatches[0]["tokens"], attention_mask=None, **inputs)
    after["a forward that waits for its backward"] = held()
    del output
    after["a graph dropped without a backward"] = held()
    handle = model.decoder.layers[2].register_forward_pre_hook(_fail)
    with contextlib.suppress(ArithmeticError):
        model(input_ids=microbatches[0]["tokens"], attention_mask=None, **inputs)
    handle.remove()
    with watched([model]) as seen:
        run([model], case, microbatches)
    flips = sum(
        int((forward != recompute).sum())
        for layer in seen["recompute"]
        for forward, recompute in zip(seen["forward"][layer], seen["recompute"][layer], strict=True)
    )
    after["a training step behind a failed forward"] = held()
    freeze.close()
    with watched([model]) as seen:  # without the freeze the same noise shows how many flips it prevented, about
        run([model], case, microbatches)
    unfrozen = sum(
        int((forward != recompute).any(dim=1).sum())
        for layer in seen["recompute"]
        for forward, recompute in zip(seen["forward"][layer], seen["recompute"][layer], strict=True)
    )
    per_step = freeze.report.recompute_flips / 2
    return {
        "flips_counted": per_step / unfrozen,
        "held": after,
        "flips": flips,
        "restored": [router.router_replay for router in moe_routers([model])],
    }


def _fail(*_: Any) -> None:
    raise ArithmeticError("injected")


def test_one_freeze_serves_a_whole_run_and_keeps_nothing(workers_1):
    (result,) = workers_1.run(whole_run_under_freeze)
    waiting = result["held"].pop("a forward that waits for its backward")
    assert waiting == 4  # one micro-batch, four layers
    assert set(result["held"].values()) == {0}, result["held"]
    assert result["flips"] == 0
    assert 0.8 < result["flips_counted"] < 1.25  # another draw of the noise
    assert result["restored"] == [None] * 4


def backward_after_leaving(kind: str) -> dict[str, Any]:
    """The session is left before its backward, and every recompute would route otherwise live."""
    case = Case(layout=ParallelSizes(), config=FULL, num_microbatches=1)
    config, (model,), (microbatch,) = build(case)
    add_noise_in_recompute([model], scale=2.0)
    session = mrr.record(model) if kind == "record" else mrr.freeze_recompute(model)
    with watched([model]) as seen:
        with session:
            if kind == "record":
                session.microbatch(microbatch["routing_rows"])
            inputs = {key: microbatch[key] for key in ("position_ids", "labels")}
            loss = model(input_ids=microbatch["tokens"], attention_mask=None, **inputs).sum()
        loss.backward()
    del loss
    gc.collect()
    return {
        "recomputed": len(seen["recompute"]),
        "flips": sum(
            int((maps[0] != seen["forward"][layer][0]).any(dim=1).sum()) for layer, maps in seen["recompute"].items()
        ),
        "left over": left_over([model]),
    }


@pytest.mark.parametrize("kind", ["record", "freeze"])
def test_a_backward_after_its_session_was_left_is_exact_and_then_nothing_is_left(kind, workers_1):
    assert workers_1.run(backward_after_leaving, kind) == [{"recomputed": 4, "flips": 0, "left over": []}]


def checkpoint_around_the_model() -> dict[str, int]:
    """Megatron's checkpoint around model and loss, with full recompute inside it."""
    from megatron.core.tensor_parallel import checkpoint

    case = Case(layout=ParallelSizes(), config=FULL, num_microbatches=2)
    _, (model,), microbatches = build(case)
    add_noise_in_recompute([model], scale=2.0)
    scale = torch.ones(1, requires_grad=True)

    def forward(scale: torch.Tensor) -> torch.Tensor:
        return scale * model(microbatches[0]["tokens"], microbatches[0]["position_ids"], None).sum()

    with watched([model]) as seen, mrr.freeze_recompute(model):
        inside = checkpoint(forward, False, scale)
        beside = model(microbatches[1]["tokens"], microbatches[1]["position_ids"], None).sum()
        (inside + beside).backward()
    # Autograd runs the youngest first: the plain micro-batch, then of the other the outer recompute and the inner ones.
    owner = (1, 0, 0)
    wrong = sum(
        int((recompute != seen["forward"][layer][number]).any(dim=1).sum())
        for layer, recomputed in seen["recompute"].items()
        for number, recompute in zip(owner, recomputed, strict=True)
    )
    return {"layers": len(seen["recompute"]), "wrong": wrong}


def test_a_checkpoint_around_model_and_loss_is_exact(workers_1):
    assert workers_1.run(checkpoint_around_the_model) == [{"layers": 4, "wrong": 0}]


def in_place_on_packed_outputs(recompute: dict[str, Any]) -> dict[str, int]:
    """verl's way: packed rows, `logits.div_(temperature)` in place, one backward over three micro-batches."""
    case = Case(layout=ParallelSizes(), config=recompute, num_microbatches=3, batch_size=1)
    config, (model,), microbatches = build(case)
    add_noise_in_recompute([model], scale=2.0)
    routes = random_routes(case.num_tokens, config.num_layers, config.moe_router_topk, config.num_moe_experts)
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=range(1, 5), num_experts=config.num_moe_experts)
    with watched([model]) as seen, mrr.replay(model, trace) as session:
        losses = []
        for microbatch in microbatches:
            session.microbatch(microbatch["routing_rows"])
            logits = model(input_ids=microbatch["tokens"], position_ids=microbatch["position_ids"], attention_mask=None)
            logits.div_(0.7)
            losses.append(logits.square().mean())
        torch.stack(losses).sum().backward()
    wrong = sum(
        int((recompute != seen["forward"][layer][number]).any(dim=1).sum())
        for layer, recomputed in seen["recompute"].items()
        for number, recompute in zip((2, 1, 0), recomputed, strict=True)
    )
    return {"layers": len(seen["recompute"]), "wrong": wrong}


@pytest.mark.parametrize("recompute", [FULL, MOE], ids=["full", "moe"])
def test_outputs_changed_in_place_do_not_hide_whose_recompute_it_is(recompute, workers_1):
    assert workers_1.run(in_place_on_packed_outputs, recompute) == [{"layers": 4, "wrong": 0}]


def sessions_closed_in_the_wrong_order() -> list[Any]:
    case = Case(layout=ParallelSizes())
    _, (model,), _ = build(case)
    freeze = mrr.freeze_recompute(model)
    recording = mrr.record(model)
    freeze.close()
    recording.close()
    return [router.router_replay for router in moe_routers([model])]


def test_a_freeze_closed_inside_another_session_does_not_come_back(workers_1):
    assert workers_1.run(sessions_closed_in_the_wrong_order) == [[None] * 4]


def checkpoint_layers(model: Any) -> None:
    """Put torch's non-reentrant checkpoint around each layer, as FSDP and others use it."""
    from torch.utils.checkpoint import checkpoint

    for layer in model.decoder.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **kwargs: checkpoint(
            forward, *args, use_reentrant=False, **kwargs
        )


def near_ties(frozen: bool) -> str:
    """Flips in a non-reentrant recompute: other numbers of tokens an expert, other shapes, a dead run."""
    case = Case(layout=ParallelSizes(), num_microbatches=1)
    _, chunks, microbatches = build(case)
    checkpoint_layers(chunks[0])
    add_noise_in_recompute(chunks, scale=2.0)
    session = mrr.freeze_recompute(chunks) if frozen else None
    try:
        run(chunks, case, microbatches)
    except torch.utils.checkpoint.CheckpointError as error:
        return str(error)
    if session is not None:
        session.close()
    return "trained"


def test_near_ties_kill_a_checkpointed_run_unless_its_recompute_is_frozen(workers_1):
    assert "different metadata" in workers_1.run(near_ties, False)[0]
    assert workers_1.run(near_ties, True) == ["trained"]


def non_reentrant(microbatches_in_flight: int) -> dict[str, int]:
    """Several micro-batches under a non-reentrant checkpoint around each layer."""
    case = Case(layout=ParallelSizes(), num_microbatches=microbatches_in_flight)
    _, (model,), microbatches = build(case)
    checkpoint_layers(model)
    with watched([model]) as seen, mrr.record(model) as recording:
        run([model], case, microbatches, recording)
    differ = sum(
        int((forward != recompute).sum())
        for layer in seen["recompute"]
        for forward, recompute in zip(seen["forward"][layer], seen["recompute"][layer], strict=True)
    )
    return {"differ": differ, "recomputes": recording.report.recomputes}


def test_a_non_reentrant_checkpoint_is_recognised_too(workers_1):
    assert workers_1.run(non_reentrant, 2) == [{"differ": 0, "recomputes": 8}]
