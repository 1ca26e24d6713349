"""Three programs on one model: rounding, a corrupted dense layer, and a changed router; a diff distinguishes them."""

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.demo import load_response, write_checkpoint
from megatron_router_replay.testing import ParallelSizes, load_qwen3_moe, run_ranks

pytestmark = pytest.mark.slow


PROGRAMS = ("as it is", "weights in bf16", "a corrupted dense layer", "a changed router")


def record(checkpoint):
    """Return the routes of each program's forwards; layers 1, 3 and 4 are MoE layers, layer 2 is dense."""
    layout = ParallelSizes()
    layout.initialize()
    return [record_one(checkpoint, layout, program) for program in PROGRAMS]


def record_one(checkpoint, layout, program):
    (chunk,) = load_qwen3_moe(checkpoint, layout)
    layers = chunk.decoder.layers
    with torch.no_grad():
        if program == "weights in bf16":
            for weight in chunk.parameters():
                weight.copy_(weight.bfloat16())
        if program == "a corrupted dense layer":
            add_noise(layers[1].mlp.linear_fc2.weight)
        if program == "a changed router":
            add_noise(layers[2].mlp.router.weight)
        with mrr.record([chunk]) as recording:
            for sample in mrr.engines.vllm.decode_batch(load_response(), model=checkpoint):
                ids = sample.token_ids.long().unsqueeze(0)
                positions = torch.arange(ids.shape[1]).unsqueeze(0)
                chunk(input_ids=ids, position_ids=positions, attention_mask=None)
    return recording.trace()


def add_noise(weight):
    weight += 0.6 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    ((as_it_is, *changed),) = run_ranks(1, record, checkpoint)
    return dict(zip(PROGRAMS[1:], (mrr.diff_traces(as_it_is, trace).conclusion for trace in changed)))


def test_weights_in_bf16_look_like_rounding(texts):
    assert "something between" not in texts["weights in bf16"]
    assert "That fits rounding (another precision, kernel or layout), and as well weights" in texts["weights in bf16"]


@pytest.mark.parametrize("program", PROGRAMS[2:])
def test_a_jump_names_the_layers_around_it(texts, program):
    assert "something between layer 1 and layer 3, or after every layer, differs: " in texts[program], texts[program]
    assert "or of a dense layer between" in texts[program]
    assert "rounding" not in texts[program]
