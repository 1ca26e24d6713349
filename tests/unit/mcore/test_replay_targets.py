"""What a trainer may set as the target of a driven RouterReplay: a table of distinct ids in any integer dtype."""

import pytest
import torch

from megatron_router_replay.errors import TraceError
from megatron_router_replay.mcore.driven import as_target

TARGET = torch.tensor([[3, 1], [0, 2]], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("ids", "bad"),
    [([[1, 1], [0, 2]], 0), ([[0, 2], [2, 2]], 1), ([[0, 1, 2], [3, 0, 3]], 1), ([[-1, 2], [0, 1]], 0)],
)
def test_a_target_that_no_router_chose_is_refused_by_its_row(ids, bad):
    with pytest.raises(TraceError, match=rf"row {bad} of the replay target"):
        as_target(ids)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_a_target_keeps_its_dtype_and_is_a_copy(dtype):
    given = TARGET.to(dtype, copy=True)
    target = as_target(given)
    given.zero_()
    assert (target.dtype, target.tolist()) == (dtype, TARGET.tolist())


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_words_are_widened(dtype):
    widened = as_target(TARGET.long().to(dtype))
    assert (widened.dtype, widened.tolist()) == (torch.int64, TARGET.tolist())


@pytest.mark.parametrize(
    "target",
    [
        torch.ones(2, 1, dtype=torch.bool),
        torch.ones(2),
        torch.ones(2, 2, 2).long(),
        torch.ones(2, 2) * 1j,
        "ids",
        [[0, 1], [2]],
        None,
        [["a", "b"]],
    ],
)
def test_what_is_no_table_of_integers_is_no_target(target):
    with pytest.raises(TraceError, match=r"must be \[num_tokens, topk\] integers, got "):
        as_target(target)
