"""verl's rollout/moe/* metrics and `diagnostics.fact.imbalance`, as docs/trainers/verl.md compares them."""

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: make test-verl")

from verl.trainer.ppo.metric_utils import compute_rollout_moe_load_balance_metrics

from megatron_router_replay.diagnostics.fact import imbalance
from megatron_router_replay.trainers import token_layers

# Layer 1 is dense, layer 2 routes top-1 of 4. Two samples: one token of prompt, three and two of response; padding behind.
LAYER_2 = torch.tensor([[3, 1, 1, 0], [3, 2, 0, 0]])
ROUTES = torch.stack([torch.zeros_like(LAYER_2), LAYER_2], dim=2).unsqueeze(3)  # zeros: dense, last token, padding
RESPONSE_MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def test_max_vio_is_imbalance_less_one_over_the_response():
    """Rows 1 1 and 2 are left of the responses: a load of 0, 2, 1, 0, whose mean is 3 / 4."""
    metrics = compute_rollout_moe_load_balance_metrics(ROUTES, RESPONSE_MASK, 4)
    response = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]]).bool()  # with a route, and read by a token of the response
    load = torch.bincount(LAYER_2[response], minlength=4)
    assert load.tolist() == [0, 2, 1, 0]
    assert imbalance(load.unsqueeze(0)).tolist() == pytest.approx([8 / 3])
    assert metrics["rollout/moe/max_vio/layer_1"] == pytest.approx(8 / 3 - 1)
    assert metrics["rollout/moe/min_vio/layer_1"] == -1  # an expert that nobody chose
    assert metrics["rollout/moe/avg_vio/layer_1"] == pytest.approx((1 + 5 / 3 + 1 / 3 + 1) / 4)


def test_the_ids_of_tokens_are_not_counted_as_experts():
    """The plug-in hooks verl's function: routes with ids give the metrics of routes without."""
    import megatron_router_replay.trainers.verl  # noqa: F401

    ids = torch.tensor([[7, 151_000, 90], [165, 3, 0]])
    values = torch.zeros(2, 4, ROUTES.shape[2] + 3, 1, dtype=torch.int64)
    for i, count in enumerate((3, 2)):
        values[i, :count] = token_layers.add(ROUTES[i, :count], ids[i], sample=i)
    own, carried = (compute_rollout_moe_load_balance_metrics(each, RESPONSE_MASK, 4) for each in (ROUTES, values))
    assert own == carried
