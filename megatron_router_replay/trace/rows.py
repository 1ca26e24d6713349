"""Copy rows of routes: as slices where they are neighbours, else as units of bytes, many times faster than id by id."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

Rows = slice | Tensor
"""Rows of a trace: neighbours, or [n] int64, each in 0..num_rows - 1."""


def joined_rows(rows: Tensor) -> Rows:
    """Return rows [n] int64 as a slice if they are neighbours, which indexes as a view; else as they are."""
    count = rows.numel()
    if not count:
        return slice(0, 0)
    first, last = int(rows[0]), int(rows[-1])
    is_run = last - first == count - 1 and torch.equal(rows, torch.arange(first, first + count, device=rows.device))
    return slice(first, first + count) if is_run else rows


def take_rows(routes: Tensor, rows: Rows) -> Tensor:
    """Return rows of routes [num_rows, layers, topk]; of neighbours a view, else a copy."""
    units = None if isinstance(rows, slice) else _units_of(routes)
    if isinstance(rows, slice) or units is None:
        return routes[rows]
    ids = units[rows.numpy()].view(routes[:0].numpy().dtype)
    return torch.from_numpy(ids).view(rows.numel(), *routes.shape[1:])


def put_rows(memory: Tensor, rows: Rows, routes: Tensor) -> None:
    """Write routes [n, layers, topk] into rows of memory [num_rows, layers, topk] of the same dtype.

    torch does not count this as a change of `memory`, so it is for memory that is no trace yet.

    Args:
        rows: n different ones.
    """
    units, source = _units_of(memory), _units_of(routes)
    if isinstance(rows, slice) or units is None or source is None:
        memory[rows] = routes
    else:
        units[rows.numpy()] = source


def _units_of(routes: Tensor) -> npt.NDArray[Any] | None:
    """Return [num_rows] views of a row's bytes; None if these do not follow one another, or are on a GPU."""
    if not (routes.is_cpu and routes.numel() and routes[:1].is_contiguous()):
        return None
    num_rows, num_layers, topk = routes.shape
    width = num_layers * topk
    return routes.numpy().reshape(num_rows, width).view(f"V{width * routes.itemsize}")[:, 0]
