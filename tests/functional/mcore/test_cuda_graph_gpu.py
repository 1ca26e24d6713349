"""Real CUDA graphs: static targets in captured routing, and what sessions say to a capture. Needs a GPU."""

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.static import StaticTargets
from tests.functional.mcore.cases import as_map, random_routes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

NUM_TOKENS, NUM_EXPERTS, TOPK = 256, 64, 6


def new_trace(seed, replay_mask=None):
    routes = random_routes(1000, 1, TOPK, NUM_EXPERTS, seed=seed)
    return mrr.RoutingTrace(topk_indices=routes, layer_numbers=[1], num_experts=NUM_EXPERTS, replay_mask=replay_mask)


def make_static(**options):
    sizes = dict(num_slots=2, num_tokens=NUM_TOKENS, layer_numbers=[1], num_experts=NUM_EXPERTS, topk=TOPK)
    return StaticTargets(**{**sizes, **options}, device="cuda")


def warm_up_and_capture(function, *args, before_capture=lambda: None):
    """Return (graph, outputs at fixed addresses)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function(*args)
    torch.cuda.current_stream().wait_stream(stream)
    before_capture()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(*args)
    return graph, outputs


def capture_slot(static, slot, logits):
    """Capture Megatron-Core's routing function for one slot; warm-ups find valid ids and use up nothing."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    class OneRouter(torch.nn.Module):
        def forward(self, logits):
            return topk_routing_with_score_function(logits, TOPK, router_replay=static.router(slot, 1))

    static.fill(slot, new_trace(0), torch.arange(NUM_TOKENS))
    result = warm_up_and_capture(OneRouter(), logits)
    static.clear(slot)
    return result


def test_captured_routers_use_what_their_slot_was_filled_with():
    static = make_static()
    logits = [torch.randn(NUM_TOKENS, NUM_EXPERTS, device="cuda") for _ in range(2)]
    graphs = [capture_slot(static, slot, logits[slot]) for slot in (0, 1)]
    for step in range(3):
        traces = [new_trace(2 * step + 1), new_trace(2 * step + 2)]
        rows = [torch.randperm(1000)[:NUM_TOKENS], torch.randperm(1000)[:NUM_TOKENS]]
        for slot in (0, 1):
            static.fill(slot, traces[slot], rows[slot])
        for slot in (1, 0):
            logits[slot].copy_(torch.randn_like(logits[slot]))
            graph, (probs, routing_map) = graphs[slot]
            graph.replay()
            expected = as_map(traces[slot].topk_indices[rows[slot], 0], NUM_EXPERTS)
            assert torch.equal(routing_map.cpu(), expected)
            assert torch.equal(probs.cpu() > 0, expected)
        assert (static.targets == NUM_EXPERTS).all()  # used up: another run would not repeat them


def test_rows_without_a_route_are_decided_inside_the_graph():
    static = make_static(live_rows=True)
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, device="cuda")
    graph, (_, routing_map) = capture_slot(static, 0, logits)
    for seed in (1, 2):
        trace = new_trace(seed, replay_mask=torch.arange(1000) % 3 != 0)
        rows = torch.randperm(1000)[:NUM_TOKENS]
        static.fill(0, trace, rows)
        logits.copy_(torch.randn_like(logits))
        graph.replay()
        live = rows % 3 == 0
        expected = torch.where(live.unsqueeze(1), logits.topk(TOPK).indices.cpu(), trace.topk_indices[rows, 0].long())
        assert torch.equal(routing_map.cpu(), as_map(expected, NUM_EXPERTS))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_filling_a_slot_waits_for_no_device(device):
    static = make_static(live_rows=True, recompute=True)
    trace, rows = new_trace(1).to(device), torch.arange(NUM_TOKENS, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        static.fill(0, trace, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = trace.topk_indices[:NUM_TOKENS, 0].cpu().long()
    assert torch.equal(static.targets[0, 0].cpu().long(), expected)


def test_the_drop_in_refuses_to_be_captured():
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    replay = mrr.RouterReplay()
    mrr.RouterReplay.clear_global_router_replay_instances()
    replay.set_target_indices(random_routes(NUM_TOKENS, 1, TOPK, NUM_EXPERTS)[:, 0].cuda())
    replay.set_router_replay_action(mrr.RouterReplayAction.REPLAY_FORWARD)
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, device="cuda")
    with pytest.raises(ReplayStateError, match="captured"):
        warm_up_and_capture(lambda: topk_routing_with_score_function(logits, TOPK, router_replay=replay))
