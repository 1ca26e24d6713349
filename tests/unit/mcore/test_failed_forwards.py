"""Forwards that fail, stop halfway or call a router twice: later ones keep their own routes, or the session raises."""

from asyncio import CancelledError

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError
from tests.unit.mcore.tiny_chunk import (
    EXPERTS,
    ROWS,
    Chunk,
    as_map,
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

# torch only warns of a hook that raises behind a forward that failed
pytestmark = pytest.mark.filterwarnings("error:module forward hook with")


class Wrapper(torch.nn.Module):
    """A chunk and its wrapper, which fail where they are told to, once."""

    def __init__(self, around=None):
        super().__init__()
        self.module = Chunk()
        self.module.around = around or self.module.around
        self.fails = ""
        self.register_forward_pre_hook(lambda *_: self.fail("hook of the wrapper"))
        self.module.register_forward_pre_hook(lambda *_: self.fail("hook of the chunk"))
        self.module.layers[2].register_forward_hook(lambda *_: self.fail("behind the last router"))

    def fail(self, where):
        if self.fails == where:
            self.fails = ""
            raise ArithmeticError("injected")

    def forward(self, *args):
        self.fail("before the chunk")
        if self.fails.startswith("layer"):
            self.module.fail_at, self.fails = int(self.fails[-1]), ""
        output = self.module(*args)
        self.fail("behind the chunk")
        return output

    def failing(self, where, number):
        self.fails = where
        with pytest.raises(ArithmeticError):
            self(tokens(), number)


WHERE = ["hook of the wrapper", "before the chunk", "hook of the chunk", "layer 0", "layer 1", "layer 2"]
WHERE += ["behind the last router", "behind the chunk"]


@pytest.mark.parametrize("around", [reentrant, non_reentrant])
@pytest.mark.parametrize("then", ["retry", "skip"])
@pytest.mark.parametrize("where", WHERE)
def test_a_forward_that_failed_and_was_caught_leaves_the_others_right(where, then, around):
    model, trace, losses = Wrapper(around), random_trace(32), []
    chunk = model.module
    with watched(chunk) as seen, mrr.replay(model, trace) as session:
        for number in range(4):
            session.microbatch(ROWS + 8 * number)
            if number in (0, 2):
                model.failing(where, number)
                if then == "skip":
                    continue
                session.microbatch(ROWS + 8 * number)
            losses.append(model(tokens(), number).square().sum())
        disturbed_backward(chunk, *losses)
    assert wrong_replays(seen, trace) == 0
    assert {number for number, _ in seen} >= ({1, 3} if then == "skip" else {0, 1, 2, 3})
    assert len(seen[3, 3]) == 2


@pytest.mark.parametrize("num_queued", [1, 2])
@pytest.mark.parametrize("where", WHERE)
def test_a_failure_with_others_queued_ahead_cannot_be_assigned_and_raises(where, num_queued):
    # Queued again and repeated, it would take the routes of the next, and each later one those of the one behind it: as
    # many forwards as micro-batches, and all of them wrong.
    model, trace = Wrapper(), random_trace(32)
    with watched(model.module) as seen:
        session = mrr.replay(model, trace)
        for number in range(1 + num_queued):
            session.microbatch(ROWS + 8 * number)
        model.failing(where, 0)
        session.microbatch(ROWS)
        with pytest.raises(ReplayStateError, match=f"failed while {num_queued + 1} others were queued"):
            model(tokens(), 0)
        mrr.close_sessions(model)
    assert wrong_replays(seen, trace) == 0


def test_a_failure_before_the_chunk_hides_no_router_that_was_left_out():
    model = Wrapper()
    chunk = model.module
    session = mrr.replay(model, random_trace())
    session.microbatch(ROWS)
    chunk.around = lambda layer, hidden: hidden if layer is chunk.layers[1] else layer(hidden)
    model(tokens())
    session.microbatch(ROWS + 8)
    model.failing("hook of the chunk", 0)
    with pytest.raises(
        ReplayStateError, match="micro-batch 0: a new forward began, but no forward of its layer 2 came"
    ):
        model(tokens())
    mrr.close_sessions(model)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_direct_forward_that_failed_is_repeated(layer):
    chunk, trace = Chunk(), random_trace()
    with watched(chunk) as seen, mrr.replay(chunk, trace) as session:
        session.microbatch(ROWS)
        chunk.fail_at = layer
        with pytest.raises(ArithmeticError):
            chunk.forward(tokens())
        for number in (0, 1):
            session.microbatch(ROWS + 8 * number)
            chunk.forward(tokens(), number)
    assert wrong_replays(seen, trace) == 0
    assert session.report.microbatches == 2


# Only a forward that returned is a success. Where its call fails, behind the last router, and who calls it.
LATE = [
    "the output layer",
    "an earlier hook of the chunk",
    "a hook of the session's time on the chunk",
    "the middle wrapper",
]
LATE += [
    "an earlier hook of the middle wrapper",
    "a hook of the session's time on the middle wrapper",
    "the outer wrapper",
]
LATE += ["an earlier hook of the outer wrapper", "a hook of the session's time on the outer wrapper"]


class Around(torch.nn.Module):
    """A wrapper that fails behind the module it wraps."""

    def __init__(self, module, name, fail):
        super().__init__()
        self.module, self.name, self.fail = module, name, fail

    def forward(self, *args):
        output = self.module(*args)
        self.fail(self.name)
        return output


class Late:
    """An outer wrapper around a middle one around a chunk, one of which fails in forward 0 where it is told to, once."""

    def __init__(self, where, error):
        self.where, self.error = where, error
        self.chunk = Chunk()
        # The last layer's own hook runs behind the last router, and in front of the return of the chunk's forward.
        self.chunk.layers[-1].register_forward_hook(lambda *_: self.fail("the output layer"))
        self.middle = Around(self.chunk, "the middle wrapper", self.fail)
        self.outer = Around(self.middle, "the outer wrapper", self.fail)
        self.add_hooks("an earlier hook of")

    def add_hooks(self, when):
        for name, module in {"chunk": self.chunk, "middle wrapper": self.middle, "outer wrapper": self.outer}.items():
            module.register_forward_hook(lambda *_, place=f"{when} the {name}": self.fail(place))

    def fail(self, where):
        if where == self.where:
            self.where = ""
            raise self.error("injected")

    @property
    def called(self):
        """The module that the caller calls: the innermost that fails, or the outermost."""
        return {"chunk": self.chunk, "middle": self.middle}.get(self.where.split(" the ")[-1].split()[0], self.outer)


@pytest.mark.parametrize("calls", ["the outermost", "the innermost that fails"])
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt, CancelledError])
@pytest.mark.parametrize("where", LATE)
@pytest.mark.parametrize("rows", ["queued ahead", "queued again", "followed", "recorded"])
def test_a_forward_that_failed_behind_its_last_router_is_repeated_exactly_or_raises(rows, where, error, calls):
    late = Late(where, error)
    model = late.outer if calls == "the outermost" else late.called
    ids = [tokens(seed=number) for number in range(3)]
    samples = [*torch.cat(ids)], [*random_trace(24).topk_indices.view(6, 4, 3, 2)]
    options = {"num_experts": EXPERTS, "layer_numbers": [1, 2, 3], "last_token": "routed"}
    trace = mrr.RoutingTrace.from_samples(*samples, **options) if rows == "followed" else random_trace(24)
    session = mrr.record(late.outer) if rows == "recorded" else mrr.replay(late.outer, trace)
    late.add_hooks("a hook of the session's time on")
    with watched(late.chunk) as seen:
        if rows == "queued ahead":
            for number in range(3):
                session.microbatch(ROWS + 8 * number)
        elif rows == "queued again":
            session.microbatch(ROWS)
        with pytest.raises(error):
            model(ids[0], 0)
        if rows == "queued ahead":  # by rows alone, forward 0 repeated looks like forward 1
            with pytest.raises(ReplayStateError, match=r"MRR407: .* failed while 2 others were queued"):
                model(ids[0], 0)
            mrr.close_sessions(late.outer)
        else:
            for number in range(3):
                if rows == "queued again":
                    session.microbatch(ROWS + 8 * number)
                model(ids[number], number)
            session.close()
            assert session.report.microbatches == 3
    if rows == "recorded":
        recorded = session.trace()
        assert recorded.sequence_lengths == (4,) * 6
        for (number, layer), maps in seen.items():
            used = recorded.layer(layer)[(ROWS + 8 * number).t().reshape(-1)]
            assert torch.equal(as_map(used), maps[-1])
    else:
        assert wrong_replays(seen, trace) == 0


