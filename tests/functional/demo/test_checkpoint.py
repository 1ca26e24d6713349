"""The demo's checkpoint: the bits that the vLLM of its response served, made anew."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file

from megatron_router_replay.demo import write_checkpoint

# Of the weights in the order of their names, taken when vLLM 0.30.0 had served them.
SERVED = "f18f0789499d354f2301ec034cadf7b17db730a16d5f83052b08dcbcef0c2d67"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "new" / "folder")


def test_every_weight_has_the_bits_that_were_served(checkpoint):
    weights = load_file(f"{checkpoint}/model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].numpy().tobytes())
    assert digest.hexdigest() == SERVED


def test_weights_are_spread_as_the_docstring_says(checkpoint):
    weight = load_file(f"{checkpoint}/model.safetensors")["lm_head.weight"]
    steps = weight * 32768 / (11 / 32)
    assert torch.equal(steps, steps.round())  # evenly spaced, nothing was rounded
    assert -32768 <= steps.min() < -32000
    assert 32000 < steps.max() <= 32767
    assert weight.std().item() == pytest.approx(0.2, abs=0.005)


def test_transformers_knows_every_tensor(checkpoint):
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    weights = load_file(f"{checkpoint}/model.safetensors")
    assert torch.equal(model.model.layers[0].mlp.gate.weight, weights["model.layers.0.mlp.gate.weight"])
