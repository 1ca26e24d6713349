"""Two blocks of routes, row by row: the overlap of each decision."""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
"""Numbers or flags in numpy, in which the search for faults is written: it indexes and sorts more than it adds."""

_PIECE = 1 << 14
"""Decisions counted at a time, so that their planes stay in the cache."""


def shared_experts(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many experts two blocks of routes share, decision by decision.

    Args:
        a, b: [num_tokens, num_layers, topk], the same dtype, distinct ids in each row.

    Returns:
        (overlap [num_tokens, num_layers] uint8, 0..topk; same_order [num_tokens, num_layers] bool).
    """
    same = _same_order(a, b)
    overlap = torch.full(same.shape, a.shape[2], dtype=torch.uint8 if a.shape[2] < 256 else torch.int16)
    # Most decisions are the same to the byte: only the others are compared as sets.
    different = (~same).nonzero(as_tuple=True)
    if different[0].numel():
        counted = count_shared(a[different].numpy(), b[different].numpy())
        overlap[different] = torch.from_numpy(counted).to(overlap.dtype)
    return overlap, same


def _same_order(a: Tensor, b: Tensor) -> Tensor:
    # The widest integer that a row of ids is a multiple of: few long comparisons instead of many of one byte.
    itemsize = gcd(a.shape[2] * a.element_size(), 8)
    wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
    equal = a.contiguous().view(wide) == b.contiguous().view(wide)
    same = equal[..., 0]
    for word in range(1, equal.shape[2]):
        same = same & equal[..., word]
    return same


def count_shared(a: Array, b: Array) -> Array:
    """Return how many ids the rows of a and b share, [n] int16.

    Args:
        a, b: [n, topk], distinct ids in each row.
    """
    shared = np.zeros(len(a), dtype=np.int16)
    for start in range(0, len(a), _PIECE):
        columns_a = np.ascontiguousarray(a[start : start + _PIECE].T)
        columns_b = np.ascontiguousarray(b[start : start + _PIECE].T)
        hits: Array = np.zeros(columns_a.shape[1], dtype=np.uint8 if a.shape[1] < 256 else np.uint16)
        # Ids are distinct in a row, so each pair of columns that is equal is one expert more that both name.
        for one in columns_a:
            for other in columns_b:
                np.add(hits, one == other, out=hits)
        shared[start : start + _PIECE] = hits
    return shared
