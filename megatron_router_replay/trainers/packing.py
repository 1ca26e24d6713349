"""Rows through a trainer's own packer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.trainers.containers import Container, flatten, is_list


def pack_rows(pack: Callable[[Any], Tensor], rows: Container) -> Tensor:
    """Return rows as the trainer's packer lays out tokens. It is pack(rows + 1) - 1, so that a fill of 0 becomes -1, no
    row.

    Args:
        pack: the trainer's packer, for one micro-batch, given all that it needs but the tokens; it must fill with 0. It
            may pad, pack, permute, truncate and split over context-parallel ranks.
        rows: the micro-batch's routing rows, in the container that the packer takes its tokens in.

    Returns:
        What the packer returns, int64, -1 where it filled.

    Raises:
        LayoutError: it returns no integers, or numbers that are no rows or a row twice: it fills with another number than 0.
            On a GPU the numbers are checked without waiting for it: an assertion of the device fails instead.
    """
    # Widened first, for a packer keeps the dtype.
    shifted: Any = [_wide(part) + 1 for part in rows] if is_list(rows) else _wide(rows) + 1
    values = pack(shifted)
    is_integer = isinstance(values, Tensor) and not (
        values.is_floating_point() or values.is_complex() or values.dtype is torch.bool
    )
    if not is_integer:
        what = f"{values.dtype}" if isinstance(values, Tensor) else type(values).__name__
        raise LayoutError(f"MRR803: the packer must return the packed rows as an integer tensor, got {what}.")
    given = flatten(shifted).to(values.device, non_blocking=True)
    _check(given, values.reshape(-1), waits=not values.is_cuda)
    return values.to(torch.int64) - 1


def _check(given: Tensor, found: Tensor, *, waits: bool) -> None:
    """Raise LayoutError unless the packer returned 0 and rows that it was given; without waiting, the device asserts it."""
    # 0 stands in front of the rows, where a fill finds itself.
    ordered, again = torch.cat([given.new_zeros(1), given]).sort().values, found.sort().values
    at = torch.searchsorted(ordered, found).clamp(max=len(ordered) - 1)
    foreign = ordered[at] != found
    repeated = (again[1:] == again[:-1]) & (again[1:] != 0)
    # Rows that were given twice, of samples that fill a batch up, may come twice.
    twice = repeated & ~((ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)).any()
    for failed, values, what in (
        (foreign, found, "which the micro-batch does not have: it must fill with 0, not with a padding token"),
        (twice, again[1:], "twice: it must fill with 0, not with that number"),
    ):
        if not waits:
            torch._assert_async(~failed.any(), f"the packer returned a row {what}")
        elif bool(failed.any()):
            raise LayoutError(
                f"MRR803: the packer returned row {int(values[failed][0]) - 1}, {what}, and keep integers as they are."
            )


def _wide(rows: Any) -> Tensor:
    return torch.as_tensor(rows).to(torch.int64)
