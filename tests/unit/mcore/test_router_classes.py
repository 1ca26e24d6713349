"""Subclasses of TopKRouter and wrappers around one: exact where each call proves its map, refused by name elsewhere."""

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError, UnsupportedRouterError
from tests.unit.mcore.tiny_chunk import (
    EXPERTS,
    HIDDEN,
    Chunk,
    disturbed_backward,
    flips,
    forward,
    num_recomputed,
    random_trace,
    reentrant,
    watched,
    wrong_replays,
)


class ScalesProbabilities(TopKRouter):
    """As Megatron-Bridge's Gemma4TopKRouter: the probabilities that super() returns are normalized and scaled."""

    def routing(self, logits, padding_mask=None, **kwargs):
        probs, routing_map = super().routing(logits, padding_mask)
        return probs / probs.sum(dim=-1, keepdim=True).clamp(min=1e-20) * self.per_expert_scale, routing_map


class RoundsInput(TopKRouter):
    """As Megatron-Bridge's MiniMaxM3TopKRouter: the input of the gate has the weight's dtype."""

    def gating(self, input):  # which on a CPU is not Megatron-Core's
        return nn.functional.linear(input.to(self.weight.dtype), self.weight)


class AddsToLogits(nn.Module):
    """As Megatron-Bridge's LoRATopKRouter: it calls the parts of the router that it wraps."""

    def __init__(self, to_wrap):
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.layer_number = to_wrap.layer_number

    def forward(self, x, *args, **kwargs):
        logits = self.to_wrap.gating(self.to_wrap.apply_input_jitter(x))
        return self.to_wrap.routing(logits + self.adapter(x), *args, **kwargs)

    @property
    def weight(self):
        return self.to_wrap.weight


class Selects(TopKRouter):
    """As miles' InklingRouter: a forward of its own."""

    def forward(self, input, *args, **kwargs):
        return super().forward(input, *args, **kwargs)


class SelectsWithoutMegatron(TopKRouter):
    def routing(self, logits, padding_mask=None, **kwargs):
        probs = logits.view(-1, EXPERTS).softmax(-1)
        return probs, torch.zeros_like(probs, dtype=torch.bool).scatter(1, probs.topk(2, dim=1).indices, True)


class CopiesTheMap(ScalesProbabilities):
    def routing(self, logits, padding_mask=None, **kwargs):
        probs, routing_map = super().routing(logits, padding_mask)
        return probs, routing_map.roll(1, dims=1)


class WritesTheMap(ScalesProbabilities):
    def routing(self, logits, padding_mask=None, **kwargs):
        probs, routing_map = super().routing(logits, padding_mask)
        return probs, routing_map.logical_not_()


def chunk_of(kind):
    chunk = Chunk()
    chunk.around = reentrant
    for layer in chunk.layers:
        router = layer.router
        if kind is AddsToLogits:
            layer.router = AddsToLogits(router)
        else:
            router.__class__ = kind
            if "gating" in vars(kind):
                del router.gating
        router.per_expert_scale = nn.Parameter(torch.linspace(0.5, 2, EXPERTS))
    return chunk


@pytest.mark.parametrize("start", ["replay", "record", "freeze"])
@pytest.mark.parametrize("kind", [ScalesProbabilities, RoundsInput, AddsToLogits])
def test_a_router_of_another_class_is_exact_and_its_probabilities_are_its_own(kind, start):
    chunk, trace = chunk_of(kind), random_trace(8)
    chunk.routers[0].per_expert_scale = scale = nn.Parameter(torch.linspace(0.5, 2, EXPERTS))
    assert mrr.explain(chunk).replayable
    session = {"replay": lambda: mrr.replay(chunk, trace), "record": lambda: mrr.record(chunk)}.get(
        start, lambda: mrr.freeze_recompute(chunk)
    )()
    with watched(chunk) as seen, session:
        disturbed_backward(chunk, forward(chunk, session))
    assert (num_recomputed(seen), flips(seen)) == (3, 0)
    if start != "freeze":
        assert wrong_replays(seen, trace if start == "replay" else session.trace()) == 0
    if kind is ScalesProbabilities:
        assert scale.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", [SelectsWithoutMegatron, CopiesTheMap, WritesTheMap])
@pytest.mark.parametrize("start", ["replay", "freeze"])
def test_a_routing_that_returns_another_map_raises_in_its_first_call(kind, start):
    chunk = chunk_of(kind)
    session = mrr.replay(chunk, random_trace(8)) if start == "replay" else mrr.freeze_recompute(chunk)
    with pytest.raises(ReplayStateError, match="MRR415: layer 1: its token dispatcher got"):
        forward(chunk, session)
    session.close(check=False) if start == "replay" else mrr.close_sessions(chunk)


def test_what_cannot_prove_its_map_is_refused_by_name():
    def message(chunk):
        with pytest.raises(UnsupportedRouterError) as raised:
            mrr.freeze_recompute(chunk)
        return str(raised.value)

    assert message(chunk_of(Selects)).endswith("layers 1, 2, 3: router class Selects overrides TopKRouter.forward")
    chunk = chunk_of(ScalesProbabilities)
    chunk.config.moe_token_dispatcher_type, chunk.config.moe_flex_dispatcher_backend = "flex", "deepep"
    name = "router class ScalesProbabilities overrides TopKRouter.routing, and"
    assert f"{name} the dispatcher takes a top-k of the probabilities that it returns; use" in message(chunk)
    chunk.config.moe_flex_dispatcher_backend = "hybridep"
    assert mrr.explain(chunk).replayable
    for layer in chunk.layers:
        del layer.token_dispatcher
    assert f"{name} its layer has no token dispatcher, which would compare the map" in message(chunk)
