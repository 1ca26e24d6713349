"""Traces that the store's tests save, merge and damage."""

import torch

from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.ids import check_topk_indices

FIELDS = (
    "topk_indices",
    "layer_numbers",
    "num_experts",
    "replay_mask",
    "token_ids",
    "sequence_lengths",
    "sample_ids",
    "weight_version",
)


def make_trace(num_tokens=7, *, layer_numbers=(2, 3, 7), topk=2, num_experts=8, seed=0, **values) -> RoutingTrace:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, len(layer_numbers), num_experts, generator=generator)
    return RoutingTrace(
        topk_indices=scores.topk(topk, dim=2).indices, layer_numbers=layer_numbers, num_experts=num_experts, **values
    )


def full_trace(num_tokens=7, **options) -> RoutingTrace:
    """A trace that has every optional field, and rows without a route."""
    return make_trace(
        num_tokens,
        replay_mask=torch.arange(num_tokens) % 3 != 1,
        token_ids=torch.arange(num_tokens) + 100,
        weight_version=5,
        sequence_lengths=(num_tokens - num_tokens // 2, num_tokens // 2),
        sample_ids=("a", 'ü"\n'),
        **options,
    )


def assert_same(one: RoutingTrace, other: RoutingTrace) -> None:
    """Raise unless two traces hold the same, in rows without a route too, by the same dtypes."""
    for name in FIELDS:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, torch.Tensor):
            assert isinstance(b, torch.Tensor), name
            assert a.dtype is b.dtype, name
            assert torch.equal(a, b), name
        else:
            assert a == b, name


def assert_valid(trace: RoutingTrace) -> None:
    """Raise unless the public constructor accepts every value of a trace, and stores its routes as they are."""
    again = RoutingTrace(**{name: getattr(trace, name) for name in FIELDS})
    # A row without a route may hold any distinct ids; the constructor chooses its own.
    check_topk_indices(trace.topk_indices, num_experts=trace.num_experts, layer_numbers=trace.layer_numbers)
    trace_as_made = {name: getattr(trace, name) for name in FIELDS} | {
        "topk_indices": torch.where(trace.replay_mask[:, None, None], trace.topk_indices, again.topk_indices)
    }
    assert_same(RoutingTrace.from_checked(**trace_as_made), again)
