"""Rows and tokens that moved apart."""

import pytest
import torch

from megatron_router_replay import layout
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.layout import check_tokens, split_context_parallel
from tests.support.packing import numbered, pack_rows, pack_sequences, pad_sequences

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
    rows, tokens = pad_sequences(numbered([3, 1, 2]), fill=-1), pad_sequences(TOKENS, fill=0)
    check_tokens(rows, tokens, token_ids=TOKEN_IDS)
    with pytest.raises(LayoutError, match="tokens and rows were not moved by the same code"):
        check_tokens(bug(rows), tokens, token_ids=TOKEN_IDS)


def test_zigzag_rows_with_contiguous_tokens_are_caught():
    rows, _, bounds = pack_rows([3, 1, 2], multiple=4)
    tokens, _, _ = pack_sequences(TOKENS, fill=0, multiple=4)
    split = {"cp_rank": 0, "cp_size": 2, "cu_seqlens_padded": bounds}
    rows = split_context_parallel(rows, **split)
    check_tokens(rows, split_context_parallel(tokens, **split), token_ids=TOKEN_IDS)
    tokens = split_context_parallel(tokens, **split, style="contiguous")
    with pytest.raises(
        LayoutError,
        match=r"input_ids\[0, 2\] is 13, but its routing row 3 was recorded for token 21 \(2 of 3 positions differ\)",
    ):
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


def test_withdrawn_names_say_what_replaces_them():
    with pytest.raises(AttributeError, match=r"layout.number_rows is gone in 0.3: torch.split\(torch.arange\("):
        layout.number_rows  # noqa: B018
