"""verify=True finds what is planted: maps that leave a router with other experts than the session chose."""

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError, UnsupportedRouterError
from megatron_router_replay.mcore.core.hooks import sources_of
from tests.unit.mcore.tiny_chunk import ROWS, Chunk, forward, non_reentrant, random_trace, reentrant, tokens

STARTS = {
    "replay": lambda chunk: mrr.replay(chunk, random_trace(8), verify=True),
    "record": lambda chunk: mrr.record(chunk, verify=True),
    "freeze": lambda chunk: mrr.freeze_recompute(chunk, verify=True),
}


def changed(routing_map, kind):
    """Row 5 names another expert in place of its first, one more, or one less."""
    routing_map = routing_map.clone()
    first, other = routing_map[5].nonzero()[0], (~routing_map[5]).nonzero()[0]
    routing_map[5, first] = kind == "added"
    routing_map[5, other] = kind != "dropped"
    return routing_map


def plant(chunk, kind="exchanged", *, in_recompute=False):
    """Change what leaves the second layer's router, unseen by autograd, in front of its dispatcher."""

    def hook(router, args, output):
        if (torch._C._current_graph_task_id() != -1) == in_recompute:
            output[1].data.copy_(changed(output[1], kind))

    chunk.routers[1].register_forward_hook(hook)


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        ("exchanged", "replay"),
        ("exchanged", "record"),
        ("exchanged", "freeze"),
        ("added", "replay"),
        ("dropped", "replay"),
    ],
)
def test_a_decision_that_left_its_router_changed_is_counted_and_raises(kind, start):
    chunk = Chunk()
    plant(chunk, kind)
    session = STARTS[start](chunk)
    forward(chunk, session).backward()
    with pytest.raises(
        ReplayStateError, match="rank 0: 1 of 24 decisions left their router with other experts than were"
    ):
        session.close()
    assert (session.report.decisions["wrong"], session.report.decisions["verified"]) == (1, 24)


@pytest.mark.parametrize("around", [reentrant, non_reentrant])
@pytest.mark.parametrize("in_recompute", [False, True])
def test_recomputes_are_verified_as_their_forwards_are_and_nothing_without_verify(around, in_recompute):
    chunk = Chunk()
    chunk.around = around
    plant(chunk, in_recompute=in_recompute)
    with mrr.replay(chunk, random_trace(8)) as session:
        forward(chunk, session).backward()
    assert (session.report.decisions, session.report.recompute_flips) == ({}, None)
    session = STARTS["replay"](chunk)
    forward(chunk, session).backward()
    with pytest.raises(ReplayStateError, match="rank 0: 1 of 48 decisions left their router"):
        session.close()


def test_a_dispatcher_that_gets_nothing_leaves_nothing_verified_so_verify_raises():
    chunk = Chunk()
    router = chunk.routers[1]
    chunk.layers[1].forward = lambda hidden: hidden + router(hidden)[0].sum()
    session = STARTS["replay"](chunk)
    forward(chunk, session)
    with pytest.raises(ReplayStateError, match="rank 0: nothing was verified in layers 2, whose token dispatchers got"):
        session.close()


def test_a_layer_without_a_dispatcher_is_verified_where_its_router_is_left():
    chunk = Chunk()
    del chunk.layers[1].token_dispatcher
    router = chunk.routers[1]
    chunk.layers[1].forward = lambda hidden: hidden + router(hidden)[0].sum()
    with STARTS["replay"](chunk) as session:
        forward(chunk, session)
    assert (session.report.decisions["verified"], session.report.decisions["wrong"]) == (24, 0)


def test_a_capacity_factor_drops_tokens_so_maps_cannot_be_verified():
    chunk = Chunk(moe_expert_capacity_factor=1.0, moe_token_drop_policy="position")
    with pytest.raises(
        UnsupportedRouterError, match=r"cannot verify .*layer 1.*: moe_expert_capacity_factor=1\.0 drops"
    ):
        STARTS["record"](chunk)
    assert not any(router._forward_hooks or sources_of(router) for router in chunk.routers)
    mrr.record(chunk).close(check=False)  # without verify=True it may run


@pytest.mark.parametrize("where", ["routing", "hook"])
def test_a_freeze_verifies_its_own_choices_and_not_those_of_a_replay_inside(where):
    """Nor is the choice of a forward that failed compared with that of the replay."""
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
            forward(chunk)
        vars(router).pop("routing", None)
        failing.clear()
        with mrr.replay(chunk, random_trace(8), verify=True) as inner:
            inner.microbatch(ROWS[:, :3])
            chunk(tokens()[:, :3])
        forward(chunk)
    assert (inner.report.decisions["wrong"], inner.report.decisions["verified"]) == (0, 3 * 6)
    of_first_layer, of_all = 8, 24
    assert (outer.report.decisions["wrong"], outer.report.decisions["verified"]) == (0, of_first_layer + of_all)


@pytest.mark.parametrize(
    ("dispatcher", "backend", "scale", "raises"),
    [
        ("flex", "deepep", 500.0, True),
        ("flex", "deepep", 5.0, False),  # some probabilities are 1, beside a small one
        ("flex", "hybridep", 500.0, False),
        ("alltoall", "deepep", 500.0, False),
    ],
)
def test_a_probability_of_0_raises_where_the_dispatcher_takes_a_topk_again(dispatcher, backend, scale, raises):
    chunk = Chunk(moe_token_dispatcher_type=dispatcher, moe_flex_dispatcher_backend=backend)
    chunk.routers[1].weight.data *= scale
    session = mrr.replay(chunk, random_trace(8))
    forward(chunk, session).backward()
    if raises:
        with pytest.raises(ReplayStateError, match=r"rank 0: [1-8] decisions gave a chosen expert the probability 0"):
            session.close()
    else:
        session.close()
