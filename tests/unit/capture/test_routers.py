"""Which routers are found, in which layer, and which models are refused by name."""

import pytest
import torch
from torch import nn

from megatron_router_replay.capture import CaptureError, RouterSite, create_capturer, find_router_sites
from megatron_router_replay.capture.routers import select_megatron
from tests.unit.capture.sampling import MODELS, build_model


@pytest.mark.parametrize("name", MODELS)
def test_every_moe_layer_of_a_transformers_model_is_found(name):
    _, layer_numbers, num_experts = MODELS[name]
    sites = find_router_sites(build_model(name))
    assert tuple(site.layer_number for site in sites) == layer_numbers
    assert {(site.num_experts, site.topk) for site in sites} == {(num_experts, 2)}


def test_an_unknown_router_beside_known_ones_is_refused():
    model = build_model("mixtral")
    model.model.layers[1].mlp.gate = nn.Linear(64, 4, bias=False)
    with pytest.raises(
        CaptureError, match=r"model\.layers\.1\.mlp \(MixtralSparseMoeBlock\) has experts, but no router"
    ):
        create_capturer(model)


@torch.no_grad()
def test_any_module_can_be_captured_through_one_callable():
    """A router of an older kind: a linear layer whose logits the block sends to topk."""
    gate = nn.Linear(4, 6)
    site = RouterSite(
        module=gate, layer_number=5, num_experts=6, topk=2, select=lambda module, args, logits: logits.topk(2).indices
    )
    capturer = create_capturer(routers=[site], max_num_tokens=8)
    hidden = torch.randn(1, 3, 4)
    capturer.add_request("a", num_prompt_tokens=3)
    with capturer.forward(["a"], [[0, 1, 2]]):
        logits = gate(hidden)
    trace = capturer.finish("a", num_tokens=4).trace()
    assert trace.layer_numbers == (5,)
    assert trace.topk_indices[:3, 0].tolist() == logits[0].topk(2).indices.tolist()


def test_megatron_routes_are_read_off_the_map_not_off_the_probabilities():
    """The second token's chosen expert 3 has probability 0, as any expert that was not chosen."""
    probs = torch.tensor([[0.1, 0.0, 0.9, 0.0], [1.0, 0.0, 0.0, 0.0]])
    routing_map = torch.tensor([[True, False, True, False], [True, False, False, True]])
    router = nn.Module()
    router.topk = 2
    assert select_megatron(router, (), (probs, routing_map)).tolist() == [[2, 0], [0, 3]]


def capture_megatron(capacity_factor=None):
    """Return the routes that the capturer and `mrr.record` saw of the same forward of a tiny Megatron GPT."""
    import megatron_router_replay as mrr
    from megatron_router_replay.testing import ParallelSizes, build_tiny_gpt, tiny_gpt_config

    layout = ParallelSizes()
    layout.initialize()
    options = {} if capacity_factor is None else {"moe_expert_capacity_factor": capacity_factor}
    config = tiny_gpt_config(layout, moe_layer_freq=[0, 1, 1, 1], **options)
    chunks = build_tiny_gpt(config, layout)
    model = chunks[0].eval()
    try:
        capturer = create_capturer(model, max_num_tokens=16)
    except CaptureError as error:
        return str(error)
    tokens = torch.randint(320, (2, 8), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(8).expand(2, 8)
    for row in range(2):
        capturer.add_request(row, num_prompt_tokens=8)
    with torch.no_grad(), mrr.record(chunks) as recording:
        recording.microbatch(torch.arange(16).view(2, 8), model)
        # Megatron is s-major inside: the router's rows are token 0 of every sample, then token 1, ...
        with capturer.forward([0, 1], positions.T, sequence_first=True):
            model(tokens, positions.contiguous(), None)
    recorded = recording.trace()
    captured = [capturer.finish(row, token_ids=tokens[row].tolist()).trace() for row in range(2)]
    capturer.close()
    return captured[0].layer_numbers, torch.cat([trace.topk_indices for trace in captured]), recorded.topk_indices


def test_a_megatron_model_in_inference_is_captured_s_major(workers_1):
    ((layer_numbers, captured, recorded),) = workers_1.run(capture_megatron)
    assert layer_numbers == (2, 3, 4)
    assert captured.shape == (16, 3, 2)
    assert torch.equal(captured.sort(dim=-1)[0], recorded.sort(dim=-1)[0])


def test_a_megatron_router_that_drops_tokens_is_refused(workers_1):
    (message,) = workers_1.run(capture_megatron, 1.0)
    assert "moe_expert_capacity_factor=1.0" in message
