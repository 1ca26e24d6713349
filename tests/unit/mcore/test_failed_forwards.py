"""Forwards that fail, stop halfway or call a router twice: later ones keep their own routes, or the session raises."""

from asyncio import CancelledError
from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError
from megatron_router_replay.mcore.batches import microbatch
from megatron_router_replay.mcore.sessions.record import RecordedRoutes
from tests.unit.mcore.tiny_chunk import (
    EXPERTS,
    ROWS,
    Chunk,
    disturb,
    disturbed_backward,
    forward,
    non_reentrant,
    random_trace,
    reentrant,
    tokens,
    watched,
    wrong_replays,
)

# torch only warns of a hook that raises after a forward that failed
pytestmark = pytest.mark.filterwarnings("error:module forward hook with")


MODULES = ("chunk", "middle", "outer")


class Around(torch.nn.Module):
    """A wrapper that may fail before or after the module that it wraps."""

    def __init__(self, module, name, fail):
        super().__init__()
        self.module, self.name, self.fail = module, name, fail

    def forward(self, *args):
        self.fail(f"the front of {self.name}")
        output = self.module(*args)
        self.fail(self.name)
        return output


class Model:
    """An outer wrapper around a middle one around a chunk, one of which fails once, at a place by name."""

    def __init__(self, where="", error=ArithmeticError):
        self.where, self.error = where, error
        self.chunk = Chunk()
        # The last layer's own hook runs after the last router, and before the chunk's forward returns.
        self.chunk.layers[-1].register_forward_hook(lambda *_: self.fail("the output layer"))
        for number, layer in enumerate(self.chunk.layers):
            layer.register_forward_pre_hook(lambda *_, place=f"layer {number}": self.fail(place))
        self.middle = Around(self.chunk, "the middle wrapper", self.fail)
        self.outer = Around(self.middle, "the outer wrapper", self.fail)
        self.modules = {"chunk": self.chunk, "layer": self.chunk, "middle": self.middle, "outer": self.outer}
        for name in MODULES:
            self.modules[name].register_forward_pre_hook(
                lambda *_, name=name: self.fail(f"a hook in front of the {name}")
            )
        self.add_hooks("an earlier hook of")

    def add_hooks(self, when):
        for name in MODULES:
            self.modules[name].register_forward_hook(lambda *_, place=f"{when} the {name}": self.fail(place))

    def fail(self, where):
        if where == self.where:
            self.where = ""
            raise self.error("injected")


# Where a call fails: before the chunk's forward, in it, and after it returned. Only the last one counts.
EARLY = ["a hook in front of the outer", "the front of the middle wrapper", "a hook in front of the chunk"]
BEGUN = ["layer 0", "layer 2", "the output layer"]
LATE = ["the middle wrapper", "the outer wrapper"]
LATE += [f"an earlier hook of the {name}" for name in MODULES] + [f"a later hook of the {name}" for name in MODULES]
FAILURES = [(where, ArithmeticError, "outer") for where in EARLY + BEGUN + LATE]
FAILURES += [
    (where, ArithmeticError, "innermost") for where in ("layer 0", "a later hook of the chunk", "the middle wrapper")
]
FAILURES += [("the output layer", KeyboardInterrupt, "outer"), ("a later hook of the outer", CancelledError, "outer")]


@pytest.mark.parametrize(("where", "error", "called"), FAILURES)
@pytest.mark.parametrize("rows", ["given again", "skipped", "followed", "recorded"])
def test_a_forward_that_failed_is_repeated_exactly_or_raises(rows, where, error, called):
    failing = Model(where, error)
    chunk = failing.chunk
    chunk.around = reentrant
    innermost = next(module for name, module in failing.modules.items() if name in where)
    model = failing.outer if called == "outer" else innermost
    ids = [tokens(seed=number) for number in range(3)]
    trace = random_trace(24, token_ids=torch.cat(ids).flatten(), sequence_lengths=[4] * 6)
    is_recorded, by_hand = rows == "recorded", rows in ("given again", "skipped")
    session = mrr.record(failing.outer, padding_token_ids=[]) if is_recorded else mrr.replay(failing.outer, trace)
    failing.add_hooks("a later hook of")
    numbers, losses = range(rows == "skipped", 3), []
    with watched(chunk) as seen:
        if by_hand:
            session.microbatch(ROWS)
        with pytest.raises(error):
            model(ids[0], 0)
        for number in numbers:
            if by_hand and where in EARLY and number == numbers[0]:
                # The first rows are there still: they may be used, and no others may come.
                with pytest.raises(
                    ReplayStateError, match=r"MRR407: rank 0, chunk 0: rows were given for micro-batch 0"
                ):
                    session.microbatch(ROWS + 8 * number)
                if rows == "skipped":
                    mrr.close_sessions(failing.outer)
                    return
            elif by_hand:
                session.microbatch(ROWS + 8 * number)
            losses.append(model(ids[number], number).square().sum())
        disturbed_backward(chunk, *losses)
        session.close()
        assert session.report.microbatches == len(numbers) + (where in LATE)
        assert session.report.recomputes == 3 * len(numbers)
    if is_recorded:
        trace = session.trace()
        assert trace.sequence_lengths == (4,) * (6 + 2 * (where in LATE))
        trace = mrr.concat_traces(list(trace.samples())[-6:])
    assert wrong_replays(seen, trace) == 0


