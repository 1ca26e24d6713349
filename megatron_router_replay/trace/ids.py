"""Expert ids: their compact dtype, filler for rows without a route, the one check that they can be routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_router_replay.errors import TraceError, listed
from megatron_router_replay.trace.rows import put_rows

MAX_EXPERTS = 32768
"""The largest number of ids in int16."""

_CHECK_BYTES = 2 << 20
"""Bytes that a step of a check reads, whatever the size of the trace: they fit into a processor's cache."""


def index_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest dtype of every expert id: uint8 up to 256 experts, else int16.

    Raises:
        TraceError: num_experts is below 1 or above 32768.
    """
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise TraceError(
            f"MRR101: cannot store expert ids of num_experts={num_experts}: it must lie in 1..{MAX_EXPERTS}."
        )
    return torch.uint8 if num_experts <= 256 else torch.int16


def empty_routes(
    num_rows: int, num_layers: int, topk: int, *, num_experts: int, device: torch.device | None = None
) -> Tensor:
    """Return [num_rows, num_layers, topk] of `index_dtype(num_experts)`, with any values.

    On a CPU, numpy's memory lies in huge pages where the system has them: the first write of 100 MB takes 70 ms less.
    """
    shape, dtype = (num_rows, num_layers, topk), index_dtype(num_experts)
    if device is not None and device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(shape, np.uint8 if dtype == torch.uint8 else np.int16))


def fill_unrouted(indices: Tensor, replay_mask: Tensor, *, num_experts: int) -> None:
    """Write distinct ids, spread evenly over all experts, into the rows without a route, in every layer, in place.

    Row i takes the ids i * topk .. i * topk + topk - 1, modulo num_experts.

    Args:
        indices: [num_tokens, num_layers, topk] of `index_dtype(num_experts)`.
        replay_mask: [num_tokens] bool, False: this row is written.
    """
    _, num_layers, topk = indices.shape
    step = max(1, _CHECK_BYTES // max(1, num_layers * topk * indices.element_size()))
    places = torch.arange(topk, device=indices.device)
    unrouted = (~replay_mask).nonzero()[:, 0]
    for start in range(0, len(unrouted), step):
        rows = unrouted[start : start + step]
        ids = ((rows.unsqueeze(1) * topk + places) % num_experts).to(indices.dtype)
        put_rows(indices, rows, ids.unsqueeze(1).expand(-1, num_layers, -1).contiguous())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InvalidRoutes:
    """Routes that no router can have chosen, and their places.

    Args:
        cause: "outside" (an id is no expert's) or "repeated" (a route names an expert twice).
        rows: [rows, layers, topk], the checked rows.
        invalid: [rows, layers] bool, True: this route is at fault. At least one is.
        num_experts: experts in each layer.
    """

    cause: str
    rows: npt.NDArray[Any]
    invalid: npt.NDArray[np.bool_]
    num_experts: int

    def describe(self, layer_numbers: Sequence[int], *, first_row: int = 0) -> str:
        """Return the fault and its place: the first row and layer, its ids, the number of such routes.

        Args:
            layer_numbers: of each entry of axis 1.
            first_row: the caller's number of row 0.
        """
        row, layer = (int(i) for i in np.argwhere(self.invalid)[0])
        layers = [layer_numbers[i] for i in np.flatnonzero(self.invalid.any(axis=0)).tolist()]
        outside = f"an id lies outside 0..{self.num_experts - 1}"
        problem = "an expert is named twice" if self.cause == "repeated" else outside
        return (
            f"row {first_row + row}, layer {layer_numbers[layer]} of topk_indices is {self.rows[row, layer].tolist()}: "
            f"{problem} ({int(self.invalid.sum())} such routes in layers [{listed(layers)}])."
        )


def find_outside(rows: npt.NDArray[Any], *, num_experts: int) -> InvalidRoutes | None:
    """Return the routes of rows [rows, layers, topk], any integer dtype, with an id that is no expert's; None if none is."""
    limits = np.iinfo(rows.dtype)  # ids outside of the dtype's range need no search
    is_low = rows.size and limits.min < 0 and int(rows.min()) < 0
    if not is_low and not (rows.size and limits.max >= num_experts and int(rows.max()) >= num_experts):
        return None
    outside = np.asarray(((rows < 0) | (rows >= num_experts)).any(axis=2))
    return InvalidRoutes(cause="outside", rows=rows, invalid=outside, num_experts=num_experts)


def find_invalid_routes(
    rows: npt.NDArray[Any], *, num_experts: int, out: npt.NDArray[Any] | None = None
) -> InvalidRoutes | None:
    """Return the routes that no router can have chosen, or None; ids outside the range come before repeats.

    Args:
        rows: [rows, layers, topk], any integer dtype; a block that fits the cache, since it is read several times.
        out: gets a copy of rows without an id outside the range; of the same shape, in the narrow dtype.
    """
    outside = find_outside(rows, num_experts=num_experts)
    if outside is not None or not rows.size:
        return outside
    # Every id is an expert's, so the narrow dtype is wide enough; comparing fewer bytes is faster.
    if out is None:
        narrow = rows.astype(np.uint8 if num_experts <= 256 else np.int16, copy=False)
    else:
        out[:] = rows
        narrow = out
    if not has_repeats(narrow):
        return None
    ordered = np.sort(narrow, axis=2)
    repeated = np.asarray((ordered[..., 1:] == ordered[..., :-1]).any(axis=2))
    return InvalidRoutes(cause="repeated", rows=rows, invalid=repeated, num_experts=num_experts)


def has_repeats(rows: npt.NDArray[Any]) -> bool:
    """Return whether a route of rows [rows, layers, topk] names an expert twice; meant for blocks that fit the cache.

    Each column of ids is compared with those `step` columns later. Columns are copied to contiguous planes first, which is
    many times faster than sorting short rows, or than the same in torch, which copies such short rows slowly.
    """
    topk = rows.shape[2]
    planes = np.ascontiguousarray(rows.reshape(-1, topk).T)
    return any(bool((planes[step:] == planes[:-step]).any()) for step in range(1, topk))


def check_topk_indices(
    indices: Tensor | npt.NDArray[Any],
    *,
    num_experts: int,
    layer_numbers: Sequence[int],
    replay_mask: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Raise unless every id is an expert's and no row names an expert twice; bounded memory.

    Args:
        indices: [num_tokens, num_layers, topk], any integer dtype, on any device.
        replay_mask: [num_tokens] bool, False: this row is not checked. Default: all rows are.
        out: of the shape of `indices` and of `index_dtype(num_experts)`, both on the CPU: gets a copy of the checked rows in
            the same pass; the other rows are undefined.

    Raises:
        TraceError: names the first layer and row at fault.
    """
    num_tokens, num_layers, topk = indices.shape
    step = max(1, _CHECK_BYTES // max(1, num_layers * topk * indices.itemsize))
    for start in range(0, num_tokens, step):
        block = indices[start : start + step]
        rows = block.cpu().numpy() if isinstance(block, Tensor) else block
        copies = None if out is None else out[start : start + step].numpy()
        place = np.arange(start, start + len(rows))
        mask = None
        if replay_mask is not None:
            mask = replay_mask[start : start + step].cpu().numpy()
            if mask.all():
                mask = None
            else:
                rows, place = rows[mask], place[mask]
        fault = find_invalid_routes(rows, num_experts=num_experts, out=copies if mask is None else None)
        if fault is None:
            if mask is not None and copies is not None:
                copies[:] = block  # all rows, which is faster than to choose some
            continue
        first = int(np.flatnonzero(fault.invalid.any(axis=1))[0])
        if fault.cause == "repeated":
            advice = (
                "The usual cause is lost data, sent as zeros; mark rows without a route with -1 or replay_mask instead."
            )
        else:
            advice = (
                "Is num_experts right? An engine under expert load balancing may send physical ids. A row without a "
                "route is -1 in every layer."
            )
        # Masked rows are left out of `rows`, so the distance to the row's own place differs from row to row.
        raise TraceError(f"MRR103: {fault.describe(layer_numbers, first_row=int(place[first]) - first)} {advice}")
