"""Rows and tokens that moved apart."""

import pytest
import torch

from megatron_router_replay.layout.rows import differing_tokens
from megatron_router_replay.layout.split import split_context_parallel
from tests.support.packing import numbered, pack_rows, pack_sequences, pad_sequences

TOKENS = [torch.tensor([0, 12, 13]), torch.tensor([21]), torch.tensor([31, 32])]


def differing(rows: torch.Tensor, tokens: torch.Tensor) -> str:
    return differing_tokens(tokens, torch.where(rows >= 0, torch.cat(TOKENS)[rows.clamp(min=0)], -1), rows)


@pytest.mark.parametrize(
    ("bug", "count"),
    [
        (lambda rows: rows.roll(1, dims=1), 6),
        (lambda rows: rows.flip(0), 5),
        (lambda rows: rows.t().reshape(rows.shape), 5),
        (lambda rows: torch.where(rows >= 0, rows + 1, rows).clamp(max=5), 5),
    ],
    ids=["shifted by one", "samples swapped", "b-major read as s-major", "off by one"],
)
def test_rows_that_drift_from_their_tokens_are_caught_by_the_token_ids(bug, count):
    rows, tokens = pad_sequences(numbered([3, 1, 2]), fill=-1), pad_sequences(TOKENS, fill=0)
    assert not differing(rows, tokens)
    assert f"({count} of 6 positions differ)" in differing(bug(rows), tokens)


def test_zigzag_rows_with_contiguous_tokens_are_named_by_their_first_place():
    rows, _, bounds = pack_rows([3, 1, 2], multiple=4)
    tokens, _, _ = pack_sequences(TOKENS, fill=0, multiple=4)
    split = {"cp_rank": 0, "cp_size": 2, "cu_seqlens_padded": bounds}
    rows = split_context_parallel(rows, **split)
    assert not differing(rows, split_context_parallel(tokens, **split))
    assert differing(rows, tokens[:, :6]) == (
        "input_ids[0, 2] is 13, but its routing row 3 was recorded for token 21 (2 of 3 positions differ): "
        "tokens and rows were not moved by the same code."
    )
