"""Code that is put on a model inside a session and reorders samples: it cannot matter, or it raises.

Before the chunk's own forward, rows follow the tokens in their new order. After it, hidden states have no names, and
agreement alone sees them (docs/exactness.md).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from tests.functional.mcore.cases import DRAWN, Case, build, random_trace, watched, wrong_replays

pytestmark = [pytest.mark.version, pytest.mark.usefixtures("megatron")]
CASE = Case(num_microbatches=1, batch_size=2, sequence_length=48)
Change = Callable[[Any], Any]
"""Reorder the samples of a model's forwards; return the function to call, None: the model."""


def hook(path: str, dim: int) -> Change:
    """Swap the samples that a part of the model gets, by position or by name."""

    def swap(_: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if args:
            return (args[0].flip(dim), *args[1:]), kwargs
        name = next(name for name in ("hidden_states", "input_ids") if name in kwargs)
        return args, kwargs | {name: kwargs[name].flip(dim)}

    def put(model: Any) -> None:
        model.get_submodule(path).register_forward_pre_hook(swap, with_kwargs=True)

    return put


def hook_that_writes(model: Any) -> None:
    def write(_: Any, args: Any) -> None:
        args[0].copy_(args[0].flip(0))

    model.register_forward_pre_hook(write)


def patched_forward(model: Any) -> None:
    inner = model.forward
    model.forward = lambda ids, *args: inner(ids.flip(0), *args)


def functional_call(model: Any) -> Any:
    parameters = dict(model.named_parameters())
    return lambda ids, *args: torch.func.functional_call(model, parameters, (ids.flip(0), *args))


def class_forward(model: Any) -> Any:
    """Go past the session's forward, which is the model's own attribute."""
    model.forward = lambda ids, *args: type(model).forward(model, ids.flip(0), *args)
    return model


BEFORE: dict[str, Change] = {
    "pre-hook": hook("", 0),
    "pre-hook that writes": hook_that_writes,
    "patched forward": patched_forward,
    "functional call": functional_call,
}
AFTER: dict[str, Change] = {
    "embedding": hook("embedding", 0),
    "decoder": hook("decoder", 1),
    "router": hook("decoder.layers.0.mlp.router", 1),
}


def forward(called: Any, microbatch: dict[str, Any]) -> None:
    called(microbatch["tokens"].clone(), microbatch["position_ids"], None)


@pytest.mark.parametrize("name", BEFORE)
def test_rows_follow_tokens_that_are_reordered_before_the_chunk(name: str) -> None:
    _, (model,), (microbatch,) = build(CASE)
    trace = random_trace(CASE, token_ids=microbatch["tokens"].flatten(), sequence_lengths=[48, 48])
    with watched([model]) as seen, mrr.replay(model, trace, **DRAWN):
        forward(BEFORE[name](model) or model, microbatch)
    assert wrong_replays(CASE, seen, trace, [microbatch]) > 300
    assert wrong_replays(CASE, seen, trace, [microbatch | {"rows": microbatch["rows"].flip(0)}]) == 0


def test_a_forward_that_goes_past_the_sessions_raises() -> None:
    _, (model,), (microbatch,) = build(CASE)
    trace = random_trace(CASE, token_ids=microbatch["tokens"].flatten(), sequence_lengths=[48, 48])
    with pytest.raises(ReplayStateError, match="MRR406"), mrr.replay(model, trace, **DRAWN):
        forward(class_forward(model), microbatch)


@pytest.mark.parametrize("name", AFTER)
def test_hidden_states_that_are_reordered_in_the_chunk_raise_by_agreement(name: str) -> None:
    _, (model,), (microbatch,) = build(CASE)
    with mrr.record(model, padding_token_ids=[]) as recording:
        forward(model, microbatch)
    trace = recording.trace()
    with mrr.replay(model, trace):
        forward(model, microbatch)
    with pytest.raises(ReplayStateError, match="agree"), mrr.replay(model, trace):
        forward(AFTER[name](model) or model, microbatch)