@pytest.mark.parametrize("start", [mrr.record, lambda chunk: mrr.replay(chunk, random_trace())])
def test_one_micro_batch_at_a_time_is_given(start):
    chunk = Chunk()
    session = start(chunk)
    session.microbatch(ROWS)
    with pytest.raises(ReplayStateError, match=r"MRR407: .*micro-batch 0, and no forward has used them"):
        session.microbatch(ROWS + 8)
    chunk(tokens(), 0)
    session.microbatch(ROWS + 8)
    chunk(tokens(), 1)
    session.close()
    assert session.report.microbatches == 2


def fails_once(call):
    """Return the function, whose first call finds no memory."""
    errors = [torch.OutOfMemoryError("injected")]

    def fail(*args):
        if errors:
            raise errors.pop()
        return call(*args)

    return fail


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_forward_that_found_no_memory_for_its_masks_is_repeated(monkeypatch, by_hand):
    chunk, rows = Chunk(), ROWS.clone()
    rows[0, 3] = -1
    mask = torch.arange(8) != 3
    trace = random_trace(8, token_ids=tokens().flatten(), sequence_lengths=[4, 4], replay_mask=mask)
    monkeypatch.setattr(microbatch, "to_device", fails_once(microbatch.to_device))
    with mrr.replay(chunk, trace) as session, watched(chunk) as seen:
        for error in (pytest.raises(torch.OutOfMemoryError), nullcontext()):
            if by_hand:
                session.microbatch(rows)
            with error:
                chunk(tokens(), 0)
    assert (session.report.microbatches, wrong_replays(seen, trace, ROWS)) == (1, 0)


def test_a_forward_whose_routes_found_no_memory_is_neither_recorded_nor_counted(monkeypatch):
    chunk = Chunk()
    monkeypatch.setattr(RecordedRoutes, "_to_host", fails_once(RecordedRoutes._to_host))
    with mrr.record(chunk, padding_token_ids=[]) as recording:
        with pytest.raises(torch.OutOfMemoryError):
            chunk(tokens())
        chunk(tokens())
        assert recording._microbatches.chunks[0].digest[0] == 1  # which pipeline stages compare
    assert recording.trace().sequence_lengths == (4, 4)
    assert (recording.report.microbatches, recording.report.rows_live) == (1, 8)


