"""Every recompute uses what its own forward used, whatever the trainer does between the two.

Between forward and backward the routers get other weights, so a live recompute could not agree by luck. What was really
routed is read off Megatron's routers, by a number that travels through the model.
"""

import contextlib
import gc
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from tests.unit.mcore.tiny_chunk import (
    Chunk,
    disturb,
    flips,
    non_reentrant,
    num_recomputed,
    plain,
    random_trace,
    reentrant,
    tokens,
    watched,
    wrong_replays,
)

KINDS = {"reentrant": reentrant, "non-reentrant": non_reentrant}
NUM_LAYERS = 3
NUM_TOKENS = 8


def trace(num_microbatches=4, **options):
    return random_trace(num_microbatches * NUM_TOKENS, **options)


def rows(number):
    return torch.arange(number * NUM_TOKENS, (number + 1) * NUM_TOKENS).view(2, 4)


def run(chunk, number, session=None):
    """One forward, numbered."""
    if session is not None:
        session.microbatch(rows(number))
    return chunk(tokens(), number)


@pytest.fixture(params=KINDS)
def chunk(request):
    chunk = Chunk()
    chunk.around = KINDS[request.param]
    return chunk


def orders(losses):
    yield "in order", lambda: [loss.backward() for loss in losses]
    yield "newest first", lambda: [loss.backward() for loss in reversed(losses)]
    yield "one backward over all", lambda: torch.stack(losses).sum().backward()
    yield (
        "twice through one graph",
        lambda: [
            losses[0].backward(retain_graph=True),
            *(loss.backward() for loss in losses),
        ],
    )


@pytest.mark.parametrize("order", ["in order", "newest first", "one backward over all", "twice through one graph"])
def test_any_order_of_backwards(chunk, order):
    the_trace = trace()
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        losses = [run(chunk, number, session).square().sum() for number in range(3)]
        disturb(chunk)
        dict(orders(losses))[order]()
    assert num_recomputed(seen) == NUM_LAYERS * (4 if order == "twice through one graph" else 3)
    assert wrong_replays(seen, the_trace) == 0


def test_a_hooked_hidden_state_that_joins_two_micro_batches(chunk):
    hidden = []
    handle = chunk.layers[1].register_forward_hook(lambda module, args, output: hidden.append(output))
    with watched(chunk) as seen, mrr.freeze_recompute(chunk):
        first = run(chunk, 0).square().sum()
        run(chunk, 1)
        handle.remove()
        disturb(chunk)
        (first + hidden[1].square().sum()).backward()  # of the second micro-batch a hidden state only, not its output
    assert num_recomputed(seen) == NUM_LAYERS + 2
    assert flips(seen) == 0


@pytest.mark.parametrize("kind", ["record", "replay"])
def test_one_backward_over_a_frozen_micro_batch_and_one_of_a_session_inside(chunk, kind):
    with watched(chunk) as seen, mrr.freeze_recompute(chunk):
        outer = run(chunk, 0).square().sum()
        with mrr.record(chunk) if kind == "record" else mrr.replay(chunk, trace()) as session:
            inner = run(chunk, 1, session).square().sum()
            disturb(chunk)
            (outer + inner).backward()
    assert num_recomputed(seen) == 2 * NUM_LAYERS
    assert flips(seen) == 0


@pytest.mark.parametrize("outer", KINDS)
@pytest.mark.parametrize("inner", [None, *KINDS])
def test_a_checkpoint_around_model_and_loss_beside_a_plain_micro_batch(outer, inner):
    chunk = Chunk()
    chunk.around = KINDS[inner] if inner else plain
    the_trace = trace()

    def chunk_and_loss(scale):
        return (chunk(tokens(), 0) * scale).square().mean()

    scale = torch.ones(1, requires_grad=True)
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        session.microbatch(rows(0))
        inside = KINDS[outer](chunk_and_loss, scale)
        beside = run(chunk, 1, session).square().mean()
        third = run(chunk, 2, session).square().mean()
        disturb(chunk)
        (inside + beside).backward()
        third.backward()
    assert wrong_replays(seen, the_trace) == 0
    # The outer recompute calls every router; with checkpoints inside it, the inner recomputes call them once more.
    inner_calls = 0 if inner is None else NUM_LAYERS
    assert sum(len(maps) - 1 for (number, _), maps in seen.items() if number == 0) in (
        NUM_LAYERS,
        NUM_LAYERS + inner_calls,
    )
    assert num_recomputed(seen) > 0


