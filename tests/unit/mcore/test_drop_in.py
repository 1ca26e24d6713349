"""RouterReplay driven as Megatron-Core's class is driven, on real TopKRouters: exact or an error, and interchangeable."""

import copy
import gc
import pickle
from enum import Enum

import numpy as np
import pytest
import torch

from megatron_router_replay import RouterReplay, RouterReplayAction, RouterReplayError, install, uninstall
from megatron_router_replay.errors import ReplayStateError, TraceError, UnsupportedRouterError
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
    watched,
)

RECORD, FORWARD, BACKWARD = RouterReplayAction


def upstream():
    from megatron.core.transformer.moe import router_replay

    return router_replay


@pytest.fixture(autouse=True)
def uninstalled():
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
    assert [replay.replay_backward_list for replay in RouterReplay.global_router_replay_instances] == [[]] * 3


def test_a_recorded_forward_is_frozen_in_its_recompute_too(chunk):
    RouterReplay.set_global_router_replay_action(RECORD)
    with watched(chunk) as seen:
        loss = chunk(tokens(), 0).square().mean()
        recorded = [indices.clone() for indices in RouterReplay.get_recorded_data()]
        RouterReplay.clear_global_router_replay_action()
        disturb(chunk)
        loss.backward()
    assert num_recomputed(seen) == 3
    assert flips(seen) == 0
    assert all(torch.equal(seen[0, layer + 1][0], as_map(recorded[layer])) for layer in range(3))
    assert all(torch.equal(a, b) for a, b in zip(recorded, RouterReplay.get_recorded_data()))


def test_a_recompute_takes_its_own_entry_out_and_no_other(chunk):
    losses = [forward(chunk, number) for number in (0, 1)]
    RouterReplay.set_global_router_replay_action(BACKWARD)
    losses[1].backward()
    for router, target in zip(chunk.routers, routes(0)):
        assert [entry.tolist() for entry in router.router_replay.replay_backward_list] == [target.tolist()]


def test_entries_of_passes_without_a_backward_are_never_used(chunk):
    with watched(chunk) as seen:
        with torch.no_grad():
            forward(chunk, 0)  # old log-probs
        assert [replay.replay_backward_list for replay in RouterReplay.global_router_replay_instances] == [[]] * 3
        RouterReplay.set_replay_data(routes(1))  # skipped
        chunk.fail_at = 1
        with pytest.raises(ArithmeticError):
            forward(chunk, 2)
        loss = forward(chunk, 3)
        RouterReplay.set_global_router_replay_action(BACKWARD)
        disturb(chunk)
        loss.backward()
    assert num_recomputed(seen) == 3
    assert wrong({key: maps for key, maps in seen.items() if key[0] != 2}) == 0


@pytest.mark.parametrize("action", [FORWARD, BACKWARD])
def test_a_replay_action_in_the_recompute_of_a_live_forward_raises(chunk, action):
    RouterReplay.set_replay_data(routes(0))
    loss = chunk(tokens(), 0).square().mean()
    RouterReplay.set_global_router_replay_action(action)
    with pytest.raises(ReplayStateError, match="whose forward is not known"):
        loss.backward()


def test_the_recompute_of_a_live_forward_records_nothing(chunk):
    loss = chunk(tokens(), 0).square().mean()
    RouterReplay.set_global_router_replay_action(RECORD)
    loss.backward()
    assert RouterReplay.get_recorded_data() == [None] * 3


def test_switched_off_nothing_is_kept(chunk):
    loss = forward(chunk, 0)
    RouterReplay.clear_global_router_replay_action()
    assert all(replay._alive for replay in RouterReplay.global_router_replay_instances)
    loss.backward()
    del loss
    gc.collect()
    assert not any(replay._alive for replay in RouterReplay.global_router_replay_instances)


def test_targets_are_copied_and_checked_however_they_are_set():
    replay = RouterReplay()
    target = torch.tensor([[0, 1], [2, 3]])
    replay.target_topk_idx = target
    target.zero_()
    assert replay.target_topk_idx.tolist() == [[0, 1], [2, 3]]
    for bad in ([[0, 0]], [[0, -1]], [0, 1], [[0.5, 1.0]], "routes", object()):
        with pytest.raises(TraceError):
            replay.target_topk_idx = bad
        with pytest.raises(TraceError):
            replay.set_target_indices(bad)
    for given in (
        [[0, 1], [2, 3]],
        np.array([[0, 1], [2, 3]], dtype=np.uint16),
        np.array([[0, 1], [2, 3]], dtype=np.uint32),
    ):
        replay.set_target_indices(given)
        assert replay.target_topk_idx.tolist() == [[0, 1], [2, 3]]
    assert len(replay.replay_backward_list) == 3