class FailsAt(TorchFunctionMode):
    """Let the n-th operation of torch find no memory."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.left -= function is not torch.as_tensor  # which takes no memory for a tensor
        if self.left == 0:
            self.left = -1  # once
            raise torch.OutOfMemoryError("injected")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["replay", "rows by hand", "record"])
def test_a_forward_that_fails_at_any_operation_is_repeated_exactly_and_counted_once(kind):
    chunk, mask = Chunk(), torch.arange(8) != 3
    chunk.around = reentrant
    trace = random_trace(8, token_ids=tokens().flatten(), sequence_lengths=[4, 4], replay_mask=mask)
    options = {"verify": True, "min_agreement": 0, "ask_every_layer": True}
    session = mrr.record(chunk, padding_token_ids=[]) if kind == "record" else mrr.replay(chunk, trace, **options)
    num_failed = num_forwards = 0
    with watched(chunk) as seen:
        while num_failed == num_forwards:
            failing, num_forwards = FailsAt(num_forwards + 1), num_forwards + 1
            for mode in (failing, nullcontext()):
                try:
                    with mode:
                        # They are there still if the forward failed before it took them.
                        if kind == "rows by hand" and session._microbatches.chunks[0].given is None:
                            session.microbatch(ROWS)
                        output = chunk(tokens(), 0)
                    break
                except torch.OutOfMemoryError:
                    num_failed += 1
        disturbed_backward(chunk, output.square().sum())
        session.close()
    assert num_failed == num_forwards - 1 > 100
    report, num_rows = session.report, 8 * num_forwards
    assert (report.microbatches, report.rows_replayed + report.rows_live) == (num_forwards, num_rows)
    assert session._microbatches.chunks[0].digest[0] == num_forwards
    if kind == "record":
        trace = session.trace()
        assert trace.sequence_lengths == (4,) * (2 * num_forwards)
    assert wrong_replays(seen, trace) == 0


def test_what_was_refused_or_failed_is_counted_nowhere():
    chunk, rows = Chunk(), torch.tensor([[0, 1, 2, 3], [0, 1, 2, -1]])
    ids = tokens()[:1].repeat(2, 1)
    with mrr.replay(chunk, random_trace(8, token_ids=tokens().reshape(-1))) as session:
        with pytest.raises(LayoutError, match="MRR203"):
            session.microbatch(rows, token_ids=tokens())
        session.microbatch(rows)
        chunk.fail_at = 1
        with pytest.raises(ArithmeticError):
            chunk(ids)
        session.microbatch(rows)
        chunk(ids)
    assert session.report.rows_repeated == 3
    of_both = {"token_ids": [1, 2, 3, 4] * 2, "sequence_lengths": [4, 4]}
    routes = random_trace(4).topk_indices.repeat(2, 1, 1)
    trace = mrr.RoutingTrace(topk_indices=routes, layer_numbers=(1, 2, 3), num_experts=EXPERTS, **of_both)
    with mrr.replay(chunk, trace) as session:
        chunk.fail_at = 1
        with pytest.raises(ArithmeticError):
            chunk(torch.tensor([[1, 2, 3, 4]]))
        chunk(torch.tensor([[1, 2, 3, 4]]))
    assert session.report.segments_ambiguous == 1


def test_a_failure_before_the_chunk_hides_no_router_that_was_left_out():
    failing = Model()
    model, chunk = failing.outer, failing.chunk
    session = mrr.replay(model, random_trace())
    session.microbatch(ROWS)
    chunk.around = lambda layer, hidden: hidden if layer is chunk.layers[1] else layer(hidden)
    model(tokens())
    session.microbatch(ROWS + 8)
    failing.where = "a hook in front of the chunk"
    with pytest.raises(ArithmeticError):
        model(tokens(), 0)
    with pytest.raises(
        ReplayStateError, match="micro-batch 0: a new forward began, but no forward of its layer 2 came"
    ):
        model(tokens())
    mrr.close_sessions(model)


def test_layers_that_share_a_router_raise():
    chunk = Chunk(num_layers=2)
    chunk.layers[1].router = chunk.layers[0].router
    session = mrr.replay(chunk, random_trace(num_layers=1))
    session.microbatch(ROWS)
    with pytest.raises(ReplayStateError, match="called the router of layer 1 twice"):
        chunk(tokens())
    mrr.close_sessions(chunk)


def test_a_router_that_fails_in_its_forward_and_in_its_recompute_is_retried():
    chunk, trace = Chunk(), random_trace()
    chunk.around = reentrant
    gating, fails = chunk.routers[1].gating, [True]

    def fail_once(hidden):
        if fails and fails.pop():
            raise ArithmeticError("injected")
        return gating(hidden)

    chunk.routers[1].gating = fail_once
    with watched(chunk) as seen, mrr.replay(chunk, trace, verify=True) as session:
        with pytest.raises(ArithmeticError):
            forward(chunk, session)
        with pytest.raises(ReplayStateError, match="layer 2: a forward without routes"):
            chunk.routers[1].routing(torch.zeros(8, EXPERTS))
        loss = forward(chunk, session)
        disturb(chunk)
        fails.append(True)
        with pytest.raises(ArithmeticError):
            loss.backward(retain_graph=True)
        loss.backward()
    assert wrong_replays(seen, trace) == 0


def test_a_model_that_was_rebuilt_beyond_recognition_is_restored_all_the_same():
    chunk = Chunk()
    before = list(chunk.routers)
    freeze = mrr.freeze_recompute(chunk)
    chunk.layers[1].router = Chunk().layers[1].router
    chunk.layers[1].router.layer_number = None
    with pytest.raises(LayoutError, match="has no layer_number"):
        freeze.close()
    assert not [hook for module in [chunk, *before] for hook in (*module._forward_hooks, *module._forward_pre_hooks)]


@pytest.mark.parametrize("kind", [reentrant, non_reentrant])
@pytest.mark.parametrize("fails", [False, True])
def test_a_recompute_of_the_model_that_stops_or_fails_leaves_the_rows_of_the_next_forward(fails, kind):
    # A non-reentrant checkpoint stops its recompute with an exception, in the middle of the model, once it has all it needs.
    failing, trace = Model(), random_trace(24)
    chunk, model = failing.chunk, failing.outer
    with watched(chunk) as seen, mrr.replay(failing.outer, trace) as session:
        session.microbatch(ROWS)
        output = kind(lambda _: model(tokens(), 0), torch.ones(1, requires_grad=True))
        session.microbatch(ROWS + 8)
        disturb(chunk)
        if fails:
            chunk.fail_at = 1
            with pytest.raises(ArithmeticError):
                output.sum().backward()
        else:
            output.sum().backward()
        model(tokens(), 1)
        session.microbatch(ROWS + 16)
        model(tokens(), 2)
    assert sorted(number for number, layer in seen if layer == 3) == [0, 1, 2]
    assert wrong_replays(seen, trace) == 0
