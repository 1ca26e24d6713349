"""The routes of one request on the host: its prompt's rows, which n completions share, and its own rows behind them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FIRST_ROWS = 32
"""Rows that a request's generation gets at first; doubled whenever they do not suffice."""

Array = NDArray[Any]


class PromptRoutes:
    """The rows of one prompt, allocated once; every completion of the prompt holds this object, none a copy.

    Args:
        num_tokens: of the prompt.
        num_layers, topk, dtype, unwritten: as in the device buffer.
    """

    def __init__(self, num_tokens: int, num_layers: int, topk: int, dtype: np.dtype[Any], unwritten: int) -> None:
        self.rows: Array = np.full((num_tokens, num_layers, topk), unwritten, dtype)
        self.written = np.zeros(num_tokens, np.bool_)
        self.is_shared = False
        self._int16: Array | None = None

    def write(self, position: int, rows: Array) -> None:
        """Store rows from `position` on; of a shared prompt only those that no other completion stored before."""
        where = slice(position, position + len(rows))
        if self.is_shared:
            new = ~self.written[where]
            if not new.any():
                return
            self.rows[where][new] = rows[new]
        else:
            self.rows[where] = rows
        self.written[where] = True
        self._int16 = None

    def as_int16(self) -> Array:
        """Return the rows as int16, -1 where none was captured; the same array for every completion."""
        if self._int16 is None:
            self._int16 = as_int16(self.rows, self.written)
        return self._int16


class RequestRoutes:
    """One request: the prompt, and the rows behind it, which grow geometrically.

    Args:
        request_id: the engine's.
        prompt: new, or that of the request whose prompt this one shares.
        num_cached_tokens: leading positions that the engine takes from its prefix cache and never forwards.
    """

    def __init__(self, request_id: Hashable, prompt: PromptRoutes, num_cached_tokens: int) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.num_prompt_tokens = len(prompt.rows)
        self.num_cached_tokens = num_cached_tokens
        self.is_released = False
        self._rows: Array = prompt.rows[:0]
        self._written: NDArray[np.bool_] = prompt.written[:0]

    def write(self, position: int, rows: Array) -> None:
        """Store rows [n, num_layers, topk] from `position` on; what a later forward says of a position holds."""
        in_prompt = self.num_prompt_tokens - position
        if in_prompt > 0:
            # Completions that share the prompt still need what this one forwarded of it.
            if not self.is_released or self.prompt.is_shared:
                self.prompt.write(position, rows[:in_prompt])
            rows = rows[in_prompt:]
            position += in_prompt
        if len(rows) and not self.is_released:
            start = position - self.num_prompt_tokens
            end = start + len(rows)
            if end > len(self._rows):
                self._grow(max(end, 2 * len(self._rows), _FIRST_ROWS))
            self._rows[start:end] = rows
            self._written[start:end] = True

    def generation(self, num_rows: int) -> tuple[Array, NDArray[np.bool_]]:
        """Return the first rows behind the prompt and which of them were written; copies of exactly that size."""
        held = min(num_rows, len(self._rows))
        rows = np.empty((num_rows, *self._rows.shape[1:]), self._rows.dtype)
        written = np.zeros(num_rows, np.bool_)
        rows[:held], written[:held] = self._rows[:held], self._written[:held]
        return rows, written

    def release(self) -> None:
        """Give the memory back; own rows that are still on their way are dropped."""
        self.is_released = True
        self._rows, self._written = self._rows[:0].copy(), self._written[:0].copy()

    @property
    def num_bytes(self) -> int:
        return int(self._rows.nbytes + self._written.nbytes)

    def _grow(self, capacity: int) -> None:
        rows = np.empty((capacity, *self._rows.shape[1:]), self._rows.dtype)
        written = np.zeros(capacity, np.bool_)
        rows[: len(self._rows)], written[: len(self._written)] = self._rows, self._written
        self._rows, self._written = rows, written


def as_int16(rows: Array, written: NDArray[np.bool_]) -> Array:
    """Return rows as int16, read-only, with -1 where nothing was written; a view where nothing changes."""
    if rows.dtype == np.int16 and bool(written.all()):
        rows = rows.view()
    else:
        rows = rows.astype(np.int16)
        rows[~written] = -1
    rows.flags.writeable = False
    return rows
