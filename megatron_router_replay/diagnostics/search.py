"""Find the rows, layers and ids of a that b's routes match.

The pieces of `counting.py` are cut by layer into cells. A cell is bad if fewer than half of its decisions are near those
of a. Each bad cell is compared with a few explanations: a's rows at another offset, another layer of a, one repeated
route, a's experts under other ids. The best one is taken if it fits three quarters of the cell. A bad cell without an
explanation is unrelated to a if chance is likelier than noise. Neighbouring pieces with the same explanation become one
fact; its first and last rows are then found row by row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_router_replay.diagnostics.counting import Array, Counter, Samples, count_shared
from megatron_router_replay.diagnostics.fact import Fact
from megatron_router_replay.diagnostics.source import TraceSource, block_rows
from megatron_router_replay.trace.runs import neighbour_runs

MAX_ROWS = 32768
"""Rows of b that are read again; of more suspect rows, evenly spread pieces are read."""

_SUSPECT = 0.1  # share of far decisions in a cell
_FITS = 0.75
_MIN_ROWS = 6  # fewer rows match different rows by chance
_SURE = 40.0  # bits by which chance must be likelier than noise
_KEY_ROWS = 3  # rows in a key: a single set of experts occurs too often
_MOST_OCCURRENCES = 64  # a key that occurs more often, such as filler, is ignored
_LAYER, _CONSTANT, _NAMES, _NOTHING = range(1 << 41, (1 << 41) + 4)
_KINDS = {_LAYER: "layer", _CONSTANT: "constant", _NAMES: "names", _NOTHING: "nothing"}
"""Kinds by the label of a cell. Any other label but 0 is the offset of the rows that match."""


class Search:
    """The suspect rows of b and the same rows of a: n rows in order, L layers of b, P pieces.

    Attributes:
        rows: [n] row numbers. starts: [P] the first index of each piece. segment: [P] pieces with the same number have no
            piece between them that was left out as unsuspicious.
        ids_a, ids_b: [n, layers, topk]. routed_a, routed_b: [n] bool.
        column: [L] index of b's layer in a's layers, -1: a has no such layer.
        in_place: [n, L] bool, decisions near those of a in the same row.
    """

    def __init__(self, counts: Counter) -> None:
        self.a, self.b = counts.a, counts.b
        lengths_a, lengths_b = self.a.sequence_lengths, self.b.sequence_lengths
        self.samples_a = Samples(lengths_a or lengths_b, self.a.num_tokens)
        self.samples_b = Samples(lengths_b or lengths_a, self.b.num_tokens)
        layers = {number: i for i, number in enumerate(self.a.layer_numbers)}
        self.column = np.array([layers.get(number, -1) for number in self.b.layer_numbers])
        self.numbers = np.random.default_rng(1).integers(1 << 63, size=self.a.num_experts, dtype=np.uint64)
        starts = counts.piece_starts[counts.piece_starts < self.b.num_tokens]
        sizes = np.diff(starts, append=self.b.num_tokens)
        pieces, self.segment = self._suspects(counts, starts, sizes)
        self.piece_starts = starts
        self.starts = np.cumsum(sizes[pieces]) - sizes[pieces]
        runs = [np.arange(starts[piece], starts[piece] + sizes[piece]) for piece in pieces]
        self.rows = np.concatenate([np.empty(0, np.int64), *runs])
        (self.ids_a, self.routed_a), (self.ids_b, self.routed_b) = (
            read_rows(each, self.rows) for each in (self.a, self.b)
        )
        self.in_place = self.near(self.ids_a, self.routed_a, self.column)

    def _suspects(self, counts: Counter, starts: Array, sizes: Array) -> tuple[Array, Array]:
        suspect = np.ones(len(starts), dtype=bool)
        self.unsuspicious = ~suspect
        if self.b.num_tokens > MAX_ROWS and counts.layers:
            rows, far = counts.rows_by_piece.numpy()[: len(starts)], counts.far_by_piece.numpy()[: len(starts)]
            # Rows that only b has may be copies.
            suspect = (far >= _SUSPECT * np.maximum(1, rows)[:, None]).any(axis=1) | (rows == 0)
            self.unsuspicious = ~suspect
            # A fault may begin and end inside of a piece.
            suspect = suspect | np.append(suspect[1:], False) | np.append(False, suspect[:-1])
        pieces = np.flatnonzero(suspect)
        most = max(1, MAX_ROWS // int(sizes.max()))
        if len(pieces) > most:
            pieces = pieces[np.linspace(0, len(pieces) - 1, most).astype(np.int64)]
        self.complete = len(pieces) == int(suspect.sum())
        segment: Array = np.cumsum(~suspect)[pieces]
        self.unsuspicious[pieces] = False  # their rows are compared
        return pieces, segment

    def near(self, ids_a: Array, routed_a: Array, columns: Array, at: slice = slice(None)) -> Array:
        """Return which decisions of b share more than half of their experts with rows of a, [n, L] bool."""
        ids_b, topk = self.ids_b[at], self.ids_b.shape[2]
        shared = count_shared(ids_a[:, columns].reshape(-1, topk), ids_b.reshape(-1, topk))
        there = (routed_a & self.routed_b[at])[:, None] & (columns >= 0)
        near: Array = there & (2 * shared > topk).reshape(there.shape)
        return near

    def at_offsets(self, offsets: Array, at: slice = slice(None)) -> Array:
        """Return which decisions are near a's rows at an offset: [n] -> [n, L]."""
        return self.near(*read_rows(self.a, self.rows[at] + offsets), self.column, at)

    def sets(self, ids: Array) -> Array:
        """Return each decision's set of experts as one number: the sum of random numbers, [..., topk] -> [...] uint64."""
        total: Array = self.numbers[ids[..., 0]]
        for column in range(1, ids.shape[-1]):
            total = total + self.numbers[ids[..., column]]
        return total

    def by_piece(self, values: Array) -> Array:
        """Return the sums of each piece, [n, ...] -> [P, ...]."""
        sums: Array = np.add.reduceat(values, self.starts, axis=0, dtype=np.result_type(values, np.int64))
        return sums

    def per_row(self, of_pieces: Array) -> Array:
        """Return the value of each row's piece, [P, ...] -> [n, ...]."""
        values: Array = np.repeat(of_pieces, np.diff(self.starts, append=len(self.rows)), axis=0)
        return values

    def facts(self) -> Iterator[Fact]:
        """Yield facts without their text."""
        if not len(self.rows):
            return
        routed = self.by_piece(self.routed_b)[:, None]
        here = self.by_piece(self.in_place) / np.maximum(1, routed)
        bad = (here < 0.5) & (routed > 0)
        if not bad.any():
            return
        best, labels = np.maximum(_FITS, here + 0.25), np.zeros(bad.shape, dtype=np.int64)
        self.fitting: dict[int, Array] = {}
        self.explained = np.zeros_like(self.in_place)
        for label, fitting in self._explanations(bad):
            fits = self.by_piece(fitting) / np.maximum(1, routed)
            labels = np.where(bad & (fits > best), label, labels)
            best = np.where(bad, np.maximum(best, fits), best)
        yield from self._regions(labels)
        self.bits = self._bits_of_chance(here)
        self.bits[self.explained] = -4.0
        self.fitting[_NOTHING] = self.routed_b[:, None] & ~self.in_place
        yield from self._regions(np.where(bad & (self.by_piece(self.bits) > 0), _NOTHING, 0))

    def _bits_of_chance(self, here: Array) -> Array:
        """Return the bits by which chance explains each decision better than noise, [n, L]."""
        order = np.random.default_rng(2).permutation(len(self.rows))
        comparable = self.routed_a & self.routed_b
        unrelated = self.near(self.ids_a[order], self.routed_a[order], self.column)
        # Of a few rows the share may be 0 by luck.
        chance = (unrelated.sum(axis=0) + 1) / ((self.routed_b & self.routed_a[order]).sum() + 2)
        noise = np.maximum(np.quantile(here, 0.75, axis=0).clip(0.5, 0.97), chance + 0.01)
        bits: Array = np.where(self.in_place, np.log2(chance / noise), np.log2((1 - chance) / (1 - noise)))
        bits[:, self.column < 0] = bits[~comparable] = 0.0
        return bits

    def _regions(self, labels: Array) -> Iterator[Fact]:
        """Yield a fact for each run of neighbouring pieces with one label, [P, L]."""
        for label in np.unique(labels[labels != 0]).tolist():
            chosen = labels == label
            some = np.flatnonzero(chosen.any(axis=1))
            breaks = (np.diff(some) > 1) | (np.diff(self.segment[some]) > 0)
            for run in np.split(some, np.flatnonzero(breaks) + 1):
                layers = np.flatnonzero(2 * chosen[run].sum(axis=0) >= chosen[run].sum(axis=0).max())
                fact = self._fact(label, run, layers)
                if fact is not None:
                    yield fact

    def _explanations(self, bad: Array) -> Iterator[tuple[int | Array, Array]]:
        """Yield labels (one, or [P, 1]) and the decisions that an explanation fits, [n, L]."""
        for offset in (-1, 1, -2, 2, -3, 3):
            yield offset, self.at_offsets(np.full(len(self.rows), offset))
        for offsets in self._likely_offsets(bad):
            yield offsets[:, None], self.at_offsets(self.per_row(offsets))
        bad_rows = self.per_row(bad)
        sets_a, sets_b = self.sets(self.ids_a), self.sets(self.ids_b)
        self.source_columns = self.column.copy()
        self.names: dict[int, Array] = {}
        renamed = self.ids_a[:, self.column].copy()
        constant = np.zeros(bad_rows.shape, dtype=bool)
        for layer in np.flatnonzero(bad.any(axis=0)).tolist():
            rows = np.flatnonzero(bad_rows[:, layer] & self.routed_b)
            sets, times = np.unique(sets_b[rows, layer], return_counts=True)
            constant[:, layer] = (sets_b[:, layer] == sets[times.argmax()]) & self.routed_b
            rows = rows[self.routed_a[rows]][:4096]
            if not len(rows):
                continue
            equal = (sets_a[rows] == sets_b[rows, layer, None]).mean(axis=0)
            # Every layer chooses popular experts, so a layer must exceed the median of all layers.
            if equal.max() >= 0.2 + np.median(equal):
                self.source_columns[layer] = equal.argmax()
            if self.column[layer] >= 0 and len(rows) * self.a.topk >= 6 * self.a.num_experts:
                self.names[layer] = _expert_names(
                    self.ids_a[rows, self.column[layer]], self.ids_b[rows, layer], self.a.num_experts
                )
                renamed[:, layer] = self.names[layer][renamed[:, layer]]
        self.fitting[_LAYER] = self.near(self.ids_a, self.routed_a, self.source_columns)
        self.fitting[_CONSTANT] = constant
        self.fitting[_NAMES] = self.near(renamed, self.routed_a, np.arange(len(self.column))) & (self.column >= 0)
        yield from [(label, self.fitting[label]) for label in (_LAYER, _CONSTANT, _NAMES)]

    def _likely_offsets(self, bad: Array) -> list[Array]:
        """Return the two offsets at which most rows of each piece occur in a, [P] int64, 0: none.

        The sets of experts of three rows in one of the four worst layers make a key, which is searched in all of a.
        """
        layers = [
            layer for layer in np.argsort(-bad.sum(axis=0))[:4] if self.column[layer] >= 0 and bad[:, layer].any()
        ]
        at = np.flatnonzero(self.per_row(np.any(bad, axis=1)) & self.routed_b)
        at = at[at < len(self.rows) - _KEY_ROWS]
        at = at[self.rows[at + _KEY_ROWS - 1] == self.rows[at] + _KEY_ROWS - 1]
        if not layers or not len(at):
            return []
        layer_numbers = [self.b.layer_numbers[layer] for layer in layers]
        order = np.argsort(layer_numbers)
        layers = [layers[i] for i in order]
        known = [_keys(self.sets(self.ids_b[:, layer]))[at] for layer in layers]
        sorts = [np.argsort(keys, kind="stable") for keys in known]
        pairs: list[tuple[Array, Array]] = []
        step = block_rows(self.a)
        for start in range(0, self.a.num_tokens, step):
            block = self.a.read(start, start + step + _KEY_ROWS - 1, sorted(layer_numbers))
            for i, (keys, sort) in enumerate(zip(known, sorts)):
                found = _keys(self.sets(block.topk_indices[:, i].numpy()))[:step]
                left, right = (np.searchsorted(keys[sort], found, side) for side in ("left", "right"))
                times = np.where(right - left > _MOST_OCCURRENCES, 0, right - left)
                index = np.repeat(left - np.cumsum(times) + times, times) + np.arange(times.sum())
                pairs.append((at[sort][index], np.repeat(np.arange(start, start + len(found)), times)))
        row, source = (np.concatenate(values) for values in zip(*pairs))
        piece, offset = np.searchsorted(self.starts, row, side="right") - 1, source - self.rows[row]
        piece, offset = piece[offset != 0], offset[offset != 0]
        pairs_found, votes = np.unique(piece << 42 | offset + (1 << 41), return_counts=True)
        voted, offsets = pairs_found >> 42, (pairs_found & (1 << 42) - 1) - (1 << 41)
        _, which, in_all = np.unique(offsets, return_inverse=True, return_counts=True)
        ranked = np.lexsort((-np.abs(offsets), in_all[which], votes))
        first, second = np.zeros((2, len(self.starts)), dtype=np.int64)
        first[voted[ranked]] = offsets[ranked]  # the last one that is written has most votes
        ranked = ranked[offsets[ranked] != first[voted[ranked]]]
        second[voted[ranked]] = offsets[ranked]
        return [first, second]

    def _fact(self, label: int, run: Array, layers: Array) -> Fact | None:
        """Return the fact of neighbouring pieces, narrowed to the rows that it fits better than a's rows in place."""
        bounds = np.append(self.starts, len(self.rows))
        low, high = run[0], run[-1]
        # A run may begin and end inside the pieces next to it.
        low -= low > 0 and self.segment[low - 1] == self.segment[low]
        high += high + 1 < len(self.segment) and self.segment[high + 1] == self.segment[high]
        at = slice(int(bounds[low]), int(bounds[high + 1]))
        offset = label if label < _LAYER else None
        fitting = self.at_offsets(np.array(offset), at) if offset is not None else self.fitting[label][at]
        fits, in_place = fitting[:, layers].mean(axis=1), self.in_place[at][:, layers].mean(axis=1)
        gains = np.where(self.routed_b[at], fits - np.maximum(in_place, 0.5), 0.0)
        if label == _NOTHING:
            gains = self.bits[at][:, layers].sum(axis=1)
        first, last = _best_run(gains)
        rows = (int(self.rows[at][first]), int(self.rows[at][last]))
        if offset is not None and len(layers) == len(self.column):
            first, last, rows = self._whole_samples(fitting, self.rows[at], first, last, offset)
        inside = np.arange(first, last + 1)[self.routed_b[at][first : last + 1]]
        held = fitting[inside][:, layers]
        if len(inside) < _MIN_ROWS or held.mean() < _FITS:
            return None
        if label == _NOTHING and gains[first : last + 1].sum() < _SURE:
            return None
        self.explained[np.ix_(at.start + inside, layers)] |= held
        sources = self.source_columns[layers].tolist() if label == _LAYER else []
        return Fact(
            kind=_KINDS.get(label, "row"),
            text="",
            layer_numbers=tuple(self.b.layer_numbers[layer] for layer in layers),
            rows=rows,
            samples=self.samples_b.touched(*rows),
            offset=offset,
            source_layers=tuple(self.a.layer_numbers[column] for column in sources),
            source_samples=() if offset is None else self.samples_a.whole(rows[0] + offset, rows[1] + offset),
            held=int(held.sum()),
            decisions=held.size,
        )

    def _whole_samples(
        self, fitting: Array, rows: Array, first: int, last: int, offset: int
    ) -> tuple[int, int, tuple[int, int]]:
        """Return first, last and their row numbers, widened or cut by a few rows to whole samples of a if they fit there."""
        as_found = first, last, (int(rows[first]), int(rows[last]))
        sources, starts = rows[[first, last]] + offset, self.samples_a.starts
        # The ends of a run may be two rows off; a shared prompt fits both samples.
        one, last_one = self.samples_a.of_rows(np.clip([sources[0] + 2, sources[1] - 2], *sources)).tolist()
        if not self.samples_a.known or last_one >= len(self.samples_a.lengths):
            return as_found
        low, high = int(starts[one]) - offset, int(starts[last_one + 1]) - 1 - offset
        if low < 0 or high >= self.b.num_tokens:
            return as_found
        from_piece, to_piece = np.searchsorted(self.piece_starts, [low, high], side="right") - 1
        begin, stop = int(np.searchsorted(rows, low)), int(np.searchsorted(rows, high, side="right")) - 1
        added = np.concatenate([fitting[begin:first], fitting[last + 1 : stop + 1]])
        if self.unsuspicious[from_piece : to_piece + 1].any() or (len(added) and added.mean() < _FITS):
            return as_found
        return begin, stop, (low, high)

    def agrees_before(self, row: int) -> bool:
        """Return whether the rows before a row agree with a."""
        index = int(np.searchsorted(self.rows, row))
        return bool(index) and bool(self.in_place[max(0, index - 8) : index].mean() > 0.5)


