"""RouterReplay driven as Megatron-Core's class is driven, on real TopKRouters: exact or an error, and interchangeable."""

import copy
import gc
import pickle
import sys
import weakref
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import router_replay as upstream
from megatron.core.transformer.moe.router import TopKRouter

import megatron_router_replay as mrr
from megatron_router_replay import install, uninstall
from megatron_router_replay.errors import ReplayStateError, UnsupportedRouterError
from megatron_router_replay.mcore import RouterReplay, RouterReplayAction
from megatron_router_replay.mcore.core import hooks
from tests.unit.mcore.tiny_chunk import (
    Chunk,
    as_map,
    disturb,
    flips,
    non_reentrant,
    num_recomputed,
    random_routes,
    reentrant,
    tokens,
    unknown,
    watched,
)

RECORD, FORWARD, BACKWARD = RouterReplayAction


@pytest.fixture(autouse=True)
def uninstalled():
    RouterReplay.clear_global_router_replay_instances()  # of other tests
    yield
    uninstall()


@pytest.fixture(params=[reentrant, non_reentrant])
def chunk(request):
    chunk = Chunk()
    chunk.around = request.param
    for router in chunk.routers:
        router.router_replay = RouterReplay()
    return chunk


def routes(number):
    return list(random_routes(8, seed=number).unbind(1))


def forward(chunk, number):
    RouterReplay.set_replay_data(routes(number))
    RouterReplay.set_global_router_replay_action(FORWARD)
    return chunk(tokens(), number).square().mean()


def queued():
    """How many targets each instance still has for recomputes that are announced."""
    return [len(replay.replay_backward_list) for replay in RouterReplay.global_router_replay_instances]


def wrong(seen):
    return sum(
        int((routing_map != as_map(routes(number)[layer - 1])).any(dim=1).sum())
        for (number, layer), maps in seen.items()
        for routing_map in maps
    )


@pytest.mark.parametrize("order", ["dpo", "newer first", "older first"])
@pytest.mark.parametrize("action", [BACKWARD, None, RECORD, FORWARD])
def test_every_recompute_uses_its_forwards_routes_whatever_the_action_says_by_then(chunk, order, action):
    with watched(chunk) as seen:
        losses = [forward(chunk, number) for number in range(2)]
        if action is None:
            RouterReplay.clear_global_router_replay_action()
        else:
            RouterReplay.set_global_router_replay_action(action)
        disturb(chunk)
        if order == "dpo":
            (losses[0] - losses[1]).backward()
        else:
            for loss in reversed(losses) if order == "newer first" else losses:
                loss.backward()
    assert num_recomputed(seen) == 6
    assert wrong(seen) == 0
    # As upstream: a call under REPLAY_BACKWARD takes the first entry off, whichever its tape says.
    assert queued() == [0 if action is BACKWARD else 2] * 3


def test_a_target_that_is_overwritten_before_the_recompute_changes_no_recompute(chunk):
    """A driver may write each micro-batch into the same target_topk_idx."""
    with watched(chunk) as seen:
        loss = forward(chunk, 0)
        for replay, target in zip(RouterReplay.global_router_replay_instances, routes(1)):
            replay.target_topk_idx.copy_(target)
        first_in = [replay.replay_backward_list[0] for replay in RouterReplay.global_router_replay_instances]
        disturb(chunk)
        loss.backward()
    assert (num_recomputed(seen), wrong(seen)) == (3, 0)
    assert all(map(torch.equal, first_in, routes(0)))


def test_targets_that_are_cleared_are_freed_and_the_recompute_uses_its_tape(chunk):
    with watched(chunk) as seen:
        loss = forward(chunk, 0)
        kept = [weakref.ref(router.router_replay.target_topk_idx) for router in chunk.routers]
        RouterReplay.clear_global_router_replay_action()
        RouterReplay.clear_global_indices()
        gc.collect()
        assert all(target() is None for target in kept)
        disturb(chunk)
        loss.backward()
    assert (num_recomputed(seen), wrong(seen)) == (3, 0)


@pytest.mark.parametrize("then", [RECORD, None])
@pytest.mark.parametrize("first", [FORWARD, RECORD])
def test_a_checkpoint_of_ones_own_raises_under_another_action_or_none(chunk, first, then):
    chunk.around = unknown
    RouterReplay.set_replay_data(routes(0))
    RouterReplay.set_global_router_replay_action(first)
    loss = chunk(tokens(), 0).square().mean()
    RouterReplay.set_global_router_replay_action(then)
    with pytest.raises(ReplayStateError, match=r"MRR412: layer \d is recomputed, but no tape of its forward is known"):
        loss.backward()
    uninstall()
    RouterReplay.clear_global_router_replay_action()
    uninstall()
    chunk(tokens(), 0).square().mean().backward()  # no RouterReplay is needed any more


