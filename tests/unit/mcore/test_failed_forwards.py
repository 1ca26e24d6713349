"""Forwards that fail, stop halfway or call a router twice: later ones keep their own routes, or the session raises."""

import contextlib

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError
from tests.unit.mcore.tiny_chunk import (
    EXPERTS,
    Chunk,
    disturb,
    non_reentrant,
    random_trace,
    reentrant,
    tokens,
    watched,
    wrong_replays,
)

# torch only warns of a hook that raises behind a forward that failed
pytestmark = pytest.mark.filterwarnings("error:module forward hook with")
ROWS = torch.arange(8).view(2, 4)
trace = random_trace


def test_a_forward_that_fails_behind_the_last_router_with_others_queued_cannot_be_assigned_and_raises():
    chunk = Chunk()

    def out_of_memory(module, args, output):
        raise ArithmeticError("in the output layer")

    handle = chunk.layers[2].register_forward_hook(out_of_memory)
    session = mrr.replay(chunk, trace())
    session.microbatch(ROWS)
    session.microbatch(ROWS + 8)
    with pytest.raises(ArithmeticError):
        chunk(tokens())
    handle.remove()
    with pytest.raises(ReplayStateError, match="failed while 1 others were queued"):
        chunk(tokens())
    mrr.close_sessions(chunk)


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.fails = False
        self.fails_behind = False

    def forward(self, *args):
        if self.fails:
            raise ArithmeticError("injected")
        output = self.module(*args)
        if self.fails_behind:
            raise ArithmeticError("injected")
        return output


def add_failing_hook(module):
    """A hook that was there before any session's; return the list that holds an entry while it fails."""
    failing = []

    def fail(module, args):
        if failing:
            raise ArithmeticError("injected")

    module.register_forward_pre_hook(fail)
    return failing


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("where", ["wrapper", "hook of the wrapper", "hook of the chunk"])
def test_a_forward_that_fails_before_it_reaches_the_chunk_leaves_later_ones_right(where, others):
    chunk, the_trace = Chunk(), trace(32)
    wrapper = Wrapper(chunk)
    failing = add_failing_hook(chunk if where == "hook of the chunk" else wrapper)
    wrapper.fails = where == "wrapper"
    failing += [] if wrapper.fails else [True]
    with watched(chunk) as seen:
        session = mrr.replay(wrapper, the_trace)
        session.microbatch(ROWS)
        for number in range(others):
            session.microbatch(ROWS + 8 * (number + 1))
        with pytest.raises(ArithmeticError):
            wrapper(tokens(), 0)
        wrapper.fails = False
        failing.clear()
        if others:
            with pytest.raises(ReplayStateError, match="failed while 1 others were queued"):
                wrapper(tokens(), 0)
            mrr.close_sessions(chunk)
        else:
            for number in (1, 2):  # 0 is skipped
                session.microbatch(ROWS + 8 * number)
                wrapper(tokens(), number)
            session.close()
            assert sorted(number for number, layer in seen if layer == 1) == [1, 2]
    assert wrong_replays(seen, the_trace) == 0


@pytest.mark.parametrize("where", ["wrapper", "hook of the wrapper", "hook of the chunk"])
@pytest.mark.parametrize("first", ["runs", "fails in the chunk", "fails before the chunk"])
def test_a_forward_that_fails_before_the_chunk_takes_its_routes_with_it(first, where):
    chunk, the_trace = Chunk(), trace(24)
    wrapper = Wrapper(chunk)
    failing = add_failing_hook(chunk if where == "hook of the chunk" else wrapper)
    with watched(chunk) as seen, mrr.replay(wrapper, the_trace) as session:
        session.microbatch(ROWS)
        chunk.fail_at = 1 if first == "fails in the chunk" else None
        wrapper.fails = first == "fails before the chunk"
        with contextlib.nullcontext() if first == "runs" else pytest.raises(ArithmeticError):
            wrapper(tokens(), 0)
        session.microbatch(ROWS + 8)
        wrapper.fails = where == "wrapper"
        failing[:] = [] if wrapper.fails else [True]
        with pytest.raises(ArithmeticError):
            wrapper(tokens(), 1)
        session.microbatch(ROWS + 16)
        wrapper.fails = False
        failing.clear()
        wrapper(tokens(), 2)
    assert sorted(layer for number, layer in seen if number == 2) == [1, 2, 3]
    assert wrong_replays(seen, the_trace) == 0


