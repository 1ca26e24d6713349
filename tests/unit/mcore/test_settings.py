"""Settings that keep a router from being replayed, on Megatron-Core's own TransformerConfig of the installed version."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.enums import CudaGraphScope
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_router_replay.mcore.model.support import config_refusals
from tests.unit.mcore.tiny_chunk import config

pytestmark = pytest.mark.version
ROUTER: Any = SimpleNamespace(num_experts=8, topk=2)  # what the checks read of a router
FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}
GRAPH_FIELD = "cuda_graph_modules" if "cuda_graph_modules" in FIELDS else "cuda_graph_scope"  # renamed in 0.18
SINCE_0_18 = GRAPH_FIELD == "cuda_graph_modules"


def set_after(**values: Any) -> TransformerConfig:
    """A config with fields that its own checks would ask other fields for."""
    made = config()
    for name, value in values.items():
        assert hasattr(made, name), f"this Megatron-Core has no {name}"
        setattr(made, name, value)
    return made


def test_a_plain_config_is_not_refused():
    assert list(config_refusals(config(), ROUTER)) == []


# (cuda_graph_impl, what it captures and other fields, what the refusal names; None: the router stays outside)
GRAPHS: list[tuple[str, dict[str, Any], str | None]] = [
    ("none", {GRAPH_FIELD: []}, None),
    ("local", {GRAPH_FIELD: ["attn"]}, None),
    ("local", {GRAPH_FIELD: []}, "full"),
    ("local", {GRAPH_FIELD: ["moe_router"]}, "moe_router"),  # which brings moe_preprocess along
    # The old name of the modules is read as Megatron-Core reads it.
    ("transformer_engine", {"cuda_graph_scope": ["attn"]}, None),
    ("transformer_engine", {"cuda_graph_scope": ["attn", "moe_router"]}, "moe_router"),
]
if SINCE_0_18:  # scopes of inference graphs stand apart, and do not matter to training
    GRAPHS += [
        ("full_iteration", {GRAPH_FIELD: []}, "full_iteration"),
        ("local", {GRAPH_FIELD: ["attn"], "inference_cuda_graph_scope": "layer"}, None),
        ("local", {GRAPH_FIELD: [], "inference_cuda_graph_scope": "block"}, None),
    ]
else:
    GRAPHS += [("local", {GRAPH_FIELD: ["full_iteration"]}, "full_iteration")]
    if hasattr(CudaGraphScope, "full_iteration_inference"):  # in 0.17 alone
        GRAPHS += [("local", {GRAPH_FIELD: ["full_iteration_inference"]}, None)]


@pytest.mark.parametrize(("implementation", "fields", "refused"), GRAPHS)
def test_cuda_graphs_with_the_router_in_them_are_refused_and_others_are_not(implementation, fields, refused):
    reasons = list(config_refusals(config(cuda_graph_impl=implementation, **fields), ROUTER))
    assert len(reasons) == (refused is not None)
    assert refused is None or refused in reasons[0]
    assert refused is None or f"cuda_graph_impl={implementation!r} with {GRAPH_FIELD}" in reasons[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("moe_router_force_biased", -0.5),
        ("moe_router_force_load_balancing", True),
        ("moe_expert_rank_capacity_factor", 1.5),
        ("moe_paged_stash", True),
    ],
)
def test_a_setting_that_cannot_be_exact_is_refused_by_its_name(field, value):
    if field not in FIELDS:
        pytest.skip(f"this Megatron-Core has no {field}")
    (reason,) = config_refusals(set_after(**{field: value}), ROUTER)
    assert reason.startswith(f"{field}={value}")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type='sinkhorn'"),
        ({"moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"]}, "type='quantile_balancing'"),
        ({"moe_token_drop_policy": "probs", "moe_expert_capacity_factor": 3.9}, "moe_token_drop_policy='probs'"),
        (
            {"moe_token_drop_policy": "probs", "moe_expert_capacity_factor": 4.0},
            None,
        ),  # 8 experts of 2: none is dropped
        ({"moe_token_drop_policy": "position", "moe_expert_capacity_factor": 1.0}, None),
    ],
)
def test_what_chooses_by_itself_or_drops_by_probability_is_refused(values, reason):
    reasons = list(config_refusals(set_after(**values), ROUTER))
    assert len(reasons) == (reason is not None)
    assert reason is None or reason in reasons[0]
