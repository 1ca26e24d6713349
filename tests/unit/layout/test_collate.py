"""Samples as a batch whose rows move with its tokens, and the proof that they did."""

import pytest
import torch

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.layout import check_tokens, collate_packed, collate_padded, split_batch

SAMPLES = [
    {"input_ids": torch.tensor([11, 12, 13]), "labels": torch.tensor([12, 13, 14])},
    {"input_ids": torch.tensor([21]), "labels": torch.tensor([22])},
    {"input_ids": torch.tensor([31, 32]), "labels": torch.tensor([32, 33])},
]
TOKEN_IDS = torch.tensor([11, 12, 13, 21, 31, 32], dtype=torch.int32)


def test_a_left_padded_batch():
    batch = collate_padded(SAMPLES, pad_token_id=0, side="left", multiple=4)
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[0, 11, 12, 13], [0, 0, 0, 21], [0, 0, 31, 32]],
        "labels": [[-100, 12, 13, 14], [-100, -100, -100, 22], [-100, -100, 32, 33]],
        "position_ids": [[0, 0, 1, 2], [0, 0, 0, 0], [0, 0, 0, 1]],
        "routing_rows": [[-1, 0, 1, 2], [-1, -1, -1, 3], [-1, -1, 4, 5]],
        "routing_padding": [[True, False, False, False], [True, True, True, False], [True, True, False, False]],
    }


def test_a_packed_batch():
    batch = collate_packed(SAMPLES, pad_token_id=0, sequence_multiple=2)
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[11, 12, 13, 0, 21, 0, 31, 32]],
        "labels": [[12, 13, 14, -100, 22, -100, 32, 33]],
        "position_ids": [[0, 1, 2, 0, 0, 0, 0, 1]],
        "routing_rows": [[0, 1, 2, -1, 3, -1, 4, 5]],
        "routing_padding": [[False, False, False, True, False, True, False, False]],
        "cu_seqlens": [0, 3, 4, 6],
        "cu_seqlens_padded": [0, 4, 6, 8],
    }


@pytest.mark.parametrize("style", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_tokens_and_rows_still_match_after_every_split(cp_size, style):
    padded = collate_padded(SAMPLES, pad_token_id=0, multiple=2 * cp_size)
    packed = collate_packed(SAMPLES, pad_token_id=0, sequence_multiple=2 * cp_size, total_multiple=16)
    for batch in (padded, packed):
        parts = [split_batch(batch, cp_rank=r, cp_size=cp_size, style=style) for r in range(cp_size)]
        for part in parts:
            check_tokens(part["routing_rows"], part["input_ids"], token_ids=TOKEN_IDS)
        rows = torch.cat([part["routing_rows"].flatten() for part in parts])
        assert sorted(rows[rows >= 0].tolist()) == [0, 1, 2, 3, 4, 5]


def test_samples_in_another_order_bring_their_own_rows():
    samples = [
        {"input_ids": torch.tensor([31, 32]), "routing_rows": torch.tensor([4, 5])},
        {"input_ids": torch.tensor([11, 12, 13]), "routing_rows": torch.tensor([0, 1, 2])},
    ]
    batch = collate_padded(samples, pad_token_id=0)
    assert batch["routing_rows"].tolist() == [[4, 5, -1], [0, 1, 2]]
    check_tokens(batch["routing_rows"], batch["input_ids"], token_ids=TOKEN_IDS)
    assert collate_padded(samples[:1], pad_token_id=0)["routing_rows"].tolist() == [[4, 5]]


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
    batch = collate_padded(SAMPLES, pad_token_id=0)
    with pytest.raises(LayoutError, match="tokens and routing_rows were not moved by the same code"):
        check_tokens(bug(batch["routing_rows"]), batch["input_ids"], token_ids=TOKEN_IDS)


def test_zigzag_rows_with_contiguous_tokens_are_caught():
    batch = collate_packed(SAMPLES, pad_token_id=0, sequence_multiple=4)
    tokens = split_batch(batch, cp_rank=0, cp_size=2, style="contiguous")["input_ids"]
    rows = split_batch(batch, cp_rank=0, cp_size=2)["routing_rows"]
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


def test_without_multiples_nothing_is_padded_and_own_fields_are_filled_with_zeros():
    samples = [{"input_ids": torch.tensor([5, 6]), "reward": torch.tensor([1, 2])},
               {"input_ids": torch.tensor([7]), "reward": torch.tensor([3])}]  # fmt: skip
    padded = collate_padded(samples, pad_token_id=9)
    assert padded["input_ids"].tolist() == [[5, 6], [7, 9]]
    assert padded["reward"].tolist() == [[1, 2], [3, 0]]
    assert collate_packed(samples, pad_token_id=9)["input_ids"].tolist() == [[5, 6, 7]]


@pytest.mark.parametrize("collate", [collate_padded, collate_packed])
@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"input_ids": torch.ones(2)}, {"tokens": torch.ones(2)}], "sample 1 has fields of lengths"),
        ([{"input_ids": torch.ones(2), "labels": torch.ones(3)}], "sample 0 has fields of lengths"),
        ([], "cannot lay out no sequences"),
        ({"input_ids": torch.arange(3)}, "cannot collate one sample: give a list of samples"),
        (torch.arange(3), "cannot collate a list with tensor"),
        ([torch.arange(3)], "cannot collate a list with tensor"),
        ([{"input_ids": [1, 2]}], "input_ids of sample 0 is .1, 2.: it must be a tensor"),
        ([{"input_ids": torch.tensor(1)}], "input_ids of sample 0 is tensor.1.: it must be a tensor"),
    ],
)
def test_what_is_no_list_of_samples_of_the_same_fields_is_told_as_such(collate, samples, message):
    with pytest.raises(LayoutError, match=f"^MRR205: {message}"):
        collate(samples, pad_token_id=0)