def test_a_forward_that_fails_in_a_wrapper_behind_the_chunk_with_others_queued_cannot_be_assigned_and_raises():
    # Queued again and repeated, it would take the routes of the next, and each later one those of the one behind it: as
    # many forwards as micro-batches, and all of them wrong.
    chunk, the_trace = Chunk(), trace(24)
    wrapper = Wrapper(chunk)
    wrapper.fails_behind = True
    with watched(chunk) as seen:
        session = mrr.replay(wrapper, the_trace)
        session.microbatch(ROWS)
        session.microbatch(ROWS + 8)
        with pytest.raises(ArithmeticError):
            wrapper(tokens(), 0)
        wrapper.fails_behind = False
        session.microbatch(ROWS)
        with pytest.raises(ReplayStateError, match="micro-batch 0 failed while 2 others were queued"):
            wrapper(tokens(), 0)
        mrr.close_sessions(chunk)
    assert wrong_replays(seen, the_trace) == 0


def test_a_forward_that_fails_in_a_wrapper_behind_the_chunk_leaves_later_ones_right():
    chunk, the_trace = Chunk(), trace(16)
    wrapper = Wrapper(chunk)
    with watched(chunk) as seen, mrr.replay(wrapper, the_trace) as session:
        for wrapper.fails_behind in (True, False):
            session.microbatch(ROWS)
            with pytest.raises(ArithmeticError) if wrapper.fails_behind else contextlib.nullcontext():
                wrapper(tokens(), 0)
        session.microbatch(ROWS + 8)
        wrapper(tokens(), 1)
    assert (len(seen[0, 1]), len(seen[1, 1]), wrong_replays(seen, the_trace)) == (2, 1, 0)


def test_a_failure_before_the_chunk_does_not_hide_that_the_forward_before_it_left_out_a_router():
    chunk = Chunk()
    wrapper = Wrapper(chunk)
    failing = add_failing_hook(chunk)
    session = mrr.replay(wrapper, trace())
    session.microbatch(ROWS)
    chunk.around = lambda layer, hidden: hidden if layer is chunk.layers[1] else layer(hidden)
    wrapper(tokens())
    session.microbatch(ROWS + 8)
    failing.append(True)
    with pytest.raises(ArithmeticError):
        wrapper(tokens())
    failing.clear()
    with pytest.raises(
        ReplayStateError, match="micro-batch 0: a new forward began, but no forward of its layer 2 came"
    ):
        wrapper(tokens())
    mrr.close_sessions(chunk)


def test_the_end_names_the_layers_of_a_forward_that_stopped_halfway_but_not_of_one_that_failed():
    chunk = Chunk()
    with mrr.replay(chunk, trace(16)) as session:
        session.microbatch(ROWS)
        chunk(tokens(), 0)
        session.microbatch(ROWS + 8)
        chunk.fail_at = 2
        with pytest.raises(ArithmeticError):
            chunk(tokens(), 1)
    halfway = "micro-batch 0: its layer 2, layer 3 was not forwarded"
    with pytest.raises(ReplayStateError, match=halfway), mrr.replay(chunk, trace()) as session:
        session.microbatch(ROWS)
        chunk.layers[0](torch.zeros(4, 2, chunk.layers[0].router.config.hidden_size))


