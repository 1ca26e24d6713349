"""Read the rows of two traces that are searched for matches, cut into pieces.

A piece has about 32 rows of a sample; a piece in a single layer is a cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np

from megatron_router_replay.diagnostics.counting import Array, Counter, Samples, count_shared
from megatron_router_replay.diagnostics.source import TraceSource

MAX_ROWS = 32768
"""Rows that are searched; of a longer trace, those around the block of rows that differs most."""

_PIECE_ROWS = 32  # short enough that a fault in half of a sample fills a piece


class Window:
    """The searched rows of both traces: n rows, L layers of b, P pieces. Rows after a trace's last one have no route.

    Attributes:
        first: number of the first row that is searched.
        starts: [P] index of the first row of each piece, counted from `first`.
        ids_a, ids_b: [n, layers, topk]. routed_a, routed_b: [n] bool. sets_a, sets_b: [n, layers] a number for each set.
        column: [L] index of b's layer in a's layers, -1: a has no such layer.
        in_place: [n, L] bool, decisions near those of a in the same row.
        alike: [n] bool, rows with a route in both, before the first different token of their sample.
        different: [n, L] bool, decisions of alike rows that differ.
    """

    def __init__(self, counts: Counter) -> None:
        self.a, self.b = a, b = counts.a, counts.b
        self.samples_a = Samples(a.sequence_lengths or b.sequence_lengths, a.num_tokens)
        self.samples = Samples(b.sequence_lengths or a.sequence_lengths, b.num_tokens)
        self.first = max(0, min(counts.worst_row() - MAX_ROWS // 2, b.num_tokens - MAX_ROWS))
        # Rows of a that match lie in the same window: a search of all of a would read it once for each offset.
        num_rows = min(max(a.num_tokens, b.num_tokens), MAX_ROWS)
        (self.ids_a, self.routed_a, self.tokens), (self.ids_b, self.routed_b, _) = (
            _read(s, self.first, num_rows) for s in (a, b)
        )
        self.counts, rows = counts, self.first + np.arange(num_rows)
        self.alike = self.routed_a & self.routed_b & counts.has_same_tokens(rows)
        layers = {number: i for i, number in enumerate(a.layer_numbers)}
        self.column = np.array([layers.get(number, -1) for number in b.layer_numbers])
        # A set of experts as one number: the sum of random numbers.
        self._numbers = np.random.default_rng(1).integers(1 << 63, size=a.num_experts, dtype=np.uint64)
        self.sets_a, self.sets_b = (self.set_numbers(ids) for ids in (self.ids_a, self.ids_b))
        # A piece never crosses the end of a sample, because faults often begin or end there.
        bounds = np.unique([0, *(self.samples.starts - self.first).clip(0, num_rows), num_rows])
        # The pieces of a sample have nearly equal lengths.
        pieces = [
            np.linspace(begin, end, max(1, round((end - begin) / _PIECE_ROWS)) + 1).astype(np.int64)[:-1]
            for begin, end in pairwise(bounds.tolist())
        ]
        self.starts = np.concatenate(pieces)
        self.in_place = self.near(0, self.column)
        self.different = (self.sets_a[:, self.column] != self.sets_b) & self.alike[:, None] & (self.column >= 0)

    @cached_property
    def is_distinct(self) -> Array:
        """Rows that are alike and have routes in a which no earlier one has, [n] bool."""
        rows = np.flatnonzero(self.alike)
        distinct = np.zeros_like(self.alike)
        distinct[rows[np.unique(self.sets_a[rows], axis=0, return_index=True)[1]]] = True
        return distinct

    def set_numbers(self, ids: Array) -> Array:
        """Return a number for each set of experts, [..., topk] -> [...]."""
        numbers: Array = self._numbers[ids].sum(axis=-1, dtype=np.uint64)
        return numbers

    def near(self, offset: int | Array, columns: Array, ids_a: Array | None = None) -> Array:
        """Return which decisions of b share more than half of their experts with rows of a, [n, L] bool.

        Args:
            offset: of a's row, one or [n].
            columns: [L] of a's layers.
            ids_a: the experts of a under other ids.
        """
        rows, topk = np.arange(len(self.ids_b)) + offset, self.ids_b.shape[2]
        inside = (rows >= 0) & (rows < len(rows))
        rows = np.where(inside, rows, 0)
        ids_a = self.ids_a if ids_a is None else ids_a
        shared = count_shared(ids_a[rows][:, columns].reshape(-1, topk), self.ids_b.reshape(-1, topk))
        routed = (inside & self.routed_a[rows] & self.routed_b)[:, None] & (columns >= 0)
        near: Array = routed & (2 * shared > topk).reshape(routed.shape)
        return near

    def by_piece(self, values: Array) -> Array:
        """Return the sums of each piece, [n, ...] -> [P, ...]."""
        sums: Array = np.add.reduceat(values, self.starts, axis=0, dtype=np.int64)
        return sums

    def per_row(self, by_piece: Array) -> Array:
        """Return the value of each row's piece, [P, ...] -> [n, ...]."""
        values: Array = np.repeat(by_piece, np.diff(self.starts, append=len(self.ids_b)), axis=0)
        return values

    def moved_samples(self, offsets: Array) -> Iterator[tuple[Array, int, int]]:
        """Yield the rows of b that lie in one sample of a at one offset, their sample in b, and that of a."""
        moved = np.flatnonzero(offsets)
        sources = self.samples_a.of_rows(moved + offsets[moved] + self.first)
        # A sample of a may lie in several places of b, each with an offset of its own.
        for source, offset in np.unique(np.stack([sources, offsets[moved]]), axis=1).T.tolist():
            rows = moved[(sources == source) & (offsets[moved] == offset)]
            yield rows, self.samples.at(self.first + int(rows[0] + rows[-1]) // 2), source


def _read(source: TraceSource, start: int, num_rows: int) -> tuple[Array, Array, Array]:
    """Return the rows from `start` on: experts [num_rows, num_layers, topk], which have a route, token ids (-1: unknown)."""
    rows = source.read(start, start + num_rows)
    missing = num_rows - rows.num_tokens
    ids, routed = rows.topk_indices.numpy(), rows.replay_mask.numpy()
    tokens = np.full(num_rows, -1) if rows.token_ids is None else np.pad(rows.token_ids.numpy(), (0, missing))
    return np.pad(ids, ((0, missing), (0, 0), (0, 0))), np.pad(routed, (0, missing)), tokens
