import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.layout import merge_context_parallel, pack_rows, split_context_parallel


def test_zigzag_keeps_one_chunk_from_the_start_and_one_from_the_end():
    rows = torch.arange(8).unsqueeze(0)
    assert split_context_parallel(rows, cp_rank=0, cp_size=2).tolist() == [[0, 1, 6, 7]]
    assert split_context_parallel(rows, cp_rank=1, cp_size=2).tolist() == [[2, 3, 4, 5]]


def test_zigzag_cuts_every_packed_sequence():
    packed = pack_rows([3, 8], sequence_multiple=4)
    split = [split_context_parallel(packed.values, cp_rank=r, cp_size=2, cu_seqlens_padded=packed[2]) for r in (0, 1)]
    assert split[0].tolist() == [[0, -1, 3, 4, 9, 10]]
    assert split[1].tolist() == [[1, 2, 5, 6, 7, 8]]


def test_contiguous_cuts_the_whole_row():
    packed = pack_rows([3, 5], total_multiple=2)
    parts = [
        split_context_parallel(packed.values, cp_rank=r, cp_size=2, cu_seqlens_padded=packed[2], style="contiguous")
        for r in (0, 1)
    ]
    assert [part.tolist() for part in parts] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_a_group_of_one_keeps_the_same_tensor():
    rows = torch.arange(7).unsqueeze(0)
    assert split_context_parallel(rows, cp_rank=0, cp_size=1) is rows


@given(st.integers(1, 3), st.integers(0, 40), st.integers(1, 4), st.sampled_from(["zigzag", "contiguous"]))
def test_padded_batches_round_trip_or_say_what_to_pad_to(b, s, cp_size, style):
    rows = torch.arange(b * s).view(b, s)
    multiple = 1 if cp_size == 1 else 2 * cp_size if style == "zigzag" else cp_size
    if s % multiple:
        with pytest.raises(LayoutError, match=f"Pad each sequence to a multiple of {multiple} first"):
            split_context_parallel(rows, cp_rank=0, cp_size=cp_size, style=style)
        return
    parts = [split_context_parallel(rows, cp_rank=r, cp_size=cp_size, style=style) for r in range(cp_size)]
    assert torch.equal(merge_context_parallel(parts, style=style), rows)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 4))
def test_packed_rows_round_trip_and_each_rank_has_as_many(lengths, cp_size, total_multiple):
    rows, _, bounds = pack_rows(lengths, sequence_multiple=2 * cp_size, total_multiple=total_multiple)
    parts = [split_context_parallel(rows, cp_rank=r, cp_size=cp_size, cu_seqlens_padded=bounds) for r in range(cp_size)]
    assert {part.shape for part in parts} == {(1, rows.shape[1] // cp_size)}
    assert torch.equal(merge_context_parallel(parts, cu_seqlens_padded=bounds), rows)


def test_a_packed_row_is_not_one_sequence():
    packed = pack_rows([6, 10], sequence_multiple=2)
    with pytest.raises(LayoutError, match="sequence 0 of 6 positions over cp_size=2"):
        split_context_parallel(packed.values, cp_rank=0, cp_size=2, cu_seqlens_padded=packed.cu_seqlens_padded)


@pytest.mark.parametrize("bounds", [[0, 4], [1, 8], [0, 6, 4, 8], [[0, 8]], []])
def test_boundaries_that_do_not_cover_the_row_raise(bounds):
    with pytest.raises(LayoutError, match="does not cover a row of 8 positions"):
        split_context_parallel(
            torch.arange(8).unsqueeze(0), cp_rank=0, cp_size=2, cu_seqlens_padded=torch.tensor(bounds)
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_context_parallel(torch.zeros(4), cp_rank=0, cp_size=2), r"must be \[b, s, ...\]"),
        (lambda: split_context_parallel(torch.zeros(1, 4), cp_rank=2, cp_size=2), "cp_rank=2"),
        (lambda: split_context_parallel(torch.zeros(1, 4), cp_rank=0, cp_size=2, style="z"), "'zigzag' or"),
        (lambda: merge_context_parallel([]), "one part a rank"),
        (lambda: merge_context_parallel([torch.zeros(1, 2), torch.zeros(1, 3)]), "all of one shape"),
    ],
)
def test_what_does_not_fit_raises(call, message):
    with pytest.raises(LayoutError, match=message):
        call()


def test_one_part_alone_is_whole_and_is_held_against_its_bounds_too():
    part = torch.arange(5).view(1, 5)  # odd: a single rank needs no multiple
    assert merge_context_parallel([part], cu_seqlens_padded=torch.tensor([0, 2, 5])).tolist() == part.tolist()
    with pytest.raises(LayoutError, match="does not cover a row of 5 positions"):
        merge_context_parallel([part], cu_seqlens_padded=torch.tensor([0, 4]))


def test_a_row_of_no_sequences_is_covered_by_a_single_bound():
    rows = torch.empty(1, 0, dtype=torch.int64)
    assert split_context_parallel(rows, cp_rank=1, cp_size=2, cu_seqlens_padded=torch.tensor([0])).shape == (1, 0)
