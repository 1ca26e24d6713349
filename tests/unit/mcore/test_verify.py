"""verify=True finds what is planted: maps that leave a router with other experts than the session chose."""

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError, UnsupportedRouterError
from tests.unit.mcore.tiny_chunk import Chunk, non_reentrant, plain, random_trace, reentrant, tokens

ROWS = torch.arange(8).view(2, 4)
NOW = {"in the forward": False, "in the recompute": True}


def exchanged(routing_map):
    """Row 5 names another expert in place of its first."""
    routing_map = routing_map.clone()
    chosen, other = routing_map[5].nonzero()[0], (~routing_map[5]).nonzero()[0]
    routing_map[5, chosen], routing_map[5, other] = False, True
    return routing_map


def added(routing_map):
    routing_map = routing_map.clone()
    routing_map[5, (~routing_map[5]).nonzero()[0]] = True
    return routing_map


def dropped(routing_map):
    routing_map = routing_map.clone()
    routing_map[5, routing_map[5].nonzero()[0]] = False
    return routing_map


def plant(chunk, change, *, in_recompute):
    """Change what leaves the second layer's router, before the session's verifier sees it."""

    def hook(router, args, output):
        recompute = torch._C._current_graph_task_id() != -1
        return (output[0], change(output[1])) if recompute == in_recompute else None

    chunk.routers[1].register_forward_hook(hook)


def starts(chunk):
    trace = random_trace(8)
    return {
        "replay": lambda: mrr.replay(chunk, trace, verify=True),
        "record": lambda: mrr.record(chunk, verify=True),
        "freeze": lambda: mrr.freeze_recompute(chunk, verify=True),
    }


def train(chunk, session, kind):
    if kind != "freeze":
        session.microbatch(ROWS)
    chunk(tokens()).float().sum().backward()


@pytest.mark.parametrize("kind", ["replay", "record", "freeze"])
@pytest.mark.parametrize("change", [exchanged, added, dropped])
def test_a_decision_that_left_its_router_changed_is_counted_and_raises(change, kind):
    chunk = Chunk()
    plant(chunk, change, in_recompute=False)
    session = starts(chunk)[kind]()
    train(chunk, session, kind)
    with pytest.raises(
        ReplayStateError, match="rank 0: 1 of 24 decisions left their router with other experts than were"
    ):
        session.close()
    assert (session.report.decisions_wrong, session.report.decisions_verified) == (1, 24)


@pytest.mark.parametrize("around", [reentrant, non_reentrant])
@pytest.mark.parametrize("in_recompute", NOW.values(), ids=NOW)
def test_recomputes_are_verified_as_their_forwards_are(around, in_recompute):
    chunk = Chunk()
    chunk.around = around
    plant(chunk, exchanged, in_recompute=in_recompute)
    session = starts(chunk)["replay"]()
    train(chunk, session, "replay")
    with pytest.raises(ReplayStateError, match="rank 0: 1 of 48 decisions left their router"):
        session.close()


@pytest.mark.parametrize("around", [plain, reentrant])
def test_without_a_fault_nothing_is_wrong_and_without_verify_nothing_is_counted(around):
    for verify, counts in ((True, (0, 24 if around is plain else 48)), (False, (None, None))):
        chunk = Chunk()
        chunk.around = around
        with mrr.replay(chunk, random_trace(8), verify=verify) as session:
            train(chunk, session, "replay")
        assert (session.report.decisions_wrong, session.report.decisions_verified) == counts
        assert (session.report.recompute_flips, session.report.decisions_recomputed) == (None, None)
        if not verify:
            assert not any(router.last_used for router in session._routers()), "what nobody compares is not kept"
        assert not chunk.routers[1]._forward_hooks, "what watched is gone"


@pytest.mark.parametrize("kind", ["replay", "record", "freeze"])
def test_a_capacity_factor_drops_tokens_behind_the_selection_so_maps_cannot_be_verified(kind):
    chunk = Chunk(moe_expert_capacity_factor=1.0, moe_token_drop_policy="position")
    with pytest.raises(
        UnsupportedRouterError, match=r"cannot verify .*layer 1.*: moe_expert_capacity_factor=1\.0 drops"
    ):
        starts(chunk)[kind]()
    assert all(not router._forward_hooks and router.router_replay is None for router in chunk.routers)
    mrr.record(chunk).close()  # without verify it may run


def test_a_session_that_saw_no_forward_found_nothing_wrong():
    with mrr.freeze_recompute(Chunk(), verify=True) as session:
        pass
    assert (session.report.decisions_wrong, session.report.decisions_verified) == (0, 0)


def test_a_freeze_verifies_its_own_choices_alone_and_not_those_of_a_replay_inside():
    chunk = Chunk()
    with mrr.freeze_recompute(chunk, verify=True) as outer:
        with mrr.replay(chunk, random_trace(8), verify=True) as inner:
            train(chunk, inner, "replay")
        train(chunk, outer, "freeze")
    assert (inner.report.decisions_wrong, inner.report.decisions_verified) == (0, 24)
    assert (outer.report.decisions_wrong, outer.report.decisions_verified) == (0, 24)


@pytest.mark.parametrize(("where", "verified"), [("routing", 8), ("hook", 16)])
@pytest.mark.parametrize("num_tokens", [8, 6])
def test_the_choice_of_a_freeze_whose_forward_failed_is_not_compared_with_a_replay_inside(num_tokens, where, verified):
    chunk = Chunk()
    router = chunk.routers[1]
    failing = [True]

    def fail(*_):
        if failing:
            raise ArithmeticError("injected")

    # Either way the router has chosen; the hook stands in front of the session's.
    if where == "hook":
        router.register_forward_hook(fail)
    with mrr.freeze_recompute(chunk, verify=True) as outer:
        if where == "routing":
            routing = router.routing
            router.routing = lambda *args, **kwargs: (routing(*args, **kwargs), fail())
        with pytest.raises(ArithmeticError):
            chunk(tokens())
        vars(router).pop("routing", None)
        failing.clear()
        with mrr.replay(chunk, random_trace(8)) as inner:
            inner.microbatch(ROWS[:, : num_tokens // 2])
            chunk(tokens()[:, : num_tokens // 2])
    assert (outer.report.decisions_wrong, outer.report.decisions_verified) == (0, verified)