def test_two_forwards_of_the_model_inside_one_checkpoint(chunk):
    the_trace = trace()

    def preference_loss(scale):  # DPO: chosen and rejected in one checkpointed function
        return (chunk(tokens(), 0) - chunk(tokens(), 1)).mul(scale).square().mean()

    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        session.microbatch(rows(0))
        session.microbatch(rows(1))
        loss = chunk.around(preference_loss, torch.ones(1, requires_grad=True))
        disturb(chunk)
        loss.backward(retain_graph=True)
        loss.backward()
    assert num_recomputed(seen) >= 4 * NUM_LAYERS
    assert wrong_replays(seen, the_trace) == 0


@pytest.mark.parametrize(
    "wrap", [lambda output: output, lambda output: output.transpose(0, 1), lambda output: output[:, :1]]
)
def test_an_output_changed_in_place(chunk, wrap):
    with watched(chunk) as seen, mrr.record(chunk) as recording:
        logits = wrap(run(chunk, 0, recording))
        logits.div_(0.7)
        disturb(chunk)
        logits.square().sum().backward()
    assert num_recomputed(seen) == NUM_LAYERS
    assert flips(seen) == 0


def test_a_direct_forward_of_the_model_is_exact_and_keeps_nothing(chunk):
    freeze = mrr.freeze_recompute(chunk)
    with watched(chunk) as seen:
        for number in range(5):
            loss = chunk.forward(tokens(), number).square().sum()
            disturb(chunk, seed=number)
            loss.backward()
            del loss
            assert held(freeze) == 0
    assert num_recomputed(seen) == 5 * NUM_LAYERS
    assert flips(seen) == 0
    the_trace = trace()
    freeze.close()
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        losses = []
        for number in range(3):
            session.microbatch(rows(number))
            losses.append(chunk.forward(tokens(), number).square().sum())
        disturb(chunk)
        torch.stack(losses).sum().backward()
    assert wrong_replays(seen, the_trace) == 0


def held(session):
    gc.collect()
    return sum(len(router.replay_backward_list) for router in session._routers())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluations_leave_nothing_behind(chunk, mode):
    with watched(chunk) as seen, mrr.freeze_recompute(chunk) as freeze:
        with mode():
            run(chunk, 0)
        assert held(freeze) == 0
        loss = run(chunk, 1).square().sum()
        with mode():
            run(chunk, 2)
        assert held(freeze) == NUM_LAYERS
        disturb(chunk)
        loss.backward()
        del loss
        assert held(freeze) == 0
    assert flips(seen) == 0


def test_a_graph_that_is_dropped_takes_its_routes_along(chunk):
    with mrr.freeze_recompute(chunk) as freeze:
        output = run(chunk, 0)
        assert held(freeze) == NUM_LAYERS
        del output
        assert held(freeze) == 0


def test_without_checkpoints_nothing_is_kept_at_all():
    chunk = Chunk()
    with mrr.freeze_recompute(chunk) as freeze:
        output = run(chunk, 0)
        assert held(freeze) == 0
        output.sum().backward()
    assert freeze.report.forwards == NUM_LAYERS
    assert freeze.report.microbatches == 1