@pytest.mark.parametrize("action", [FORWARD, RECORD, None])
def test_a_model_that_a_session_has_left_is_driven_as_before(chunk, action):
    for _ in range(2):
        with mrr.freeze_recompute(chunk):
            chunk(tokens(), 0).square().sum().backward()
        with watched(chunk) as seen:
            RouterReplay.set_replay_data(routes(1))
            if action is not None:
                RouterReplay.set_global_router_replay_action(action)
            loss = chunk(tokens(), 1).square().sum()
            if action is not None:
                disturb(chunk)
            RouterReplay.clear_global_router_replay_action()
            loss.backward()
        assert (num_recomputed(seen), flips(seen)) == (3, 0)
        assert wrong(seen) == 0 or action is not FORWARD


def test_a_model_that_a_session_has_left_may_announce_its_own_recomputes(chunk):
    mrr.freeze_recompute(chunk).close()
    chunk.around = unknown
    with watched(chunk) as seen:
        loss = forward(chunk, 1)
        disturb(chunk)
        RouterReplay.set_global_router_replay_action(BACKWARD)
        loss.backward()
    assert (num_recomputed(seen), wrong(seen), queued()) == (3, 0, [0] * 3)


@pytest.mark.parametrize("action", [None, BACKWARD])
def test_a_driven_forward_whose_recompute_comes_inside_a_session_uses_its_tape(chunk, action):
    with watched(chunk) as seen:
        loss = forward(chunk, 0)
        RouterReplay.set_replay_data(routes(1))  # of a forward to come
        RouterReplay.clear_global_router_replay_action()
        with mrr.freeze_recompute(chunk):
            if action is not None:
                RouterReplay.set_global_router_replay_action(action)
            disturb(chunk)
            loss.backward()
    assert (num_recomputed(seen), wrong(seen)) == (3, 0)
    # Else a recompute to come would get the target of another forward.
    assert queued() == [1 if action is BACKWARD else 2] * 3
    last = [replay.replay_backward_list[-1] for replay in RouterReplay.global_router_replay_instances]
    assert all(map(torch.equal, last, routes(1)))
    RouterReplay.clear_global_router_replay_action()


def test_a_recorded_forward_is_frozen_in_its_recompute_too(chunk):
    RouterReplay.set_global_router_replay_action(RECORD)
    with watched(chunk) as seen:
        loss = chunk(tokens(), 0).square().mean()
        recorded = [indices.clone() for indices in RouterReplay.get_recorded_data()]
        RouterReplay.clear_global_router_replay_action()
        disturb(chunk)
        loss.backward()
    assert (num_recomputed(seen), flips(seen)) == (3, 0)
    assert all(torch.equal(seen[0, layer + 1][0], as_map(recorded[layer])) for layer in range(3))
    assert all(map(torch.equal, recorded, RouterReplay.get_recorded_data()))


@pytest.mark.parametrize("action", list(RouterReplayAction))
def test_a_recompute_of_a_live_forward_refuses_to_replay_and_records_nothing(chunk, action):
    RouterReplay.set_replay_data(routes(0))
    loss = chunk(tokens(), 0).square().mean()
    RouterReplay.set_global_router_replay_action(action)
    with pytest.raises(
        ReplayStateError, match=r"MRR413: .* its forward must have run in a session, or under an action"
    ):
        loss.backward()
    assert RouterReplay.get_recorded_data() == [None] * 3


def test_list_enum_and_static_helpers_are_megatrons_own():
    theirs = upstream.RouterReplay
    assert issubclass(RouterReplay, theirs)
    assert upstream.RouterReplayAction is RouterReplayAction
    assert RouterReplay.global_router_replay_instances is theirs.global_router_replay_instances
    for name in ("set_global_router_replay_action", "get_recorded_data", "clear_global_indices"):
        assert getattr(RouterReplay, name) is getattr(theirs, name)


def test_an_action_is_an_enums_member_of_that_value_or_raises():
    replay = RouterReplay()
    replay.set_router_replay_action(Enum("Another", {"RECORD": "record"}).RECORD)  # a trainer's own, named alike
    assert replay.router_replay_action is RECORD
    with pytest.raises(ReplayStateError, match="no RouterReplayAction"):
        replay.set_router_replay_action("record")
    assert replay.router_replay_action is RECORD


