"""Checkpoints of every kind: what a recompute chooses is its forward's, or our error; also after the session was left."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.distributed._composable import checkpoint as composable

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from tests.unit.mcore.tiny_chunk import (
    Chunk,
    by_hooks,
    disturb,
    flips,
    non_reentrant,
    num_recomputed,
    random_trace,
    reentrant,
    reentrant_with_gradients,
    tokens,
    watched,
    with_gradients,
)


def recompute(function, inputs, grad):
    inputs = inputs.detach().requires_grad_()
    with torch.enable_grad():
        output = function(inputs)
    torch.autograd.backward(output, grad)
    return inputs.grad


class WithoutContext(torch.autograd.Function):
    """A checkpoint whose forward gets no ctx."""

    @staticmethod
    def forward(function, inputs):
        return function(inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.function = inputs[0]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad):
        return None, recompute(ctx.function, *ctx.saved_tensors, grad)


class NamedSelf(torch.autograd.Function):
    """A checkpoint that calls its ctx self."""

    @staticmethod
    def forward(self, function, inputs):
        self.function = function
        self.save_for_backward(inputs)
        return function(inputs)

    @staticmethod
    def backward(self, grad):
        return None, recompute(self.function, *self.saved_tensors, grad)


def by_hook(layer, hidden):
    """A checkpoint that a hook on the output's gradient recomputes, as Megatron-Core's CheckpointWithoutOutput."""
    with torch.no_grad():
        output = layer(hidden)
    output = output + hidden * 0
    kept = hidden.detach()
    if output.requires_grad:
        output.register_hook(lambda grad: grad + 0 * layer(kept))
    return output


@pytest.mark.parametrize("closed_before_backward", [False, True])
@pytest.mark.parametrize("kind", [WithoutContext, NamedSelf])
@pytest.mark.parametrize("outer", [None, reentrant, non_reentrant])
def test_an_autograd_function_that_checkpoints_in_an_unknown_way_raises(kind, outer, closed_before_backward):
    chunk = Chunk()
    chunk.around = kind.apply

    def two_forwards(scale):
        return (chunk(tokens(), 0) - chunk(tokens(), 1)).mul(scale).square().mean()

    with watched(chunk) as seen, pytest.raises(ReplayStateError, match=kind.__name__):
        session = mrr.freeze_recompute(chunk)
        try:
            scale = torch.ones(1, requires_grad=True)
            loss = two_forwards(scale) if outer is None else outer(two_forwards, scale)
            disturb(chunk)
            if closed_before_backward:
                session.close()
            loss.backward()
        finally:
            mrr.close_sessions(chunk)
    assert flips(seen) == 0


def test_a_recompute_by_a_hook_inside_a_known_checkpoint_is_not_taken_for_that_checkpoints():
    chunk = Chunk()
    chunk.around = by_hook

    def two_forwards(scale):
        return (chunk(tokens(), 0) - chunk(tokens(), 1)).mul(scale).square().mean()

    with (
        watched(chunk) as seen,
        pytest.raises(ReplayStateError, match="saw no forward of it"),
        mrr.freeze_recompute(chunk),
    ):
        loss = reentrant(two_forwards, torch.ones(1, requires_grad=True))
        disturb(chunk)
        loss.backward()
    assert flips(seen) == 0


def test_an_autograd_function_that_recomputes_its_parts_in_another_order_raises():
    class Tiles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, *tiles):
            ctx.function = function
            ctx.save_for_backward(*tiles)
            return tuple(function(tile) for tile in tiles)

        @staticmethod
        def backward(ctx, *grads):
            pairs = reversed(list(zip(ctx.saved_tensors, grads)))
            return (None, *reversed([recompute(ctx.function, tile, grad) for tile, grad in pairs]))

    chunk = Chunk(num_layers=1)
    chunk.around = lambda layer, hidden: torch.cat(Tiles.apply(layer, *hidden.split(2)))
    with pytest.raises(ReplayStateError, match="which call this repeats cannot be told"), mrr.freeze_recompute(chunk):
        loss = chunk(tokens()).sum()
        disturb(chunk)
        loss.backward()
    chunk.around = lambda layer, hidden: Tiles.apply(layer, hidden)[0]
    with watched(chunk) as seen, mrr.freeze_recompute(chunk):
        loss = chunk(tokens()).sum()
        disturb(chunk)
        loss.backward()
    assert (num_recomputed(seen), flips(seen)) == (1, 0)


# Kinds that are known


def save_routing_on_cpu(chunk):
    """Hide the hooks of a checkpoint where routers ask, and there alone: what else it saves still makes it recompute."""

    def saving(routing):
        def forward(*args, **kwargs):
            with save_on_cpu():
                return routing(*args, **kwargs)

        return forward

    for router in chunk.routers:
        router.routing = saving(router.routing)


def nested(outer, inner):
    return lambda layer, hidden: outer(lambda h: inner(layer, h), hidden)


KNOWN = {
    "gradients on inside a reentrant one": (reentrant_with_gradients, 1),
    "gradients on inside a non-reentrant one": (lambda layer, hidden: non_reentrant(with_gradients(layer), hidden), 1),
    "reentrant": (reentrant, 1),
    "non-reentrant": (non_reentrant, 1),
    "by hooks": (by_hooks, 1),
    "reentrant in non-reentrant": (nested(non_reentrant, reentrant), 2),
    "non-reentrant in reentrant": (nested(reentrant, non_reentrant), 2),
    "by hooks in non-reentrant": (
        nested(non_reentrant, by_hooks),
        1,
    ),  # the inner saves all, so the outer never recomputes
    "reentrant in by hooks": (nested(by_hooks, reentrant), 2),
}


def run(chunk, *, session, closed_before_backward, num_forwards=2):
    """Run forwards and one backward with other router weights; the session is left before the backward or after."""
    try:
        loss = torch.stack([chunk(tokens(), number).square().sum() for number in range(num_forwards)]).sum()
        disturb(chunk)
        if closed_before_backward:
            session.close()
        loss.backward()
    finally:
        mrr.close_sessions(chunk)


@pytest.mark.parametrize("closed_before_backward", [False, True])
@pytest.mark.parametrize("saves_on_cpu", [False, True])
@pytest.mark.parametrize("kind", KNOWN)
def test_a_recompute_uses_what_its_forward_chose(kind, saves_on_cpu, closed_before_backward):
    chunk = Chunk()
    chunk.around, num_recomputes = KNOWN[kind]
    with watched(chunk) as seen:
        session = mrr.freeze_recompute(chunk)
        if saves_on_cpu:
            save_routing_on_cpu(chunk)
        run(chunk, session=session, closed_before_backward=closed_before_backward)
    assert (num_recomputed(seen), flips(seen)) == (2 * 3 * num_recomputes, 0)


@pytest.mark.parametrize("closed_before_backward", [False, True])
@pytest.mark.parametrize("saves_on_cpu", [False, True])
def test_composable_checkpoints(saves_on_cpu, closed_before_backward):
    chunk = Chunk()
    for layer in chunk.layers:
        composable(layer.router)
        composable(layer)
    with watched(chunk) as seen:
        session = mrr.freeze_recompute(chunk)
        if saves_on_cpu:
            save_routing_on_cpu(chunk)
        run(chunk, session=session, closed_before_backward=closed_before_backward)
    assert (num_recomputed(seen) >= 2 * 3, flips(seen)) == (True, 0)


@pytest.mark.parametrize("closed_before_backward", [False, True])
def test_a_composable_checkpoint_inside_a_reentrant_one_raises(closed_before_backward):
    chunk = Chunk()
    chunk.around = reentrant
    for layer in chunk.layers:
        composable(layer)
    with watched(chunk) as seen, pytest.raises(ReplayStateError, match="composable one\\) inside a reentrant one"):
        run(chunk, session=mrr.freeze_recompute(chunk), closed_before_backward=closed_before_backward)
    assert flips(seen) == 0


@pytest.mark.parametrize("kind", ["freeze", "record", "replay"])
@pytest.mark.parametrize("around", [reentrant, non_reentrant])
def test_a_recompute_of_group_limited_routing_uses_what_its_forward_chose(around, kind):
    chunk = Chunk(moe_router_num_groups=4, moe_router_group_topk=2)
    chunk.around = around
    trace = random_trace(8, replay_mask=torch.arange(8) % 2 == 0)
    starts = {"freeze": mrr.freeze_recompute, "record": mrr.record, "replay": lambda model: mrr.replay(model, trace)}
    with watched(chunk) as live:
        chunk(tokens())
    with watched(chunk) as seen, starts[kind](chunk) as session:
        if kind != "freeze":
            session.microbatch(torch.arange(8).view(2, 4))
        loss = chunk(tokens()).square().sum()
        disturb(chunk)
        loss.backward()
    assert (num_recomputed(seen), flips(seen)) == (3, 0)
    is_live = torch.arange(8).view(2, 4).t().reshape(-1) % 2 == 1 if kind == "replay" else slice(None)
    assert torch.equal(seen[0, 1][0][is_live], live[0, 1][0][is_live])


# Kinds that are not


@pytest.mark.parametrize("closed_before_backward", [False, True])
@pytest.mark.parametrize("inner", [reentrant, non_reentrant])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_known_checkpoint_inside_an_unknown_function_raises(inner, enabled, closed_before_backward):
    chunk = Chunk()

    def around(layer, hidden):
        function = lambda h: inner(layer, h)  # noqa: E731
        return WithoutContext.apply(with_gradients(function) if enabled else function, hidden)

    chunk.around = around
    with watched(chunk) as seen, pytest.raises(ReplayStateError, match="WithoutContext"):
        run(chunk, session=mrr.freeze_recompute(chunk), closed_before_backward=closed_before_backward)
    assert flips(seen) == 0


class RecomputedByHook(torch.autograd.Function):
    """As Megatron-Core's CheckpointWithoutOutput: a hook on the output's gradient recomputes, not the backward."""

    @staticmethod
    def forward(ctx, layer, hidden):
        ctx.save_for_backward(hidden)
        return layer(hidden)

    @staticmethod
    def backward(ctx, grad):
        return None, grad


@pytest.mark.parametrize("closed_before_backward", [False, True])
def test_a_recompute_by_a_hook_raises(closed_before_backward):
    chunk = Chunk()

    def around(layer, hidden):
        output = RecomputedByHook.apply(layer, hidden)
        kept = hidden.detach()
        output.register_hook(lambda grad: grad + 0 * layer(kept))
        return output

    chunk.around = around
    with (
        watched(chunk) as seen,
        pytest.raises(ReplayStateError, match=r"saw no forward of it|by no checkpoint that is known"),
    ):
        run(chunk, session=mrr.freeze_recompute(chunk), closed_before_backward=closed_before_backward)
    assert flips(seen) == 0
