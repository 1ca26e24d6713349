"""StaticTargets on a CPU: graphs of make_fx, which run no Python again and read the same storages, as CUDA graphs do."""

from contextlib import contextmanager

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError, TraceError
from megatron_router_replay.mcore.static import StaticTargets
from megatron_router_replay.testing import ParallelSizes, megatron_on_cpu
from tests.functional.mcore.cases import Case, as_map, build, moe_routers, random_routes

NUM_TOKENS, NUM_EXPERTS, TOPK = 8, 8, 2
LAYERS = (1, 2, 3, 4)


def new_trace(seed, num_rows=20, layers=LAYERS, replay_mask=None):
    routes = random_routes(num_rows, len(layers), TOPK, NUM_EXPERTS, seed=seed)
    return mrr.RoutingTrace(topk_indices=routes, layer_numbers=layers, num_experts=NUM_EXPERTS, replay_mask=replay_mask)


def one_layer(**options):
    sizes = dict(num_slots=2, num_tokens=NUM_TOKENS, layer_numbers=[1], num_experts=NUM_EXPERTS, topk=TOPK)
    return StaticTargets(**{**sizes, **options})


def capture(static, slot, logits, **options):
    """A graph of Megatron-Core's routing function that reads this slot: logits -> (probabilities, map)."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    reader = static.router(slot, 1)
    static.fill(slot, new_trace(0, layers=[1]), torch.arange(NUM_TOKENS))  # make_fx runs what it captures
    return make_fx(lambda leaf: topk_routing_with_score_function(leaf, TOPK, router_replay=reader, **options))(logits)


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


def test_a_graph_that_runs_again_without_new_routes_raises_and_repeats_nothing():
    static, logits = one_layer(), torch.randn(NUM_TOKENS, NUM_EXPERTS)
    graph = capture(static, 0, logits)
    with pytest.raises(RuntimeError, match="slot 0, layer 1: not filled since its last run"):
        graph(logits)
    static.fill(0, new_trace(1, layers=[1]), torch.arange(NUM_TOKENS))
    graph(logits)
    with pytest.raises(RuntimeError, match="not filled"):
        graph(logits)


def test_a_slot_that_waits_for_its_run_takes_no_other_routes():
    static, trace, rows = one_layer(), new_trace(1, layers=[1]), torch.arange(NUM_TOKENS)
    static.fill(0, trace, rows)
    static.fill(1, trace, rows)
    with pytest.raises(ReplayStateError, match="slot 0 is filled"):
        static.fill(0, trace, rows)
    static.clear(0)
    static.fill(0, trace, rows)


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_that_does_not_exist_raises(slot):
    static = one_layer()
    for use in (static.clear, lambda slot: static.router(slot, 1), lambda slot: static.fill(slot, None, None)):
        with pytest.raises(ReplayStateError, match=f"no slot {slot}, only 0..1"):
            use(slot)


@pytest.mark.parametrize(
    ("trace", "rows", "error", "said"),
    [
        (new_trace(1), torch.arange(7), LayoutError, r"must be \[8\] integers, got \[7\]"),
        (new_trace(1), torch.arange(8).view(2, 4), LayoutError, r"got \[2, 4\]"),
        (new_trace(1), torch.arange(8.0), LayoutError, "float32"),
        (new_trace(1), torch.arange(8) + 13, LayoutError, "outside the trace's rows"),
        (new_trace(1), torch.arange(8) - 2, LayoutError, "outside the trace's rows"),
        (new_trace(1, replay_mask=torch.arange(20) != 5), torch.arange(8), LayoutError, "live_rows=True"),
        (new_trace(1, layers=[2, 3]), torch.arange(8), TraceError, "no layer_number 1"),
    ],
)
def test_what_cannot_be_replayed_is_refused_and_leaves_the_slot_unfilled(trace, rows, error, said):
    static = one_layer()
    with pytest.raises(error, match=said):
        static.fill(0, trace, rows)
    assert (static.targets == NUM_EXPERTS).all()


def test_a_trace_of_other_experts_is_refused():
    trace = mrr.RoutingTrace(topk_indices=[[[0, 1]]] * 8, layer_numbers=[1], num_experts=4)
    with pytest.raises(TraceError, match="top-2 of 4 experts, the static targets top-2 of 8"):
        one_layer().fill(0, trace, torch.arange(8))


@pytest.mark.parametrize(("shape", "said"), [((7, 8), "routes 7 tokens"), ((8, 9), "has 9 experts, not 8")])
def test_a_router_of_other_shapes_raises_when_it_is_captured(shape, said):
    with pytest.raises(ReplayStateError, match=said):
        capture(one_layer(), 0, torch.randn(shape))


def test_256_experts_leave_room_for_the_mark_of_an_unfilled_slot():
    assert StaticTargets(num_slots=1, num_tokens=1, layer_numbers=[1], num_experts=255, topk=1).targets.tolist() == [
        [[[255]]]
    ]
    assert StaticTargets(num_slots=1, num_tokens=1, layer_numbers=[1], num_experts=256, topk=1).targets.tolist() == [
        [[[256]]]
    ]


@pytest.mark.parametrize("groups", [{}, {"num_groups": 4, "group_topk": 2}])
def test_rows_without_a_route_and_paddings_are_told_apart_in_every_run(groups):
    static, logits = one_layer(live_rows=True), torch.randn(NUM_TOKENS, NUM_EXPERTS)
    graph = capture(static, 0, logits, **groups)
    trace = new_trace(4, layers=[1], replay_mask=torch.arange(20) % 3 != 0)
    for rows in ([0, 1, 2, 3, 4, 5, -1, -1], [6, 7, 8, -1, -1, -1, -1, 9]):
        rows = torch.tensor(rows)
        padding = rows < 0
        padding[-2] = False  # the last but one has no route, and is not known to be padding
        static.fill(0, trace, rows, padding=padding)
        logits = torch.randn(NUM_TOKENS, NUM_EXPERTS)
        routing_map = graph(logits)[1]
        live = ((rows >= 0) & (rows % 3 == 0)) | ((rows < 0) & ~padding)
        routed = (rows >= 0) & ~live
        assert torch.equal(routing_map[routed], as_map(trace.topk_indices[rows[routed], 0], NUM_EXPERTS))
        if not groups:
            assert torch.equal(routing_map[live], as_map(logits.topk(TOPK).indices[live], NUM_EXPERTS))
        assert (routing_map.sum(dim=1) == TOPK).all()
        # Paddings take all experts in turn.
        assert routing_map[padding].sum(dim=0).max() == 1


@contextmanager
def reading(router, reader):
    router.router_replay = reader
    yield
    router.router_replay = None


@torch._dynamo.config.patch(error_on_nested_fx_trace=False)
def recomputed(live):
    """Two micro-batches, forwards before backwards, in one captured graph; a recompute sees other logits."""
    _, (model,), _ = build(Case(layout=ParallelSizes()))
    router = moe_routers([model])[0]
    gating = router.gating
    router.gating = lambda hidden: gating(hidden) + (torch._C._current_graph_task_id() != -1) * hidden[..., :8] * 5
    static = one_layer(recompute=True, live_rows=live)
    readers = [static.router(slot, 1) for slot in (0, 1)]

    def step(*inputs):
        maps = []

        def routed(hidden):
            probs, routing_map = router(hidden)
            maps.append(routing_map)
            return probs

        losses = []
        for slot, hidden in enumerate(inputs):
            with reading(router, readers[slot]), set_checkpoint_early_stop(False):
                probs = checkpoint(routed, hidden.requires_grad_(), use_reentrant=False)
                losses.append((probs * torch.arange(8.0)).sum())
        gradients = []
        for slot, hidden in enumerate(inputs):
            with reading(router, readers[slot]):
                gradients += torch.autograd.grad(losses[slot], [hidden])
        return maps, gradients

    trace = new_trace(5, layers=[1], replay_mask=(torch.arange(20) % 2 == 0) | (not live))

    def fill(rows):
        for slot in (0, 1):
            static.fill(slot, trace, rows[slot])

    fill([torch.arange(8), torch.arange(8)])
    graph = make_fx(step)(torch.randn(4, 2, 64), torch.randn(4, 2, 64))
    result = []
    for _ in range(2):
        rows = [torch.randperm(20)[:8], torch.randperm(20)[:8]]
        fill(rows)
        maps, _ = graph(torch.randn(4, 2, 64), torch.randn(4, 2, 64))
        assert len(maps) == 4  # two forwards, two recomputes
        for slot in (0, 1):
            given = rows[slot] % 2 == 0 if live else slice(None)
            result += [
                torch.equal(maps[slot], maps[2 + slot]),
                torch.equal(maps[slot][given], as_map(trace.topk_indices[rows[slot], 0], NUM_EXPERTS)[given]),
            ]
    return result, bool((static.targets == NUM_EXPERTS).all() and (static.used == NUM_EXPERTS).all())


@pytest.mark.parametrize("live", [False, True])
def test_a_captured_recompute_uses_what_its_own_forward_used(live, workers_1):
    assert workers_1.run(recomputed, live) == [([True] * 8, True)]


def test_a_slot_whose_recompute_has_not_run_takes_no_other_routes():
    static, logits = one_layer(recompute=True), torch.randn(NUM_TOKENS, NUM_EXPERTS)
    capture(static, 0, logits)
    with pytest.raises(ReplayStateError, match="slot 0 is filled: its forward or its recompute has not run"):
        static.fill(0, new_trace(1, layers=[1]), torch.arange(NUM_TOKENS))
