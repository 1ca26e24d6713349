"""StaticTargets in a whole model on a CPU: graphs of make_fx, which run no Python again and read the same storages.

`tests/unit/mcore/test_static.py` has what needs no model: slots, refusals, rows without a route, recomputes.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.static import StaticTargets
from megatron_router_replay.testing import ParallelSizes, megatron_on_cpu
from tests.functional.mcore.cases import Case, as_map, build, moe_routers, random_routes

NUM_TOKENS, NUM_EXPERTS, TOPK = 8, 8, 2
LAYERS = (1, 2, 3, 4)


def new_trace(seed, num_rows=20, layers=LAYERS, replay_mask=None):
    routes = random_routes(num_rows, len(layers), TOPK, NUM_EXPERTS, seed=seed)
    return mrr.RoutingTrace(topk_indices=routes, layer_numbers=layers, num_experts=NUM_EXPERTS, replay_mask=replay_mask)


@pytest.fixture(autouse=True)
def on_cpu():
    with megatron_on_cpu():
        yield


def replayed_in_python(routers, topk_indices, hidden):
    """Each router's probabilities, chosen by the drop-in RouterReplay."""
    result = []
    for position, router in enumerate(routers):
        router.router_replay = mrr.RouterReplay()
        router.router_replay.set_target_indices(topk_indices[:, position])
        router.router_replay.set_router_replay_action(mrr.RouterReplayAction.REPLAY_FORWARD)
        result.append(router(hidden)[0])
        router.router_replay = None
    mrr.RouterReplay.clear_global_router_replay_instances()
    return result


@torch._dynamo.config.patch(error_on_nested_fx_trace=False)  # Megatron-Core compiles one function of its router
@torch.no_grad()
def captured_routers():
    """Capture the routers of a model once for each of two slots; run them on other routes and hidden states."""
    _, (model,), _ = build(Case(layout=ParallelSizes()))
    routers = moe_routers([model])
    static = StaticTargets(num_slots=2, num_tokens=NUM_TOKENS, layer_numbers=LAYERS, num_experts=NUM_EXPERTS, topk=TOPK)

    def run(hidden):
        return [router(hidden) for router in routers]

    graphs = []
    for slot in (0, 1):
        with static.capturing(slot, model):
            run(torch.zeros(4, 2, 64))
            run(torch.zeros(4, 2, 64))  # warm-ups use up nothing
            graphs.append(make_fx(run)(torch.randn(4, 2, 64)))
    left_over = [router.router_replay for router in routers if router.router_replay is not None]
    wrong = wrong_probs = 0
    for step in range(3):
        traces = [new_trace(10 * step), new_trace(10 * step + 1)]
        rows = [torch.randperm(20)[:NUM_TOKENS], torch.randperm(20)[:NUM_TOKENS]]
        for slot in (0, 1):
            static.fill(slot, traces[slot], rows[slot])
        for slot in (1, 0):
            hidden = torch.randn(4, 2, 64)
            expected = replayed_in_python(routers, traces[slot].topk_indices[rows[slot]], hidden)
            for position, (probs, routing_map) in enumerate(graphs[slot](hidden)):
                target = traces[slot].topk_indices[rows[slot], position]
                wrong += int((routing_map != as_map(target, NUM_EXPERTS)).any(dim=1).sum())
                wrong_probs += int(not torch.equal(probs, expected[position]))
    return wrong, wrong_probs, left_over


@torch.no_grad()
def nothing_captured():
    _, (model,), _ = build(Case(layout=ParallelSizes()))
    static = StaticTargets(num_slots=1, num_tokens=NUM_TOKENS, layer_numbers=LAYERS, num_experts=NUM_EXPERTS, topk=TOPK)
    routers = moe_routers([model])
    with pytest.raises(ReplayStateError) as raised, static.capturing(0, model):
        torch.compile(routers[0], backend="eager")(torch.zeros(4, 2, 64))
    torch._dynamo.reset()
    return str(raised.value), [router.router_replay for router in routers]


def test_capturing_without_a_capture_raises_also_under_torch_compile(workers_1):
    ((message, left_over),) = workers_1.run(nothing_captured)
    assert "slot 0, layer 1: its router was not captured, so later runs would route live" in message
    assert left_over == [None] * 4


def test_captured_routers_of_a_model_use_what_their_slot_was_filled_with(workers_1):
    assert workers_1.run(captured_routers) == [(0, 0, [])]
