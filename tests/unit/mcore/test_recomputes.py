"""Every recompute uses what its own forward used, whatever the trainer does between the two.

Between forward and backward the routers get other weights, so a live recompute could not agree by luck. What was really
routed is read off Megatron's routers, by a number that travels through the model.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.distributed._composable import checkpoint as composable
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import megatron_router_replay as mrr
from tests.unit.mcore.tiny_chunk import (
    KINDS,
    ROWS,
    STARTS,
    Chunk,
    disturb,
    disturbed_backward,
    flips,
    forward,
    held,
    live_maps,
    non_reentrant,
    num_recomputed,
    plain,
    random_trace,
    reentrant,
    tokens,
    watched,
    wrong_replays,
)

AROUND = {"reentrant": reentrant, "non-reentrant": non_reentrant}


@pytest.fixture(params=AROUND)
def chunk(request):
    chunk = Chunk()
    chunk.around = AROUND[request.param]
    return chunk


# ---- kinds of checkpoints


def save_routing_on_cpu(chunk):
    """Hide the hooks of a checkpoint where routers ask; what else it saves still makes it recompute."""

    def saving(routing):
        def forward(*args, **kwargs):
            with save_on_cpu():
                return routing(*args, **kwargs)

        return forward

    for router in chunk.routers:
        router.routing = saving(router.routing)


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recompute_uses_what_its_forward_chose_also_after_the_session(kind, start):
    chunk = Chunk()
    chunk.around, num_recomputes = KINDS[kind]
    with watched(chunk) as seen:
        with start(chunk) as session:
            losses = [forward(chunk, session, number) for number in (0, 1)]
        disturbed_backward(chunk, *losses)
    assert (num_recomputed(seen), flips(seen)) == (2 * 3 * num_recomputes, 0)


@pytest.mark.parametrize("kind", ["composable", "non-reentrant", "by hooks"])
def test_hooks_that_hide_those_of_a_checkpoint_where_routers_ask(kind):
    chunk = Chunk()
    save_routing_on_cpu(chunk)
    if kind == "composable":
        for layer in chunk.layers:
            composable(layer.router)
            composable(layer)
    else:
        chunk.around = KINDS[kind][0]
    with watched(chunk) as seen, mrr.freeze_recompute(chunk):
        disturbed_backward(chunk, *(forward(chunk, number=number) for number in (0, 1)))
    assert num_recomputed(seen) >= 2 * 3
    assert flips(seen) == 0


# What replay and its options compute beside the choice.
SELECTED = {
    "freeze": mrr.freeze_recompute,
    "replay": lambda chunk: mrr.replay(chunk, random_trace(replay_mask=torch.arange(16) % 3 != 0)),
    "ask": lambda chunk: mrr.replay(chunk, random_trace(replay_mask=torch.arange(16) % 3 != 0), ask_every_layer=True),
}


@pytest.mark.parametrize("inner", [plain, reentrant])
@pytest.mark.parametrize("saved", ["mm", "topk gather", "where index_select sort scatter eq bitwise_and sum _to_copy"])
@pytest.mark.parametrize("start", SELECTED.values(), ids=SELECTED)
def test_selective_checkpoints_pair_the_operations_of_forward_and_recompute(start, saved, inner):
    """A reentrant forward inside has no gradients: a live top-k gathers nothing there, and neither may its recompute."""

    def policy(context, op, *args, **kwargs):
        is_saved = op.overloadpacket in [getattr(torch.ops.aten, name) for name in saved.split()]
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    chunk = Chunk()
    chunk.around = lambda layer, hidden: checkpoint(
        partial(inner, layer), hidden, use_reentrant=False, context_fn=contexts
    )
    with watched(chunk) as seen, start(chunk) as session:
        disturbed_backward(chunk, *(forward(chunk, session, number) for number in (0, 1)))
    assert (num_recomputed(seen), flips(seen)) == (6 if inner is plain else 12, 0)


# ---- orders of backwards, and graphs that micro-batches share


def test_two_forwards_of_the_model_inside_one_checkpoint(chunk):
    def preference_loss(scale):  # DPO: chosen and rejected in one checkpointed function
        return (forward_of(0) - forward_of(1)).mul(scale).square().mean()

    def forward_of(number):
        session.microbatch(ROWS + 8 * number)
        return chunk(tokens(), number)

    trace = random_trace()
    with watched(chunk) as seen, mrr.replay(chunk, trace) as session:
        loss = chunk.around(preference_loss, torch.ones(1, requires_grad=True))
        disturb(chunk)
        loss.backward(retain_graph=True)
        loss.backward()
    assert num_recomputed(seen) >= 4 * 3
    assert wrong_replays(seen, trace) == 0


def test_a_micro_batch_that_is_given_inside_the_checkpoint_is_given_once(chunk):
    trace, around, chunk.around = random_trace(), chunk.around, plain
    with watched(chunk) as seen, mrr.replay(chunk, trace) as session:

        def model(scale):
            session.microbatch(ROWS)
            return (chunk(tokens(), 0) * scale).sum()

        disturbed_backward(chunk, around(model, torch.ones(1, requires_grad=True)))
    assert (num_recomputed(seen), wrong_replays(seen, trace), session.report.microbatches) == (3, 0, 1)


@pytest.mark.parametrize("outer", AROUND)
def test_a_backward_inside_a_checkpointed_function_adds_nothing_to_its_tape(outer):
    inner = Chunk(num_layers=1)
    inner.around = non_reentrant

    def with_gradients_of_its_own(scale):
        with torch.enable_grad():
            torch.autograd.grad(inner(tokens(), 0).square().sum(), inner.embedding)  # recomputes inside the first run
        return (inner(tokens(seed=2), 1) * scale).square().sum()

    with watched(inner) as seen, mrr.freeze_recompute(inner):
        loss = AROUND[outer](with_gradients_of_its_own, torch.ones(1, requires_grad=True))
        disturbed_backward(inner, loss)
    assert len(seen[0, 1]) >= 4, "forward and recompute, in each run of the function"
    assert flips(seen) == 0


def test_saved_tensors_asked_for_outside_a_backward_are_a_recompute():
    chunk, trace = Chunk(num_layers=1), random_trace(24, 1)
    with watched(chunk) as seen, mrr.replay(chunk, trace) as session:

        def forward_of(ids, number):
            session.microbatch(ROWS + 8 * number)
            return chunk(ids, number)

        twice = lambda ids: (forward_of(ids, 0) + 2 * forward_of(ids, 1)).tanh()  # noqa: E731
        first = checkpoint(twice, tokens(), use_reentrant=False)
        disturb(chunk)
        assert first.grad_fn._saved_result is not None  # recomputes
        second = forward_of(tokens(), 2)
        (first.sum() + second.sum()).backward()
    assert num_recomputed(seen) >= 2
    assert wrong_replays(seen, trace) == 0


# ---- threads


def test_backwards_in_several_threads_at_once_are_exact_and_verified(chunk):
    trace = random_trace(32)
    with watched(chunk) as seen, mrr.replay(chunk, trace, verify=True) as session:
        losses = [forward(chunk, session, number) for number in range(4)]
        disturb(chunk)
        meet = threading.Barrier(4, timeout=120)
        for router in chunk.routers:  # all four have chosen before the first is compared
            routing = router.routing
            router.routing = lambda *args, routing=routing, **kwargs: (routing(*args, **kwargs), meet.wait())[0]
        with ThreadPoolExecutor(4) as threads:
            done = [threads.submit(loss.backward) for loss in losses]
        assert [each.exception() for each in done] == [None] * 4
    assert (num_recomputed(seen), wrong_replays(seen, trace)) == (12, 0)
    report = session.report
    assert (report.recomputes, report.decisions["verified"], report.decisions["wrong"]) == (12, 2 * 12 * 8, 0)


# ---- what is kept, and for how long


def test_routes_live_as_long_as_the_graph_and_only_for_checkpoints_with_gradients(chunk):
    with watched(chunk) as seen, mrr.freeze_recompute(chunk) as freeze:
        loss = forward(chunk, number=1)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                forward(chunk, number=2)
        assert held(chunk) == 3
        disturbed_backward(chunk, loss)
        dropped = forward(chunk, number=3)
        del loss
        assert held(chunk) == 3
        del dropped
        chunk.around = plain
        without_checkpoints = forward(chunk, number=4)
        assert (without_checkpoints.requires_grad, held(chunk)) == (True, 0)
    assert (freeze.report.forwards, freeze.report.microbatches) == (5 * 3, 5)
    assert flips(seen) == 0


# ---- ask_every_layer


def test_flips_are_the_decisions_that_a_live_recompute_would_have_changed(chunk):
    live = live_maps(chunk)
    with watched(chunk) as seen, mrr.freeze_recompute(chunk, ask_every_layer=True) as freeze:
        losses = [forward(chunk, number=number) for number in range(3)]
        assert freeze.report.flips_of_layer == {1: 0, 2: 0, 3: 0}
        disturb(chunk)
        torch.stack(losses).sum().backward()
    assert flips(seen) == 0
    # The three forwards are of the same tokens, so what was live in any recompute of a layer belongs to any of them.
    assert [len(maps) for maps in live.values()] == [6] * 3
    expected = {
        layer: sum(int((later != maps[0]).any(dim=1).sum()) for later in maps[3:]) for layer, maps in live.items()
    }
    assert min(expected.values()) > 0
    report = freeze.report
    assert report.flips_of_layer == expected
    assert (report.recompute_flips, report.decisions["recomputed"]) == (sum(expected.values()), 3 * 3 * 8)


def test_without_a_change_nothing_flips_whatever_the_order_of_the_columns(chunk):
    # Since Megatron-Core 0.18 a forward without gradients leaves the experts of a row unsorted.
    of_five = Chunk(moe_router_topk=5)
    of_five.around = chunk.around
    with mrr.freeze_recompute(of_five, ask_every_layer=True) as freeze:
        forward(of_five).backward()
    assert (freeze.report.recompute_flips, freeze.report.decisions["recomputed"]) == (0, 24)


def test_checkpoints_are_live_again_after_a_session(chunk):
    """A router that had a session is on the tape of a live forward: its recompute is told apart from one without a tape."""
    with mrr.replay(chunk, random_trace()) as session:
        forward(chunk, session).backward()
    chunk.zero_grad()
    forward(chunk).backward()
    other = Chunk()
    other.around = chunk.around
    forward(other).backward()
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(chunk.parameters(), other.parameters()))
