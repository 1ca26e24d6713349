"""Who gets which rows and layers, and how many bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_router_replay.trace.header import TraceFormat
from megatron_router_replay.transport import ParallelLayout, Place, TransportError
from megatron_router_replay.transport.plan import Part, partition_samples, plan_buckets, plan_routes

FORMAT = TraceFormat(layer_numbers=(2, 3, 5), topk=8, num_experts=128)


def test_round_robin_gives_sample_i_to_rank_i_modulo_size() -> None:
    assert partition_samples([9, 9, 9, 9, 9], dp_size=2) == ((0, 2, 4), (1, 3))


def test_balanced_gives_the_longest_first_to_the_rank_with_the_fewest_tokens() -> None:
    # 8 | 7, 7+6 | 8+5, then full: each takes two
    assert partition_samples([5, 8, 6, 7], dp_size=2, partition="balanced") == ((0, 1), (2, 3))


@given(
    lengths=st.lists(st.integers(0, 1000), max_size=60),
    dp_size=st.integers(1, 9),
    rule=st.sampled_from(["round_robin", "balanced"]),
)
@settings(deadline=None)
def test_a_partition_is_complete_even_and_the_same_every_time(lengths: list[int], dp_size: int, rule: str) -> None:
    samples = partition_samples(lengths, dp_size=dp_size, partition=rule)
    assert sorted(sample for of_rank in samples for sample in of_rank) == list(range(len(lengths)))
    counts = [len(of_rank) for of_rank in samples]
    assert max(counts) - min(counts) <= 1
    assert samples == partition_samples(list(lengths), dp_size=dp_size, partition=rule)


@given(lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=60), dp_size=st.integers(1, 9))
@settings(deadline=None)
def test_balanced_ranks_differ_by_one_sample_at_most(lengths: list[int], dp_size: int) -> None:
    samples = partition_samples(lengths, dp_size=dp_size, partition="balanced")
    tokens = [sum(lengths[sample] for sample in of_rank) for of_rank in samples]
    if len(lengths) % dp_size == 0:
        assert max(tokens) - min(tokens) <= max(lengths)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ("by_length", "must be 'round_robin'"),
        ([[0], [0]], "1 of them twice"),
        ([[0], [3]], r"samples 0\.\.3, there are 3"),
        ([[0, 1, 2]], "names 1 ranks"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(partition: object, message: str) -> None:
    with pytest.raises(TransportError, match=message):
        partition_samples([1, 2, 3], dp_size=2, partition=partition)  # type: ignore[arg-type]


def test_ranks_are_numbered_tp_first_pp_last() -> None:
    layout = ParallelLayout(stage_layers=((2,), (3, 5)), dp_size=2, cp_size=2, tp_size=2)
    places = layout.places()
    assert len(places) == 16
    assert places[0] == Place(0, 0, 0, 0)
    assert places[1] == Place(0, 0, 0, 1)
    assert places[2] == Place(0, 0, 1, 0)
    assert places[4] == Place(1, 0, 0, 0)
    assert places[0] == Place()
    assert places[8] == Place(0, 1, 0, 0)
    assert [layout.place_of(rank) for rank in range(16)] == places


def test_a_layer_on_two_stages_is_refused() -> None:
    with pytest.raises(TransportError, match="names a layer twice"):
        ParallelLayout(stage_layers=((1, 2), (2, 3)))


def test_a_stage_whose_layers_the_trace_lacks_is_refused() -> None:
    with pytest.raises(TransportError, match=r"MoE layers \[4\], the trace has \[2, 3, 5\]"):
        plan_routes((3,), layout=ParallelLayout(stage_layers=((2, 4),)), format=FORMAT)


def test_bytes_are_rows_times_layers_times_topk_and_a_mask_byte() -> None:
    layout = ParallelLayout(stage_layers=((2, 3), (5,)), dp_size=2)
    plan = plan_routes((10, 20, 30), layout=layout, format=FORMAT)
    # dp0 has samples 0 and 2: 40 rows of 2 or 1 layers x 8 ids and a byte of mask
    assert plan[Place(0, 0)].nbytes == 40 * (2 * 8 + 1)
    assert plan[Place(0, 1)].nbytes == 40 * (1 * 8 + 1)
    assert plan[Place(1, 1)].nbytes == 20 * (1 * 8 + 1)


def test_ids_above_255_take_two_bytes_and_optional_values_four() -> None:
    wide = TraceFormat(layer_numbers=(1,), topk=8, num_experts=300, has_token_ids=True, has_weight_version=True)
    assert wide.row_bytes(1) == 16 + 1 + 4 + 4


def test_the_payload_of_the_issue_is_384_bytes_a_token_and_480() -> None:
    layers = TraceFormat(layer_numbers=tuple(range(1, 49)), topk=8, num_experts=128)
    assert layers.row_bytes(48) - 1 == 384
    assert layers.row_bytes(60) - 1 == 480


def test_tensor_parallel_ranks_share_a_part_and_pipeline_stages_do_not() -> None:
    plan = plan_routes((3,), layout=ParallelLayout(stage_layers=((2,), (5,)), tp_size=2), format=FORMAT)
    assert list(plan) == [Place(0, 0, 0, 0), Place(0, 0, 0, 1), Place(0, 1, 0, 0), Place(0, 1, 0, 1)]
    assert plan[Place(tp_rank=1)] is plan[Place()]
    assert [plan[Place(pp_rank=stage)].format.layer_numbers for stage in (0, 1)] == [(2,), (5,)]


def test_balanced_fills_every_rank_when_all_samples_are_as_long() -> None:
    # By hand: 7 samples over 3 ranks are 3, 2 and 2; each goes to the rank with the fewest tokens, then the lowest rank.
    assert partition_samples([4] * 7, dp_size=3, partition="balanced") == ((0, 3, 6), (1, 4), (2, 5))


def test_balanced_spreads_samples_without_tokens_evenly() -> None:
    # All ranks have 0 tokens for ever, so the lowest one that takes samples gets them: 3 to rank 0, then 2 each.
    samples = partition_samples([0] * 7, dp_size=3, partition="balanced")
    assert sorted(len(of_rank) for of_rank in samples) == [2, 2, 3]
    assert samples == ((0, 1, 2), (3, 4), (5, 6))


def test_balanced_gives_one_long_sample_no_more_company_than_the_others_have() -> None:
    # 100 to rank 0; then 1, 1 to each of the others, which are full with two, or three for the one that may take most.
    samples = partition_samples([100] + [1] * 6, dp_size=3, partition="balanced")
    assert [len(of_rank) for of_rank in samples] == [2, 3, 2]
    assert samples == ((0, 6), (1, 3, 5), (2, 4))


@pytest.mark.parametrize("dp_size", [0, -1])
def test_a_partition_needs_a_rank(dp_size: int) -> None:
    with pytest.raises(TransportError, match=f"dp_size={dp_size}: it must be 1 or more"):
        partition_samples([1], dp_size=dp_size)


def test_a_partition_may_name_the_first_and_the_last_sample_and_no_other() -> None:
    assert partition_samples([1, 2, 3], dp_size=2, partition=[[2], [0]]) == ((2,), (0,))
    for outside in (-1, 3):
        with pytest.raises(TransportError, match="there are 3, from 0"):
            partition_samples([1, 2, 3], dp_size=2, partition=[[outside], [0]])


@pytest.mark.parametrize("size", ["dp_size", "cp_size", "tp_size"])
def test_a_layout_has_one_rank_of_each_kind_at_least(size: str) -> None:
    assert getattr(ParallelLayout(stage_layers=((1,),), **{size: 1}), size) == 1
    with pytest.raises(TransportError, match=f"sizes of 1 or more, got 1 stages.*{size}=0"):
        ParallelLayout(stage_layers=((1,),), **{size: 0})
    with pytest.raises(TransportError, match="got 0 stages"):
        ParallelLayout(stage_layers=())


def test_the_layers_of_a_stage_are_sorted_as_a_trace_has_them() -> None:
    layout = ParallelLayout(stage_layers=((5, 2), (3,)))
    assert layout.stage_layers == ((2, 5), (3,))
    assert plan_routes((1,), layout=layout, format=FORMAT)[Place()].format.layer_numbers == (2, 5)


def test_the_last_rank_has_a_place_and_the_one_behind_it_has_none() -> None:
    layout = ParallelLayout(stage_layers=((2,), (3, 5)), dp_size=2)
    assert layout.place_of(3) == Place(1, 1, 0, 0)
    for rank in (4, -1):
        with pytest.raises(TransportError, match=f"rank {rank} is not in a layout of 4 ranks"):
            layout.place_of(rank)


def test_a_sample_may_have_no_tokens_but_not_fewer() -> None:
    layout = ParallelLayout(stage_layers=((2,),))
    part = plan_routes((0, 0), layout=layout, format=FORMAT)[Place()]
    assert (part.nbytes, part.sequence_lengths) == (0, (0, 0))
    with pytest.raises(TransportError, match="a sample has -1 tokens"):
        plan_routes((3, -1), layout=layout, format=FORMAT)


def test_rows_of_a_part_are_runs_of_the_batch() -> None:
    # dp0 has samples 0 and 2: rows 0..3 and 6..10 of the batch
    plan = plan_routes((4, 2, 5), layout=ParallelLayout(stage_layers=((2,),), dp_size=2), format=FORMAT)
    assert (plan[Place()].runs, plan[Place(1)].runs) == (((0, 4), (6, 11)), ((4, 6),))


def part_of(lengths: tuple[int, ...], samples: list[int]) -> Part:
    plan = plan_routes(lengths, layout=ParallelLayout(stage_layers=((2,),)), format=FORMAT, partition=[samples])
    return plan[Place()]


def buckets_of(part: Part, sender_ends: list[int], bucket_bytes: int) -> list[tuple[int, int, int, list]]:
    buckets = plan_buckets({Place(): part}, sender_ends, bucket_bytes)
    return [(bucket.sender, bucket.start, bucket.stop, bucket.runs) for bucket in buckets]


def test_a_bucket_crosses_samples_but_not_senders() -> None:
    # 9 bytes a row; sender 0 has samples 0 and 1 (rows 0..5), sender 1 sample 2 (rows 6..10, its own 0..4).
    part = part_of((4, 2, 5), [0, 1, 2])
    assert buckets_of(part, [6, 11], 45) == [
        (0, 0, 5, [(0, 4), (4, 5)]),
        (1, 6, 11, [(0, 5)]),
        (0, 5, 6, [(5, 6)]),
    ]
    assert buckets_of(part, [6, 11], 1000) == [(0, 0, 6, [(0, 4), (4, 6)]), (1, 6, 11, [(0, 5)])]


def test_samples_in_another_order_than_the_senders_make_buckets_of_their_own() -> None:
    part = part_of((4, 2, 5), [1, 2, 0])
    assert buckets_of(part, [6, 11], 1000) == [(0, 0, 2, [(4, 6)]), (1, 2, 7, [(0, 5)]), (0, 7, 11, [(0, 4)])]


def test_a_bucket_is_filled_to_its_last_byte_and_a_row_never_divided() -> None:
    part = part_of((5,), [0])
    assert [bucket[:3] for bucket in buckets_of(part, [5], 18)] == [(0, 0, 2), (0, 2, 4), (0, 4, 5)]
    assert [stop - start for _, start, stop, _ in buckets_of(part, [5], 17)] == [1] * 5
    assert [stop - start for _, start, stop, _ in buckets_of(part, [5], 1)] == [1] * 5
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
@settings(deadline=None)
def test_buckets_cover_all_rows_once_and_respect_their_size(lengths, order, senders, bucket_bytes) -> None:
    samples = list(range(len(lengths)))
    order.shuffle(samples)
    part = part_of(tuple(lengths), samples)
    rows = [row for sample in samples for row in range(sum(lengths[:sample]), sum(lengths[: sample + 1]))]
    ends = [sum(lengths[: len(lengths) * (number + 1) // senders]) for number in range(senders)]
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
