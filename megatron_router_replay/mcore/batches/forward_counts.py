"""Counts that a forward makes: they travel from its inputs and its micro-batch to its chunk, its rank and the report."""

from __future__ import annotations

from collections.abc import Iterable
from operator import add
from typing import NamedTuple


class ForwardCounts(NamedTuple):
    """Counts of a forward, or their sum over forwards, chunks or ranks.

    Names and meanings are those of `judge.report.SessionReport`. Where a count is made, it is given by name.
    """

    microbatches: int = 0
    rows_replayed: int = 0
    rows_live: int = 0
    rows_padding: int = 0
    rows_repeated: int = 0
    segments_ambiguous: int = 0

    @property
    def rows(self) -> int:
        """The rows that were routed, with padding."""
        return self.rows_replayed + self.rows_live + self.rows_padding

    def __add__(self, other: ForwardCounts) -> ForwardCounts:  # type: ignore[override]
        """Return the sum of each count; a tuple would be lengthened."""
        return ForwardCounts(*map(add, self, other))

    @staticmethod
    def total(parts: Iterable[ForwardCounts]) -> ForwardCounts:
        """Return the sum of counts."""
        return sum(parts, start=ForwardCounts())
