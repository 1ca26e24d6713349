"""The rows of two traces that may hold a fact, read again: what the search for facts looks at.

A set of experts is compared as one number: each expert has a random 63-bit number, a set's is their sum. Equal sets have
equal numbers whatever the order and the layer; unequal sets do not, but for a chance of 2**-63. Two decisions are *near*
if they share more than half of their experts: noise exchanges one or two.
"""

from __future__ import annotations

import numpy as np

from megatron_router_replay.diagnostics.counting import Array, Counter, Samples, count_shared
from megatron_router_replay.diagnostics.source import TraceSource

MAX_ROWS = 32768
"""Rows that are read again at most; of more, pieces are taken that are spread over all."""

_SUSPECT = 0.1
"""Share of far decisions from which a piece of a layer is read again wherever it lies."""

_GAP = 512
"""Rows that are read although nobody asked, where two runs are no further apart than this."""


class ReadRows:
    """Rows of a trace, any of them in any order; each is read when it is first asked for, and kept."""

    def __init__(self, source: TraceSource) -> None:
        self._source = source
        dtype = np.uint8 if source.num_experts <= 256 else np.int16
        # Row -1 is none: it lies before all others and has no route.
        self._rows: Array = np.array([-1])
        self._ids: Array = np.zeros((1, len(source.layer_numbers), source.topk), dtype=dtype)
        self._routed: Array = np.zeros(1, dtype=bool)

    def read(self, rows: Array) -> tuple[Array, Array]:
        """Return experts [n, num_layers, topk], and which rows have a route, [n] bool; rows that are not there have none."""
        inside = np.unique(rows[(rows >= 0) & (rows < self._source.num_tokens)])
        missing = np.setdiff1d(inside, self._rows, assume_unique=True)
        parts = [(self._rows, self._ids, self._routed)]
        for run in np.split(missing, np.flatnonzero(np.diff(missing) > _GAP) + 1) if len(missing) else ():
            block = self._source.read(int(run[0]), int(run[-1]) + 1)
            parts.append((run, block.topk_indices.numpy()[run - run[0]], block.replay_mask.numpy()[run - run[0]]))
        if len(parts) > 1:
            order = np.argsort(np.concatenate([run for run, _, _ in parts]), kind="stable")
            self._rows, self._ids, self._routed = (np.concatenate(column)[order] for column in zip(*parts))
        at = np.minimum(np.searchsorted(self._rows, rows), len(self._rows) - 1)
        return self._ids[at], self._routed[at] & (self._rows[at] == rows)


