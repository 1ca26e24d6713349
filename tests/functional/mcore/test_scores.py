"""Drifted routes keep Megatron's score semantics: probabilities and router gradients of a hand-written reference.

The reference is a float64 formula per token in plain python loops over experts; it shares nothing with the code under test.
"""

import itertools
import math

import pytest
import torch

import megatron_router_replay as mrr
from tests.functional.mcore.cases import LATER_SCORE_FUNCTIONS, random_routes

NUM_TOKENS, NUM_EXPERTS, TOPK = 6, 8, 3

MODES = {
    "-".join([score, *(["pre"] * pre), *(["bias"] * bias), *(["groups"] * groups), *(["scaled"] * scaled)]): dict(
        moe_router_score_function=score,
        moe_router_pre_softmax=pre,
        moe_router_enable_expert_bias=bias,
        moe_router_num_groups=4 if groups else None,
        moe_router_group_topk=2 if groups else None,
        moe_router_topk_scaling_factor=2.5 if scaled else None,
    )
    for score, pre, bias, groups, scaled in itertools.product(
        ("softmax", "sigmoid"), (False, True), (False, True), (False, True), (False, True)
    )
    # Megatron's own constraints: bias and groups with sigmoid or pre-softmax, scaling with pre-softmax for softmax.
    if not (score == "sigmoid" and pre) and not (score == "softmax" and bias)
} | {
    f"{score}{'-scaled' * scaled}": dict(
        moe_router_score_function=score,
        moe_router_pre_softmax=False,
        moe_router_enable_expert_bias=False,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_router_topk_scaling_factor=2.5 if scaled else None,
    )
    for score in LATER_SCORE_FUNCTIONS
    for scaled in (False, True)
}


def reference_probs(logits: torch.Tensor, routes: list[list[int]], mode: dict) -> torch.Tensor:
    """[n, num_experts] float64 probabilities of the routed experts, by the definition of each score function."""
    rows = []
    for token, experts in zip(logits.double(), routes):
        if mode["moe_router_score_function"] == "sigmoid":
            scores = {e: 1 / (1 + torch.exp(-token[e])) for e in experts}
            total = sum(scores.values()) if len(experts) > 1 else 1.0
        elif mode["moe_router_score_function"] == "sqrtsoftplus":
            scores = {e: torch.sqrt(torch.log(1 + torch.exp(token[e]))) for e in experts}
            total = sum(scores.values()) if len(experts) > 1 else 1.0
        elif mode["moe_router_pre_softmax"]:
            scores = {e: torch.exp(token[e]) for e in experts}
            total = sum(torch.exp(logit) for logit in token)
        else:
            scores = {e: torch.exp(token[e]) for e in experts}
            total = sum(scores.values())
        scale = mode["moe_router_topk_scaling_factor"] or 1.0
        zero = token[0] * 0
        rows.append(torch.stack([scores[e] / total * scale if e in scores else zero for e in range(NUM_EXPERTS)]))
    return torch.stack(rows)


