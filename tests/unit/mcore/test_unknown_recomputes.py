"""A recompute without a tape of its forward raises, in a session and after it."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore import RouterReplay, RouterReplayAction, Tape
from megatron_router_replay.mcore.core.tape import checkpoint_state
from tests.unit.mcore.tiny_chunk import (
    ROWS,
    STARTS,
    Chunk,
    disturb,
    disturbed_backward,
    flips,
    forward,
    non_reentrant,
    num_recomputed,
    plain,
    random_trace,
    recompute,
    reentrant,
    tokens,
    unknown,
    watched,
    with_gradients,
    wrong_replays,
)

UNKNOWN = "no tape of its forward is known"


def by_hook(layer, hidden):
    """A hook on the output's gradient recomputes, as in Megatron-Core's CheckpointWithoutOutput."""
    with torch.no_grad():
        output = layer(hidden)
    output = output + hidden * 0
    kept = hidden.detach()
    if output.requires_grad:
        output.register_hook(lambda grad: grad + 0 * layer(kept))
    return output


KINDS = {
    "function": unknown,
    "hook": by_hook,
    "reentrant inside": lambda layer, hidden: unknown(lambda h: reentrant(layer, h), hidden),
    "non-reentrant inside": lambda layer, hidden: unknown(with_gradients(lambda h: non_reentrant(layer, h)), hidden),
}


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("outer", [None, reentrant, non_reentrant])
@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_kind_of_checkpoint_raises_in_its_backward(kind, outer, left):
    """Also around two forwards, and inside a checkpoint that is known."""
    chunk = Chunk()
    chunk.around = KINDS[kind]

    def two_forwards(scale):
        return (forward_of(0) - forward_of(1)).mul(scale).square().mean()

    given = set()

    def forward_of(number):
        if number not in given:  # a recompute may come after the session
            session.microbatch(ROWS + 8 * number)
        given.add(number)
        return chunk(tokens(), number)

    scale = torch.ones(1, requires_grad=True)
    session = mrr.replay(chunk, random_trace())
    with watched(chunk) as seen:
        loss = two_forwards(scale) if outer is None else outer(two_forwards, scale)
        disturb(chunk)
        if left:
            session.close()
        with pytest.raises(ReplayStateError, match=UNKNOWN):
            loss.backward()
    mrr.close_sessions(chunk)
    assert flips(seen) == 0


def test_an_unknown_recompute_inside_a_recompute_is_not_the_next_call_of_its_tape():
    """A backward that runs only where gradients are on: in the recompute of a reentrant checkpoint."""
    chunk = Chunk(num_layers=1)
    chunk.around = by_hook

    def with_gradients_of_its_own(hidden):
        output = by_hook(chunk.layers[0], hidden)
        if output.requires_grad:
            torch.autograd.grad(output.square().sum(), hidden, retain_graph=True)
        return chunk.layers[0](output)

    hidden = torch.randn(4, 2, 8)
    hidden[..., -1] = 0
    with watched(chunk) as seen, mrr.freeze_recompute(chunk):
        loss = reentrant(with_gradients_of_its_own, hidden.requires_grad_()).square().sum()
        disturb(chunk)
        with pytest.raises(ReplayStateError, match=UNKNOWN):
            loss.backward()
    assert [len(maps) for maps in seen.values()] == [3], "two of the forward, one of the recompute"


class InAnotherOrder(torch.autograd.Function):
    """Two calls of a function, recomputed in the other order; each has a tape."""

    @staticmethod
    def forward(ctx, function, *halves):
        ctx.tapes, ctx.function = (Tape(), Tape()), function
        ctx.save_for_backward(*halves)
        outputs = []
        for tape, half in zip(ctx.tapes, halves):
            with tape.forward():
                outputs.append(function(half))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        gradients = []
        for tape, half, grad in reversed(list(zip(ctx.tapes, ctx.saved_tensors, grads))):
            with tape.recompute():
                gradients.append(recompute(ctx.function, half, grad))
        return None, *reversed(gradients)


def test_parts_that_are_recomputed_in_another_order_are_exact_if_each_has_a_tape():
    chunk = Chunk(num_layers=1)
    chunk.around = lambda layer, hidden: torch.cat(InAnotherOrder.apply(layer, *hidden.split(2)))
    with watched(chunk) as seen, mrr.freeze_recompute(chunk):
        disturbed_backward(chunk, forward(chunk))
    first, second, *again = seen[0, 1]
    assert torch.equal(again[0], second)
    assert torch.equal(again[1], first)


class BackwardsUnderOneTape(InAnotherOrder):
    """Its two calls share a tape, which would give each the experts of the other."""

    @staticmethod
    def forward(ctx, function, *halves):
        with Tape().forward():
            return tuple(map(function, halves))


@pytest.mark.parametrize("around", [plain, reentrant])
def test_one_tape_takes_one_call_of_each_router(around):
    chunk = Chunk(num_layers=1)

    def halves(hidden):
        return torch.cat(BackwardsUnderOneTape.apply(lambda half: around(chunk.layers[0], half), *hidden.split(2)))

    chunk.around = lambda layer, hidden: halves(hidden)
    with mrr.freeze_recompute(chunk), pytest.raises(ReplayStateError, match=r"is called twice under one mcore\.Tape"):
        forward(chunk)


def test_one_tape_for_several_first_runs_is_ambiguous():
    chunk, tape = Chunk(num_layers=2), Tape()
    hidden = torch.randn(4, 2, 8)
    with mrr.freeze_recompute(chunk):
        for layer in chunk.layers:
            with tape.forward():
                layer(hidden)
        with pytest.raises(ReplayStateError, match="ran its function several times in one forward"), tape.recompute():
            chunk.layers[0](hidden)


def in_a_thread_of_its_own(function):
    """Return a function that works in another thread, as one with a timeout or a pool of its own does."""

    def run(*args):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *args).result()

    return run


@contextmanager
def driven(chunk):
    for router in chunk.routers:
        router.router_replay = RouterReplay()
        router.router_replay.set_target_indices(random_trace(8).layer(1))
        router.router_replay.router_replay_action = RouterReplayAction.REPLAY_FORWARD
    yield


@pytest.mark.parametrize("start", [STARTS["replay"], driven])
@pytest.mark.parametrize("around", [reentrant, non_reentrant])
def test_a_checkpointed_function_that_works_in_a_thread_of_its_own_is_refused(around, start):
    chunk = Chunk()
    chunk.around = lambda layer, hidden: around(in_a_thread_of_its_own(layer), hidden)
    refused = pytest.raises(ReplayStateError, match="Call the model in the thread that runs the checkpointed function")
    with refused, start(chunk) as session:
        forward(chunk, session)


@pytest.mark.parametrize("have_their_own", [False, True])
@pytest.mark.parametrize("around", [reentrant, non_reentrant])
def test_routers_that_change_places_between_forward_and_backward_raise(around, have_their_own):
    chunk = Chunk()
    one, other = chunk.layers[:2]
    for layer in (one, other) if have_their_own else ():
        layer.router.router_replay = RouterReplay()
    hidden = torch.randn(4, 2, 8, requires_grad=True)
    hidden.data[..., -1] = 0
    with mrr.freeze_recompute(chunk):
        loss = around(lambda h: other(one(h)), hidden).sum()
        one.router, other.router = other.router, one.router
        with pytest.raises(
            ReplayStateError, match="recomputed as call 1 of its checkpoint, where the forward called layer"
        ):
            loss.backward()


def test_a_recompute_that_calls_a_router_more_often_than_its_forward_raises():
    chunk, runs = Chunk(num_layers=1), []

    def once_then_twice(scale):
        runs.append(None)
        return sum(chunk(tokens(), number) for number in range(len(runs))) * scale

    more = pytest.raises(
        ReplayStateError, match="recomputed as call 2 of its checkpoint, where the forward called none"
    )
    with mrr.freeze_recompute(chunk), more:
        reentrant(once_then_twice, torch.ones(1, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("around", [reentrant, non_reentrant])
def test_a_recompute_that_calls_fewer_routers_than_its_forward_raises(around):
    chunk, runs = Chunk(num_layers=2), []

    def both_then_one(hidden):
        runs.append(None)
        layers = chunk.layers if len(runs) == 1 else chunk.layers[:1]
        for layer in layers:
            hidden = layer(hidden)
        return hidden

    with torch.utils.checkpoint.set_checkpoint_early_stop(False), mrr.freeze_recompute(chunk):
        out = around(both_then_one, torch.randn(4, 2, 8, requires_grad=True))
        with pytest.raises(ReplayStateError, match="ended after 1 calls of routers, but its forward made 2"):
            out.sum().backward()


def test_a_recompute_of_a_forward_before_the_session_raises():
    chunk = Chunk()
    chunk.around = reentrant
    loss = forward(chunk)
    unheld = r"where the forward called none: .* must have run in a session"
    with pytest.raises(ReplayStateError, match=unheld), mrr.freeze_recompute(chunk):
        loss.backward()


# ---- a model that a session has left


def gradients_of_a_step(chunk):
    """Return the gradients of a step without a session, in which the routers change before the recompute."""
    disturbed_backward(chunk, forward(chunk))
    return [parameter.grad.clone() for parameter in chunk.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("kind", ["function", "hook"])
def test_a_step_after_a_session_with_ones_own_checkpoint_raises_until_uninstall(kind, start):
    chunk, never_held = Chunk(), Chunk()
    chunk.around = never_held.around = KINDS[kind]
    with start(chunk) as session, torch.no_grad():  # the old policy's forward, whose backward never comes
        forward(chunk, session)
    with pytest.raises(ReplayStateError, match=UNKNOWN):
        forward(chunk).backward()
    chunk.zero_grad()
    mrr.uninstall()
    mrr.install()
    assert all(map(torch.equal, gradients_of_a_step(chunk), gradients_of_a_step(never_held)))


@pytest.mark.parametrize("around", [reentrant, non_reentrant])
def test_a_recompute_after_uninstall_has_the_experts_of_its_forward(around):
    chunk, trace = Chunk(), random_trace()
    chunk.around = around
    with watched(chunk) as seen:
        with mrr.replay(chunk, trace, min_agreement=0) as session:
            loss = forward(chunk, session)
        mrr.uninstall()
        disturbed_backward(chunk, loss)
    assert (num_recomputed(seen), wrong_replays(seen, trace)) == (3, 0)
    disturb(chunk, seed=3)
    with watched(chunk) as seen:  # a step of its own is live
        disturbed_backward(chunk, forward(chunk))
    assert flips(seen) > 0


def test_uninstall_leaves_the_routers_of_an_open_session_registered():
    chunk = Chunk()
    chunk.around = unknown
    with mrr.freeze_recompute(chunk):
        mrr.uninstall()
        with pytest.raises(ReplayStateError, match=UNKNOWN):
            forward(chunk).backward()


def test_a_forward_that_failed_before_its_dispatcher_leaves_nothing_for_steps_without_a_session():
    chunk = Chunk()

    def fail(*_):
        raise ArithmeticError("between the router and its dispatcher")

    handle = chunk.routers[1].register_forward_hook(fail)
    with pytest.raises(ArithmeticError), mrr.freeze_recompute(chunk):
        forward(chunk)
    handle.remove()
    mrr.uninstall()
    mrr.install()
    assert all(map(torch.equal, gradients_of_a_step(chunk), gradients_of_a_step(Chunk())))


@pytest.mark.parametrize(("task", "repeats"), [(-1, False), (0, True), (1, True)])
def test_the_first_backward_of_a_process_is_a_backward(monkeypatch, task, repeats):
    """torch numbers the backwards of a process from 0; only the first of all would run live."""
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: task)
    assert checkpoint_state() == (None, repeats, False)
