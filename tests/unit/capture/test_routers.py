"""Routers found in each layer, and models that are refused by name."""

import pytest
from torch import nn

pytest.importorskip("transformers")

from megatron_router_replay.capture import CaptureError, Capturer
from megatron_router_replay.capture.routers import find_router_sites
from tests.unit.capture.sampling import build_model


def test_an_unknown_router_beside_known_ones_is_refused():
    model = build_model("mixtral")
    model.model.layers[1].mlp.gate = nn.Linear(64, 4, bias=False)
    with pytest.raises(
        CaptureError, match=r"model\.layers\.1\.mlp \(MixtralSparseMoeBlock\) has experts, but no router"
    ):
        Capturer(model)


def test_models_whose_routers_do_not_say_enough_are_refused():
    with pytest.raises(CaptureError, match="Linear has no router that is known here"):
        Capturer(nn.Linear(2, 2))
    model = build_model("mixtral")
    model.model.layers[2].mlp.gate.top_k = None
    with pytest.raises(
        CaptureError, match=r"layers\.2\.mlp\.gate .* has no layer, num_experts or top_k that can be read"
    ):
        Capturer(model)
    model = build_model("mixtral")
    model.model.layers[2].mlp.second = model.model.layers[0].mlp.gate
    del model.model.layers[0].mlp.gate, model.model.layers[0].mlp.experts
    with pytest.raises(CaptureError, match="second router of layer_number 3"):
        Capturer(model)


def test_routers_of_a_multi_token_prediction_layer_are_left_out():
    model = build_model("mixtral")
    model.mtp = nn.ModuleList([build_model("mixtral").model.layers[0]])
    assert [site.layer_number for site in find_router_sites(model)] == [1, 2, 3]
