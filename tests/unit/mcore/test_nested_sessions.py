"""A record or replay inside a freeze, left before its backward: it stays for its recomputes, and the freeze goes on."""

import types

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from tests.unit.mcore.tiny_chunk import (
    Chunk,
    as_map,
    disturb,
    flips,
    non_reentrant,
    num_recomputed,
    random_trace,
    reentrant,
    tokens,
    watched,
)

ROWS = torch.arange(8).view(2, 4)
KINDS = {"reentrant": reentrant, "non-reentrant": non_reentrant}


@pytest.fixture(params=KINDS)
def chunk(request):
    chunk = Chunk()
    chunk.around = KINDS[request.param]
    return chunk


def replayed_and_left(chunk, number):
    """The loss of a replayed forward whose session was left before its backward."""
    with mrr.replay(chunk, random_trace(8, seed=number)) as session:
        session.microbatch(ROWS)
        return chunk(tokens(), number).square().sum()


def wrong(seen, number):
    at = ROWS.t().reshape(-1)
    of_number = {layer: maps for (forward, layer), maps in seen.items() if forward == number}
    assert len(of_number) == 3
    expected = {layer: as_map(random_trace(8, seed=number).layer(layer)[at]) for layer in of_number}
    return sum(not torch.equal(one, expected[layer]) for layer, maps in of_number.items() for one in maps)


def test_forwards_and_recomputes_of_the_freeze_go_on_behind_a_session_that_was_left(chunk):
    with watched(chunk) as seen, mrr.freeze_recompute(chunk, verify=True) as freeze:
        losses = [chunk(tokens(), 0).square().sum()]
        losses.append(replayed_and_left(chunk, 1))
        losses.append(chunk(tokens(), 2).square().sum())
        losses.append(replayed_and_left(chunk, 3))
        losses.append(chunk(tokens(), 4).square().sum())
        disturb(chunk)
        torch.stack(losses).sum().backward()
    assert (num_recomputed(seen), flips(seen)) == (5 * 3, 0)
    assert wrong(seen, 1) == wrong(seen, 3) == 0
    assert freeze.report.forwards == 3 * 3
    assert freeze.report.recomputes == 3 * 3  # those of the freeze's own forwards


def test_both_are_exact_after_both_were_left_in_either_order(chunk):
    own = [router.router_replay for router in chunk.routers]
    for inner_first in (True, False):
        with watched(chunk) as seen:
            freeze = mrr.freeze_recompute(chunk)
            frozen = chunk(tokens(), 0).square().sum()
            session = mrr.replay(chunk, random_trace(8, seed=1))
            session.microbatch(ROWS)
            replayed = chunk(tokens(), 1).square().sum()
            for left in (session, freeze) if inner_first else (freeze, session):
                left.close()
            disturb(chunk)
            live = chunk(tokens(), 2)
            (frozen + replayed + live.detach().sum()).backward()
        assert (num_recomputed(seen), flips(seen), wrong(seen, 1)) == (2 * 3, 0, 0)
        del frozen, replayed, live
        assert [router.router_replay for router in chunk.routers] == own


def test_a_router_that_stops_asking_behind_a_session_that_was_left_is_noticed(chunk):
    with pytest.raises(ReplayStateError, match="chose experts without asking"), mrr.freeze_recompute(chunk):
        _kept = replayed_and_left(chunk, 1)
        chunk.routers[1].routing = lambda logits, padding_mask=None: (logits.flatten(0, 1), logits.flatten(0, 1) > 0)
        chunk(tokens(), 2)


def test_another_object_on_a_router_behind_a_session_that_was_left_is_noticed(chunk):
    stranger = types.SimpleNamespace(get_replay_topk=lambda scores, topk, *rest: rest[-1](scores, topk))
    with (
        pytest.raises(ReplayStateError, match="replaced during the session by SimpleNamespace"),
        mrr.freeze_recompute(chunk),
    ):
        _kept = replayed_and_left(chunk, 1)
        chunk.routers[1].router_replay = stranger
        chunk(tokens(), 2)


def test_a_loss_that_is_kept_behind_its_backward_keeps_no_session_in_place():
    chunk = Chunk()
    chunk.around = reentrant
    own = [router.router_replay for router in chunk.routers]
    loss = replayed_and_left(chunk, 1)
    assert [router.router_replay for router in chunk.routers] != own
    loss.backward()
    chunk(tokens(), 2)  # the nodes are there, but what they saved is not: no recompute can come
    assert [router.router_replay for router in chunk.routers] == own
    assert loss.grad_fn is not None