def test_a_wrong_number_of_tensors_raises_what_megatron_core_raises():
    RouterReplay()
    with pytest.raises(ValueError, match="1 routers"):
        RouterReplay.set_replay_data([])
    with pytest.raises(RouterReplayError):
        RouterReplay.set_replay_data([])


def test_actions_of_either_enum_mean_the_same():
    theirs = upstream().RouterReplayAction
    for ours in RouterReplayAction:
        same = theirs[ours.name]
        assert ours == same
        assert same == ours
        assert hash(ours) == hash(same)
        assert {ours: 1}[same] == 1
    assert RouterReplayAction.RECORD != theirs.REPLAY_FORWARD
    assert RouterReplayAction.RECORD != "record"
    another = Enum("Another", {"RECORD": "record"})
    assert RouterReplayAction.RECORD != another.RECORD
    assert RouterReplayAction.RECORD != type("RouterReplayAction", (), {"value": "record"})()
    replay = RouterReplay()
    replay.set_router_replay_action(theirs.RECORD)
    assert replay.router_replay_action is RECORD
    with pytest.raises(ReplayStateError, match="no RouterReplayAction"):
        replay.set_router_replay_action("record")


def test_static_helpers_and_models_built_before_install_or_driven_after_uninstall():
    theirs, their_action = upstream().RouterReplay, upstream().RouterReplayAction
    chunk = Chunk()
    chunk.around = reentrant
    chunk.routers[0].router_replay = theirs()
    install()
    chunk.routers[1].router_replay = upstream().RouterReplay()  # ours by now
    uninstall()
    chunk.routers[2].router_replay = RouterReplay()
    for helpers, actions in ((theirs, RouterReplayAction), (RouterReplay, their_action)):
        assert len(helpers.global_router_replay_instances) == 3
        with watched(chunk) as seen:
            losses = []
            for number in range(2):
                helpers.set_replay_data(routes(number))
                helpers.set_global_router_replay_action(actions.REPLAY_FORWARD)
                losses.append(chunk(tokens(), number).square().mean())
            helpers.set_global_router_replay_action(actions.REPLAY_BACKWARD)
            disturb(chunk)
            (losses[0] + losses[1]).backward()
        assert num_recomputed(seen) == 6
        assert wrong(seen) == 0
        helpers.clear_global_indices()
        helpers.clear_global_router_replay_action()


def test_an_instance_that_is_adopted_keeps_what_it_holds():
    theirs, action = upstream().RouterReplay, upstream().RouterReplayAction
    held, empty = theirs(), theirs()
    target, recorded = routes(0)[0], routes(1)[0]
    held.set_target_indices(target)
    held.record_indices(recorded)
    held.set_router_replay_action(action.REPLAY_FORWARD)
    install()
    for instance in (held, empty):
        assert type(instance) is RouterReplay
    assert held.target_topk_idx.tolist() == target.tolist()
    assert held.target_topk_idx is not target, "copied, as every target"
    assert held.recorded_topk_idx.tolist() == recorded.tolist()
    assert [entry.tolist() for entry in held.replay_backward_list] == [target.tolist()]
    assert held.router_replay_action is FORWARD
    assert (empty.target_topk_idx, empty.recorded_topk_idx, empty.router_replay_action) == (None, None, None)
    assert empty.replay_backward_list == []


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("target_topk_idx", torch.tensor([[3, 3]])),
        ("target_topk_idx", torch.tensor([[0, -1]])),
        ("replay_backward_list", [torch.tensor([[0, 1]]), torch.tensor([[3, 3]])]),
        ("router_replay_action", "record"),
    ],
)
def test_an_instance_that_cannot_be_adopted_is_refused_and_nothing_is_changed(name, bad):
    theirs = upstream().RouterReplay
    first, second = theirs(), theirs()
    first.set_target_indices(routes(0)[0])
    setattr(second, name, bad)
    held = [dict(vars(instance)) for instance in (first, second)]
    ours = RouterReplay.global_router_replay_instances
    with pytest.raises(RouterReplayError):
        install()
    assert [type(instance) for instance in (first, second)] == [theirs, theirs]
    for instance, before in zip((first, second), held):
        assert vars(instance).keys() == before.keys()
        assert all(vars(instance)[key] is value for key, value in before.items())
    assert upstream().RouterReplay is theirs
    assert RouterReplay.global_router_replay_instances is ours


