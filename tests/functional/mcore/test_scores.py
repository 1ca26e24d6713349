"""Drifted routes keep Megatron's score semantics: probabilities and router gradients of a hand-written reference.

The reference is a float64 formula per token in plain python loops over experts; it shares nothing with the code under test.
"""

import pytest
import torch

import megatron_router_replay as mrr
from tests.functional.mcore.cases import DRAWN, MEGATRON, Case, as_map, build, moe_routers, random_routes

NUM_TOKENS, NUM_EXPERTS, TOPK = 6, 8, 3


def mode_of(score: str, pre: bool = False, bias: bool = False, groups: bool = False, scaled: bool = False) -> dict:
    return dict(
        moe_router_score_function=score,
        moe_router_pre_softmax=pre,
        moe_router_enable_expert_bias=bias,
        moe_router_num_groups=4 if groups else None,
        moe_router_group_topk=2 if groups else None,
        moe_router_topk_scaling_factor=2.5 if scaled else None,
    )


# Megatron's own constraints: pre-softmax is of softmax, bias of sigmoid.
MODES = {
    "softmax": mode_of("softmax"),
    "softmax-groups-scaled": mode_of("softmax", groups=True, scaled=True),
    "softmax-pre-scaled": mode_of("softmax", pre=True, scaled=True),
    "sigmoid-bias": mode_of("sigmoid", bias=True),
    "sigmoid-bias-groups-scaled": mode_of("sigmoid", bias=True, groups=True, scaled=True),
}
if MEGATRON >= (0, 18):
    MODES["sqrtsoftplus-scaled"] = mode_of("sqrtsoftplus", scaled=True)


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


def check_against_reference(mode: dict, dtype: torch.dtype, tolerance: float) -> None:
    """Route through a real TopKRouter inside a replay session; compare probabilities and gradients."""
    case = Case(config={"num_layers": 1, "moe_router_topk": TOPK, "moe_router_dtype": None, **mode})
    _, (model,), _ = build(case)
    (router,) = moe_routers([model])
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.linspace(-1, 1, NUM_EXPERTS))
    routes = random_routes(NUM_TOKENS, 1, topk=TOPK)
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(NUM_TOKENS, 1, NUM_EXPERTS, generator=generator)).to(dtype).requires_grad_()
    weights = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator)

    session = mrr.replay(
        model, mrr.RoutingTrace(topk_indices=routes, layer_numbers=[1], num_experts=NUM_EXPERTS), **DRAWN
    )
    session.microbatch(torch.arange(NUM_TOKENS)[None])
    router.gating = lambda hidden: logits
    probs, routing_map = router(torch.zeros(NUM_TOKENS, 1, 64))
    (probs * weights).sum().backward()
    session.close(check=False)  # the router ran without its model: there is no schedule to account for

    by_hand = logits.detach().double().view(NUM_TOKENS, NUM_EXPERTS).requires_grad_()
    expected = reference_probs(by_hand, routes[:, 0].tolist(), mode)
    (expected * weights).sum().backward()
    assert torch.equal(routing_map, as_map(routes[:, 0]))
    torch.testing.assert_close(probs.double(), expected, rtol=0, atol=tolerance)
    assert by_hand.grad.abs().max() > 1e-3
    if dtype is torch.float32:
        torch.testing.assert_close(logits.grad.double().view_as(by_hand), by_hand.grad, rtol=0, atol=tolerance)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_drifted_routes_get_the_probabilities_and_gradients_of_the_formula(mode, megatron):
    check_against_reference(mode, torch.float32, 1e-6)


def test_in_bf16_drifted_routes_stay_within_its_rounding(megatron):
    check_against_reference(MODES["softmax"], torch.bfloat16, 2**-8)
