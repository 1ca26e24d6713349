import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.layout import (
    merge_router_rows,
    merge_sequence_parallel,
    rows_for_router,
    split_sequence_parallel,
)


def test_each_tp_rank_gets_its_own_consecutive_rows():
    topk_indices = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]], dtype=torch.uint8)
    assert split_sequence_parallel(topk_indices, tp_rank=1, tp_size=2).tolist() == [[4, 5], [6, 7]]


def test_the_router_sees_position_0_of_every_sequence_first():
    rows = torch.tensor([[0, 1, 2, 3], [4, 5, 6, -1]])
    assert rows_for_router(rows).tolist() == [0, 4, 1, 5, 2, 6, 3, -1]


def test_under_sequence_parallelism_a_rank_keeps_a_run_of_positions_of_every_sequence():
    rows = torch.tensor([[0, 1, 2, 3], [4, 5, 6, -1]])
    assert rows_for_router(rows, tp_rank=0, tp_size=2, sequence_parallel=True).tolist() == [0, 4, 1, 5]
    assert rows_for_router(rows, tp_rank=1, tp_size=2, sequence_parallel=True).tolist() == [2, 6, 3, -1]


def test_without_sequence_parallelism_every_tp_rank_sees_every_token():
    rows = torch.tensor([[0, 1, 2]])
    assert rows_for_router(rows, tp_rank=1, tp_size=2).tolist() == [0, 1, 2]


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 6), st.integers(1, 4), st.booleans())
def test_merging_what_all_routers_saw_gives_the_batch_back(b, chunk, tp_size, sequence_parallel):
    rows = torch.arange(b * chunk * tp_size).view(b, chunk * tp_size)
    ranks = range(tp_size) if sequence_parallel else range(1)
    parts = [rows_for_router(rows, tp_rank=r, tp_size=tp_size, sequence_parallel=sequence_parallel) for r in ranks]
    assert torch.equal(merge_router_rows(parts, batch_size=b), rows)


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 5))
def test_sizes_that_do_not_divide_raise_and_all_others_round_trip(s, tp_size):
    values = torch.arange(s)
    if s % tp_size:
        with pytest.raises(LayoutError, match=f"Pad the sequences, or the packed row, to a multiple of {tp_size}"):
            split_sequence_parallel(values, tp_rank=0, tp_size=tp_size)
    else:
        parts = [split_sequence_parallel(values, tp_rank=r, tp_size=tp_size) for r in range(tp_size)]
        assert torch.equal(merge_sequence_parallel(parts), values)


def test_a_batch_whose_tokens_divide_but_whose_positions_do_not_raises():
    # 2 * 3 = 6 tokens divide by 2, but Megatron splits the 3 positions.
    with pytest.raises(LayoutError, match="3 positions over tp_size=2"):
        rows_for_router(torch.zeros(2, 3, dtype=torch.int64), tp_rank=0, tp_size=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rows_for_router(torch.zeros(3)), r"must be \[b, s\]"),
        (lambda: split_sequence_parallel(torch.zeros(4), tp_rank=2, tp_size=2), "tp_rank=2"),
        (lambda: merge_sequence_parallel([]), "one part a rank"),
        (lambda: merge_sequence_parallel([torch.zeros(2), torch.zeros(3)]), "all of one shape"),
        (lambda: merge_router_rows([torch.zeros(3)], batch_size=2), "batch_size=2"),
    ],
)
def test_what_does_not_fit_raises(call, message):
    with pytest.raises(LayoutError, match=message):
        call()


def test_one_rank_is_the_default_and_keeps_every_position():
    rows = torch.tensor([[0, 1, 2], [3, 4, 5]])
    assert rows_for_router(rows, sequence_parallel=True).tolist() == [0, 3, 1, 4, 2, 5]


def test_merged_rows_keep_what_each_token_holds():
    routes = torch.arange(2 * 3 * 2).view(2, 3, 2)  # two sequences of three tokens, top-2
    seen = routes.transpose(0, 1).reshape(6, 2)
    assert torch.equal(merge_router_rows([seen], batch_size=2), routes)
    assert torch.equal(merge_router_rows([seen[:2], seen[2:4], seen[4:]], batch_size=2), routes)
    for batch_size in (0, 4):
        with pytest.raises(LayoutError, match=f"not a multiple of batch_size={batch_size}"):
            merge_router_rows([seen], batch_size=batch_size)
