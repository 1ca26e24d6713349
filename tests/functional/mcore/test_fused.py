"""Routers with moe_router_fusion=True: sessions run Megatron-Core's unfused routing function, so everything equals it.

Where live routing itself would run (outside of sessions) it needs Transformer Engine, so nothing here routes live.
"""

from importlib.util import find_spec
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
    set_fusion,
    watched,
)
from tests.functional.mcore.test_recompute import FULL_2, MOE
from tests.functional.mcore.test_scores import MODES

NUM_TOKENS, NUM_EXPERTS, TOPK = 64, 8, 3


def one_router(mode: dict[str, Any]) -> tuple[Any, Any]:
    """Return a model of one layer and its router; the expert bias, where there is one, moves the selection."""
    layout = ParallelSizes()
    layout.initialize()
    config = tiny_gpt_config(layout, num_layers=1, moe_router_topk=TOPK, moe_router_dtype=None, **mode)
    (model,) = build_tiny_gpt(config, layout)
    (router,) = moe_routers([model])
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.linspace(-1, 1, NUM_EXPERTS))
    return model, router


def routed(model: Any, router: Any, logits: torch.Tensor, start: Any) -> tuple[torch.Tensor, ...]:
    """Return (probs, map, gradient of the logits, experts used) of one micro-batch under a session."""
    leaf = logits.clone().requires_grad_()
    session = start(model)
    session.microbatch(torch.arange(NUM_TOKENS)[None])
    router.gating = lambda hidden: leaf
    probs, routing_map = router(torch.zeros(NUM_TOKENS, 1, 64))
    (probs * torch.linspace(-1, 1, probs.numel()).view_as(probs)).sum().backward()
    session._detach()  # the router ran without its model: there is no schedule to account for
    assert leaf.grad is not None
    return probs.detach(), routing_map, leaf.grad


def fused_beside_unfused(mode: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    model, router = one_router(mode)
    routes = random_routes(NUM_TOKENS, 1, TOPK, NUM_EXPERTS)
    logits = (3 * torch.randn(NUM_TOKENS, 1, NUM_EXPERTS, generator=torch.Generator().manual_seed(3))).to(dtype)

    def trace(every: int) -> Any:
        mask = torch.arange(NUM_TOKENS) % every > 0
        return mrr.RoutingTrace(topk_indices=routes, layer_numbers=[1], num_experts=NUM_EXPERTS, replay_mask=mask)

    every_row = mrr.RoutingTrace(topk_indices=routes, layer_numbers=[1], num_experts=NUM_EXPERTS)
    starts = {
        "replay": lambda model: mrr.replay(model, every_row),
        "replay with live rows": lambda model: mrr.replay(model, trace(3)),
        "record": mrr.record,
    }
    largest: dict[str, Any] = {}
    for name, start in starts.items():
        results = {}
        for fused in (False, True):
            router.config.moe_router_fusion = fused
            results[fused] = routed(model, router, logits, start)
        probs, routing_map, gradient = results[True]
        expected_probs, expected_map, expected_gradient = results[False]
        largest[name] = {
            "equal": torch.equal(probs, expected_probs) and torch.equal(gradient, expected_gradient),
            "map": int((routing_map != expected_map).sum()),
            "chosen": int(routing_map.sum()),
            "as replayed": int((routing_map[1:3] != as_map(routes[1:3, 0], NUM_EXPERTS)).sum()),
        }
    return largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_probabilities_map_and_gradients_equal_the_unfused_path(mode, dtype, workers_1):
    (results,) = workers_1.run(fused_beside_unfused, mode, dtype)
    for name, largest in results.items():
        assert largest["chosen"] == NUM_TOKENS * TOPK
        assert largest["map"] == 0
        assert largest["equal"]
        assert (largest["as replayed"] == 0) == (name != "record")


def replayed_in_training(case: Case) -> dict[str, Any]:
    """The same random routes unfused and fused on this rank: losses and gradients, and the maps that left the routers."""
    config, chunks, microbatches = build(case)
    layers = range(1, config.num_layers + 1)
    routes = random_routes(case.num_tokens, config.num_layers, config.moe_router_topk, config.num_moe_experts)
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=layers, num_experts=config.num_moe_experts)
    with mrr.replay(chunks, trace, verify=True) as session:
        unfused = run(chunks, case, microbatches, session)

    set_fusion(chunks, True)
    with watched(chunks) as seen, mrr.replay(chunks, trace, verify=True) as session:
        fused = run(chunks, case, microbatches, session)
    with mrr.freeze_recompute(chunks), mrr.replay(chunks, trace) as inside:
        nested = run(chunks, case, microbatches, inside)
    with mrr.record(chunks, verify=True) as recording:
        recorded = run(chunks, case, microbatches, recording)
    with mrr.replay(chunks, recording.trace(num_tokens=case.num_tokens), verify=True) as again:
        replayed_again = run(chunks, case, microbatches, again)
    wrong = sum(
        int((routing_map != as_map(routes[rows_seen(case, microbatch), layer - 1], config.num_moe_experts)).sum())
        for phase in seen.values()
        for layer, maps in phase.items()
        for microbatch, routing_map in zip(microbatches, maps, strict=True)
    )
    return {
        "fused_is_unfused": same(unfused, fused),
        "nested_is_fused": same(fused, nested),
        "replay_is_recording": same(recorded, replayed_again),
        "wrong": wrong,
        "report": session.report.to_dict(),
        "left_over": left_over(chunks),
    }