def test_static_helpers_and_models_that_are_driven_after_uninstall():
    chunk = Chunk()
    chunk.around = reentrant
    install()
    for router in chunk.routers[:2]:
        router.router_replay = upstream.RouterReplay()  # ours by now
    uninstall()
    chunk.routers[2].router_replay = RouterReplay()
    for helpers in (upstream.RouterReplay, RouterReplay):
        with watched(chunk) as seen:
            helpers.set_replay_data(routes(0))
            helpers.set_global_router_replay_action(FORWARD)
            loss = chunk(tokens(), 0).square().mean()
            helpers.set_global_router_replay_action(BACKWARD)
            disturb(chunk)
            loss.backward()
        assert (num_recomputed(seen), wrong(seen)) == (3, 0)
        helpers.clear_global_indices()
        helpers.clear_global_router_replay_action()


def test_a_model_that_was_built_before_is_refused_and_nothing_is_changed():
    theirs = upstream.RouterReplay
    first, second = theirs(), theirs()
    with pytest.raises(ReplayStateError, match=r"MRR417: install\(\) comes before the model: 2 RouterReplay objects"):
        install()
    assert (type(first), type(second), upstream.RouterReplay) == (theirs, theirs, theirs)
    RouterReplay.clear_global_router_replay_instances()
    install()
    assert upstream.RouterReplay is RouterReplay


def test_an_action_puts_the_hooks_in_where_they_are_gone(monkeypatch):
    replay = RouterReplay()
    monkeypatch.setattr(TopKRouter, "routing", lambda *args, **kwargs: None)
    replay.set_router_replay_action(RECORD)
    assert hooks.is_hook(TopKRouter.routing)
    replay.clear_router_replay_action()


def test_install_replaces_the_names_in_every_megatron_module_that_holds_them(monkeypatch):
    theirs = upstream.RouterReplay
    late = SimpleNamespace(RouterReplay=theirs, RouterReplayAction=upstream.RouterReplayAction)
    elsewhere = SimpleNamespace(RouterReplay=theirs)
    monkeypatch.setitem(sys.modules, "megatron.some_inference_module", late)
    monkeypatch.setitem(sys.modules, "a_trainer.replay", elsewhere)
    for _ in range(2):
        install()
    assert (late.RouterReplay, late.RouterReplayAction) == (RouterReplay, RouterReplayAction)
    assert elsewhere.RouterReplay is theirs
    uninstall()
    assert late.RouterReplay is theirs


@pytest.mark.parametrize("fused", [False, True])
def test_a_router_with_fusion_is_driven_by_the_unfused_code(fused, monkeypatch):
    install()
    chunk = Chunk(num_layers=1, moe_enable_routing_replay=True)
    monkeypatch.setattr(chunk.routers[0].config, "moe_router_fusion", fused)
    with watched(chunk) as seen:
        RouterReplay.set_replay_data(routes(0)[:1])
        RouterReplay.set_global_router_replay_action(FORWARD)
        chunk(tokens(), 0)
    assert (len(seen), wrong(seen)) == (1, 0)


@pytest.mark.parametrize(("field", "value"), [("moe_router_load_balancing_type", "sinkhorn")])
@pytest.mark.parametrize("left_by_a_session", [False, True])
def test_a_router_that_would_request_nothing_raises_when_it_is_driven(field, value, left_by_a_session):
    install()
    chunk = Chunk(num_layers=1, moe_enable_routing_replay=True)
    (router,) = chunk.routers
    assert type(router.router_replay) is RouterReplay
    if left_by_a_session:
        mrr.freeze_recompute(chunk).close()
    setattr(router.config, field, value)
    RouterReplay.set_global_router_replay_action(RECORD)
    with pytest.raises(UnsupportedRouterError, match=field):
        chunk(tokens())
    assert RouterReplay.get_recorded_data() == [None]


def test_a_model_that_holds_replay_objects_can_be_copied_and_pickled():
    chunk = Chunk(num_layers=1)
    chunk.around = reentrant
    (router,) = chunk.routers
    router.router_replay = RouterReplay()
    router.router_replay.set_target_indices(routes(0)[0])
    for twin in (copy.deepcopy(router.router_replay), pickle.loads(pickle.dumps(router.router_replay))):
        assert torch.equal(twin.target_topk_idx, router.router_replay.target_topk_idx)
        assert twin.target_topk_idx is not router.router_replay.target_topk_idx
