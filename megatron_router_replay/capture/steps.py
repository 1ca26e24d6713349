"""Whose token each row of a forward is: request ids and positions -> the slots and positions of every captured request."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_router_replay.capture.errors import CaptureError
from megatron_router_replay.capture.requests import RequestRoutes

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepPart:
    """One request's tokens in one forward: row `slots[i]` of the buffer is token `positions[i]` of the request."""

    request: RequestRoutes
    slots: IntArray
    positions: IntArray


def token_positions(attention_mask: Any) -> IntArray:
    """Return the position of each token in its own sequence, -1 on padding; for left and right padding alike.

    Args:
        attention_mask: [batch, length], nonzero on tokens; a torch tensor, numpy array or list.

    Returns:
        [batch, length] int64.
    """
    mask = as_positions(attention_mask) != 0
    positions: IntArray = np.where(mask, np.cumsum(mask, axis=-1) - 1, -1)
    return positions


def as_positions(values: Any) -> IntArray:
    """Return integers of any kind as an int64 array.

    Raises:
        CaptureError: they are no integers.
    """
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.dtype.kind not in "iub" and array.size:
        raise CaptureError(f"positions must be integers, got {array.dtype}.")
    return array.astype(np.int64)


def iterate_requests(
    request_ids: Sequence[Hashable | None],
    positions: IntArray,
    *,
    query_lengths: Sequence[int] | None,
    sequence_first: bool,
) -> Iterator[tuple[Hashable, IntArray, IntArray]]:
    """Yield (request id, slots, positions) of each entry of a batch that is not None.

    Args:
        request_ids: one per sequence of the batch.
        positions: [batch, length], [length, batch] if `sequence_first`, [batch] for one token each, or with `query_lengths`
            [sum of them], one sequence behind the other.

    Raises:
        CaptureError: the shapes do not fit one another.
    """
    num_requests = len(request_ids)
    slots: IntArray = np.arange(positions.size, dtype=np.int64)
    if query_lengths is not None:
        lengths = [int(length) for length in query_lengths]
        if positions.ndim != 1 or len(lengths) != num_requests or sum(lengths) != positions.size or min(lengths) < 0:
            raise CaptureError(
                f"query_lengths {lengths} (sum {sum(lengths)}) do not fit {num_requests} requests and positions of shape "
                f"{list(positions.shape)}: give one length a request, positions [sum of the lengths]."
            )
        bounds = np.cumsum(lengths)[:-1]
        yield from _present(request_ids, np.split(slots, bounds), np.split(positions, bounds))
        return
    if positions.ndim == 1:
        positions = positions[None, :] if sequence_first else positions[:, None]
    if positions.ndim == 2:
        slots = slots.reshape(positions.shape)
        if sequence_first:
            slots, positions = slots.T, positions.T
    if positions.ndim != 2 or positions.shape[0] != num_requests:
        raise CaptureError(
            f"positions of shape {list(positions.shape)} do not fit {num_requests} requests: expected [batch, length], or "
            "[batch] with one token each, or [tokens] with query_lengths."
        )
    yield from _present(request_ids, list(slots), list(positions))


def _present(
    request_ids: Sequence[Hashable | None], slots: Sequence[IntArray], positions: Sequence[IntArray]
) -> Iterator[tuple[Hashable, IntArray, IntArray]]:
    for request_id, own_slots, own_positions in zip(request_ids, slots, positions):
        if request_id is None:
            continue
        if own_positions.size == 1:
            if own_positions[0] >= 0:
                yield request_id, own_slots, own_positions
            continue
        tokens = own_positions >= 0
        yield request_id, own_slots[tokens], own_positions[tokens]
