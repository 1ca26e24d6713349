"""A token dispatcher gets the map and probabilities of its router: each way to change them raises, reading is legal."""

import functools
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.core import dispatch
from tests.unit.mcore.test_counts import on_a_gpu
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


CHANGES = {
    "copied": copied,
    "an expert less": without_an_expert,
    "a row less": lambda probs, routing_map: (probs, routing_map[:-1]),
    "transposed": lambda probs, routing_map: (probs, routing_map.t()),  # eight tokens, eight experts
    "another dtype": lambda probs, routing_map: (probs, routing_map.view(torch.uint8)),
    "probabilities of a row less": lambda probs, routing_map: (probs[:, :-1], routing_map),
    "rows in another order": lambda probs, routing_map: (
        probs,
        routing_map.view(2, 2, 2, -1).transpose(0, 1).reshape(8, -1),
    ),
    "rolled in place": rolled_in_place,
    "zeroed in place": zeroed_in_place,
}


class Around(nn.Module):
    """A trainer's module in place of the router."""

    def __init__(self, router, change):
        super().__init__()
        self.inner, self.change = router, change

    def forward(self, *args):
        return self.change(*self.inner(*args))


def hook(layer, change):
    return layer.router.register_forward_hook(lambda _, __, output: change(*output))


def wrapped(owner, name, change):
    inner = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: change(*inner(*args, **kwargs)))


def around_the_router(layer, change):
    layer.router = Around(layer.router, change)


@contextmanager
def around_the_class(layer, change):
    """As profilers do: `functools.wraps` copies the attributes of the method."""
    method = TopKRouter.routing

    @functools.wraps(method)
    def routing(router, *args, **kwargs):
        routed = method(router, *args, **kwargs)
        return change(*routed) if router is layer.router else routed

    with mock.patch.object(TopKRouter, "routing", routing):
        yield


def around_the_dispatcher(layer, change):
    inner = layer.token_dispatcher.dispatch_preprocess

    def dispatch_preprocess(hidden, routing_map, probs):
        probs, routing_map = change(probs, routing_map)
        return inner(hidden, routing_map, probs)

    layer.token_dispatcher.dispatch_preprocess = dispatch_preprocess


PLACES = {
    "hook": hook,
    "router.routing": lambda layer, change: wrapped(layer.router, "routing", change),
    "layer.route": lambda layer, change: wrapped(layer, "route", change),
    "module": around_the_router,
    "routing of the class": around_the_class,
    "dispatcher": around_the_dispatcher,
}


@contextmanager
def planted(chunk, place, change):
    """Put a change between the second layer's router and its dispatcher."""
    plant = PLACES[place](chunk.layers[1], change)
    with ExitStack() as stack:
        if hasattr(plant, "remove"):
            stack.callback(plant.remove)
        elif plant is not None:
            stack.enter_context(plant)
        yield


def check_raises(place, change):
    chunk = Chunk()
    session = mrr.replay(chunk, random_trace())
    refused = pytest.raises(
        ReplayStateError, match=r"MRR415: layer 2: its token dispatcher got .* than left the router"
    )
    with planted(chunk, place, change), refused as error:
        forward(chunk, session)
    session.close(check=False)
    return str(error.value)


@pytest.mark.parametrize("place", PLACES)
def test_a_map_that_is_exchanged_before_its_dispatcher_raises_wherever_that_is(place):
    check_raises(place, rolled)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_map_or_the_probabilities_raises(change):
    assert ("(written in place)" in check_raises("hook", CHANGES[change])) == ("in place" in change)


@pytest.mark.parametrize("change", [rolled_in_place, zeroed_in_place])
def test_a_write_to_an_inference_tensor_raises(change):
    """Inference tensors have no version that would count the write."""
    with torch.inference_mode():
        assert "(written in place)" in check_raises("hook", change)


@pytest.mark.parametrize(
    ("place", "kind", "around"), [*((place, "replay", "reentrant") for place in PLACES), *zip(PLACES, STARTS, AROUND)]
)
def test_a_hook_or_wrapper_that_only_reads_is_legal(place, kind, around):
    chunk = Chunk()
    chunk.around = AROUND[around]
    with watched(chunk) as seen, STARTS[kind](chunk) as session, planted(chunk, place, looked_at):
        forward(chunk, session).backward()
    assert session.report.forwards == 3
    assert kind != "replay" or wrong_replays(seen, random_trace()) == 0


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_alias_passes(mode):
    """Autograd hands aliases on where a module has a full backward hook; in inference mode there are no versions."""
    chunk = Chunk()
    chunk.routers[1].register_full_backward_hook(lambda *_: None)
    with mode(), mrr.freeze_recompute(chunk) as session:
        forward(chunk)
    assert session.report.forwards == 3


def test_a_write_to_an_inference_tensor_on_a_gpu_is_asserted_there():
    """The host does not wait to learn of it."""
    with torch.inference_mode():
        values = torch.tensor([1, 2])
    *_, kept = dispatch.identity_of(values)
    assert dispatch.has_values(on_a_gpu(values), kept)
    with pytest.raises(RuntimeError, match="written to between a router and its dispatcher"):
        dispatch.has_values(on_a_gpu(values + 1), kept)


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
    session.close(check=False)


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
        forward(chunk)  # without a session: neither compared, nor taken for the recomputed map


def test_a_dispatcher_that_calls_its_base_class_is_compared_once():
    class Rolls(Dispatcher):
        def dispatch_preprocess(self, hidden, routing_map, probs):
            return super().dispatch_preprocess(hidden, routing_map.roll(1, 0), probs)

    one, other = Chunk(), Chunk()
    one.layers[1].token_dispatcher = Rolls()
    with mrr.freeze_recompute([one, other]):  # its base class would get another map than the router's
        forward(one)
        forward(other)


def test_a_map_that_was_dispatched_before_is_none_of_the_next_forward():
    """A layer that keeps the outputs of its router dispatches them again: the tensors are the router's, but no call's."""
    chunk = Chunk()
    layer = chunk.layers[1]
    with mrr.freeze_recompute(chunk), torch.no_grad():
        kept = hook(layer, lambda *routed: setattr(layer, "route", lambda hidden: routed) or routed)
        forward(chunk)
        kept.remove()
        with pytest.raises(ReplayStateError, match=r"MRR415: layer 2: .* did not make for this router"):
            forward(chunk)


def test_a_driven_router_is_compared_once_a_session_had_its_dispatcher():
    """Before, no dispatcher knows its router, so nothing is kept for one."""
    chunk = Chunk(num_layers=1)
    (router,) = chunk.routers
    router.router_replay = mrr.mcore.RouterReplay()
    router.router_replay.set_router_replay_action(mrr.mcore.RouterReplayAction.RECORD)
    hook(chunk.layers[0], rolled)
    forward(chunk)
    assert id(router) not in dispatch.thread.outputs
    router.router_replay.clear_router_replay_action()
    mrr.freeze_recompute(chunk).close(check=False)
    router.router_replay.set_router_replay_action(mrr.mcore.RouterReplayAction.RECORD)
    with pytest.raises(ReplayStateError, match="layer 1: its token dispatcher got another routing map"):
        forward(chunk)
    router.router_replay.clear_router_replay_action()


def test_a_recompute_behind_its_session_is_compared_too():
    chunk = Chunk()
    chunk.around = reentrant
    with mrr.replay(chunk, random_trace(8)) as session:
        loss = forward(chunk, session)
    hook(chunk.layers[1], rolled)
    with pytest.raises(ReplayStateError, match="layer 2: its token dispatcher got another routing map"):
        loss.backward()
