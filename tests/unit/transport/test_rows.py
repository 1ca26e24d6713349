"""Rows into message memory and back."""

from __future__ import annotations

import pytest
import torch

from megatron_router_replay import RoutingTrace
from megatron_router_replay.transport import ParallelLayout, Place, TraceRows, TransportError, plan_routes
from megatron_router_replay.transport.rows import as_bytes, views_of_bytes


def _trace(num_tokens: int, *, first: int = 0, num_experts: int = 300, token_ids: bool = True) -> RoutingTrace:
    ids = torch.arange(first, first + num_tokens * 3 * 2).view(num_tokens, 3, 2) % num_experts
    return RoutingTrace(
        topk_indices=ids,
        layer_numbers=(1, 2, 4),
        num_experts=num_experts,
        token_ids=torch.arange(first, first + num_tokens) if token_ids else None,
    )


def test_any_range_of_rows_crosses_runs_and_traces() -> None:
    traces = [_trace(5), _trace(4, first=100)]
    source = TraceRows(traces)
    layout = ParallelLayout(stage_layers=((1, 4), (2,)))
    plan = plan_routes((5, 4), layout=layout, format=source.format, cp_rows={(0, 0): torch.tensor([1, 2, 4, 5, 6, 8])})
    part = plan.part(Place())
    whole = torch.cat([trace.topk_indices for trace in traces])[[1, 2, 4, 5, 6, 8]][:, [0, 2]]
    for start in range(6):
        for stop in range(start + 1, 7):
            memory = source.format.empty(stop - start, 2)
            source.fill(part, start, stop, memory)
            assert torch.equal(memory["topk_indices"], whole[start:stop])
            assert memory["token_ids"].tolist() == [1, 2, 4, 100, 101, 103][start:stop]


def test_traces_of_different_kinds_are_refused() -> None:
    with pytest.raises(TransportError, match="trace 1"):
        TraceRows([_trace(3), _trace(3, token_ids=False)])
    with pytest.raises(TransportError, match="no traces"):
        TraceRows([])


def test_views_of_bytes_begins_at_multiples_of_its_width_and_fills_the_bytes() -> None:
    format = TraceRows([_trace(3)]).format
    flat = torch.zeros(3 * format.row_bytes(3), dtype=torch.uint8)
    memory = views_of_bytes(flat, format, 3, 3)
    assert {name: (value.storage_offset() * value.itemsize, list(value.shape)) for name, value in memory.items()} == {
        "token_ids": (0, [3]),
        "topk_indices": (12, [3, 3, 2]),
        "replay_mask": (48, [3]),
    }
    assert flat.numel() == 51


def test_int16_travels_as_bytes() -> None:
    assert as_bytes(torch.tensor([[258, 3]], dtype=torch.int16)).tolist() == [2, 1, 3, 0]
