"""The training side's rows, one micro-batch ahead."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from megatron_router_replay import RoutingTrace
from megatron_router_replay.errors import LayoutError, TraceError
from megatron_router_replay.mcore.batches.prefetch import prefetch, prefetch_batches


def _trace(device: str = "cpu") -> RoutingTrace:
    ids = torch.arange(10 * 2 * 2).view(10, 2, 2)
    return RoutingTrace(
        topk_indices=ids,
        layer_numbers=(1, 2),
        num_experts=40,
        token_ids=torch.arange(10),
        replay_mask=ids[:, 0, 0] != 4,
    ).to(device)


ROWS = [torch.tensor([[3, 1, -1], [1, 7, -1]]), torch.tensor([9]), torch.tensor([-1, -1])]


def _check(device: str) -> None:
    trace = _trace()
    for rows, routes in zip(ROWS, prefetch(trace, ROWS, device=device)):
        assert torch.equal(routes.routing_rows, rows)
        assert routes.topk_indices.device.type == torch.device(device).type
        assert routes.source is trace
        taken = routes.layers((1, 2)).cpu()  # [b, s, layers, topk]
        as_2d = rows.view(1, -1) if rows.dim() == 1 else rows
        assert taken.shape == (*as_2d.shape, 2, 2)
        assert torch.equal(taken[as_2d >= 0], trace.topk_indices[as_2d[as_2d >= 0]])


def test_each_microbatch_gets_its_rows_as_routers_see_them() -> None:
    _check("cpu")
    first = next(prefetch(_trace(), ROWS))
    expected = _trace().topk_indices[torch.tensor([[3, 1], [1, 7]])]  # [s, b]
    assert torch.equal(first.topk_indices[:2], expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_each_microbatch_gets_its_rows_on_a_gpu() -> None:
    _check("cuda")


def test_the_next_microbatch_is_loaded_while_the_caller_works() -> None:
    asked: list[int] = []

    def rows() -> object:
        for number in range(3):
            asked.append(number)
            yield torch.tensor([number])

    steps = prefetch(_trace(), rows())  # type: ignore[arg-type]
    next(steps)
    assert asked == [0, 1]


def test_a_schedule_that_asks_for_no_more_than_it_queued_retains_nothing() -> None:
    batches = [{"routing_rows": rows} for rows in ROWS]
    steps = prefetch_batches(_trace(), batches)
    kept = [weakref.ref(next(steps)["routing_rows"].topk_indices) for _ in ROWS]
    gc.collect()
    assert [ref() for ref in kept] == [None, None, None]
    assert batches[0]["routing_rows"] is ROWS[0], "what was given is as it was"


def test_only_the_layers_asked_for_are_loaded() -> None:
    trace = _trace()
    (routes,) = prefetch(trace, [torch.tensor([4, 2])], layer_numbers=[2])
    assert torch.equal(routes.layers([2])[0], trace.topk_indices[[4, 2]][:, 1:])
    with pytest.raises(TraceError, match=r"prefetched without layer 1: \[2\]"):
        routes.layers([1, 2])
    with pytest.raises(TraceError, match="no layer_number 3"):
        next(prefetch(trace, ROWS, layer_numbers=[3]))


def test_rows_outside_the_trace_raise() -> None:
    with pytest.raises(LayoutError, match=r"reach 2\.\.10, the trace has 0\.\.9"):
        list(prefetch(_trace(), [torch.tensor([2, 10])]))
    with pytest.raises(LayoutError, match="reach -2"):
        list(prefetch(_trace(), [torch.tensor([-2, 3])]))


class Pair(NamedTuple):
    one: object
    other: object


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, 5),
        torch.zeros(4, 6)[::2, ::3],
        torch.zeros(70_000, dtype=torch.bfloat16),
        np.zeros((3, 4), np.int32),
        torch.zeros(0),
        torch.zeros(2, dtype=torch.complex64).conj(),
    ],
)
def test_what_is_written_over_anywhere_in_a_batch_is_what_it_was(value: torch.Tensor | np.ndarray) -> None:
    trace, rows = _trace(), torch.zeros(1, dtype=torch.int64)
    memory = rows.numpy() if isinstance(value, np.ndarray) else rows

    def batches() -> Iterator[dict[str, object]]:
        for _ in range(10):
            yield {"a": {"b": (1, [value])}, "c": Pair("name", value), "routing_rows": rows}
            value[:] = value + 1
            memory[:] = memory + 1

    for number, batch in enumerate(prefetch_batches(trace, batches())):
        (one, (copied,)), pair = batch["a"]["b"], batch["c"]
        assert (one, type(pair), pair.one) == (1, Pair, "name")
        assert torch.equal(batch["routing_rows"].topk_indices[0, 0], trace.topk_indices[number])
        for each in (copied, pair.other):
            assert (type(each), each.shape, each.dtype) == (type(value), value.shape, value.dtype)
            assert bool((each == number).all())
    assert number == 9


def test_inference_tensors_are_copied_too() -> None:
    with torch.inference_mode():
        value = torch.zeros(3)
        (first, *_) = prefetch_batches(_trace(), ({"a": value.add_(1), "routing_rows": rows} for rows in ROWS))
    assert first["a"].tolist() == [1, 1, 1]


def test_an_empty_micro_batch_is_inside_every_trace() -> None:
    (routes,) = prefetch(_trace()[:0], [torch.empty(1, 0, dtype=torch.int64)])
    assert routes.topk_indices.shape == (0, 1, 2, 2)
