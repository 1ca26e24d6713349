"""Runs of neighbours: numbers that increase by one are copied, sent or indexed as one slice."""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq

import numpy as np
import numpy.typing as npt

Runs = npt.NDArray[np.int64]
"""[n, 3] int64: (position, start, length) of each run."""


def neighbour_runs(numbers: npt.ArrayLike) -> Runs:
    """Return the runs of numbers of which each is one more than the number before it.

    Args:
        numbers: [m] integers in any order, for example rows, token positions or layer indices. Consecutive numbers make
            one run as long as they also follow one another; [3, 4, 4, 5] are two runs.

    Returns:
        [n, 3] int64, one row (position, start, length) a run: numbers[position : position + length] are
        start .. start + length - 1. The lengths add up to m.
    """
    values = np.asarray(numbers, dtype=np.int64)
    if not values.size:
        return np.empty((0, 3), np.int64)
    positions = np.concatenate([[0], np.flatnonzero(np.diff(values) != 1) + 1])
    lengths = np.diff(positions, append=values.size)
    return np.stack([positions, values[positions], lengths], axis=1)


def as_slice(indices: Sequence[int]) -> slice | list[int]:
    """Return indices as a slice if they are one run, which indexes as a view; else as a list, which copies."""
    start = indices[0] if indices else 0  # no indices are the empty slice
    run = range(start, start + len(indices))
    return slice(run.start, run.stop) if all(map(eq, indices, run)) else list(indices)
