"""What enters a token dispatcher is what left the router's own routing: every way to change it raises, looking is legal."""

import functools
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.core import dispatch
from tests.unit.mcore.test_deferred_checks import on_a_gpu
from tests.unit.mcore.tiny_chunk import (
    AROUND,
    EXPERTS,
    STARTS,
    Chunk,
    Dispatcher,
    forward,
    random_trace,
    reentrant,
    watched,
    wrong_replays,
)


def rolled(probs, routing_map):
    return probs, routing_map.roll(1, 0)


def rolled_in_place(probs, routing_map):
    routing_map.copy_(routing_map.roll(1, 0))
    return probs, routing_map


def copied(probs, routing_map):
    return probs, routing_map.clone()


def without_an_expert(probs, routing_map):
    """The flex dispatcher with DeepEP takes a top-k of the probabilities, and no map."""
    return probs * (torch.arange(probs.shape[1]) > 0), routing_map


def zeroed_in_place(probs, routing_map):
    with torch.no_grad():
        probs[:, 0] = 0
    return probs, routing_map


def looked_at(probs, routing_map):
    routing_map.sum(), probs.detach().sum()
    return probs, routing_map


CHANGES = [rolled, rolled_in_place, copied, without_an_expert, zeroed_in_place]


class Around(nn.Module):
    """A module of somebody's own in the router's place."""

    def __init__(self, router, change):
        super().__init__()
        self.inner, self.change = router, change

    def forward(self, *args):
        return self.change(*self.inner(*args))


def hook(layer, change):
    return layer.router.register_forward_hook(lambda _, __, output: change(*output))


def hook_in_front(layer, change):
    return layer.router.register_forward_hook(lambda _, __, output: change(*output), prepend=True)


def global_hook(layer, change):
    return register_module_forward_hook(lambda m, _, output: change(*output) if m is layer.router else None)


def wrapped(owner, name, change):
    inner = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: change(*inner(*args, **kwargs)))


def around_the_router(layer, change):
    layer.router = Around(layer.router, change)


@contextmanager
def around_the_class(layer, change, name="forward"):
    """As profilers do: `functools.wraps` copies what is on the method."""
    method = getattr(TopKRouter, name)

    @functools.wraps(method)
    def wrapper(router, *args, **kwargs):
        routed = method(router, *args, **kwargs)
        return change(*routed) if router is layer.router else routed

    with mock.patch.object(TopKRouter, name, wrapper):
        yield


def around_the_dispatcher(layer, change):
    inner = layer.token_dispatcher.dispatch_preprocess

    def dispatch_preprocess(hidden, routing_map, probs):
        probs, routing_map = change(probs, routing_map)
        return inner(hidden, routing_map, probs)

    layer.token_dispatcher.dispatch_preprocess = dispatch_preprocess


PLACES = {
    "hook": hook,
    "hook in front": hook_in_front,
    "global hook": global_hook,
    "router.forward": lambda layer, change: wrapped(layer.router, "forward", change),
    "router.routing": lambda layer, change: wrapped(layer.router, "routing", change),
    "layer.route": lambda layer, change: wrapped(layer, "route", change),
    "module": around_the_router,
    "class": around_the_class,
    "routing of the class": lambda layer, change: around_the_class(layer, change, "routing"),
    "dispatcher": around_the_dispatcher,
}


@contextmanager
def planted(chunk, place, change):
    """Put a change between the second layer's router and its dispatcher."""
    layer = chunk.layers[1]
    # A module put around the router would be found as an exchanged one: the router's path changes, the router does not.
    with ExitStack() as stack:
        plant = PLACES[place](layer, change)
        if hasattr(plant, "remove"):
            stack.callback(plant.remove)
        elif plant is not None:
            stack.enter_context(plant)
        yield


