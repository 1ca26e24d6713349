"""Expert ids: their compact dtype, filler for rows without a route, the one check that they can be routes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_router_replay.errors import TraceError, listed

MAX_EXPERTS = 32768
"""The largest number of ids in int16."""

_CHECK_BYTES = 2 << 20
"""Bytes that a step of a check reads, whatever the size of the trace: they fit into a processor's cache."""

_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
"""The unsigned word of `topk` bytes, one for each column of a route."""


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


def spread_experts(start: int, num_rows: int, *, topk: int, num_experts: int) -> Tensor:
    """Return `topk` distinct expert ids for each of `num_rows` rows without a route, spread evenly over all experts.

    Row i takes the ids (start + i) * topk .. + topk - 1, modulo num_experts: no expert gets more than
    ceil(num_rows * topk / num_experts) of them.

    Returns:
        [num_rows, topk] of `index_dtype(num_experts)`.
    """
    ids = torch.arange(start * topk, (start + num_rows) * topk, dtype=torch.int64) % num_experts
    return ids.view(num_rows, topk).to(index_dtype(num_experts))


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
    if not rows.size or (int(rows.min()) >= 0 and int(rows.max()) < num_experts):
        return None
    outside = np.asarray(((rows < 0) | (rows >= num_experts)).any(axis=2))
    return InvalidRoutes(cause="outside", rows=rows, invalid=outside, num_experts=num_experts)


def find_invalid_routes(rows: npt.NDArray[Any], *, num_experts: int) -> InvalidRoutes | None:
    """Return the routes that no router can have chosen, or None; ids outside the range come before repeats.

    Args:
        rows: [rows, layers, topk], any integer dtype; a block that fits the cache, since it is read several times.
    """
    outside = find_outside(rows, num_experts=num_experts)
    if outside is not None or not rows.size:
        return outside
    # Every id is an expert's, so the narrow dtype is wide enough; comparing fewer bytes is faster.
    narrow = rows.astype(np.uint8 if num_experts <= 256 else np.int16, copy=False)
    if has_repeats(narrow):
        return InvalidRoutes(cause="repeated", rows=rows, invalid=repeated_routes(narrow), num_experts=num_experts)
    return None


def repeated_routes(rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which routes of rows [rows, layers, topk] name an expert twice, [rows, layers] bool."""
    ordered = np.sort(rows, axis=2)
    return np.asarray((ordered[..., 1:] == ordered[..., :-1]).any(axis=2))


def has_repeats(rows: npt.NDArray[Any]) -> bool:
    """Return whether a route of rows [rows, layers, topk] names an expert twice; meant for blocks that fit the cache.

    For topk 2, 4 and 8 every id is compared with the id `step` places later, across the ends of routes too, so that
    nothing has to be moved; a word has a route's answers, and those across its end are left out once for all routes.
    For others the columns become contiguous planes. Both are many times faster than sorting short rows, or than the
    same in torch, which copies such short rows slowly.
    """
    topk = rows.shape[2]
    if topk not in _WORDS:
        planes = np.ascontiguousarray(rows.reshape(-1, topk).T)
        return any(bool((planes[step:] == planes[:-step]).any()) for step in range(1, topk))
    flat = rows.reshape(-1)
    same = np.zeros(flat.size, np.bool_)
    for step in range(1, topk):
        np.equal(flat[step:], flat[:-step], out=same[:-step])
        answers = np.bitwise_or.reduce(same.view(_WORDS[topk]))
        # Bytes beyond the first topk - step compare a route with the next one.
        if any(answers.tobytes()[: topk - step]):
            return True
    return False


def _blocks(shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each block of [rows, layers, topk] and the row after its last."""
    step = max(1, _CHECK_BYTES // max(1, shape[1] * shape[2] * itemsize))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def first_invalid(
    indices: Tensor, *, num_experts: int, replay_mask: Tensor | None = None
) -> tuple[InvalidRoutes, npt.NDArray[np.int64]] | None:
    """Return the first block's routes that no router can have chosen, and the row of each entry; bounded memory.

    Args:
        indices: [num_tokens, num_layers, topk], any integer dtype, on any device.
        replay_mask: [num_tokens] bool, False: this row is not looked at. Default: all rows are.
    """
    for start, stop in _blocks(indices.shape, indices.element_size()):
        rows = indices[start:stop].cpu().numpy()
        place = np.arange(start, stop)
        if replay_mask is not None:
            mask = replay_mask[start:stop].cpu().numpy()
            if not mask.all():
                rows, place = rows[mask], place[mask]
        fault = find_invalid_routes(rows, num_experts=num_experts)
        if fault is not None:
            return fault, place
    return None


def check_topk_indices(
    indices: Tensor,
    *,
    num_experts: int,
    layer_numbers: Sequence[int],
    replay_mask: Tensor | None = None,
    first_row: int = 0,
) -> None:
    """Raise unless every id is an expert's and no row names an expert twice; arguments as of `first_invalid`.

    Args:
        first_row: the number of row 0, for the message.

    Raises:
        TraceError: names the first layer and row at fault.
    """
    invalid = first_invalid(indices, num_experts=num_experts, replay_mask=replay_mask)
    if invalid is None:
        return
    fault, place = invalid
    first = int(np.flatnonzero(fault.invalid.any(axis=1))[0])
    if fault.cause == "repeated":
        advice = (
            "The usual cause is lost data, sent as zeros; mark rows without a route with -1 or replay_mask instead."
        )
    else:
        advice = (
            "Is num_experts right? An engine under expert load balancing may send physical ids. A row without a route "
            "is -1 in every layer."
        )
    # Masked rows are left out of `rows`, so the distance to the row's own place differs from row to row.
    raise TraceError(
        f"MRR103: {fault.describe(layer_numbers, first_row=first_row + int(place[first]) - first)} {advice}"
    )
