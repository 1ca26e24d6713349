"""Which positions of a batch a rank keeps, and the order in which its routers see them."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.layout.split import rows_for_router, split_context_parallel, split_sequence_parallel
from tests.support.packing import pack_rows

ROWS = torch.tensor([[0, 1, 2, 3], [4, 5, 6, -1]])
PACKED = torch.tensor([0, 6, 16])


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, [0, 4, 1, 5, 2, 6, 3, -1]),
        ({"sequence_parallel": True}, [0, 4, 1, 5, 2, 6, 3, -1]),
        ({"tp_rank": 1, "tp_size": 2}, [0, 4, 1, 5, 2, 6, 3, -1]),
        ({"tp_rank": 0, "tp_size": 2, "sequence_parallel": True}, [0, 4, 1, 5]),
        ({"tp_rank": 1, "tp_size": 2, "sequence_parallel": True}, [2, 6, 3, -1]),
    ],
)
def test_a_router_sees_position_0_of_every_sequence_first_or_its_share_of_them(options, rows):
    assert rows_for_router(ROWS, **options).tolist() == rows
    routes = torch.stack([ROWS, ROWS + 100], dim=2)  # what sessions order: several values a token
    assert rows_for_router(routes, **options).tolist() == [[row, row + 100] for row in rows]


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 5))
def test_sizes_that_do_not_divide_raise_and_all_others_are_split_without_loss(s, tp_size):
    values = torch.arange(s)
    if s % tp_size:
        with pytest.raises(LayoutError, match=f"Pad the sequences, or the packed row, to a multiple of {tp_size}"):
            split_sequence_parallel(values, tp_rank=0, tp_size=tp_size)
    else:
        parts = [split_sequence_parallel(values, tp_rank=r, tp_size=tp_size) for r in range(tp_size)]
        assert torch.equal(torch.cat(parts), values)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        # 2 * 3 = 6 tokens divide by 2, but Megatron splits the 3 positions.
        (lambda: rows_for_router(ROWS[:, :3], tp_size=2, sequence_parallel=True), "3 positions over tp_size=2"),
        (lambda: rows_for_router(torch.zeros(3)), r"must be \[b, s, \.\.\.\]"),
        (lambda: split_sequence_parallel(torch.zeros(4), tp_rank=2, tp_size=2), "tp_rank=2"),
        (lambda: split_sequence_parallel(torch.zeros(4), tp_rank=-1, tp_size=2), "tp_rank=-1"),
        (lambda: split(torch.zeros(4), 2), r"must be \[b, s, ...\]"),
        (lambda: split_context_parallel(ROWS, cp_rank=2, cp_size=2), r"cp_rank=2 must lie in 0\.\.cp_size - 1"),
        (lambda: split_context_parallel(ROWS, cp_rank=-1, cp_size=2), "cp_rank=-1"),
        # A packed row is not one sequence.
        (lambda: split(torch.zeros(1, 16), 2, cu_seqlens_padded=PACKED), "sequence 0 of 6 positions over cp_size=2"),
        (
            lambda: split(torch.zeros(1, 8), 2, cu_seqlens_padded=torch.tensor([0.0, 8.5])),
            "cu_seqlens_padded must be integers",
        ),
    ],
)
def test_what_does_not_fit_raises(call, message):
    with pytest.raises(LayoutError, match=message):
        call()


def split(values, cp_size, **options):
    return [split_context_parallel(values, cp_rank=r, cp_size=cp_size, **options).tolist() for r in range(cp_size)]


def test_zigzag_cuts_every_packed_sequence():
    rows, _, bounds = pack_rows([3, 8], multiple=4)
    assert split(rows, 2, cu_seqlens_padded=bounds) == [[[0, -1, 3, 4, 9, 10]], [[1, 2, 5, 6, 7, 8]]]


def test_a_group_of_one_keeps_the_same_tensor():
    rows = torch.arange(7).unsqueeze(0)  # odd: a single rank needs no multiple
    assert split_context_parallel(rows, cp_rank=0, cp_size=1) is rows


@given(st.integers(1, 3), st.integers(0, 40), st.integers(1, 4))
def test_each_position_is_kept_by_one_rank_or_the_message_says_what_to_pad_to(b, s, cp_size):
    rows = torch.arange(b * s).view(b, s)
    multiple = 1 if cp_size == 1 else 2 * cp_size
    if s % multiple:
        with pytest.raises(LayoutError, match=f"Pad each sequence to a multiple of {multiple} first"):
            split_context_parallel(rows, cp_rank=0, cp_size=cp_size)
        return
    parts = split(rows, cp_size)
    assert [sorted(chain.from_iterable(part[i] for part in parts)) for i in range(b)] == rows.tolist()


@pytest.mark.parametrize("bounds", [[0, 4], [1, 8], [0, 6, 4, 8], [[0, 8]], []])
def test_boundaries_that_do_not_cover_the_row_raise(bounds):
    for cp_size in (1, 2):
        with pytest.raises(LayoutError, match="does not cover a row of 8 positions"):
            split(torch.arange(8).unsqueeze(0), cp_size, cu_seqlens_padded=torch.tensor(bounds, dtype=torch.int32))


def test_a_row_of_no_sequences_is_covered_by_a_single_bound():
    assert split(torch.empty(1, 0, dtype=torch.int64), 2, cu_seqlens_padded=torch.tensor([0])) == [[[]], [[]]]
