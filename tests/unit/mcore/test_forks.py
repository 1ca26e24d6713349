"""miles' Megatron-LM, whose routing function asks a manager for the top-k: every session works there, without a trainer."""

import re

import pytest
import torch
from megatron.core.transformer.moe import router as router_module

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError, UnsupportedRouterError
from megatron_router_replay.mcore.model.upstream import check_version, must_verify
from tests.support import miles_fork
from tests.unit.mcore.test_mtp import OF_MTP, WithMtp
from tests.unit.mcore.tiny_chunk import (
    AROUND,
    ROWS,
    SCORES,
    Chunk,
    disturbed_backward,
    flips,
    forward,
    live_maps,
    num_recomputed,
    random_trace,
    reentrant,
    tokens,
    watched,
    wrong_replays,
)

pytestmark = pytest.mark.version

MILES = ["miles-main", "miles-main-20260819"]


@pytest.fixture(params=MILES)
def manager(request, monkeypatch):
    manager = miles_fork.Manager()
    miles_fork.install(monkeypatch, request.param, manager)
    return manager


@pytest.fixture(params=[True, False], ids=["enabled", "off"])
def enabled(request, manager):
    manager.enabled = request.param


@pytest.mark.parametrize(
    ("around", "scores"), [*((around, "softmax") for around in AROUND), *(("reentrant", scores) for scores in SCORES)]
)
def test_a_replay_is_exact_in_forwards_and_recomputes(around, scores, manager, enabled):
    chunk, trace = Chunk(**SCORES[scores]), random_trace(8)
    chunk.around = AROUND[around]
    with watched(chunk) as seen, mrr.replay(chunk, trace) as session:
        disturbed_backward(chunk, forward(chunk, session))
    assert (wrong_replays(seen, trace), flips(seen)) == (0, 0)
    assert num_recomputed(seen) == (0 if around == "plain" else 3)
    # Its code may change every day, so the maps of each router are compared.
    assert session.report.decisions["verified"] == 24 * (1 if around == "plain" else 2)


@pytest.mark.parametrize("around", ["plain", "reentrant"])
def test_a_recording_and_a_freeze_need_no_trainer(around, manager, enabled):
    chunk = Chunk()
    chunk.around = AROUND[around]
    with watched(chunk) as seen, mrr.record(chunk) as session:
        disturbed_backward(chunk, forward(chunk, session))
    assert (wrong_replays(seen, session.trace()), flips(seen)) == (0, 0)
    chunk = Chunk()
    chunk.around = AROUND[around]
    with watched(chunk) as seen, mrr.freeze_recompute(chunk):
        disturbed_backward(chunk, forward(chunk))
    assert (num_recomputed(seen) > 0, flips(seen)) == (around == "reentrant", 0)


def test_the_manager_answers_where_no_session_decides_and_is_itself_after_uninstall(manager):
    chunk, trace = Chunk(), random_trace(8)
    manager.enabled = True
    with watched(chunk) as live:
        forward(chunk)
    assert manager.num_requests == 3
    with mrr.replay(chunk, trace) as session:
        forward(chunk, session)
        assert "get_topk_fn" in vars(manager)
        with session.paused(), watched(chunk) as paused:
            forward(chunk)
    assert all(torch.equal(live[key][0], maps[0]) for key, maps in paused.items())
    mrr.mcore.uninstall()
    assert vars(manager).keys() == {"enabled", "num_requests"}
    with watched(chunk) as seen, mrr.replay(chunk, trace) as session:  # the next session finds it again
        forward(chunk, session)
    assert wrong_replays(seen, trace) == 0


def test_what_a_trainer_puts_in_the_managers_place_during_a_session_is_met(manager):
    chunk, trace = Chunk(), random_trace(8)
    manager.enabled = True
    original = manager.get_topk_fn
    with watched(chunk) as seen, mrr.replay(chunk, trace) as session:
        manager.get_topk_fn = lambda compute_topk, **options: original(compute_topk, **options)
        forward(chunk, session)
    assert wrong_replays(seen, trace) == 0
    mrr.mcore.uninstall()
    assert not hasattr(manager.get_topk_fn, "is_hook")


def test_without_the_managers_door_a_session_raises(manager, monkeypatch):
    """Planted: what every session of miles' users would see, and the tests above."""
    monkeypatch.setattr("megatron_router_replay.mcore.core.hooks._hook_manager", lambda manager: None)
    chunk = Chunk()
    manager.enabled = True
    session = mrr.replay(chunk, random_trace(8))
    with pytest.raises(ReplayStateError, match="MRR414: layer 1 chose experts without a request to the session"):
        forward(chunk, session)
    session.close(check=False)