CASES = {
    "single": Case(layout=ParallelSizes()),
    "single-full": Case(layout=ParallelSizes(), config=FULL_2),
    "pp2-full": Case(layout=ParallelSizes(pp_size=2), config=FULL),
    "pp2-vpp2-moe": Case(layout=ParallelSizes(pp_size=2, vp_size=2), config=MOE),
    "tp2": Case(layout=ParallelSizes(tp_size=2)),
    "ep2": Case(layout=ParallelSizes(ep_size=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_training_with_fused_routers_is_that_with_unfused_ones(name, request):
    case = CASES[name]
    for rank in request.getfixturevalue(f"workers_{case.layout.world_size}").run(replayed_in_training, case):
        assert rank["fused_is_unfused"]
        assert rank["nested_is_fused"]
        assert rank["replay_is_recording"]
        assert rank["wrong"] == 0
        assert rank["report"]["decisions_verified"] > 0
        assert (rank["report"]["recomputes"] > 0) == bool(case.config)
        assert rank["left_over"] == []


def live_message(model: Any, case: Case, microbatch: dict[str, Any]) -> str:
    try:
        model(input_ids=microbatch["tokens"], position_ids=microbatch["position_ids"], attention_mask=None)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def restored() -> dict[str, Any]:
    from megatron.core.transformer.moe import router as router_module

    case = Case(layout=ParallelSizes(), num_microbatches=1, fused=True)
    _, (model,), (microbatch,) = build(case)
    before = router_module.topk_routing_with_score_function
    outer = mrr.freeze_recompute(model)
    inner = mrr.record(model)
    outer.close()
    while_inner = router_module.topk_routing_with_score_function is not before
    inner._detach()
    after = router_module.topk_routing_with_score_function is before
    message = live_message(model, case, microbatch)

    # A session that ends twice, by close and by an exception behind it, counts once.
    with mrr.freeze_recompute(model):
        try:
            with mrr.record(model) as closed:
                closed.close()
                raise RuntimeError
        except RuntimeError:
            while_outer = router_module.topk_routing_with_score_function is not before

    # Another package that wraps the function while a session runs keeps its wrapper.
    session = mrr.freeze_recompute(model)
    wrapped = router_module.topk_routing_with_score_function

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    router_module.topk_routing_with_score_function = theirs
    session.close()
    kept = router_module.topk_routing_with_score_function is theirs
    passes_on = live_message(model, case, microbatch)
    with mrr.freeze_recompute(model):  # around their wrapper, which calls what the last session left
        foreign = router_module.topk_routing_with_score_function(torch.randn(5, 8), 2)[1]
    router_module.topk_routing_with_score_function = before
    return {
        "while_inner": while_inner,
        "while_outer": while_outer,
        "after": after,
        "message": message,
        "kept": kept,
        "passes_on": passes_on,
        "chosen": int(foreign.sum()),
    }


@pytest.mark.skipif(
    find_spec("transformer_engine") is not None, reason="live fused routing works with transformer_engine"
)
def test_when_the_last_session_ends_megatrons_own_function_is_back(workers_1):
    (result,) = workers_1.run(restored)
    assert result["while_inner"]
    assert result["while_outer"]
    assert result["after"]
    assert result["kept"]
    assert "Please install TE" in result["message"]
    assert "Please install TE" in result["passes_on"]
    assert result["chosen"] == 5 * 2


def other_calls() -> dict[str, bool]:
    """Calls of the replaced function that are not a session's, and one of a session's router that asks for fusion."""
    from megatron.core.transformer.moe import router as router_module

    case = Case(layout=ParallelSizes(), num_microbatches=1, fused=True)
    _, (model,), _ = build(case)
    router = moe_routers([model])[0]
    logits = torch.randn(5, 8)
    session = mrr.freeze_recompute(model)
    function = router_module.topk_routing_with_score_function
    foreign = function(logits, 2)
    try:
        outside = str(function(logits, 2, fused=True, router_replay=router.router_replay))
    except mrr.RouterReplayError as error:
        outside = str(error)
    try:
        foreign_fused = str(function(logits, 2, fused=True))
    except ValueError as error:
        foreign_fused = str(error)
    session._detach()  # one router ran without its model: there is no schedule to account for
    expected = router_module.topk_routing_with_score_function(logits, 2)
    return {
        "foreign": all(torch.equal(*pair) for pair in zip(foreign, expected)),
        "a session's, outside a forward": "outside its own forward" in outside,
        "foreign and fused": "Please install TE" in foreign_fused,
    }


@pytest.mark.skipif(
    find_spec("transformer_engine") is not None, reason="live fused routing works with transformer_engine"
)
def test_other_calls_of_the_function_are_passed_on(workers_1):
    (passed_on,) = workers_1.run(other_calls)
    assert passed_on == {"foreign": True, "a session's, outside a forward": True, "foreign and fused": True}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_probabilities_and_gradients_are_those_of_transformer_engine(mode):
    te_router = pytest.importorskip("transformer_engine.pytorch.router", reason="transformer_engine is not installed")
    from megatron_router_replay.fused import route

    logits = torch.randn(512, NUM_EXPERTS, device="cuda")
    arguments = dict(
        use_pre_softmax=mode["moe_router_pre_softmax"],
        scaling_factor=mode["moe_router_topk_scaling_factor"],
        score_function=mode["moe_router_score_function"],
    )
    bias = torch.linspace(-1, 1, NUM_EXPERTS, device="cuda") if mode["moe_router_enable_expert_bias"] else None
    theirs = logits.clone().requires_grad_()
    probs, routing_map = te_router.fused_topk_with_score_function(
        logits=theirs,
        topk=TOPK,
        num_groups=mode["moe_router_num_groups"],
        group_topk=mode["moe_router_group_topk"],
        expert_bias=bias,
        **arguments,
    )
    ours = logits.clone().requires_grad_()
    our_probs, our_map = route(ours, routing_map.int().topk(TOPK, dim=1).indices, **arguments)
    weights = torch.randn_like(probs)
    (probs * weights).sum().backward()
    (our_probs * weights).sum().backward()
    assert torch.equal(our_map, routing_map)
    torch.testing.assert_close(our_probs, probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
