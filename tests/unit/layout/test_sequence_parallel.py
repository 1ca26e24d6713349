"""The order in which a rank's routers see the tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.layout.split import rows_for_router, split_sequence_parallel

ROWS = torch.tensor([[0, 1, 2, 3], [4, 5, 6, -1]])


def test_each_tp_rank_gets_its_own_consecutive_rows():
    topk_indices = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]], dtype=torch.uint8)
    assert split_sequence_parallel(topk_indices, tp_rank=1, tp_size=2).tolist() == [[4, 5], [6, 7]]


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
        (lambda: rows_for_router(torch.zeros(3)), r"must be \[b, s\]"),
        (lambda: split_sequence_parallel(torch.zeros(4), tp_rank=2, tp_size=2), "tp_rank=2"),
        (lambda: split_sequence_parallel(torch.zeros(4), tp_rank=-1, tp_size=2), "tp_rank=-1"),
    ],
)
def test_what_does_not_fit_raises(call, message):
    with pytest.raises(LayoutError, match=message):
        call()