class Evidence:
    """Rows of b that may hold a fact, beside the rows of a; n rows in order, L layers of b.

    Attributes:
        rows: [n] row numbers. segment: [n] rows with one number have no row between them that was left out as unsuspicious.
        starts: [pieces] where each piece of neighbouring rows begins in `rows`.
        ids, sets: [n, L, topk] and [n, L] of b. routed: [n] bool.
        column: [L] index of b's layer among a's layers; -1: a has no such layer.
        comparable: [n] whether a has a route in the same row.
        near_in_place: [n, L] whether b is near the same row and layer of a.
        by_chance: [L] share of near decisions among rows that have nothing to do with each other.
        samples, samples_a: of b and of a, each by the other's lengths where it has none.
        complete: whether every suspect row was read.
    """

    def __init__(self, counts: Counter) -> None:
        self.a, self.b = counts.a, counts.b
        self.samples_a = Samples(self.a.sequence_lengths or self.b.sequence_lengths, self.a.num_tokens)
        self.samples = Samples(self.b.sequence_lengths or self.a.sequence_lengths, self.b.num_tokens)
        self.numbers = np.random.default_rng(20250807).integers(1 << 63, size=self.b.num_experts, dtype=np.uint64)
        self.rows, self.segment, self.complete = _suspect_rows(counts)
        pieces = np.searchsorted(counts.piece_starts.numpy(), self.rows, side="right")
        self.starts = np.flatnonzero(np.diff(pieces, prepend=-1))
        self.ids, self.routed = ReadRows(self.b).read(self.rows)
        self.sets = set_numbers(self.ids, self.routed, self.numbers, nothing=1)
        self.rows_a = ReadRows(self.a)
        layers_a = {number: i for i, number in enumerate(self.a.layer_numbers)}
        self.column = np.array([layers_a.get(number, -1) for number in self.b.layer_numbers], dtype=np.int64)
        self.comparable = self.rows_a.read(self.rows)[1] & self.routed
        self.near_in_place = self.near(self.rows, self.column)
        shuffled = np.random.default_rng(1).permutation(len(self.rows))
        chance = self.near(self.rows[shuffled], self.column)[self.comparable & self.comparable[shuffled]]
        # Of a few rows the share may be 0 by luck, and what "never" happens would prove anything.
        self.by_chance = (chance.sum(axis=0) + 1) / (len(chance) + 2)

    def near(self, rows: Array, columns: Array, where: Array | None = None) -> Array:
        """Return where b is near rows of a, [n, L] bool.

        Args:
            rows: [n] the row of a that each row of b is compared with. columns: [L] the layer of a, -1: none.
            where: [n] bool, rows that are looked at; the others are False.
        """
        looked_at = np.flatnonzero(self.routed if where is None else where & self.routed)
        ids_a, routed = self.rows_a.read(rows[looked_at])
        ids_a, known = ids_a[:, columns], routed[:, None] & (columns >= 0)
        shared = count_shared(ids_a.reshape(-1, ids_a.shape[2]), self.ids[looked_at].reshape(-1, ids_a.shape[2]))
        result = np.zeros(self.sets.shape, dtype=bool)
        result[looked_at] = known & (2 * shared > ids_a.shape[2]).reshape(known.shape)
        return result

    def sets_of_a(self, rows: Array) -> Array:
        """Return the numbers of the sets of these rows of a, [n, layers of a]; of rows without a route 0."""
        return set_numbers(*self.rows_a.read(rows), self.numbers, nothing=0)

    def by_piece(self, values: Array) -> Array:
        """Return the sums of each piece, [n, ...] -> [pieces, ...] int64."""
        sums: Array = np.add.reduceat(values, self.starts, axis=0, dtype=np.int64)
        return sums

    def per_row(self, of_pieces: Array) -> Array:
        """Return the value of each row's piece, [pieces, ...] -> [n, ...]."""
        values: Array = np.repeat(of_pieces, np.diff(np.append(self.starts, len(self.rows))), axis=0)
        return values


def set_numbers(ids: Array, routed: Array, numbers: Array, *, nothing: int) -> Array:
    """Return the number of each decision's set, [n, layers, topk] -> [n, layers] uint64; rows without a route: `nothing`."""
    total: Array = numbers[ids[..., 0]]
    for column in range(1, ids.shape[-1]):
        total = total + numbers[ids[..., column]]
    total[~routed] = nothing
    return total


def _suspect_rows(counts: Counter) -> tuple[Array, Array, bool]:
    """Return the rows to read again, their segments, and whether these are all that are suspect."""
    num_rows = counts.b.num_tokens
    starts = counts.piece_starts.numpy()
    starts = starts[starts < num_rows]
    sizes = np.minimum(np.append(starts[1:], num_rows), num_rows) - starts
    suspect = np.ones(len(starts), dtype=bool)
    if num_rows > MAX_ROWS and counts.layers:
        rows, far = counts.rows_by_piece.numpy()[: len(starts)], counts.far_by_piece.numpy()[: len(starts)]
        # Rows that only b has may be copies of others, so they are looked at, too.
        suspect = (far >= _SUSPECT * np.maximum(1, rows)[:, None]).any(axis=1) | (rows == 0)
        # A fault ends inside a piece, in a few rows only perhaps.
        suspect = suspect | np.append(suspect[1:], False) | np.append(False, suspect[:-1])
    chosen = _spread(np.flatnonzero(suspect), sizes, MAX_ROWS)
    complete = len(chosen) == int(suspect.sum())
    # A few of the others: names of experts are exchanged without anything being far.
    others = _spread(np.flatnonzero(~suspect), sizes, MAX_ROWS // 4)
    chosen = np.union1d(chosen, others)
    left_out = ~suspect
    left_out[others] = False
    runs = [np.arange(starts[piece], starts[piece] + sizes[piece]) for piece in chosen]
    rows_to_read = np.concatenate([np.empty(0, np.int64), *runs])
    return rows_to_read, np.repeat(np.cumsum(left_out)[chosen], sizes[chosen]), complete


def _spread(pieces: Array, sizes: Array, most_rows: int) -> Array:
    """Return pieces with at most so many rows, spread over all that were given: a fault may begin anywhere."""
    if not len(pieces) or sizes[pieces].sum() <= most_rows:
        return pieces
    count = max(1, most_rows // int(sizes[pieces].max()))
    return pieces[np.unique(np.linspace(0, len(pieces) - 1, count).astype(np.int64))]
