"""Rows through packers of trainers: what they fill becomes -1, and what is no row raises."""

import contextlib

import pytest
import torch
from torch.nn.functional import pad

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.trainers import number_batch, pack_rows, packing
from tests.unit.trainers.batches import ROWS, attention_mask, nested, padded, token_ids


def pack_rows_of_a_mask(mask, multiple=4):
    """[B, S] -> [1, total]: each sample's tokens, padded with 0 to a multiple."""
    return lambda values: torch.cat(
        [pad(row[at.bool()], (0, -int(at.sum()) % multiple)) for row, at in zip(values, mask)]
    ).unsqueeze(0)


def pack_list(values, multiple=16):
    row = torch.cat(list(values))
    return pad(row, (0, -len(row) % multiple)).unsqueeze(0)


EXPECTED = [0, 1, 2, 3, 4, -1, -1, -1, 5, -1, -1, -1, 6, 7, 8, 9, 10, 11, 12, 13]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_packer_of_padded_batches(side):
    mask = attention_mask(side=side)
    rows = number_batch(padded(token_ids(), side=side), mask)
    assert pack_rows(pack_rows_of_a_mask(mask), rows).tolist() == [EXPECTED]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_packers_of_lists_and_of_nested_tensors(dtype):
    rows = [torch.tensor(part, dtype=dtype) for part in ROWS]
    assert pack_rows(pack_list, rows).tolist() == [[*range(14), -1, -1]]
    assert pack_rows(lambda values: pack_list(values.unbind()), nested(rows)).dtype is torch.int64
    assert pack_rows(lambda values: pack_list(values.unbind()), nested(rows)).tolist() == [[*range(14), -1, -1]]


NUMBERED = number_batch(token_ids())


@pytest.mark.parametrize(
    ("packer", "rows", "packed"),
    [
        (pack_list, [torch.tensor([255], dtype=torch.uint8)], [[255, *[-1] * 15]]),
        (lambda values: torch.cat(values).flip(0)[:3], NUMBERED, [13, 12, 11]),
        (lambda values: pad(values, (0, 2)), torch.tensor([[-1, 3, 4]]), [[-1, 3, 4, -1, -1]]),
        # As a trainer fills a batch.
        (torch.cat, [NUMBERED[0], NUMBERED[0]], [0, 1, 2, 3, 4] * 2),
    ],
    ids=["a row beyond a narrow dtype", "a part, reordered", "rows without a token", "a sample twice"],
)
def test_a_packer_may_pad_keep_a_part_reorder_and_repeat(packer, rows, packed):
    assert pack_rows(packer, rows).tolist() == packed


@pytest.mark.parametrize(
    ("fill", "message"), [(99, "returned row 98, which the micro-batch"), (3, "returned row 2, twice")]
)
def test_a_packer_that_fills_with_a_padding_token_raises(fill, message):
    with pytest.raises(LayoutError, match=message):
        pack_rows(lambda values: pad(torch.cat(values), (0, 2), value=fill), NUMBERED)


def test_a_packer_that_does_not_keep_integers_raises():
    with pytest.raises(LayoutError, match=r"integer tensor, got torch\.bfloat16"):
        pack_rows(lambda values: torch.cat(values).to(torch.bfloat16), NUMBERED)
    with pytest.raises(LayoutError, match=r"returned row -\d+, which the micro-batch"):
        pack_rows(lambda values: torch.cat(values).to(torch.int8), [torch.arange(200, 210)])
    with pytest.raises(LayoutError, match="got tuple"):
        pack_rows(lambda values: (torch.cat(values), None), NUMBERED)


@pytest.mark.parametrize(
    ("given", "found", "message"),
    [
        ([1, 2, 3], [3, 1, 2, 0, 0], None),
        ([1, 1, 2], [1, 1, 2], None),
        ([], [0, 0], None),
        ([1, 2, 3], [1, 2, 4], "which the micro-batch does not have"),
        ([1, 2, 3], [1, 2, 2], "a row twice"),
        ([], [1], "which the micro-batch does not have"),
    ],
)
def test_a_gpus_check_waits_for_nothing_and_says_the_same(given, found, message):
    """On a CPU the same operations assert at once."""
    tensors = torch.tensor(given, dtype=torch.int64), torch.tensor(found)
    with contextlib.nullcontext() if message is None else pytest.raises(RuntimeError, match=message):
        packing._check(*tensors, waits=False)