def read_rows(source: TraceSource, rows: Array) -> tuple[Array, Array]:
    """Return experts [n, num_layers, topk] and which rows have a route [n]; rows outside of the trace have none."""
    ids = np.zeros(
        (len(rows), len(source.layer_numbers), source.topk), dtype=np.uint8 if source.num_experts <= 256 else np.int16
    )
    routed = np.zeros(len(rows), dtype=bool)
    inside = np.flatnonzero((rows >= 0) & (rows < source.num_tokens))
    for position, first, length in neighbour_runs(rows[inside]).tolist():
        block, at = source.read(first, first + length), inside[position : position + length]
        ids[at], routed[at] = block.topk_indices.numpy(), block.replay_mask.numpy()
    return ids, routed


def _keys(sets: Array) -> Array:
    """Return one number for each row and the rows after it, [n] -> [n]; the last few are those of the first rows."""
    keys: Array = sets
    for step in range(1, _KEY_ROWS):
        keys = keys * np.uint64(0x9E3779B97F4A7C15) ^ np.roll(sets, -step)
    return keys


def _expert_names(a: Array, b: Array, num_experts: int) -> Array:
    """Return b's expert that occurs most often with each expert of a, [num_experts]."""
    together = np.zeros(num_experts**2, dtype=np.int64)
    for one in a.T.astype(np.int64):
        for other in b.T:
            together += np.bincount(one * num_experts + other, minlength=num_experts**2)
    counts = together.reshape(num_experts, num_experts)
    names: Array = (counts / np.maximum(1, counts.sum(axis=0))).argmax(axis=1)  # popular experts occur with all others
    return names


def _best_run(gains: Array) -> tuple[int, int]:
    """Return the first and last row of the run with the greatest sum; of equal ones a short one."""
    ends = gains.cumsum()
    starts = ends - gains
    last = int((ends - np.minimum.accumulate(starts)).argmax())
    return last - int(starts[last::-1].argmin()), last