def test_layers_that_share_a_router_raise():
    chunk = Chunk(num_layers=2)
    chunk.layers[1].router = chunk.layers[0].router
    session = mrr.replay(chunk, random_trace(num_layers=1))
    session.microbatch(ROWS)
    session.microbatch(ROWS + 8)
    with pytest.raises(ReplayStateError, match="called the router of layer 1 twice"):
        chunk(tokens())
    mrr.close_sessions(chunk)


def test_a_router_that_fails_in_its_forward_and_in_its_recompute_is_retried():
    chunk, trace = Chunk(), random_trace()
    chunk.around = reentrant
    gating, fails = chunk.routers[1].gating, [True]

    def fail_once(hidden):
        if fails.pop() if fails else False:
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


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", [reentrant, non_reentrant])
@pytest.mark.parametrize("fails", [False, True])
def test_a_recompute_of_the_model_that_stops_or_fails_leaves_those_that_wait(fails, kind, wrapped):
    # A non-reentrant checkpoint stops its recompute with an exception, in the middle of the model, once it has all it needs.
    wrapper, trace = Wrapper(), random_trace(24)
    chunk = wrapper.module
    model = wrapper if wrapped else chunk
    with watched(chunk) as seen, mrr.replay(wrapper, trace) as session:
        session.microbatch(ROWS)
        output = kind(lambda _: model(tokens(), 0), torch.ones(1, requires_grad=True))
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
    assert wrong_replays(seen, trace) == 0