@pytest.mark.parametrize("make", ["freeze", "record", "replay"])
@pytest.mark.parametrize("by", ["close", "exception"])
def test_a_backward_after_its_session_was_left_is_exact(chunk, make, by):
    the_trace = trace()
    own = [router.router_replay for router in chunk.routers]
    with (
        watched(chunk) as seen,
        contextlib.suppress(ArithmeticError),
        {
            "freeze": lambda: mrr.freeze_recompute(chunk),
            "record": lambda: mrr.record(chunk),
            "replay": lambda: mrr.replay(chunk, the_trace),
        }[make]() as session,
    ):
        first = run(chunk, 0, None if make == "freeze" else session).square().sum()
        second = run(chunk, 1, None if make == "freeze" else session).square().sum()
        if by == "exception":
            raise ArithmeticError("left")
    disturb(chunk)
    with watched(chunk) as after:
        live = chunk(tokens(), 7)  # a forward after the session is live
        second.backward()
        live.sum().backward()
    with mrr.freeze_recompute(chunk), watched(chunk) as later:
        first.backward()  # under another session, too
    for number, late in ((0, later), (1, after)):
        for layer in (1, 2, 3):
            (recomputed,) = late[number, layer]
            assert torch.equal(recomputed, seen[number, layer][0])
    del first, second, live
    gc.collect()
    assert [router.router_replay for router in chunk.routers] == own


