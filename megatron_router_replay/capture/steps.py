"""Whose token each row of a forward is: request ids and positions -> the slots and positions of every captured request."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_router_replay.capture.errors import CaptureError
from megatron_router_replay.capture.requests import RequestRoutes

IntArray = NDArray[np.int64]

SlottedPositions = tuple[IntArray, int, int]
"""One sequence's positions, and the slot of entry i: first + i * step, as (positions, first, step)."""

FindRequest = Callable[[Hashable], "RequestRoutes | None"]
"""request id -> its routes, None where it is not captured; raises where it is not running."""


_INT64 = np.dtype(np.int64)  # there is one such object, and asking for it is cheaper than a call that changes nothing

_STEPS_AHEAD = 32
"""Decode steps whose positions a plan works out at once."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """Consecutive tokens of one request in one forward: row slots[i] of the buffer is token position + i."""

    request: RequestRoutes
    slots: slice
    position: int


class StepPlan:
    """Whose tokens a forward holds; decode steps that go on one token further share the plan of the first.

    `is_decode` says that it holds one token of each request.

    Args:
        request_ids, positions, query_lengths, sequence_first: of begin_forward.
        find: looks a request up.

    Raises:
        CaptureError: see `iterate_runs`, or `find` raised.
    """

    def __init__(
        self,
        request_ids: Sequence[Hashable | None],
        positions: IntArray,
        *,
        query_lengths: Sequence[int] | None,
        sequence_first: bool,
        find: FindRequest,
    ) -> None:
        self.num_tokens = positions.size
        self.parts: list[StepPart] = []
        for request_id, slots, position in iterate_runs(
            request_ids, positions, query_lengths=query_lengths, sequence_first=sequence_first
        ):
            request = find(request_id)
            if request is not None:
                self.parts.append(StepPart(request, slots, position))
        self.num_steps = 0
        self._request_ids = list(request_ids)
        self.is_decode = query_lengths is None and positions.size == len(self._request_ids)
        self._first = positions.flatten()
        self._expected = [self._first.tobytes()]  # the positions of the steps to come, the next one last

    def holds_for(self, request_ids: Sequence[Hashable | None], positions: IntArray) -> bool:
        """Return whether a forward is this plan's next step: the same requests in the same rows, each a token further."""
        return (
            self.is_decode
            and positions.size == self.num_tokens
            and positions.tobytes() == self._expected[-1]
            and self._request_ids == list(request_ids)
        )

    def advance(self) -> int:
        """Count a step that ran; return how many of the plan ran before it."""
        self.num_steps += 1
        if self.is_decode:
            # For many steps at a time: between two forwards numpy is in no cache; one addition took 25 us of a step's 400.
            if len(self._expected) > 1:
                self._expected.pop()
            else:
                steps = range(self.num_steps + _STEPS_AHEAD - 1, self.num_steps - 1, -1)
                self._expected = [(self._first + (self._first >= 0) * step).tobytes() for step in steps]
        return self.num_steps - 1


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
    if array.dtype is _INT64:
        return array
    if array.dtype.kind not in "iub" and array.size:
        raise CaptureError(f"positions must be integers, got {array.dtype}.")
    return array.astype(np.int64)


def iterate_runs(
    request_ids: Sequence[Hashable | None],
    positions: IntArray,
    *,
    query_lengths: Sequence[int] | None,
    sequence_first: bool,
) -> Iterator[tuple[Hashable, slice, int]]:
    """Yield (request id, slots, first position) of each run of consecutive tokens, None and padding left out.

    Args:
        request_ids: one per sequence of the batch.
        positions: [batch, length], [length, batch] if `sequence_first`, [batch] for one token each, or with `query_lengths`
            [sum of them], one sequence behind the other.

    Raises:
        CaptureError: the shapes do not fit one another, or a position is below -1.
    """
    if positions.size and positions.min() < -1:
        raise CaptureError(f"a position is {positions.min()}: tokens count from 0, padding is -1.")
    batch = len(request_ids)
    if query_lengths is not None:
        sequences = _packed_sequences(positions, [int(length) for length in query_lengths], batch)
    else:
        rows = _rows_of_batch(positions, batch, sequence_first=sequence_first)
        if rows.size == batch:
            yield from _single_tokens(request_ids, rows)
            return
        # Slots count through the forward's tokens as they lie in memory: [length, batch] steps over the other sequences.
        length = rows.shape[1]
        sequences = [(row, i, batch) if sequence_first else (row, i * length, 1) for i, row in enumerate(rows)]
    for request_id, (sequence, first_slot, step) in zip(request_ids, sequences):
        if request_id is not None:
            yield from _runs(request_id, sequence, first_slot, step)


def _single_tokens(
    request_ids: Sequence[Hashable | None], positions: IntArray
) -> Iterator[tuple[Hashable, slice, int]]:
    """Yield the runs of a decode step: one token each, so no array operation per request pays."""
    for slot, (request_id, position) in enumerate(zip(request_ids, positions.ravel().tolist())):
        if request_id is not None and position >= 0:
            yield request_id, slice(slot, slot + 1, 1), position


def _packed_sequences(positions: IntArray, lengths: list[int], batch: int) -> list[SlottedPositions]:
    """Cut positions that stand one sequence behind the other."""
    fits = positions.ndim == 1 and len(lengths) == batch and sum(lengths) == positions.size
    if not fits or min(lengths, default=0) < 0:
        raise CaptureError(
            f"query_lengths {lengths} (sum {sum(lengths)}) do not fit {batch} requests and positions of shape "
            f"{list(positions.shape)}: give one length a request, positions [sum of the lengths]."
        )
    starts = [0, *accumulate(lengths)]
    return [(positions[start : start + length], start, 1) for start, length in zip(starts, lengths)]


def _rows_of_batch(positions: IntArray, batch: int, *, sequence_first: bool) -> IntArray:
    """Return positions as [batch, length], or [batch] of one token each."""
    if positions.ndim == 2 and sequence_first:
        positions = positions.T
    if positions.ndim not in (1, 2) or positions.shape[0] != batch:
        raise CaptureError(
            f"positions of shape {list(positions.shape)} do not fit {batch} requests: expected [batch, length], or [batch] "
            "with one token each, or [tokens] with query_lengths."
        )
    return positions


def _runs(request_id: Hashable, positions: IntArray, first: int, step: int) -> Iterator[tuple[Hashable, slice, int]]:
    """Split one sequence's positions, of which entry i is in slot first + i * step."""
    ends = np.flatnonzero(positions[1:] != positions[:-1] + 1) + 1
    bounds = [0, *ends.tolist(), positions.size]
    for begin, end in pairwise(bounds):
        if begin == end:
            continue
        # Padding is -1, 0, 1, ... where the first token follows it.
        skip = 1 if positions[begin] < 0 else 0
        if begin + skip < end:
            slots = slice(first + (begin + skip) * step, first + (end - 1) * step + 1, step)
            yield request_id, slots, int(positions[begin + skip])
