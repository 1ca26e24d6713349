"""Rows, layers and bytes of each place, and its buckets."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_router_replay.trace.header import TraceFormat
from megatron_router_replay.transport import ParallelLayout, Place, TransportError
from megatron_router_replay.transport.plan import Part, plan_buckets, plan_routes

FORMAT = TraceFormat(layer_numbers=(2, 3, 5), topk=8, num_experts=128)


@pytest.mark.parametrize(
    "partition", ["by_length", [[0], [0]], [[0], [3]], [[-1], [0]], [[0, 1, 2]], [[0], [1], [2]]], ids=str
)
def test_a_partition_that_does_not_fit_is_refused(partition) -> None:
    layout = ParallelLayout(stage_layers=((2,),), dp_size=2)
    with pytest.raises(TransportError, match="MRR601: partition="):
        plan_routes((1, 2, 3), layout=layout, format=FORMAT, partition=partition)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage_layers": ((1, 2), (2, 3))}, "names a layer twice"),
        ({"stage_layers": ()}, "needs a stage"),
        *(({size: 0}, f"sizes of 1 or more: .*{size}=0") for size in ("dp_size", "cp_size", "tp_size")),
    ],
)
def test_a_layout_that_no_job_has_is_refused(options, message) -> None:
    with pytest.raises(TransportError, match=message):
        ParallelLayout(**{"stage_layers": ((1,),)} | options)


def test_a_rank_outside_of_the_layout_is_refused() -> None:
    layout = ParallelLayout(stage_layers=((1,), ()))
    assert [layout.place_of(rank) for rank in (0, 1)] == layout.places() == [Place(), Place(pp_rank=1)]
    for rank in (2, -1):
        with pytest.raises(TransportError, match=f"rank {rank} is not in a layout of 2 ranks"):
            layout.place_of(rank)


@pytest.mark.parametrize(
    ("lengths", "stage", "message"),
    [
        ((3,), (2, 4), r"MoE layers \[4\], the trace has \[2, 3, 5\]"),
        ((3, -1), (2,), "a sample has -1 tokens"),
    ],
)
def test_a_batch_that_does_not_fit_its_layout_is_refused(lengths, stage, message) -> None:
    with pytest.raises(TransportError, match=message):
        plan_routes(lengths, layout=ParallelLayout(stage_layers=(stage,)), format=FORMAT)


def test_a_place_gets_its_samples_in_its_stages_layers_and_copies_share_a_part() -> None:
    layout = ParallelLayout(stage_layers=((5, 2), (3,)), dp_size=2, cp_size=2, tp_size=2)
    plan = plan_routes((10, 20, 30), layout=layout, format=FORMAT)
    assert list(plan) == [Place(0, 0), Place(1, 0), Place(0, 1), Place(1, 1)]
    # dp0 has samples 0 and 2: 40 rows of 2 or 1 layers x 8 ids and a byte of mask. Layers are sorted, as in a trace.
    first, second, other = plan[Place()], plan[Place(0, 1)], plan[Place(1, 0)]
    assert (first.runs, first.format.layer_numbers, first.nbytes) == (((0, 10), (30, 60)), (2, 5), 40 * (2 * 8 + 1))
    assert (second.runs, second.format.layer_numbers, second.nbytes) == (first.runs, (3,), 40 * (1 * 8 + 1))
    assert (other.runs, other.sequence_lengths) == (((10, 30),), (20,))
    assert all(plan[Place(1, 0, cp, tp).first_copy] is other for cp in range(2) for tp in range(2))
    assert layout.num_copies == 4


def part_of(lengths: tuple[int, ...], samples: list[int]) -> Part:
    plan = plan_routes(lengths, layout=ParallelLayout(stage_layers=((2,),)), format=FORMAT, partition=[samples])
    return plan[Place()]


@pytest.mark.parametrize(
    ("samples", "bucket_bytes", "buckets"),
    [
        # 9 bytes a row; samples of rows 0..3, 4..5 and 6..10.
        ([0, 1, 2], 45, [(0, [(0, 4), (4, 5)]), (5, [(5, 6), (6, 10)]), (10, [(10, 11)])]),
        ([1, 2, 0], 1000, [(0, [(4, 6), (6, 11), (0, 4)])]),
        # Two rows and not three; a row is never divided.
        ([1, 0], 26, [(0, [(4, 6)]), (2, [(0, 2)]), (4, [(2, 4)])]),
        ([1], 8, [(0, [(4, 5)]), (1, [(5, 6)])]),
        ([], 1000, []),
    ],
)
def test_a_bucket_crosses_samples_and_is_filled(samples, bucket_bytes, buckets) -> None:
    found = plan_buckets({Place(): part_of((4, 2, 5), samples)}, bucket_bytes)
    assert [(bucket.start, bucket.runs) for bucket in found] == buckets


def test_places_take_turns() -> None:
    # Two stages of 9 bytes a row, a row a bucket.
    plan = plan_routes((3,), layout=ParallelLayout(stage_layers=((2,), (3,))), format=FORMAT)
    order = [(bucket.start, bucket.place.pp_rank) for bucket in plan_buckets(plan, 9)]
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    bucket_bytes=st.integers(1, 60),
)
def test_buckets_are_the_rows_of_a_part_in_order(lengths, order, bucket_bytes) -> None:
    samples = list(range(len(lengths)))
    order.shuffle(samples)
    starts = [0, *accumulate(lengths)]
    rows = [row for sample in samples for row in range(starts[sample], starts[sample + 1])]
    came: list[int] = []
    for bucket in plan_buckets({Place(): part_of(tuple(lengths), samples)}, bucket_bytes):
        assert bucket.start == len(came)
        own = [row for begin, end in bucket.runs for row in range(begin, end)]
        assert 0 < len(own) * 9 == bucket.nbytes <= max(bucket_bytes, 9)
        came += own
    assert came == rows
