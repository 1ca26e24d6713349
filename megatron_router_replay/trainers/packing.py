"""Rows through a trainer's own packer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.trainers.containers import Container, as_samples, is_list


def packed(pack: Callable[[Any], Tensor], rows: Container) -> Tensor:
    """Return rows as the trainer's packer lays out tokens: pack(rows + 1) - 1, so that a fill of 0 becomes -1, no row.

    Args:
        pack: the trainer's packer, for one micro-batch, given all that it needs but the tokens; it must fill with 0. It
            may pad, pack, permute, truncate and split over context-parallel ranks.
        rows: the micro-batch's routing rows, in the container that the packer takes its tokens in.

    Returns:
        What the packer returns, int64, -1 where it filled.

    Raises:
        LayoutError: it returns no integers, or numbers that are no rows or a row twice: it fills with another number than 0.
    """
    # Widened first, for a packer keeps the dtype.
    shifted: Any = [_wide(part) + 1 for part in rows] if is_list(rows) else _wide(rows) + 1
    values = pack(shifted)
    is_integer = isinstance(values, Tensor) and not (
        values.is_floating_point() or values.is_complex() or values.dtype is torch.bool
    )
    if not is_integer:
        what = f"{values.dtype}" if isinstance(values, Tensor) else type(values).__name__
        raise LayoutError(f"the packer must return the packed rows as an integer tensor, got {what}.")
    flat = _flat(values)
    found = flat[flat != 0].to(torch.int64)
    given = _flat(shifted).to(found.device)
    given = given[given != 0]
    foreign = found[~torch.isin(found, given)]
    if foreign.numel():
        raise LayoutError(
            f"the packer returned {int(foreign[0]) - 1}, which is none of the micro-batch's rows ({foreign.numel()} such "
            "positions): it must fill with 0, not with a padding token, and keep integers as they are."
        )
    once, count = torch.unique(found, return_counts=True)
    # Rows that were given twice, of samples that fill a batch up, may come twice.
    if bool((count > 1).any()) and torch.unique(given).numel() == given.numel():
        at = int(count.argmax())
        raise LayoutError(
            f"the packer returned row {int(once[at]) - 1} {int(count[at])} times: it must fill with 0, not with that number."
        )
    return values.to(torch.int64) - 1


def _wide(rows: Any) -> Tensor:
    return torch.as_tensor(rows).to(torch.int64)


def _flat(values: Container) -> Tensor:
    """Return all values of a container, [n]."""
    if isinstance(values, Tensor) and not values.is_nested:
        return values.reshape(-1)
    parts = [part.reshape(-1) for part in as_samples(values, "rows")]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