def compare_with_reference(mode: dict, dtype: torch.dtype) -> dict[str, float]:
    """Route through a real TopKRouter inside a replay session; return largest errors of probs and gradients."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_router_replay.testing import ParallelSizes, build_tiny_gpt, tiny_gpt_config

    layout = ParallelSizes()
    layout.initialize()
    config = tiny_gpt_config(layout, num_layers=1, moe_router_topk=TOPK, moe_router_dtype=None, **mode)
    (model,) = build_tiny_gpt(config, layout)
    (router,) = [module for module in model.modules() if isinstance(module, TopKRouter)]
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.linspace(-1, 1, NUM_EXPERTS))
    routes = random_routes(NUM_TOKENS, 1, TOPK, NUM_EXPERTS)
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(NUM_TOKENS, 1, NUM_EXPERTS, generator=generator)).to(dtype).requires_grad_()
    weights = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator)

    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=[1], num_experts=NUM_EXPERTS)
    session = mrr.replay(model, trace)
    session.microbatch(torch.arange(NUM_TOKENS)[None])
    router.gating = lambda hidden: logits
    probs, routing_map = router(torch.zeros(NUM_TOKENS, 1, 64))
    (probs * weights).sum().backward()
    session._detach()  # the router ran without its model: there is no schedule to account for

    expected_logits = logits.detach().double().view(NUM_TOKENS, NUM_EXPERTS).requires_grad_()
    expected = reference_probs(expected_logits, routes[:, 0].tolist(), mode)
    (expected * weights).sum().backward()
    assert expected_logits.grad is not None
    assert logits.grad is not None
    map_expected = torch.zeros(NUM_TOKENS, NUM_EXPERTS, dtype=torch.bool).scatter(1, routes[:, 0], True)
    return {
        "map_wrong": int((routing_map != map_expected).sum()),
        "probs": float((probs.double() - expected).abs().max()),
        "gradient": float((logits.grad.double().view_as(expected_logits) - expected_logits.grad).abs().max()),
        "gradient_size": float(expected_logits.grad.abs().max()),
    }


def native_routes_are_no_change(mode: dict, dtype: torch.dtype) -> dict[str, bool]:
    """Replay the router's own routes, in its own column order: outputs and gradients to the last bit."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(64, NUM_EXPERTS, generator=generator).to(dtype)
    weights = torch.randn(64, NUM_EXPERTS, generator=generator)
    arguments = dict(
        topk=TOPK,
        use_pre_softmax=mode["moe_router_pre_softmax"],
        num_groups=mode["moe_router_num_groups"],
        group_topk=mode["moe_router_group_topk"],
        scaling_factor=mode["moe_router_topk_scaling_factor"],
        score_function=mode["moe_router_score_function"],
        expert_bias=torch.linspace(-1, 1, NUM_EXPERTS) if mode["moe_router_enable_expert_bias"] else None,
    )
    replay = mrr.RouterReplay()
    results = []
    for action in (None, mrr.RouterReplayAction.RECORD, mrr.RouterReplayAction.REPLAY_FORWARD):
        leaf = logits.clone().requires_grad_()
        if action is mrr.RouterReplayAction.REPLAY_FORWARD:
            replay.set_target_indices(replay.get_recorded_indices())
        replay.set_router_replay_action(action)
        probs, routing_map = topk_routing_with_score_function(leaf, router_replay=replay, **arguments)
        (probs * weights).sum().backward()
        results.append((probs.detach(), routing_map, leaf.grad))
    return {
        name: all(torch.equal(a, b) for a, b in zip(results[0], results[i]))
        for i, name in ((1, "record"), (2, "replay"))
    }


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_drifted_routes_get_the_probabilities_and_gradients_of_the_formula(mode, workers_1):
    (errors,) = workers_1.run(compare_with_reference, mode, torch.float32)
    assert errors["map_wrong"] == 0
    assert errors["gradient_size"] > 1e-3
    assert errors["probs"] < 1e-6
    assert errors["gradient"] < 1e-6


def test_in_bf16_drifted_routes_stay_within_its_rounding(workers_1):
    (errors,) = workers_1.run(compare_with_reference, MODES["softmax"], torch.bfloat16)
    assert errors["map_wrong"] == 0
    assert errors["probs"] < 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_replaying_native_routes_is_bit_identical_to_no_replay(mode, dtype, workers_1):
    (equal,) = workers_1.run(native_routes_are_no_change, mode, dtype)
    assert equal == {"record": True, "replay": True}


def test_the_reference_itself_sums_to_one_over_the_routed_experts():
    probs = reference_probs(torch.randn(4, NUM_EXPERTS), [[0, 1, 2]] * 4, MODES["softmax"])
    assert all(math.isclose(float(row.sum()), 1.0) for row in probs)
