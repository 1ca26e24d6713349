"""Sequences as a padded batch or a packed row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.layout.rows import check_tokens, number_rows, pack_sequences, pad_sequences
from megatron_router_replay.layout.split import split_context_parallel
from tests.unit.layout.numbered import pack_rows, pad_rows

lengths_of_sequences = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def test_rows_are_numbered_from_zero_and_padded_on_the_right_or_the_left():
    assert [rows.tolist() for rows in number_rows([2, 0, 1])] == [[0, 1], [], [2]]
    assert pad_rows([3, 1]).tolist() == [[0, 1, 2], [3, -1, -1]]
    assert pad_rows([3, 1], multiple=4).tolist() == [[0, 1, 2, -1], [3, -1, -1, -1]]
    assert pad_rows([3, 1], seq_length=5, side="left").tolist() == [[-1, -1, 0, 1, 2], [-1, -1, -1, -1, 3]]


def test_packing_aligns_each_sequence_and_the_last_takes_the_rest_splittably():
    rows, cu_seqlens, cu_seqlens_padded = pack_rows([3, 4, 1], sequence_multiple=4, total_multiple=8)
    assert rows.tolist() == [[0, 1, 2, -1, 3, 4, 5, 6, 7, -1, -1, -1, -1, -1, -1, -1]]
    assert cu_seqlens.tolist() == [0, 3, 7, 8]
    assert cu_seqlens_padded.tolist() == [0, 4, 8, 16]
    assert cu_seqlens.dtype is cu_seqlens_padded.dtype is torch.int32
    assert rows.dtype is torch.int64
    packed = pack_rows([2, 1], total_length=6)
    assert packed.values.tolist() == [[0, 1, 2, -1, -1, -1]]
    assert packed.cu_seqlens_padded.tolist() == [0, 2, 6]
    # 12 positions, rounded up to 16 alone, would leave a last sequence of 10: not a multiple of 6.
    packed = pack_rows([5, 6], sequence_multiple=6, total_multiple=16)
    assert packed.cu_seqlens_padded.tolist() == [0, 6, 48]


def test_values_of_any_shape_and_dtype_take_the_same_path():
    weights = [torch.tensor([[0.5, 1.0]]), torch.tensor([[2.0, 3.0], [4.0, 5.0]])]
    assert pad_sequences(weights, fill=0).tolist() == [[[0.5, 1.0], [0, 0]], [[2, 3], [4, 5]]]
    assert pack_sequences(weights, fill=0).values.shape == (1, 3, 2)


@settings(deadline=None)
@given(lengths_of_sequences, st.sampled_from(["left", "right"]), st.integers(1, 8))
def test_every_row_appears_once_and_in_order_when_padded(lengths, side, multiple):
    rows = pad_rows(lengths, side=side, multiple=multiple)
    assert rows.shape[1] % multiple == 0
    assert rows.shape[1] < max(lengths) + multiple
    assert rows[rows >= 0].tolist() == list(range(sum(lengths)))
    assert (rows >= 0).sum(dim=1).tolist() == lengths


@settings(deadline=None)
@given(lengths_of_sequences, st.integers(1, 8), st.integers(1, 20))
def test_every_row_appears_once_and_in_order_when_packed(lengths, sequence_multiple, total_multiple):
    rows, cu_seqlens, padded = pack_rows(lengths, sequence_multiple=sequence_multiple, total_multiple=total_multiple)
    assert rows[rows >= 0].tolist() == list(range(sum(lengths)))
    assert cu_seqlens.diff().tolist() == lengths
    assert bool((padded.diff() % sequence_multiple == 0).all())
    assert rows.shape == (1, int(padded[-1]))
    assert rows.shape[1] % total_multiple == 0
    for start, first, length in zip(padded.tolist(), cu_seqlens.tolist(), lengths):
        assert rows[0, start : start + length].tolist() == list(range(first, first + length))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pad_rows([5], seq_length=4), "use seq_length=5, or truncate tokens and routes together"),
        (lambda: pad_rows([2], seq_length=6, multiple=4), "use seq_length=8"),
        (lambda: pad_rows([]), "no sequences"),
        (lambda: number_rows([-1]), "a sequence length=-1 must be an integer of 0 or more"),
        (lambda: number_rows([1.0]), "a sequence length=1.0 must be an integer"),
        (lambda: pad_rows([1], side="middle"), "'left' or 'right'"),
        (lambda: pad_rows([1], multiple=0), "1 or more"),
        (lambda: pack_rows([]), "no sequences"),
        (lambda: pack_rows([5, 5], total_length=8), "at least 10"),
        (lambda: pack_rows([4], sequence_multiple=4, total_length=6), "a multiple of 4"),
        (lambda: pack_rows([4], sequence_multiple=0), "1 or more"),
        (lambda: pad_sequences([torch.zeros(1), torch.zeros(1, dtype=torch.int64)], fill=0), "sequence 1"),
    ],
)
def test_what_does_not_fit_says_what_to_do(call, message):
    with pytest.raises(LayoutError, match=message):
        call()


def test_more_positions_than_int32_counts_are_refused_before_memory_is_taken():
    half = torch.zeros(1, dtype=torch.int8).expand(2**30)
    with pytest.raises(LayoutError, match=r"2147483648 positions are more than cu_seqlens \(int32\) can count"):
        pack_sequences([half, half], fill=0)


# ---- rows and tokens that moved apart

TOKENS = [torch.tensor([11, 12, 13]), torch.tensor([21]), torch.tensor([31, 32])]
TOKEN_IDS = torch.cat(TOKENS)


@pytest.mark.parametrize(
    "bug",
    [
        lambda rows: rows.roll(1, dims=1),
        lambda rows: rows.flip(0),
        lambda rows: rows.t().reshape(rows.shape),
        lambda rows: torch.where(rows >= 0, rows + 1, rows).clamp(max=5),
    ],
    ids=["shifted by one", "samples swapped", "b-major read as s-major", "off by one"],
)
def test_rows_that_drift_from_their_tokens_are_caught_by_the_token_ids(bug):
    rows, tokens = pad_rows([3, 1, 2]), pad_sequences(TOKENS, fill=0)
    check_tokens(rows, tokens, token_ids=TOKEN_IDS)
    with pytest.raises(LayoutError, match="tokens and rows were not moved by the same code"):
        check_tokens(bug(rows), tokens, token_ids=TOKEN_IDS)


def test_zigzag_rows_with_contiguous_tokens_are_caught():
    rows, _, bounds = pack_rows([3, 1, 2], sequence_multiple=4)
    tokens = pack_sequences(TOKENS, fill=0, sequence_multiple=4).values
    split = {"cp_rank": 0, "cp_size": 2, "cu_seqlens_padded": bounds}
    rows = split_context_parallel(rows, **split)
    check_tokens(rows, split_context_parallel(tokens, **split), token_ids=TOKEN_IDS)
    tokens = split_context_parallel(tokens, **split, style="contiguous")
    with pytest.raises(LayoutError, match=r"input_ids\[0, 2\] is 13, but its routing row 3 was recorded for token 21"):
        check_tokens(rows, tokens, token_ids=TOKEN_IDS)


@pytest.mark.parametrize(
    ("rows", "message"),
    [([[0, 6]], "the trace has rows 0..5"), ([[-2, 0]], "padding is -1"), ([[0]], "one row a position")],
)
def test_rows_outside_the_trace_or_of_another_shape_are_caught(rows, message):
    with pytest.raises(LayoutError, match=message):
        check_tokens(torch.tensor(rows), torch.tensor([[11, 12]]), token_ids=TOKEN_IDS)


def test_an_unknown_token_and_padding_prove_nothing():
    check_tokens(torch.tensor([[0, 1]]), torch.tensor([[11, 12]]), token_ids=torch.tensor([11, -1]))
    check_tokens(torch.tensor([[-1]]), torch.tensor([[0]]), token_ids=torch.empty(0, dtype=torch.int32))
    with pytest.raises(LayoutError, match="its routing row 0 was recorded for token 11"):
        check_tokens(torch.tensor([[0, -1]]), torch.tensor([[10, 12]]), token_ids=torch.tensor([11, -1]))
