"""Rows by hand: one row of a packed batch, no rows at all, dtypes without a sign, and bounds."""

import pytest
import torch

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.mcore.batches.row_inputs import RowInputs, check_range


def checked(rows):
    return RowInputs.checked(rows, token_ids=None, padding=None)


def test_rows_without_a_batch_dimension_are_one_packed_row_of_their_own_memory():
    rows = torch.tensor([4, -1, 2])
    inputs = checked(rows)
    rows[0] = 9
    assert inputs.rows.tolist() == [[4, -1, 2]]
    assert (inputs.lowest, inputs.highest) == (-1, 4)


def test_no_rows_are_within_a_trace_without_rows():
    check_range(checked(torch.empty(1, 0, dtype=torch.int64)), 0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32])
def test_a_lost_minus_1_is_refused_and_smaller_rows_are_not(dtype):
    with pytest.raises(LayoutError, match="MRR201: rows are torch"):
        checked(torch.tensor([[-1, 0]]).to(dtype))
    assert checked(torch.tensor([[1, 0]]).to(dtype)).rows.tolist() == [[1, 0]]
    # Eight bytes become int64, where it is -1 again.
    assert checked(torch.tensor([[-1, 0]]).to(torch.uint64)).lowest == -1


def test_a_signed_row_may_be_the_highest_of_its_dtype():
    assert checked(torch.tensor([[127, -1]], dtype=torch.int8)).highest == 127
