"""Compiled code writes into the live buffer in every call, not into a copy that was made while tracing."""

import pytest
import torch

pytest.importorskip("transformers")

from megatron_router_replay.capture import RouterSite, create_capturer, write_routes
from tests.unit.capture.sampling import build_model, experts_of, recompute, sample


class SmallMoE(torch.nn.Module):
    """A router with the seam in its forward; no data-dependent shapes, so it compiles as one graph."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(16, 8, bias=False)

    def forward(self, hidden):
        weights, topk_indices = self.gate(hidden).topk(2)
        write_routes(self, topk_indices)
        return hidden * weights.sum(dim=-1, keepdim=True)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@torch.no_grad()
def test_one_compiled_graph_keeps_writing_to_the_live_buffer(backend):
    torch.manual_seed(0)
    layer = SmallMoE()
    site = RouterSite(module=layer, layer_number=1, num_experts=8, topk=2, select=None)
    capturer = create_capturer(routers=[site], max_num_tokens=8)
    address = capturer.buffer.tensor.data_ptr()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(3):
        hidden = torch.randn(8, 16)
        capturer.buffer.tensor.fill_(255)
        compiled(hidden)
        assert torch.equal(capturer.buffer.tensor[0].long(), layer.gate(hidden).topk(2).indices)
    assert capturer.buffer.tensor.data_ptr() == address
    assert layer.routed_experts_seam.out.data_ptr() == address
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@torch.no_grad()
def test_after_close_the_compiled_graph_writes_no_more():
    layer = SmallMoE()
    site = RouterSite(module=layer, layer_number=1, num_experts=8, topk=2, select=None)
    capturer = create_capturer(routers=[site], max_num_tokens=8)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(8, 16))
    capturer.close()
    capturer.buffer.tensor.fill_(255)
    compiled(torch.randn(8, 16))
    assert (capturer.buffer.tensor == 255).all()


@pytest.mark.slow
def test_a_generation_of_a_compiled_model_is_captured():
    """Hooks on transformers' routers, traced with the whole model; prefill and decode steps of several shapes."""
    model = build_model("mixtral")
    model.set_experts_implementation("batched_mm")  # the eager experts loop over the data, which no graph can hold
    capturer = create_capturer(model, max_num_tokens=16)
    compiled = torch.compile(model, backend="aot_eager")
    sequences, captured = sample(compiled, [[5, 6, 7, 8], [9, 10]], [5, 4], capturer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    capturer.close()
    for row, sequence in enumerate(sequences):
        assert torch.equal(experts_of(captured[row].trace()), experts_of(recompute(model, sequence)))
