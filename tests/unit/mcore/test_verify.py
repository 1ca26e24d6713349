"""verify=True finds what is planted: maps that leave a router with other experts than the session chose."""

import pytest
import torch
from megatron.core.transformer.moe import router as router_module

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError, UnsupportedRouterError
from megatron_router_replay.mcore.core.call import current
from megatron_router_replay.mcore.core.hooks import sources_of
from tests.unit.mcore.tiny_chunk import Chunk, forward, non_reentrant, random_trace, reentrant, tokens


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Take a planted routing function away again, and with it the session's hook around it."""
    monkeypatch.setattr(
        router_module, "topk_routing_with_score_function", router_module.topk_routing_with_score_function
    )


def verified(chunk):
    return mrr.replay(chunk, random_trace(8), verify=True)


def changed(routing_map, kind):
    """Row 5 names another expert in place of its first, one more, or one less."""
    routing_map = routing_map.clone()
    first, other = routing_map[5].nonzero()[0], (~routing_map[5]).nonzero()[0]
    routing_map[5, first] = kind == "added"
    routing_map[5, other] = kind != "dropped"
    return routing_map


def plant(chunk, kind="exchanged", *, in_recompute=False):
    """Change the map that the second layer's router makes, as a routing function that was never read may."""
    topk = router_module.topk_routing_with_score_function

    def other(*args, **kwargs):
        probs, routing_map = topk(*args, **kwargs)
        is_planted = current.call is not None and current.call.router is chunk.routers[1]
        if is_planted and (torch._C._current_graph_task_id() != -1) == in_recompute:
            routing_map = changed(routing_map, kind)
        return probs, routing_map

    router_module.topk_routing_with_score_function = other


@pytest.mark.parametrize("kind", ["exchanged", "added", "dropped"])
def test_a_map_that_leaves_its_router_changed_is_counted_and_raises(kind):
    chunk = Chunk()
    plant(chunk, kind)
    session = verified(chunk)
    forward(chunk, session).backward()
    with pytest.raises(
        ReplayStateError, match="rank 0: 1 of 24 decisions left their router with other experts than were"
    ):
        session.close()
    assert (session.report.decisions["wrong"], session.report.decisions["verified"]) == (1, 24)


@pytest.mark.parametrize("around", [reentrant, non_reentrant])
@pytest.mark.parametrize("in_recompute", [False, True])
def test_recomputes_are_verified_as_their_forwards_are(around, in_recompute):
    chunk = Chunk()
    chunk.around = around
    plant(chunk, in_recompute=in_recompute)
    session = verified(chunk)
    forward(chunk, session).backward()
    with pytest.raises(ReplayStateError, match="rank 0: 1 of 48 decisions left their router"):
        session.close()


def test_a_layer_without_a_dispatcher_is_verified_where_its_router_is_left():
    chunk = Chunk()
    del chunk.layers[1].token_dispatcher
    router = chunk.routers[1]
    chunk.layers[1].forward = lambda hidden: hidden + router(hidden)[0].sum()
    with verified(chunk) as session:
        forward(chunk, session)
    assert (session.report.decisions["verified"], session.report.decisions["wrong"]) == (24, 0)


def test_a_capacity_factor_drops_tokens_so_maps_cannot_be_verified():
    chunk = Chunk(moe_expert_capacity_factor=1.0, moe_token_drop_policy="position")
    with pytest.raises(
        UnsupportedRouterError, match=r"cannot verify .*layer 1.*: moe_expert_capacity_factor=1\.0 drops"
    ):
        verified(chunk)
    assert not any(router._forward_hooks or sources_of(router) for router in chunk.routers)
    mrr.replay(chunk, random_trace(8)).close(check=False)  # without verify=True it may run


def test_a_router_that_is_refused_without_verify_is_refused_with_it():
    with pytest.raises(UnsupportedRouterError, match="moe_router_force_load_balancing=True replaces the logits"):
        verified(Chunk(moe_router_force_load_balancing=True))


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


def test_a_paused_forward_without_a_checkpoint_is_verified():
    chunk = Chunk()
    plant(chunk)
    session = verified(chunk)
    forward(chunk, session).backward()
    with session.paused(), torch.no_grad():
        chunk(tokens())
    with pytest.raises(ReplayStateError, match="2 of 48 decisions left their router"):
        session.close()