@pytest.mark.parametrize("around", [reentrant, non_reentrant])
def test_the_recompute_of_an_adopted_target_takes_its_entry_out_as_any_other(around):
    theirs, action = upstream().RouterReplay, upstream().RouterReplayAction
    chunk = Chunk()
    chunk.around = around
    for router in chunk.routers:
        router.router_replay = theirs()
    theirs.set_replay_data(routes(0))
    theirs.set_global_router_replay_action(action.REPLAY_FORWARD)
    install()
    with watched(chunk) as seen:
        loss = chunk(tokens(), 0).square().mean()
        theirs.clear_global_router_replay_action()
        disturb(chunk)
        loss.backward()
    assert (num_recomputed(seen), wrong(seen)) == (3, 0)
    # A second target is the one that the next announced recompute takes, not what is left of the first.
    assert [router.router_replay.replay_backward_list for router in chunk.routers] == [[]] * 3


def test_install_replaces_the_names_in_every_megatron_module_that_holds_them():
    import sys
    import types

    late = types.ModuleType("megatron.some_inference_module")
    late.RouterReplay, late.RouterReplayAction = upstream().RouterReplay, upstream().RouterReplayAction
    theirs = late.RouterReplay
    sys.modules[late.__name__] = late
    try:
        install()
        assert late.RouterReplay is RouterReplay
        assert late.RouterReplayAction is RouterReplayAction
        uninstall()
        assert late.RouterReplay is theirs
    finally:
        del sys.modules[late.__name__]


@pytest.mark.parametrize(
    ("field", "value"), [("moe_router_fusion", True), ("moe_router_load_balancing_type", "sinkhorn")]
)
def test_a_router_that_would_never_ask_raises_when_it_is_driven(field, value):
    install()
    chunk = Chunk(num_layers=1, moe_enable_routing_replay=True)
    (router,) = chunk.routers
    assert type(router.router_replay) is RouterReplay
    router.router_replay.set_router_replay_action(RECORD)
    router.router_replay.clear_router_replay_action()
    setattr(router.config, field, value)
    with pytest.raises(UnsupportedRouterError, match=field):
        RouterReplay.set_global_router_replay_action(RECORD)


def test_a_model_that_holds_replay_objects_can_be_copied_and_pickled():
    chunk = Chunk(num_layers=1)
    chunk.around = reentrant
    (router,) = chunk.routers
    router.router_replay = RouterReplay()
    router.router_replay.set_target_indices(routes(0)[0])
    for twin in (copy.deepcopy(router.router_replay), pickle.loads(pickle.dumps(router.router_replay))):
        assert torch.equal(twin.target_topk_idx, router.router_replay.target_topk_idx)
        assert twin.target_topk_idx is not router.router_replay.target_topk_idx


def test_a_copy_of_a_model_that_is_being_driven_does_what_it_is_told_and_nothing_before():
    chunk = Chunk(num_layers=1)
    (router,) = chunk.routers
    with watched(chunk) as live:
        chunk(tokens(), 0)
    router.router_replay = RouterReplay()
    RouterReplay.set_replay_data([routes(0)[0]])
    RouterReplay.set_global_router_replay_action(FORWARD)
    twin = copy.deepcopy(chunk)
    of_twin = twin.routers[0].router_replay
    RouterReplay.clear_global_router_replay_action()  # of the original alone
    with pytest.raises(ReplayStateError, match="was copied, with its model, while REPLAY_FORWARD was set"):
        twin(tokens(), 0)
    with watched(twin) as seen:
        of_twin.set_router_replay_action(FORWARD)
        twin(tokens(), 0)
        of_twin.clear_router_replay_action()
        twin(tokens(), 0)
    assert torch.equal(seen[0, 1][0], as_map(routes(0)[0]))
    assert torch.equal(seen[0, 1][1], live[0, 1][0])
    assert not torch.equal(seen[0, 1][0], seen[0, 1][1])


def test_a_copy_that_is_made_while_its_original_records_routes_live():
    chunk = Chunk(num_layers=1)
    chunk.routers[0].router_replay = RouterReplay()
    RouterReplay.set_global_router_replay_action(RECORD)
    twin = copy.deepcopy(chunk)
    twin(tokens(), 0)
    assert twin.routers[0].router_replay.get_recorded_indices() is None
