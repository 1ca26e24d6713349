"""The routes of one request on the host: its prompt's rows, which n completions share, and its own rows behind them.

Beside each row stands the id of the token that the model ran there, where it was seen: what finish() is given must be these.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_router_replay.capture.buffer import UNSEEN

_FIRST_ROWS = 32
"""Rows that a request's generation gets at least; always a power of two, so that it is copied seldom."""

Array = NDArray[Any]


class PromptRoutes:
    """The rows of one prompt, allocated once; every completion of the prompt holds this object, none a copy.

    Args:
        num_tokens: of the prompt.
        num_layers, topk, dtype: of the rows.
    """

    def __init__(self, num_tokens: int, num_layers: int, topk: int, dtype: np.dtype[Any]) -> None:
        self.rows: Array = np.zeros((num_tokens, num_layers, topk), dtype)
        self.written = np.zeros(num_tokens, np.bool_)
        self.token_ids = np.full(num_tokens, UNSEEN, np.int32)
        self.is_shared = False
        self._int16: Array | None = None

    def write(self, position: int, rows: Array, token_ids: NDArray[np.int32]) -> None:
        """Store rows from `position` on; of a shared prompt only those that no other completion stored before."""
        where = slice(position, position + len(rows))
        if self.is_shared:
            new = ~self.written[where]
            if not new.any():
                return
            self.rows[where][new] = rows[new]
            self.token_ids[where][new] = token_ids[new]
        else:
            self.rows[where] = rows
            self.token_ids[where] = token_ids
        self.written[where] = True
        self._int16 = None

    @property
    def num_bytes(self) -> int:
        return int(self.rows.nbytes + self.written.nbytes + self.token_ids.nbytes)

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
        self._token_ids: NDArray[np.int32] = prompt.token_ids[:0]

    @property
    def is_dropped(self) -> bool:
        """Whether nobody will ask for rows that are still on their way: it ended, and no other request needs its prompt."""
        return self.is_released and not self.prompt.is_shared

    def write(self, position: int, rows: Array, token_ids: NDArray[np.int32]) -> None:
        """Store what a forward says of consecutive positions; what a later forward says of them replaces it.

        Args:
            position: of the first row.
            rows: [n, num_layers, topk].
            token_ids: [n], UNSEEN where they are not known.
        """
        in_prompt = self.num_prompt_tokens - position
        if in_prompt > 0:
            # Completions that share the prompt still need what this one forwarded of it.
            if not self.is_released or self.prompt.is_shared:
                self.prompt.write(position, rows[:in_prompt], token_ids[:in_prompt])
            rows, token_ids = rows[in_prompt:], token_ids[in_prompt:]
            position += in_prompt
        if len(rows) and not self.is_released:
            start = position - self.num_prompt_tokens
            end = start + len(rows)
            if end > len(self._rows):
                self._grow(max(1 << (end - 1).bit_length(), _FIRST_ROWS))
            self._rows[start:end] = rows
            self._written[start:end] = True
            self._token_ids[start:end] = token_ids

    def seen_token_ids(self, num_rows: int) -> NDArray[np.int32]:
        """Return the ids of the tokens that the model ran, of the prompt and at most `num_rows` rows behind it."""
        return np.concatenate([self.prompt.token_ids, self._token_ids[:num_rows]])

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
        self._token_ids = self._token_ids[:0].copy()

    def abandon(self) -> None:
        """Release, and give a prompt back that no other request shares; steps on their way may still hold this request."""
        self.release()
        if not self.prompt.is_shared:
            num_layers, topk = self.prompt.rows.shape[1:]
            self.prompt = PromptRoutes(0, num_layers, topk, self.prompt.rows.dtype)

    @property
    def num_bytes(self) -> int:
        return int(self._rows.nbytes + self._written.nbytes + self._token_ids.nbytes)

    def _grow(self, capacity: int) -> None:
        rows = np.empty((capacity, *self._rows.shape[1:]), self._rows.dtype)
        written = np.zeros(capacity, np.bool_)
        token_ids = np.full(capacity, UNSEEN, np.int32)
        num_rows = len(self._rows)
        rows[:num_rows], written[:num_rows], token_ids[:num_rows] = self._rows, self._written, self._token_ids
        self._rows, self._written, self._token_ids = rows, written, token_ids


def as_int16(rows: Array, written: NDArray[np.bool_]) -> Array:
    """Return rows as int16, read-only, with -1 where nothing was written; a view where nothing changes."""
    if rows.dtype == np.int16 and bool(written.all()):
        rows = rows.view()
    else:
        rows = rows.astype(np.int16)
        rows[~written] = -1
    rows.flags.writeable = False
    return rows