@pytest.mark.parametrize("start", ["freeze", "replay"])
def test_an_mtp_layer_stays_live_and_its_recompute_is_frozen(start, manager, enabled):
    chunk, trace = WithMtp(), random_trace(8, 3)
    chunk.around = reentrant
    router = chunk.mtp.mtp_model_layer.router
    router.is_mtp_layer = True
    live = live_maps(chunk)[1]  # of decoder layer 1 and of the MTP layer in turns
    with (
        watched(chunk) as seen,
        mrr.freeze_recompute(chunk) if start == "freeze" else mrr.replay(chunk, trace) as session,
    ):
        if start == "replay":
            session.microbatch(ROWS)
        disturbed_backward(chunk, chunk(tokens()))
    assert (num_recomputed(seen), flips(seen)) == (3, 0)
    assert torch.equal(seen[OF_MTP, 1][0], live[1])
    if start == "replay":
        decoder = {key: maps for key, maps in seen.items() if key[0] != OF_MTP}
        assert (len(decoder), wrong_replays(decoder, trace)) == (2, 0)


def test_a_message_about_a_router_of_an_mtp_layer_says_so(manager):
    chunk = WithMtp()
    router = chunk.mtp.mtp_model_layer.router
    router.is_mtp_layer = True
    router.router_replay = mrr.mcore.RouterReplay()
    router.router_replay.set_router_replay_action(mrr.mcore.RouterReplayAction.RECORD)
    with pytest.raises(ReplayStateError, match="MRR417: MTP layer 1: its own RouterReplay is being driven"):
        mrr.freeze_recompute(chunk)
    router.router_replay.clear_router_replay_action()


def test_the_drop_in_is_refused_where_no_router_asks_it(monkeypatch):
    miles_fork.install(monkeypatch, "miles-main", miles_fork.Manager())
    with pytest.raises(UnsupportedRouterError, match=r"MRR402: install\(\) has no effect in miles' Megatron-LM"):
        mrr.mcore.install()


@pytest.mark.parametrize("enabled", [False, True])
def test_the_drop_in_replays_unless_the_manager_is_asked_first(enabled, monkeypatch):
    manager = miles_fork.Manager()
    miles_fork.install(monkeypatch, "miles-main-20260819", manager)
    manager.enabled, chunk, trace = enabled, Chunk(), random_trace(8)
    mrr.mcore.install()
    mrr.mcore.uninstall()
    replays = [mrr.mcore.RouterReplay() for _ in chunk.routers]
    for router, replay in zip(chunk.routers, replays):
        router.router_replay = replay
        replay.set_target_indices(trace.layer(router.layer_number)[ROWS.t().reshape(-1)])
        replay.set_router_replay_action(mrr.mcore.RouterReplayAction.REPLAY_FORWARD)
    try:
        with watched(chunk) as seen:
            if enabled:
                with pytest.raises(ReplayStateError, match="MRR414: layer 1 chose experts without a request"):
                    forward(chunk)
            else:
                forward(chunk)
                assert wrong_replays(seen, trace) == 0
    finally:
        for replay in replays:
            replay.clear_router_replay_action()


def test_sessions_verify_what_the_fork_routes(manager):
    check_version()
    assert must_verify()


def test_a_fork_that_nobody_knows_is_named_with_advice_that_works(monkeypatch):
    miles_fork.install(monkeypatch, "unknown")
    with pytest.raises(UnsupportedRouterError) as raised:
        mrr.explain(Chunk())
    message = str(raised.value)
    assert re.match(
        r"MRR402: Megatron-Core \S+ cannot replay routes: its topk_routing_with_score_function has no", message
    )
    assert re.search(r"Is \S*megatron/core a fork\?", message)
    assert "call router_replay.get_replay_topk(scores, topk, num_groups, group_topk, compute_topk)" in message
    # As it says; its own routing passes nothing.
    monkeypatch.setattr(router_module, "topk_routing_with_score_function", miles_fork.as_advised)
    chunk, trace = Chunk(), random_trace(8)
    chunk.around = reentrant
    with watched(chunk) as seen, mrr.replay(chunk, trace) as session:
        disturbed_backward(chunk, forward(chunk, session))
    assert (wrong_replays(seen, trace), num_recomputed(seen), flips(seen)) == (0, 3, 0)
