"""Traces into rows in the memory of messages; seconds of both sides."""

from __future__ import annotations

import pytest
import torch

from megatron_router_replay import RoutingTrace
from megatron_router_replay.errors import TraceError
from megatron_router_replay.trace.header import TraceFormat, views_of_bytes
from megatron_router_replay.transport import TransportError, TransportTimes
from megatron_router_replay.transport.gather import TraceRows, check_rows


def _trace(num_tokens: int, *, first: int = 0, token_ids: bool = True) -> RoutingTrace:
    ids = torch.arange(first, first + num_tokens * 3 * 2).view(num_tokens, 3, 2) % 300
    tokens = torch.arange(first, first + num_tokens) if token_ids else None
    return RoutingTrace(topk_indices=ids, layer_numbers=(1, 2, 4), num_experts=300, token_ids=tokens)


@pytest.mark.parametrize(
    ("runs", "rows"),
    [([(1, 3), (4, 7)], [1, 2, 4, 5, 6]), ([(8, 9), (0, 5)], [8, 0, 1, 2, 3, 4]), ([(5, 5)], [])],
)
def test_runs_of_rows_cross_traces(runs: list[tuple[int, int]], rows: list[int]) -> None:
    traces = [_trace(5), _trace(4, first=100)]
    source = TraceRows(traces)
    memory = source.format.select_layers((1, 4)).empty(len(rows))
    source.fill(runs, (1, 4), memory)
    assert torch.equal(memory["topk_indices"], torch.cat([trace.topk_indices for trace in traces])[rows][:, [0, 2]])
    assert memory["token_ids"].tolist() == [(row if row < 5 else row + 95) for row in rows]


def test_samples_of_traces_are_those_they_name_or_one_each() -> None:
    named = RoutingTrace(
        topk_indices=torch.arange(6).view(3, 1, 2), layer_numbers=(1,), num_experts=8, sequence_lengths=(0, 3)
    )
    whole = RoutingTrace(topk_indices=torch.arange(4).view(2, 1, 2), layer_numbers=(1,), num_experts=8)
    assert TraceRows([named, whole]).sequence_lengths == (0, 3, 2)
    assert TraceRows(trace for trace in (named, whole)).sequence_lengths == (0, 3, 2)


def test_rows_lie_in_a_message_widest_values_first() -> None:
    format = TraceFormat(layer_numbers=(1,), topk=2, num_experts=300, has_token_ids=True)
    flat = torch.tensor([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 4, 0, 5, 0, 6, 1, 1, 0, 99], dtype=torch.uint8)
    rows = views_of_bytes(flat[:-1], format, 2)  # little-endian: 4 bytes a token, 2 an id, 1 of the mask
    assert rows["token_ids"].tolist() == [1, 2]
    assert rows["topk_indices"].tolist() == [[[3, 4]], [[5, 262]]]
    assert rows["replay_mask"].tolist() == [True, False]
    rows["token_ids"][0] = 7
    assert flat[0] == 7, "views, no copies"
    assert {name: len(value) for name, value in views_of_bytes(flat, format, 0).items()} == dict.fromkeys(rows, 0)


def test_traces_of_different_kinds_are_refused() -> None:
    with pytest.raises(TransportError, match="trace 1"):
        TraceRows([_trace(3), _trace(3, token_ids=False)])
    with pytest.raises(TransportError, match="no traces"):
        TraceRows([])
    with pytest.raises(TransportError, match=r"cannot send dict \(number 1\)"):
        TraceRows([_trace(3), {}])  # type: ignore[list-item]


def test_a_trace_that_was_changed_in_place_is_not_sent() -> None:
    trace = _trace(3)
    trace.topk_indices[0] = 0
    with pytest.raises(TraceError, match="MRR110: topk_indices of the trace was changed in place"):
        TraceRows([trace])
    source = TraceRows([late := _trace(3)])
    late.topk_indices[0] = 0  # while it is sent
    with pytest.raises(TraceError, match="MRR110"):
        source.fill([(0, 3)], (1, 2, 4), source.format.empty(3))


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        (
            {"training_wait": 3.1, "rollout_decode": 2.8, "rollout_send": 0.2, "rollout_wait": 9.0},
            "routes: training waited 3.1 s, received 0.0 s: rollout side decoding (2.8 s)",
        ),
        (
            {"training_wait": 60.0, "training_receive": 0.5, "rollout_decode": 0.2, "rollout_wait": 50.0},
            "routes: training waited 60.0 s, received 0.5 s: rollout side generating",
        ),
    ],
    ids=["the transport", "generation"],
)
def test_training_names_the_step_of_the_rollout_side_that_it_waited_for(seconds: dict[str, float], line: str) -> None:
    times = TransportTimes("training")
    times.add(seconds)
    assert times.line() == line


def test_seconds_of_both_sides_are_added_also_of_a_block_that_raises_and_taken_once() -> None:
    times = TransportTimes("training")
    times.add({"rollout_send": 2.0})
    times.add({"rollout_send": 0.5})
    with pytest.raises(ValueError, match="no"), times.measure("receive"):
        raise ValueError("no")
    metrics = times.metrics()
    assert metrics.keys() == {"router_replay/transport/rollout_send_s", "router_replay/transport/training_receive_s"}
    assert metrics["router_replay/transport/rollout_send_s"] == 2.5
    assert metrics["router_replay/transport/training_receive_s"] > 0
    assert times.take()["rollout_send"] == 2.5
    assert times.take() == times.metrics() == {}


def test_rows_of_a_source_are_checked_as_decoded_ones_are():
    format = TraceFormat(layer_numbers=(1, 2), topk=2, num_experts=4)
    memory = format.empty(3)
    memory["topk_indices"][:], memory["replay_mask"][:] = torch.tensor([3, 1]), torch.tensor([True, False, True])
    memory["topk_indices"][1] = 9  # it has no route
    check_rows(memory, format)
    assert memory["topk_indices"].tolist() == [[[3, 1]] * 2, [[2, 3]] * 2, [[3, 1]] * 2]
    for wrong in ([4, 1], [3, 3]):
        memory["topk_indices"][2, 1] = torch.tensor(wrong)
        with pytest.raises(TraceError, match="MRR103: row 2, layer 2"):
            check_rows(memory, format)
