"""Rows, layers and bytes of each place."""

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
    ("partition", "message"),
    [
        ("by_length", "must be 'round_robin'"),
        ([[0], [0]], "each of 0..2 at most once"),
        ([[0], [3]], "each of 0..2 at most once"),
        ([[-1], [0]], "each of 0..2 at most once"),
        ([0, 1], "a list of samples for each rank: 'int' object"),
        ([[0.5], [1.5]], "a list of samples for each rank: 'float' object"),
        ([[0, 1, 2]], "give each of dp_size=2 ranks its own samples"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(partition, message) -> None:
    layout = ParallelLayout(stage_layers=((2,),), dp_size=2)
    with pytest.raises(TransportError, match=f"MRR601: .*{message}"):
        plan_routes((1, 2, 3), layout=layout, format=FORMAT, partition=partition)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage_layers": ((1, 2), (2, 3))}, "names a layer twice"),
        ({"stage_layers": ()}, "needs a stage"),
        ({"stage_layers": (1, 2)}, "a list of layer numbers for each stage: 'int' object"),
        ({"stage_layers": ((1.5,),)}, "a list of layer numbers for each stage: 'float' object"),
        *(({size: 0}, f"sizes of 1 or more: .*{size}=0") for size in ("dp_size", "cp_size", "tp_size")),
    ],
)
def test_a_layout_that_no_job_has_is_refused(options, message) -> None:
    with pytest.raises(TransportError, match=message):
        ParallelLayout(**{"stage_layers": ((1,),)} | options)
    for rank in (2, -1):
        with pytest.raises(TransportError, match=f"rank {rank} is not in a layout of 2 ranks"):
            ParallelLayout(stage_layers=((1,), ())).place_of(rank)


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
    assert list(plan) == layout.places()
    # dp0 has samples 0 and 2: 40 rows of 2 or 1 layers x 8 ids and a byte of mask. Layers are sorted, as in a trace.
    first, second, other = plan[Place()], plan[Place(0, 1)], plan[Place(1, 0)]
    assert (first.runs, first.format.layer_numbers, first.nbytes) == (((0, 10), (30, 60)), (2, 5), 40 * (2 * 8 + 1))
    assert (second.runs, second.format.layer_numbers, second.nbytes) == (first.runs, (3,), 40 * (1 * 8 + 1))
    assert (other.runs, other.sequence_lengths) == (((10, 30),), (20,))
    assert all(plan[Place(0, 0, cp, tp)] is first for cp in range(2) for tp in range(2))


def test_bytes_of_a_part_are_those_of_its_dtypes() -> None:
    wide = TraceFormat(layer_numbers=(2, 3), topk=8, num_experts=512, has_token_ids=True)
    (part,) = plan_routes((10,), layout=ParallelLayout(stage_layers=((2, 3),)), format=wide).values()
    assert part.nbytes == 10 * (2 * 8 * 2 + 1 + 4)  # ids above 255 have two bytes; a byte of mask, four of token


def part_of(lengths: tuple[int, ...], samples: list[int]) -> Part:
    plan = plan_routes(lengths, layout=ParallelLayout(stage_layers=((2,),)), format=FORMAT, partition=[samples])
    return plan[Place()]


def buckets_of(part: Part, sender_ends: list[int], bucket_bytes: int) -> list[tuple[int, int, int, list]]:
    buckets = plan_buckets({Place(): part}, sender_ends, bucket_bytes)
    return [(bucket.sender, bucket.start, bucket.stop, bucket.runs) for bucket in buckets]


@pytest.mark.parametrize(
    ("samples", "bucket_bytes", "buckets"),
    [
        # 9 bytes a row; sender 0 has samples 0 and 1 (rows 0..5), sender 1 sample 2 (rows 6..10, its own 0..4).
        ([0, 1, 2], 45, [(0, 0, 5, [(0, 4), (4, 5)]), (1, 6, 11, [(0, 5)]), (0, 5, 6, [(5, 6)])]),
        ([0, 1, 2], 1000, [(0, 0, 6, [(0, 4), (4, 6)]), (1, 6, 11, [(0, 5)])]),
        ([1, 2, 0], 1000, [(0, 0, 2, [(4, 6)]), (1, 2, 7, [(0, 5)]), (0, 7, 11, [(0, 4)])]),
    ],
)
def test_a_bucket_crosses_samples_but_not_senders(samples, bucket_bytes, buckets) -> None:
    assert buckets_of(part_of((4, 2, 5), samples), [6, 11], bucket_bytes) == buckets


def test_a_bucket_is_filled_to_its_last_byte_and_a_row_never_divided() -> None:
    part = part_of((5,), [0])
    assert [bucket[:3] for bucket in buckets_of(part, [5], 18)] == [(0, 0, 2), (0, 2, 4), (0, 4, 5)]
    for less_than_two_rows in (17, 1):
        assert [stop - start for _, start, stop, _ in buckets_of(part, [5], less_than_two_rows)] == [1] * 5
    assert buckets_of(part_of((0, 0), [0, 1]), [0], 100) == []


def test_senders_and_places_take_turns() -> None:
    # Two stages of 9 bytes a row, two senders of three and two rows, a row a bucket.
    plan = plan_routes((3, 2), layout=ParallelLayout(stage_layers=((2,), (3,))), format=FORMAT, partition=[[0, 1]])
    order = [(bucket.sender, bucket.place.pp_rank, bucket.start) for bucket in plan_buckets(plan, [3, 5], 9)]
    first, second = [(0, 0, 0), (0, 1, 0), (1, 0, 3), (1, 1, 3)], [(0, 0, 1), (0, 1, 1), (1, 0, 4), (1, 1, 4)]
    assert order == [*first, *second, (0, 0, 2), (0, 1, 2)]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    senders=st.integers(1, 4),
    bucket_bytes=st.integers(1, 60),
)
def test_buckets_cover_all_rows_once_and_respect_their_size(lengths, order, senders, bucket_bytes) -> None:
    samples = list(range(len(lengths)))
    order.shuffle(samples)
    part = part_of(tuple(lengths), samples)
    starts = [0, *accumulate(lengths)]
    rows = [row for sample in samples for row in range(starts[sample], starts[sample + 1])]
    ends = [starts[len(lengths) * (number + 1) // senders] for number in range(senders)]
    came: dict[int, int] = {}
    for sender, start, stop, runs in buckets_of(part, ends, bucket_bytes):
        assert 0 < (stop - start) * 9 <= max(bucket_bytes, 9)
        first = ends[sender - 1] if sender else 0
        of_batch = [first + row for begin, end in runs for row in range(begin, end)]
        assert all(first <= row < ends[sender] for row in of_batch)
        assert not came.keys() & range(start, stop)
        came |= dict(zip(range(start, stop), of_batch, strict=True))
    assert [came[position] for position in range(len(rows))] == rows
    assert len(came) == len(rows)
