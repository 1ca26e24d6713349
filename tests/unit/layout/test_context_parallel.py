"""Which positions of a batch a context-parallel rank keeps."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.layout import split_context_parallel
from tests.unit.layout.numbered import pack_rows


def split(values, cp_size, **options):
    return [split_context_parallel(values, cp_rank=r, cp_size=cp_size, **options).tolist() for r in range(cp_size)]


def test_zigzag_keeps_one_chunk_from_the_start_and_one_from_the_end():
    assert split(torch.arange(8).unsqueeze(0), 2) == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]


def test_zigzag_cuts_every_packed_sequence_and_contiguous_the_whole_row():
    rows, _, bounds = pack_rows([3, 8], sequence_multiple=4)
    assert split(rows, 2, cu_seqlens_padded=bounds) == [[[0, -1, 3, 4, 9, 10]], [[1, 2, 5, 6, 7, 8]]]
    rows, _, bounds = pack_rows([3, 5], total_multiple=2)
    assert split(rows, 2, cu_seqlens_padded=bounds, style="contiguous") == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_a_group_of_one_keeps_the_same_tensor():
    rows = torch.arange(7).unsqueeze(0)  # odd: a single rank needs no multiple
    assert split_context_parallel(rows, cp_rank=0, cp_size=1) is rows


@given(st.integers(1, 3), st.integers(0, 40), st.integers(1, 4), st.sampled_from(["zigzag", "contiguous"]))
def test_each_position_is_kept_by_one_rank_or_the_message_says_what_to_pad_to(b, s, cp_size, style):
    rows = torch.arange(b * s).view(b, s)
    multiple = 1 if cp_size == 1 else 2 * cp_size if style == "zigzag" else cp_size
    if s % multiple:
        with pytest.raises(LayoutError, match=f"Pad each sequence to a multiple of {multiple} first"):
            split_context_parallel(rows, cp_rank=0, cp_size=cp_size, style=style)
        return
    parts = split(rows, cp_size, style=style)
    assert [sorted(chain.from_iterable(part[i] for part in parts)) for i in range(b)] == rows.tolist()


@pytest.mark.parametrize("bounds", [[0, 4], [1, 8], [0, 6, 4, 8], [[0, 8]], []])
def test_boundaries_that_do_not_cover_the_row_raise(bounds):
    for cp_size in (1, 2):
        with pytest.raises(LayoutError, match="does not cover a row of 8 positions"):
            split(torch.arange(8).unsqueeze(0), cp_size, cu_seqlens_padded=torch.tensor(bounds))


PACKED = torch.tensor([0, 6, 16])


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (torch.zeros(4), {}, r"must be \[b, s, ...\]"),
        (torch.zeros(1, 4), {"cp_rank": 2}, r"cp_rank=2 must lie in 0\.\.cp_size - 1"),
        (torch.zeros(1, 4), {"cp_rank": -1}, "cp_rank=-1"),
        (torch.zeros(1, 4), {"style": "z"}, "'zigzag' or"),
        # A packed row is not one sequence.
        (torch.zeros(1, 16), {"cu_seqlens_padded": PACKED}, "sequence 0 of 6 positions over cp_size=2"),
    ],
)
def test_what_does_not_fit_raises(values, options, message):
    with pytest.raises(LayoutError, match=message):
        split_context_parallel(values, **({"cp_rank": 0, "cp_size": 2} | options))


def test_a_row_of_no_sequences_is_covered_by_a_single_bound():
    assert split(torch.empty(1, 0, dtype=torch.int64), 2, cu_seqlens_padded=torch.tensor([0])) == [[[]], [[]]]
