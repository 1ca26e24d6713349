"""Code that is put on a model inside a session and reorders samples: it cannot matter, or it raises.

Before the chunk's own forward, rows follow the tokens in their new order. After it, hidden states have no names, and
agreement alone sees them (docs/exactness.md).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from tests.functional.mcore.cases import DRAWN, Case, build, random_trace, watched, wrong_replays

pytestmark = [pytest.mark.version, pytest.mark.usefixtures("megatron")]
CASE = Case(num_microbatches=1, batch_size=2, sequence_length=48)
Change = Callable[[Any], Any]
"""Reorder the samples of a model's forwards; return the module to call, None: the model."""


def swap(args: Any, kwargs: Any, dim: int) -> tuple[Any, Any]:
    """Swap the samples of the first argument, which Megatron-Core may give by name."""
    if args:
        return (args[0].flip(dim), *args[1:]), kwargs
    name = next(name for name in ("hidden_states", "input_ids") if name in kwargs)
    return args, kwargs | {name: kwargs[name].flip(dim)}


def swapped(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].flip(0), *args[1:])


def hook(path: str, dim: int) -> Change:
    def put(model: Any) -> None:
        module = model.get_submodule(path)
        module.register_forward_pre_hook(lambda _, args, kwargs: swap(args, kwargs, dim), with_kwargs=True)

    return put


def hook_without_keywords(model: Any, **options: Any) -> None:
    model.register_forward_pre_hook(lambda _, args: swapped(args), **options)


def hook_that_writes(model: Any) -> None:
    def write(_: Any, args: Any) -> None:
        args[0].copy_(args[0].flip(0))

    model.register_forward_pre_hook(write)


def global_hook(model: Any) -> None:
    def put(module: Any, args: Any) -> Any:
        if module is model:
            handle.remove()
        return swapped(args) if module is model else None

    handle = nn.modules.module.register_module_forward_pre_hook(put)


def patched(model: Any) -> None:
    inner = model.forward
    model.forward = lambda *args: inner(*swapped(args))


class Wrapper(nn.Module):
    """A wrapper that swaps the samples which its module gets."""

    def __init__(self, module: Any, dim: int) -> None:
        super().__init__()
        self.module, self.dim = module, dim

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "module" else getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = swap(args, kwargs, self.dim)
        return self.module(*args, **kwargs)


def exchange(path: str, dim: int) -> Change:
    def put(model: Any) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Wrapper(model.get_submodule(path), dim))

    return put


def functional(model: Any) -> Any:
    parameters = dict(model.named_parameters())
    return lambda *args: torch.func.functional_call(model, parameters, swapped(args))


def called_in_a_compiled_function(model: Any) -> Any:
    called = torch._dynamo.disable(model)
    return torch.compile(lambda *args: called(*swapped(args)), backend="eager")


BEFORE: dict[str, Change] = {
    "pre-hook": hook("", 0),
    "pre-hook without keywords": hook_without_keywords,
    "pre-hook in front": lambda model: hook_without_keywords(model, prepend=True),
    "pre-hook that writes": hook_that_writes,
    "global pre-hook": global_hook,
    "patched forward": patched,
    "wrapper": lambda model: Wrapper(model, 0),
    "functional call": functional,
    "compiled function": called_in_a_compiled_function,
}
AFTER: dict[str, Change] = {
    "pre-hook on the embedding": hook("embedding", 0),
    "exchanged embedding": exchange("embedding", 0),
    "pre-hook on the decoder": hook("decoder", 1),
    "exchanged decoder": exchange("decoder", 1),
    "pre-hook on a layer": hook("decoder.layers.0", 1),
    "exchanged layer": exchange("decoder.layers.0", 1),
    "pre-hook on a router": hook("decoder.layers.0.mlp.router", 1),
}


def forward(called: Any, microbatch: dict[str, Any]) -> None:
    called(microbatch["tokens"].clone(), microbatch["position_ids"], None)


def changed_inside(model: Any, change: Change, trace: mrr.RoutingTrace, microbatch: Any, **options: Any) -> None:
    """Run a forward of a model that is changed inside the session."""
    with mrr.replay(model, trace, **options):
        forward(change(model) or model, microbatch)


@pytest.mark.parametrize("name", BEFORE)
def test_rows_follow_tokens_that_are_reordered_before_the_chunk(name: str) -> None:
    _, (model,), (microbatch,) = build(CASE)
    trace = random_trace(CASE, token_ids=microbatch["tokens"].flatten(), sequence_lengths=[48, 48])
    with watched([model]) as seen:
        changed_inside(model, BEFORE[name], trace, microbatch, **DRAWN)
    assert wrong_replays(CASE, seen, trace, [microbatch]) > 300
    assert wrong_replays(CASE, seen, trace, [microbatch | {"rows": microbatch["rows"].flip(0)}]) == 0


def test_a_forward_that_is_replaced_raises() -> None:
    def replace(model: Any) -> None:
        """Go past the session's forward."""
        model.forward = lambda *args: type(model).forward(model, *swapped(args))

    _, (model,), (microbatch,) = build(CASE)
    trace = random_trace(CASE, token_ids=microbatch["tokens"].flatten(), sequence_lengths=[48, 48])
    with pytest.raises(ReplayStateError, match="MRR406"):
        changed_inside(model, replace, trace, microbatch, **DRAWN)


@pytest.mark.parametrize("name", AFTER)
def test_hidden_states_that_are_reordered_in_the_chunk_raise_by_agreement(name: str) -> None:
    _, (model,), (microbatch,) = build(CASE)
    with mrr.record(model, padding_token_ids=[]) as recording:
        forward(model, microbatch)
    trace = recording.trace()
    changed_inside(model, lambda model: model, trace, microbatch)
    with pytest.raises(ReplayStateError, match="agree"):
        changed_inside(model, AFTER[name], trace, microbatch)
