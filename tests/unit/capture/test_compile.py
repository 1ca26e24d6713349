"""Compiled code writes into the live buffer in every call, not into a copy that was made while tracing."""

import pytest
import torch

pytest.importorskip("transformers")

from megatron_router_replay.capture import CaptureError, Capturer, RouterSite
from tests.unit.capture.sampling import build_model, experts_of, recompute, sample


class SmallMoE(torch.nn.Module):
    """Two layers without data-dependent shapes, so they compile as one graph."""

    def __init__(self):
        super().__init__()
        self.gates = torch.nn.ModuleList(torch.nn.Linear(16, 8, bias=False) for _ in range(2))

    def forward(self, hidden):
        for gate in self.gates:
            hidden = hidden * gate(hidden).topk(2).values.sum(dim=-1, keepdim=True)
        return hidden

    def capturer(self, **options):
        sites = [
            RouterSite(
                module=gate,
                layer_number=number,
                num_experts=8,
                topk=2,
                select=lambda module, args, logits: logits.topk(2).indices,
            )
            for number, gate in enumerate(self.gates, start=1)
        ]
        return Capturer(routers=sites, max_num_tokens=8, **options)

    def routes(self, hidden):
        routes = []
        for gate in self.gates:
            values, indices = gate(hidden).topk(2)
            routes.append(indices)
            hidden = hidden * values.sum(dim=-1, keepdim=True)
        return torch.stack(routes, dim=1).tolist()


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@torch.no_grad()
def test_one_compiled_graph_keeps_writing_to_the_live_buffer(backend, tp_rank):
    model = SmallMoE()
    capturer = model.capturer(tp_rank=tp_rank)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(3):
        hidden = torch.randn(8, 16)
        compiled(hidden)
        assert capturer._buffer.routes.transpose(0, 1).tolist() == model.routes(hidden)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    capturer.close()
    compiled(torch.randn(8, 16))
    assert capturer._buffer.routes.transpose(0, 1).tolist() == model.routes(hidden)  # it writes no more


@pytest.mark.parametrize("calls", [(3,), (2,), (4,), (3, 3), ()])
@torch.no_grad()
def test_compiled_code_is_counted(calls):
    """No Python of ours runs there, so the graph itself counts."""
    model = SmallMoE()
    capturer = model.capturer()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    hidden = torch.randn(9, 16)
    compiled(hidden)  # not announced, and larger than the buffer
    capturer.add_request("a", num_prompt_tokens=3)
    with capturer.forward(["a"], [[0, 1, 2]]):
        for num_tokens in calls:
            compiled(hidden[:num_tokens])
    compiled(hidden[:4])
    if calls == (3,):
        assert capturer.finish("a", [9] * 4).topk_indices[:3].tolist() == model.routes(hidden[:3])
        return
    with pytest.raises(CaptureError, match=rf"layers \[1, 2\] routed {sum(calls)} tokens in {len(calls)} calls"):
        capturer.finish("a", [9] * 4)


@torch.no_grad()
def test_an_eager_forward_beside_a_compiled_one_is_refused():
    model = SmallMoE()
    capturer = model.capturer()
    capturer.add_request("a", num_prompt_tokens=3)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with capturer.forward(["a"], [[0, 1, 2]]):
        compiled(torch.randn(3, 16))
        model(torch.randn(3, 16))
    with pytest.raises(CaptureError, match=r"layers \[1, 2\] routed 6 tokens in 2 calls"):
        capturer.drain()


@pytest.mark.slow
def test_a_generation_of_a_compiled_model_is_captured():
    """Hooks on transformers' routers, traced with the whole model; prefill and decode steps of several shapes."""
    model = build_model("mixtral")
    model.set_experts_implementation("batched_mm")  # the eager experts loop over the data, which no graph can
    capturer = Capturer(model, max_num_tokens=16)
    compiled = torch.compile(model, backend="aot_eager")
    sequences, traces = sample(compiled, [[5, 6, 7, 8], [9, 10]], [5, 4], capturer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    capturer.close()
    for row, sequence in enumerate(sequences):
        assert torch.equal(experts_of(traces[row]), experts_of(recompute(model, sequence)))