@pytest.mark.parametrize("then", ["retry", "skip"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_forward_that_failed_and_was_caught_leaves_the_others_right(chunk, layer, then):
    the_trace = trace()
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        losses = []
        for number in range(4):
            if number == 1:
                chunk.fail_at = layer
                with pytest.raises(ArithmeticError):
                    run(chunk, number, session)
                if then == "skip":
                    continue
            losses.append(run(chunk, number, session).square().sum())
        disturb(chunk)
        torch.stack(losses).sum().backward()
    assert wrong_replays(seen, the_trace) == 0
    assert session.report.microbatches == (4 if then == "retry" else 3)


def test_a_failure_with_others_queued_ahead_cannot_be_assigned_and_raises(chunk):
    with (
        pytest.raises(ReplayStateError, match="failed while 2 others were queued"),
        mrr.replay(chunk, trace()) as session,
    ):
        for number in range(3):
            session.microbatch(rows(number))
        chunk.fail_at = 1
        with contextlib.suppress(ArithmeticError):
            chunk(tokens(), 0)
        chunk(tokens(), 0)


def test_a_direct_forward_that_failed_raises_with_the_next(chunk):
    session = mrr.replay(chunk, trace())
    session.microbatch(rows(0))
    chunk.fail_at = 1
    with contextlib.suppress(ArithmeticError):
        chunk.forward(tokens(), 0)
    session.microbatch(rows(0))
    with pytest.raises(ReplayStateError, match="no forward of its layer 2, layer 3 came"):
        chunk.forward(tokens(), 0)


def test_two_threads_in_backward_at_once(chunk):
    the_trace = trace()
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        losses = [run(chunk, number, session).square().sum() for number in range(4)]
        disturb(chunk)
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert num_recomputed(seen) == 4 * NUM_LAYERS
    assert wrong_replays(seen, the_trace) == 0
    assert session.report.recomputes == 4 * NUM_LAYERS


def test_a_backward_on_another_thread_with_nested_checkpoints():
    chunk = Chunk()
    chunk.around = reentrant
    the_trace = trace()
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        losses = []
        for number in range(3):
            session.microbatch(rows(number))
            inputs = torch.ones(1, requires_grad=True)
            losses.append(reentrant(lambda scale, n: (chunk(tokens(), n) * scale).square().sum(), inputs, number))
        disturb(chunk)
        thread = threading.Thread(target=torch.stack(losses).sum().backward)
        thread.start()
        thread.join()
    assert num_recomputed(seen) == 3 * 2 * NUM_LAYERS
    assert wrong_replays(seen, the_trace) == 0


def test_saved_tensors_asked_for_outside_a_backward_are_a_recompute_not_a_forward():
    chunk = Chunk(num_layers=1)
    the_trace = random_trace(32, 1)
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        session.microbatch(rows(0))
        session.microbatch(rows(1))
        first = checkpoint(lambda hidden: chunk(hidden, 0).tanh(), tokens(), use_reentrant=False)
        disturb(chunk)
        assert first.grad_fn._saved_result is not None  # recomputes
        second = run_queued(chunk, 1)
        (first.sum() + second.sum()).backward()
    assert wrong_replays(seen, the_trace) == 0


def test_saved_tensors_asked_for_outside_a_backward_do_not_tell_two_calls_of_a_router_apart():
    chunk = Chunk(num_layers=1)
    with mrr.freeze_recompute(chunk):
        out = checkpoint(lambda hidden: (chunk(hidden, 0) + chunk(hidden, 1)).tanh(), tokens(), use_reentrant=False)
        with pytest.raises(ReplayStateError, match=r"outside a backward.*called the router 2 times.*Run the backward"):
            _ = out.grad_fn._saved_result


def test_both_calls_of_a_router_in_one_checkpoint_use_their_own_again_in_every_backward():
    chunk = Chunk(num_layers=1)
    with watched(chunk) as seen, mrr.freeze_recompute(chunk):
        leaf = torch.ones(1, requires_grad=True)
        out = reentrant(lambda scale: (chunk(tokens(), 0) + 2 * chunk(tokens(seed=2), 1)) * scale, leaf)
        disturb(chunk)
        out.square().sum().backward()
    assert num_recomputed(seen) == 2
    assert flips(seen) == 0


def test_a_recompute_that_calls_a_router_more_often_than_its_forward_raises():
    chunk = Chunk(num_layers=1)
    runs = []

    def once_then_twice(scale):
        runs.append(None)
        return sum(chunk(tokens(), number) for number in range(len(runs))) * scale

    with mrr.freeze_recompute(chunk):
        out = reentrant(once_then_twice, torch.ones(1, requires_grad=True))
        with pytest.raises(ReplayStateError, match=r"calls the router 2 times, its forward called it 1 times"):
            out.sum().backward()


def run_queued(chunk, number):
    return chunk(tokens(), number)


def test_recompute_switched_on_and_off_between_micro_batches():
    chunk = Chunk()
    the_trace = trace()
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        losses = []
        for number, around in enumerate((plain, reentrant, non_reentrant, plain)):
            chunk.around = around
            losses.append(run(chunk, number, session).square().sum())
        disturb(chunk)
        torch.stack(losses).sum().backward()
    assert num_recomputed(seen) == 2 * NUM_LAYERS
    assert wrong_replays(seen, the_trace) == 0


def test_a_recompute_of_a_forward_before_the_session_raises(chunk):
    loss = run(chunk, 0).square().sum()
    with pytest.raises(ReplayStateError, match="saw no forward of it"), mrr.freeze_recompute(chunk):
        loss.backward()


def test_a_kind_of_checkpoint_that_is_not_known_raises():
    chunk = Chunk(num_layers=1)
    kept = []

    def around(layer, hidden):
        with torch.no_grad():
            output = layer(hidden)
        output = output + hidden * 0
        kept.append(hidden.detach())
        output.register_hook(lambda grad: layer(kept[0]) * 0)
        return output

    chunk.around = around
    with pytest.raises(ReplayStateError, match="saw no forward of it"), mrr.freeze_recompute(chunk):
        chunk(tokens(), 0).sum().backward()


def test_gradients_under_checkpoints_are_those_without(chunk):
    the_trace = trace(replay_mask=torch.arange(32) % 3 != 0)
    gradients = []
    for around in (plain, chunk.around):
        fresh = Chunk()
        fresh.around = around
        with mrr.replay(fresh, the_trace) as session:
            losses = [run(fresh, number, session).square().sum() for number in range(3)]
            torch.stack(losses).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in fresh.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    assert float(gradients[0]["layers.0.router.weight"].abs().sum()) > 0
