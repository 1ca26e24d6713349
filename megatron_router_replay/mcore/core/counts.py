"""Counts of a session: added on their device, and read together at its end, with one synchronization."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.mcore.core.streams import current_stream, wait_stream

_MAX_PENDING = 256
"""Scalars on a device that wait to be read; more are added up there first, because a freeze may last a whole training."""


class Counts:
    """Counts by name. Scalars on a GPU stay there, without an operation, until `read`."""

    __slots__ = ("_counts", "_limit", "_lock", "_pending")

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._pending: list[tuple[str, Tensor, Any]] = []  # with the stream that makes it: a different one may read it
        self._limit = _MAX_PENDING
        self._lock = threading.Lock()  # several threads may run backwards at once

    def __getitem__(self, name: str) -> int:
        """Return a count, without the scalars that `read` has not read."""
        return self._counts.get(name, 0)

    def add(self, **counts: Tensor | int) -> None:
        """Add to counts by name; scalars, of which a bool counts as 0 or 1."""
        with self._lock:
            for name, count in counts.items():
                if isinstance(count, int) or count.device.type == "cpu":
                    self._counts[name] = self._counts.get(name, 0) + int(count)
                    continue
                self._pending.append((name, count, current_stream(count.device) if count.is_cuda else None))
                if len(self._pending) > self._limit:
                    self._add_up()

    def _add_up(self) -> None:
        by_name: dict[str, list[Tensor]] = {}
        for name, count, stream in self._pending:
            wait_stream(stream, count)
            by_name.setdefault(name, []).append(count)
        sums = {name: torch.stack(parts).sum() for name, parts in by_name.items()}
        self._pending = [
            (name, total, current_stream(total.device) if total.is_cuda else None) for name, total in sums.items()
        ]
        self._limit = len(self._pending) + _MAX_PENDING

    @staticmethod
    def read(all_counts: Iterable[Counts]) -> None:
        """Bring all scalars on a GPU to the host in one copy."""
        taken: list[tuple[Counts, tuple[str, Tensor, Any]]] = []
        for counts in all_counts:
            with counts._lock:
                taken += [(counts, each) for each in counts._pending]
                counts._pending = []
        if not taken:
            return
        try:
            for _, (_, count, stream) in taken:
                wait_stream(stream, count)
            # One copy for all sessions' counts: each would wait for the device.
            values = torch.cat([count.reshape(1) for _, (_, count, _) in taken]).tolist()
        except BaseException:  # a later read must find them
            for counts, each in taken:
                with counts._lock:
                    counts._pending.append(each)
            raise
        for (counts, (name, *_)), count in zip(taken, values):
            counts.add(**{name: int(count)})