def test_a_direct_forward_that_fails_before_any_router_is_found_at_the_end_at_the_latest():
    chunk = Chunk()
    session = mrr.replay(chunk, trace())
    session.microbatch(ROWS)
    chunk.fail_at = 0
    with pytest.raises(ArithmeticError):
        chunk.forward(tokens())  # calls no hook that could tell
    session.microbatch(ROWS + 8)
    chunk.forward(tokens())
    with pytest.raises(ReplayStateError, match="routes were queued, but no forward used them"):
        session.close()


def test_layers_that_share_a_router_raise():
    chunk = Chunk(num_layers=2)
    chunk.layers[1].router = chunk.layers[0].router
    session = mrr.replay(chunk, trace(num_layers=1))
    session.microbatch(ROWS)
    session.microbatch(ROWS + 8)
    with pytest.raises(ReplayStateError, match="called the router of layer 1 twice"):
        chunk(tokens())
    mrr.close_sessions(chunk)


def test_a_router_that_fails_in_its_forward_and_in_its_recompute_is_retried():
    chunk, the_trace = Chunk(), trace()
    chunk.around = reentrant
    gating, fails = chunk.routers[1].gating, [True]

    def fail_once(hidden):
        if fails.pop() if fails else False:
            raise ArithmeticError("injected")
        return gating(hidden)

    chunk.routers[1].gating = fail_once
    with watched(chunk) as seen, mrr.replay(chunk, the_trace, verify=True) as session:
        session.microbatch(ROWS)
        with pytest.raises(ArithmeticError):
            chunk(tokens())
        with pytest.raises(ReplayStateError, match="outside its own forward"):
            chunk.routers[1].routing(torch.zeros(8, EXPERTS))
        session.microbatch(ROWS)
        loss = chunk(tokens()).square().sum()
        disturb(chunk)
        fails.append(True)
        with pytest.raises(ArithmeticError):
            loss.backward(retain_graph=True)
        loss.backward()
    assert wrong_replays(seen, the_trace) == 0


def test_a_router_that_is_exchanged_during_a_freeze_is_named_at_its_end():
    chunk = Chunk()
    with pytest.raises(ReplayStateError, match=r"layer 2 .*exchanged during the session"), mrr.freeze_recompute(chunk):
        chunk.layers[1].router = Chunk().layers[1].router
        chunk(tokens())


def test_a_model_that_was_rebuilt_beyond_recognition_is_restored_all_the_same():
    chunk = Chunk()
    held = list(chunk.routers)
    freeze = mrr.freeze_recompute(chunk)
    chunk.layers[1].router = Chunk().layers[1].router
    chunk.layers[1].router.layer_number = None
    with pytest.raises(LayoutError, match="has no layer_number"):
        freeze.close()
    assert [router.router_replay for router in held] == [None] * 3
    assert not [hook for module in [chunk, *held] for hook in (*module._forward_hooks, *module._forward_pre_hooks)]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", [reentrant, non_reentrant])
@pytest.mark.parametrize("fails", [False, True])
def test_a_recompute_of_the_whole_model_that_stops_or_fails_leaves_the_micro_batches_that_wait(fails, kind, wrapped):
    # A non-reentrant checkpoint stops its recompute with an exception, in the middle of the model, once it has all it needs.
    chunk, the_trace = Chunk(), trace(24)
    wrapper = Wrapper(chunk)
    model = wrapper if wrapped else chunk
    scale = torch.ones(1, requires_grad=True)
    with watched(chunk) as seen, mrr.replay(wrapper, the_trace) as session:
        session.microbatch(ROWS)
        output = kind(lambda _: model(tokens(), 0), scale)
        for number in (1, 2):
            session.microbatch(ROWS + 8 * number)
        disturb(chunk)
        if fails:
            chunk.fail_at = 1
            with pytest.raises(ArithmeticError):
                output.sum().backward()
        else:
            output.sum().backward()
        for number in (1, 2):
            model(tokens(), number)
    assert sorted(number for number, layer in seen if layer == 3) == [0, 1, 2]
    assert wrong_replays(seen, the_trace) == 0
