"""Routers that are captured with their slot: every run reads what the slot was filled with, recomputes included."""

from contextlib import contextmanager

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from megatron_router_replay.errors import ReplayStateError, TraceError
from tests.unit.mcore.balanced_chunk import not_compiled
from tests.unit.mcore.test_static import ROWS, UNFILLED, all_unfilled, hidden, nested_traces, targets_for
from tests.unit.mcore.tiny_chunk import EXPERTS, HIDDEN, TOPK, Chunk, as_map, random_trace

__all__ = ["nested_traces", "not_compiled"]


def run_routers(chunk):
    return lambda values: [router(values)[1] for router in chunk.routers]


@torch.no_grad()
def test_each_graph_routes_to_what_its_own_slot_was_filled_with_in_every_layer():
    chunk, static, graphs = Chunk(), targets_for(), []
    run = run_routers(chunk)
    for slot in (0, 1):
        with static.capturing(slot, chunk):
            run(hidden(0))
            run(hidden(1))  # warm-ups use nothing up
            graphs.append(make_fx(run)(hidden(2)))
    assert [router.router_replay for router in chunk.routers] == [None, None, None]
    assert all_unfilled(static)
    for step in range(3):
        traces = [random_trace(20, seed=10 * step + slot) for slot in (0, 1)]
        rows = [torch.randperm(20, generator=torch.Generator().manual_seed(step + slot))[:8] for slot in (0, 1)]
        for slot in (0, 1):
            static.fill(slot, traces[slot], rows[slot])
        for slot in (1, 0):  # in another order than they were filled
            for layer, routing_map in enumerate(graphs[slot](hidden(step)), start=1):
                assert torch.equal(routing_map, as_map(traces[slot].layer(layer)[rows[slot]]))
        assert all_unfilled(static)
    with pytest.raises(RuntimeError, match="slot 0, layer 1: not filled since its last run"):
        graphs[0](hidden(0))


@torch.no_grad()
def test_a_router_that_was_not_captured_is_named_and_everything_is_put_back():
    chunk, static = Chunk(), targets_for(recompute=True, live_rows=True)
    held = [object(), None, None]
    for router, replay in zip(chunk.routers, held):
        router.router_replay = replay
    with (
        pytest.raises(ReplayStateError, match="slot 1, layer 3: its router was not captured"),
        static.capturing(1, chunk),
    ):
        make_fx(lambda values: [chunk.routers[layer](values)[1] for layer in (0, 1)])(hidden(0))
        chunk.routers[2](hidden(0))  # it runs, but into no graph
    assert [router.router_replay for router in chunk.routers] == held
    assert all_unfilled(static)


def test_a_capture_that_fails_puts_the_routers_back_and_leaves_the_slot_unfilled():
    chunk, static = Chunk(), targets_for(recompute=True)
    with pytest.raises(ArithmeticError), static.capturing(0, chunk):
        assert all(router.router_replay is not None for router in chunk.routers)
        assert not bool((static.targets[0] == UNFILLED).any()), "warm-ups route to experts that exist"
        assert torch.equal(static.used[0], static.targets[0])
        raise ArithmeticError
    assert [router.router_replay for router in chunk.routers] == [None, None, None]
    assert all_unfilled(static)


def test_what_cannot_be_captured_is_refused_before_any_router_is_touched():
    chunk, static = Chunk(), targets_for(num_layers=2)
    with pytest.raises(TraceError, match=r"no layer 3, only \[1, 2\]"), static.capturing(0, chunk):
        pass
    for slot in (-1, 2):
        with pytest.raises(ReplayStateError, match=f"no slot {slot}, only 0..1"), static.capturing(slot, chunk):
            pass
    static.fill(1, random_trace(8, 2), ROWS)
    two_layers = Chunk(num_layers=2)
    with pytest.raises(ReplayStateError, match="slot 1 is filled"), static.capturing(1, two_layers):
        pass
    assert bool((static.targets[1] != UNFILLED).all()), "and what waits for its run is still there"
    assert all(router.router_replay is None for router in (*chunk.routers, *two_layers.routers))


@contextmanager
def reading(router, reader):
    router.router_replay = reader
    yield
    router.router_replay = None


@pytest.mark.parametrize("live", [False, True])
def test_a_captured_recompute_uses_what_its_forward_used_though_its_logits_differ(live):
    """Two micro-batches, both forwards before both backwards, in one graph."""
    router = Chunk(num_layers=1).routers[0]
    gating = router.gating
    router.gating = lambda values: gating(values) + (torch._C._current_graph_task_id() != -1) * values * 5
    static = targets_for(num_layers=1, recompute=True, live_rows=live)
    readers = [static.router(slot, 1) for slot in (0, 1)]

    def step(*inputs):
        maps, losses, gradients = [], [], []

        def routed(values):
            probs, routing_map = router(values)
            maps.append(routing_map)
            return probs

        for reader, values in zip(readers, inputs):
            with reading(router, reader), set_checkpoint_early_stop(False):
                probs = checkpoint(routed, values.requires_grad_(), use_reentrant=False)
                losses.append((probs * torch.arange(float(EXPERTS))).sum())
        for reader, values, loss in zip(readers, inputs, losses):
            with reading(router, reader):
                gradients += torch.autograd.grad(loss, [values])
        return maps, gradients

    trace = random_trace(20, 1, replay_mask=(torch.arange(20) % 2 == 0) | (not live))
    for slot in (0, 1):
        static.fill(slot, trace, ROWS)
    graph = make_fx(step)(hidden(1), hidden(2))
    for seed in (3, 4):
        rows = [torch.randperm(20, generator=torch.Generator().manual_seed(seed + slot))[:8] for slot in (0, 1)]
        for slot in (0, 1):
            static.fill(slot, trace, rows[slot])
        maps, _ = graph(hidden(seed), hidden(seed + 1))
        for slot in (0, 1):
            forward, recompute = maps[slot], maps[2 + slot]
            assert torch.equal(forward, recompute)
            given = (rows[slot] % 2 == 0) | (not live)
            assert torch.equal(forward[given], as_map(trace.layer(1)[rows[slot]])[given])
            assert (forward.sum(dim=1) == TOPK).all()
        assert all_unfilled(static)


def test_a_recompute_that_nobody_announced_raises():
    chunk = Chunk(num_layers=1)
    static, router = targets_for(num_layers=1), chunk.routers[0]
    static.fill(0, random_trace(8, 1), ROWS)
    with reading(router, static.router(0, 1)):
        probs = checkpoint(lambda values: router(values)[0], hidden(1).requires_grad_(), use_reentrant=False)
        with pytest.raises(
            ReplayStateError, match="slot 0, layer 1: recomputed; make the static targets with recompute"
        ):
            probs.sum().backward()


def test_live_scores_reach_the_router_through_a_slot():
    """The probabilities are the live ones of the given experts, and the gradient flows to the router's weight."""
    router = Chunk(num_layers=1).routers[0]
    static, trace = targets_for(num_layers=1), random_trace(8, 1)
    static.fill(0, trace, ROWS)
    router.weight.requires_grad_()
    with reading(router, static.router(0, 1)):
        probs, _ = router(hidden(1))
    logits = torch.nn.functional.linear(hidden(1).view(8, HIDDEN), router.weight.detach())
    chosen = trace.layer(1).long()
    expected = torch.zeros(8, EXPERTS).scatter(1, chosen, logits.gather(1, chosen).softmax(dim=1))
    assert torch.allclose(probs, expected)
    probs.square().sum().backward()
    assert router.weight.grad.abs().sum() > 0