@pytest.mark.parametrize("inside", [False, True], ids=["before", "inside"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_whatever_changes_what_a_dispatcher_gets_raises_there(place, change, inside):
    chunk = Chunk()
    with ExitStack() as stack:
        if not inside:
            stack.enter_context(planted(chunk, place, change))
        session = mrr.replay(chunk, random_trace())
        if inside:
            stack.enter_context(planted(chunk, place, change))
        with pytest.raises(ReplayStateError, match="MRR415: layer 2: its token dispatcher got"):
            forward(chunk, session)
    session.close(verify=False)


@pytest.mark.parametrize("inside", [False, True], ids=["before", "inside"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("kind", "around"), [*zip(STARTS, AROUND), ("replay", "reentrant")])
def test_whatever_looks_is_legal(kind, place, inside, around):
    chunk, trace = Chunk(), random_trace()
    chunk.around = AROUND[around]
    with ExitStack() as stack:
        seen = stack.enter_context(watched(chunk))
        if not inside:
            stack.enter_context(planted(chunk, place, looked_at))
        session = stack.enter_context(mrr.replay(chunk, trace) if kind == "replay" else STARTS[kind](chunk))
        if inside:
            stack.enter_context(planted(chunk, place, looked_at))
        forward(chunk, session).backward()
    report = session.report
    assert report.forwards == 3
    assert kind != "replay" or wrong_replays(seen, trace) == 0


def test_an_alias_passes_as_long_as_what_it_is_an_alias_of_lives():
    """Autograd hands aliases on where a module has a full backward hook; in inference mode there are no versions."""
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        chunk = Chunk()
        chunk.routers[1].register_full_backward_hook(lambda *_: None)
        with mode(), mrr.freeze_recompute(chunk, verify=True) as session:
            forward(chunk)
        assert session.report.decisions["verified"] == 3 * 8
    for change in (
        lambda probs, routing_map: (probs, routing_map[:-1]),
        lambda probs, routing_map: (probs, routing_map.view(torch.uint8)),
        lambda probs, routing_map: (probs[:, :-1], routing_map),
        lambda probs, routing_map: (probs, routing_map.view(2, 2, 2, -1).transpose(0, 1).reshape(8, -1)),
    ):
        chunk = Chunk()
        session = mrr.freeze_recompute(chunk)
        with planted(chunk, "hook", change), pytest.raises(ReplayStateError, match="than left the router"):
            forward(chunk)
        session.close(verify=False)


@pytest.mark.parametrize("change", [rolled_in_place, zeroed_in_place])
def test_a_write_to_an_inference_tensor_raises(change):
    """Inference tensors have no version that would count the write."""
    chunk = Chunk()
    session = mrr.replay(chunk, random_trace())
    refused = pytest.raises(ReplayStateError, match=r"MRR415: layer 2: .*\(written in place\)")
    with planted(chunk, "hook", change), torch.inference_mode(), refused:
        forward(chunk, session)
    session.close(verify=False)


def test_a_write_to_an_inference_tensor_on_a_gpu_is_asserted_there():
    """The host does not wait to learn of it."""
    values = torch.tensor([1, 2])
    assert not dispatch._is_written(on_a_gpu(values), values)
    with pytest.raises(RuntimeError, match="written to between a router and its dispatcher"):
        dispatch._is_written(on_a_gpu(values + 1), values)


def test_memory_that_is_used_again_is_not_taken_for_the_map_that_was_there(monkeypatch):
    """A new map at the old one's address, of its shape, dtype and version: only the storage is another."""
    chunk, memory = Chunk(), bytearray(8 * EXPERTS)
    topk, route = router_module.topk_routing_with_score_function, chunk.layers[1].route

    def placed(routing_map):
        return torch.frombuffer(memory, dtype=torch.bool).view(8, EXPERTS).copy_(routing_map)

    def routed(*args, **kwargs):
        probs, routing_map = topk(*args, **kwargs)
        return probs, placed(routing_map)

    def routed_again(hidden):
        probs, routing_map = route(hidden)
        routing_map = routing_map.roll(1, 0)  # the map that left the router is gone
        return probs, placed(routing_map)

    monkeypatch.setattr(router_module, "topk_routing_with_score_function", routed)
    chunk.layers[1].route = routed_again
    session = mrr.replay(chunk, random_trace())
    again = pytest.raises(ReplayStateError, match="MRR415: layer 2: its token dispatcher got another routing map")
    with again, torch.no_grad():  # a graph would keep the memory
        forward(chunk, session)
    session.close(verify=False)


def test_a_dispatcher_class_that_is_patched_inside_a_session_raises():
    chunk = Chunk()

    def dispatch_preprocess(self, hidden, routing_map, probs):
        self.routing_map = routing_map.roll(1, 0)
        return hidden, probs

    session = mrr.replay(chunk, random_trace())
    with mock.patch.object(Dispatcher, "dispatch_preprocess", dispatch_preprocess):
        forward(chunk, session)
        with pytest.raises(
            ReplayStateError, match=r"layer 1 .*: its token dispatcher, or the class of it, was exchanged"
        ):
            session.close()


def test_a_router_that_is_recomputed_alone_leaves_nothing_for_the_next_dispatch():
    chunk = Chunk()
    layer = chunk.layers[1]
    layer.route = lambda hidden: reentrant(layer.router, hidden)
    with mrr.replay(chunk, random_trace()) as session:
        forward(chunk, session).backward()
    assert session.report.recomputes == 1
    del layer.route
    with planted(chunk, "hook", rolled):
        forward(chunk)  # nobody holds it: neither compared, nor taken for what was recomputed


def test_a_dispatcher_that_calls_its_base_class_is_compared_once():
    class Rolls(Dispatcher):
        def dispatch_preprocess(self, hidden, routing_map, probs):
            return super().dispatch_preprocess(hidden, routing_map.roll(1, 0), probs)

    one, other = Chunk(), Chunk()
    one.layers[1].token_dispatcher = Rolls()
    with mrr.freeze_recompute([one, other], verify=True) as session:
        forward(one)
        forward(other)
    assert session.report.decisions["verified"] == 6 * 8


def test_a_recompute_behind_its_session_is_compared_too():
    chunk = Chunk()
    chunk.around = reentrant
    with mrr.replay(chunk, random_trace(8)) as session:
        loss = forward(chunk, session)
    hook(chunk.layers[1], rolled)
    with pytest.raises(ReplayStateError, match="layer 2: its token dispatcher got another routing map"):
        loss.backward()
