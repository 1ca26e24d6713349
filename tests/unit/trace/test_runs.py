"""Runs of neighbours."""

import numpy as np
import pytest

from megatron_router_replay.trace.runs import as_slice, neighbour_runs

RUNS = {
    (5,): [(0, 5, 1)],
    (2, 3, 4): [(0, 2, 3)],
    (2, 3, 7, 8, 9, 1): [(0, 2, 2), (2, 7, 3), (5, 1, 1)],
    (3, 4, 4, 5): [(0, 3, 2), (2, 4, 2)],  # a number twice starts anew
    (5, 4, 3): [(0, 5, 1), (1, 4, 1), (2, 3, 1)],  # neighbours only upwards
    (0, 2, 4): [(0, 0, 1), (1, 2, 1), (2, 4, 1)],
    (-1, 0, 1): [(0, -1, 3)],
}


@pytest.mark.parametrize("numbers", RUNS, ids=str)
def test_runs_of_neighbours(numbers):
    assert neighbour_runs([]).shape == (0, 3)
    assert [tuple(run) for run in neighbour_runs(numbers).tolist()] == RUNS[numbers]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint32])
def test_narrow_and_unsigned_numbers_do_not_wrap(dtype):
    # 255 and 0 are not neighbours; in uint8 their difference would be 1.
    assert neighbour_runs(np.array([254, 255, 0, 1], np.uint8)).tolist() == [[0, 254, 2], [2, 0, 2]]
    assert neighbour_runs(np.array([7, 3], dtype)).tolist() == [[0, 7, 1], [1, 3, 1]]


def test_one_run_is_a_slice_and_others_are_a_list():
    assert as_slice([3, 4, 5]) == slice(3, 6)
    assert as_slice([3]) == slice(3, 4)
    assert as_slice([]) == slice(0, 0)
    assert as_slice([3, 5]) == [3, 5]
    assert as_slice([4, 3]) == [4, 3]
    assert as_slice([3, 3]) == [3, 3]
