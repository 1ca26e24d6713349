"""The demo's checkpoint: the bits that the vLLM of its response served, made anew."""

import hashlib

from safetensors.torch import load_file

from megatron_router_replay.demo import write_checkpoint

# Of the weights in the order of their names, taken when vLLM 0.30.0 had served them.
SERVED = "f18f0789499d354f2301ec034cadf7b17db730a16d5f83052b08dcbcef0c2d67"


def test_every_weight_has_the_bits_that_were_served(tmp_path):
    weights = load_file(f"{write_checkpoint(tmp_path / 'new' / 'folder')}/model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].numpy().tobytes())
    assert digest.hexdigest() == SERVED
