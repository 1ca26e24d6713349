"""State what two traces cover, and which rows, samples, layers or ids of a the routes of b match, one sentence each.

Rows are cut into pieces of 32 that end with samples; a piece of one layer is a cell. A cell is bad if fewer than half of its
decisions are near those of a (see the package's docstring). Each bad cell is compared with a few explanations: other samples
of a, a's rows at another offset, another layer of a, one repeated route, a's experts under other ids. The best one is taken
if it fits three quarters of the cell; neighbouring cells with one explanation become one fact, with its first and last row
found row by row. Rows of bad cells without an explanation are unrelated to a if most of their decisions are not near.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from megatron_router_replay.diagnostics.clues import Decisions, find_clues
from megatron_router_replay.diagnostics.counting import Array, Counter, Samples, count_shared
from megatron_router_replay.diagnostics.fact import Fact
from megatron_router_replay.diagnostics.source import TraceSource
from megatron_router_replay.tables import number_words, percent

MAX_ROWS = 32768
"""Rows that are searched; of a longer trace, those around the block of rows that differs most."""

_PIECE_ROWS = 32  # short enough that a fault in half of a sample fills a piece
_FITS = 0.75
_BETTER = 0.1  # three rows of a piece; those at the ends of a fault fit by chance
_MIN_ROWS = 6  # fewer rows match different rows by chance
_MIN_UNRELATED = 24  # noise alone exchanges most experts of fewer neighbouring decisions
_KEY_ROWS = 3  # rows in a key: a single set of experts occurs too often
_MOST_OCCURRENCES = 64  # a key that occurs more often, such as filler, is ignored
_MOST_OFFSETS = 16
_UNLIKE = "are as unlike {a}'s as unrelated rows"


def find_facts(counts: Counter) -> tuple[list[Fact], Array]:
    """Search for facts.

    Returns:
        (the coverage of two traces, then the matches of b in a, those of most decisions first, then the clues;
        [num_layers, topk + 1] int64, differing decisions that a match explains, by the number of shared experts.)
    """
    facts = list(_coverage(counts))
    explained = np.zeros(tuple(counts.alike.shape), np.int64)
    differs = counts.rows_different or not counts.layers or counts.rows_only_b
    if differs and counts.b.num_tokens and counts.a.layer_numbers and counts.b.layer_numbers:
        search = _Search(counts)
        facts += sorted(search.facts(), key=lambda fact: -fact.decisions)
        if counts.layers:
            explained = search.explained_by_overlap()
            facts += find_clues(search.unexplained())
    return facts, explained


def _coverage(counts: Counter) -> Iterator[Fact]:
    a, b = counts.a, counts.b
    if not counts.layers:
        numbers = f"{a.name} has {number_words(a.layer_numbers)}, {b.name} has {number_words(b.layer_numbers)}"
        yield Fact(kind="layers", text=f"no layer is in both: {numbers}.")
    if b.matched_by == "tokens":
        yield Fact(kind="samples", text=_paired(a.name, b.name, b.partners or ()))
    elif b.matched_by == "number":
        yield Fact(kind="samples", text=_lengths(a, b))
    elif a.sequence_lengths and b.sequence_lengths and a.sequence_lengths != b.sequence_lengths:
        each = [f"{s.name} has {len(s.sequence_lengths or ()):,} samples of {s.num_tokens:,} rows" for s in (a, b)]
        text = f"the samples have different lengths: {' and '.join(each)}."
        if sorted(a.sequence_lengths) == sorted(b.sequence_lengths):
            text = f"the samples of {b.name} have the lengths of those of {a.name} in a different order."
        yield Fact(kind="samples", text=text)
    for name, other_name, only in ((a.name, b.name, counts.only_a), (b.name, a.name, counts.only_b)):
        # Engines leave out one row a sample: the last token is sampled and never fed back.
        # Rows after the last sample, which are counted last, are of none.
        samples = (only[:-1] > 1).nonzero().flatten().tolist() if counts.samples.known else []
        if samples:
            rows = f"{int(only[samples].sum()):,} rows of {_words('sample', samples)}"
            yield Fact(kind="samples", text=f"{rows} have a route in {name} and none in {other_name}.")
    agreeing = (counts.rows_compared - counts.different_by_layer).clamp(min=1)
    # Noise exchanges the order of near-ties; nearly all decisions are reordered by a sort.
    is_sorted = (counts.other_order >= 0.9 * agreeing) & (2 * agreeing > counts.rows_compared) & (a.topk > 1)
    if listed := is_sorted.nonzero().flatten().tolist():
        layers, decisions = tuple(counts.layers[i] for i in listed), int(agreeing[listed].sum())
        text = (
            f"{int(counts.other_order[listed].sum()):,} of {decisions:,} decisions that agree list their experts in a "
        )
        text += f"different order, in {_words('layer', layers)}."
        yield Fact(kind="expert_order", text=text, layer_numbers=layers, decisions=decisions)
    if counts.rows_other_token:
        text = f"{counts.rows_other_token:,} of {counts.rows_compared:,} rows hold a different token, "
        text += f"first row {int(counts.first_other_token.min()):,}"
        firsts = counts.first_other_token[:-1]
        known = np.flatnonzero(firsts < np.iinfo(np.int64).max)
        if counts.samples.known and len(known) > 1:
            positions = firsts[known] - counts.samples.starts[known]
            text += f"; {_words('sample', known.tolist())} differ from position {int(positions.min())}"
            text += f" to {int(positions.max())} on" if positions.min() < positions.max() else " on"
        yield Fact(kind="tokens", text=f"{text}.")


def _lengths(a: TraceSource, b: TraceSource) -> str:
    pairs = list(zip(a.sequence_lengths or (), b.lengths_before))
    different = [(sample, *pair) for sample, pair in enumerate(pairs) if pair[0] != pair[1]]
    each = [
        f"sample {sample} has {one:,} rows in {a.name} and {other:,} in {b.name}"
        for sample, one, other in different[:4]
    ]
    more = f"; {len(different) - 4:,} more samples have different lengths" if len(different) > 4 else ""
    return f"{'; '.join(each)}{more}. Samples are matched by their numbers, and rows of {b.name} are numbered as in {a.name}."


def _paired(a: str, b: str, partners: Sequence[int]) -> str:
    moved = [(place, partner) for place, partner in enumerate(partners) if partner not in (-1, place)]
    missing = [place for place, partner in enumerate(partners) if partner < 0]
    text = f"samples are matched by their tokens, and rows of {b} are numbered as in {a}"
    if moved:
        places, from_b = zip(*moved)
        text += f"; {_words('sample', places)} of {a} are {_words('sample', from_b)} of {b}"
    return text + (f"; {_words('sample', missing)} of {a} have no equal in {b}." if missing else ".")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Explanation:
    """A cause of differences between n rows and L layers of b and rows and layers of a.

    Args:
        kind: of the fact.
        fitting: [n, L] bool, decisions of b that it explains.
        values: "row": the offset of a's rows; "sample_order": that of each row, [n]; "layer": a's layers, [L]; "names":
            b's id of each expert of a, [L, num_experts].
    """

    kind: str
    fitting: Array
    values: Any = None


class _Search:
    """The searched rows of both traces: n rows, L layers of b, P pieces. Rows after a trace's last one have no route.

    Attributes:
        first: number of the first row that is searched.
        starts: [P] index of the first row of each piece, counted from `first`.
        ids_a, ids_b: [n, layers, topk]. routed_a, routed_b: [n] bool. sets_a, sets_b: [n, layers] a number for each set.
        column: [L] index of b's layer in a's layers, -1: a has no such layer.
        in_place: [n, L] bool, decisions near those of a in the same row.
        alike: [n] bool, rows with a route in both, before the first different token of their sample.
        explained: [n, L] bool, decisions that the facts yielded so far explain.
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
        numbers = np.random.default_rng(1).integers(1 << 63, size=a.num_experts, dtype=np.uint64)
        self.sets_a, self.sets_b = (numbers[ids].sum(axis=2, dtype=np.uint64) for ids in (self.ids_a, self.ids_b))
        # A piece never crosses the end of a sample, because faults often begin or end there.
        bounds = np.unique([0, *(self.samples.starts - self.first).clip(0, num_rows), num_rows])
        # The pieces of a sample have nearly equal lengths.
        pieces = [
            np.linspace(begin, end, max(1, round((end - begin) / _PIECE_ROWS)) + 1).astype(np.int64)[:-1]
            for begin, end in pairwise(bounds.tolist())
        ]
        self.starts = np.concatenate(pieces)
        self.in_place = self.near(0, self.column)
        self.explained = np.zeros(self.in_place.shape, bool)
        self.different = (self.sets_a[:, self.column] != self.sets_b) & self.alike[:, None] & (self.column >= 0)

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

    def facts(self) -> Iterator[Fact]:
        """Yield the facts about rows."""
        routed = self.by_piece(self.routed_b)[:, None]
        bad = 2 * self.by_piece(self.in_place) < routed
        if not bad.any():
            return
        least, chosen = np.full(bad.shape, _FITS), np.full(bad.shape, -1)
        tried: list[_Explanation] = []
        for each in self._explanations(bad):
            fits = self.by_piece(each.fitting) / np.maximum(1, routed)
            better = bad & (fits > least)
            chosen[better] = len(tried)
            # The first explanation is the plainer one: a prompt of a group lies in many places.
            least[better] = fits[better] + _BETTER
            tried.append(each)
        # Only rows and layers that both have can be unrelated.
        # A different token has different routes, which are no fact of their own.
        unrelated = ~self.in_place & self.alike[:, None] & (self.column >= 0)
        self._match_regions(tried, chosen, bad & (chosen < 0) & (2 * self.by_piece(unrelated) > routed), unrelated)
        for index, each in enumerate(tried):
            found = self._moved if each.kind == "sample_order" else self._regions
            for fact, rows, layers in found(each, chosen == index):
                # A fact may reach into cells that it does not explain alone: these are not unrelated.
                unrelated[np.ix_(rows, layers)] &= ~each.fitting[np.ix_(rows, layers)]
                self.explained[np.ix_(rows, layers)] |= each.fitting[np.ix_(rows, layers)]
                yield fact
        cells = bad & (chosen < 0) & (2 * self.by_piece(unrelated) > routed)
        yield from self._unrelated(_Explanation(kind="nothing", fitting=unrelated), cells)

    def _match_regions(self, tried: Sequence[_Explanation], chosen: Array, cells: Array, unrelated: Array) -> None:
        """Choose explanations of cells [P, L] whose moved rows alone fit them: rows may fill a part of a piece.

        Args:
            tried: explanations.
            chosen: [P, L] their index, -1: none; changed here.
            cells: [P, L] bool, without an explanation.
            unrelated: [n, L] bool.
        """
        moved = [index for index, each in enumerate(tried) if each.kind == "row"]
        for _, rows, layers in self._regions(_Explanation(kind="nothing", fitting=unrelated), cells):
            fits = [tried[index].fitting[np.ix_(rows, layers)].mean() for index in moved]
            if max(fits) >= _FITS:
                pieces = np.unique(np.searchsorted(self.starts, rows, side="right") - 1)
                region = np.ix_(pieces, layers)
                chosen[region] = np.where(cells[region], moved[int(np.argmax(fits))], chosen[region])

    def _unrelated(self, each: _Explanation, cells: Array) -> Iterator[Fact]:
        """Yield the facts of rows that are unrelated to a; those of several regions with the same layers as one."""
        by_layers: dict[tuple[int, ...], list[tuple[Fact, Array, Array]]] = defaultdict(list)
        for found in self._regions(each, cells):
            by_layers[found[0].layer_numbers].append(found)
        for regions in by_layers.values():
            fact, _, layers = regions[0]
            rows = np.unique(np.concatenate([rows for _, rows, _ in regions]))
            rest = np.setdiff1d(np.flatnonzero(self.alike), rows)
            # Where most decisions differ, some neighbours are unlike by chance.
            if (
                len(rest)
                and 2 * self.different[np.ix_(rest, layers)].mean() > self.different[np.ix_(rows, layers)].mean()
            ):
                continue
            if len(regions) > 1:
                samples = np.unique(self.samples.of_rows(self.first + rows)).tolist() if self.samples.known else []
                in_samples = f" of {_words('sample', samples)}" if samples else f" in {len(regions):,} regions"
                text = f"{len(rows):,} rows{in_samples} of {self.b.name} {_UNLIKE}"
                fact, _, _ = self._fact(each, rows, layers, text)
            yield fact

    def explained_by_overlap(self) -> Array:
        """Return how many differing decisions facts explain, by layer of both and number of shared experts."""
        topk, layers = self.a.topk, list(self.counts.layers)
        explained = np.zeros((len(layers), topk + 1), np.int64)
        for i, number in enumerate(layers):
            column = self.b.layer_numbers.index(number)
            rows = np.flatnonzero(self.explained[:, column] & self.different[:, column])
            shared = count_shared(self.ids_a[rows, self.column[column]], self.ids_b[rows, column])
            explained[i] = np.bincount(shared, minlength=topk + 1)
        return explained

    def unexplained(self) -> Decisions:
        """Return the decisions that clues are searched in."""
        rows = np.flatnonzero(self.alike)
        columns = np.array([self.b.layer_numbers.index(number) for number in self.counts.layers])
        starts = self.samples.starts[:-1] if self.samples.known else np.zeros(0, np.int64)
        return Decisions(
            layer_numbers=self.counts.layers,
            num_experts=self.a.num_experts,
            ids_a=self.ids_a[rows][:, self.column[columns]],
            ids_b=self.ids_b[rows][:, columns],
            different=(self.different & ~self.explained)[rows][:, columns],
            tokens=self.tokens[rows],
            is_first=np.isin(rows + self.first, starts),
            is_distinct=np.isin(np.arange(len(rows)), np.unique(self.sets_a[rows], axis=0, return_index=True)[1]),
        )

    def _explanations(self, bad: Array) -> Iterator[_Explanation]:
        layer = int(bad.sum(axis=0).argmax())  # the layer that differs in most pieces
        rows, sources = self._equal_rows(bad, layer)
        offsets = self._sample_offsets(rows, sources)
        # Samples come first: of two explanations that fit equally, the earlier one is taken.
        if offsets.any():
            fitting = self.near(offsets, self.column) & (offsets != 0)[:, None]
            yield _Explanation(kind="sample_order", fitting=fitting, values=offsets)
        found, votes = np.unique(sources - rows, return_counts=True)
        likely = found[np.lexsort((np.abs(found), -votes))][:_MOST_OFFSETS].tolist()
        for offset in dict.fromkeys([-1, 1, -2, 2, -3, 3, *filter(None, likely)]):
            yield _Explanation(kind="row", fitting=self.near(offset, self.column), values=offset)
        # Layers, a constant and names are found layer by layer, from the bad rows alone.
        bad_rows = self.per_row(bad)
        columns, constant, renamed = self.column.copy(), np.zeros_like(bad_rows), self.ids_a[:, self.column].copy()
        names = np.zeros((len(columns), self.a.num_experts), np.int64)
        for layer in np.flatnonzero(bad.any(axis=0)).tolist():
            rows = np.flatnonzero(bad_rows[:, layer] & self.routed_b)
            sets, times = np.unique(self.sets_b[rows, layer], return_counts=True)
            constant[:, layer] = (self.sets_b[:, layer] == sets[times.argmax()]) & self.routed_b
            rows = rows[self.routed_a[rows]][:4096]
            if not len(rows):
                continue
            equal = (self.sets_a[rows] == self.sets_b[rows, layer, None]).mean(axis=0)
            # Every layer chooses popular experts, so a layer must exceed the median of all layers.
            if equal.max() >= 0.2 + np.median(equal):
                columns[layer] = equal.argmax()
            if self.column[layer] >= 0 and len(rows) * self.a.topk >= 6 * self.a.num_experts:
                ids_a, ids_b = self.ids_a[rows, self.column[layer]], self.ids_b[rows, layer]
                names[layer] = _expert_names(ids_a, ids_b, self.a.num_experts)
                renamed[:, layer] = names[layer][renamed[:, layer]]
        yield _Explanation(kind="layer", fitting=self.near(0, columns), values=columns)
        yield _Explanation(kind="constant", fitting=constant)
        fitting = self.near(0, np.arange(len(columns)), renamed) & names.any(axis=1)
        yield _Explanation(kind="names", fitting=fitting, values=names)

    def _equal_rows(self, bad: Array, layer: int) -> tuple[Array, Array]:
        """Return bad rows of b, and rows of a with the same sets of experts in a layer, there and in the next two rows."""
        keys_a, keys_b = _keys(self.sets_a[:, self.column[layer]]), _keys(self.sets_b[:, layer])
        if self.column[layer] < 0:  # a has no such layer, so no row of it can be equal
            keys_a = keys_a[:0]
        rows = np.flatnonzero((self.per_row(np.any(bad, axis=1)) & self.routed_b)[: len(keys_b)])
        order = np.argsort(keys_a, kind="stable")
        left, right = (np.searchsorted(keys_a[order], keys_b[rows], side) for side in ("left", "right"))
        times = np.where(right - left > _MOST_OCCURRENCES, 0, right - left)
        index = np.repeat(left - np.cumsum(times) + times, times) + np.arange(times.sum())
        return np.repeat(rows, times), order[index]

    def _sample_offsets(self, rows: Array, sources: Array) -> Array:
        """Return the offset of each row of b that lies in a different sample of a, [n]; 0: in none."""
        offsets = np.zeros(len(self.ids_b), np.int64)
        if not self.samples_a.known:
            return offsets
        # A pair of a sample and an offset as one number, which is counted much faster than a column of two.
        samples = self.samples_a.of_rows(sources + self.first)
        pairs, votes = np.unique(samples << 32 | sources - rows + (1 << 31), return_counts=True)
        in_search, decided = np.bincount(np.unique(rows), minlength=len(offsets)).cumsum(), set()
        for i in np.argsort(-votes, kind="stable"):
            sample, offset = int(pairs[i]) >> 32, (int(pairs[i]) & (1 << 32) - 1) - (1 << 31)
            if sample >= len(self.samples_a.lengths):
                continue  # rows after the last sample
            begin, end = (self.samples_a.starts[sample : sample + 2] - self.first - offset).tolist()
            place, (begin, end) = (
                self.samples.at(self.first + (begin + end) // 2),
                (max(0, begin), min(end, len(offsets))),
            )
            searched = int(in_search[end - 1] - (in_search[begin - 1] if begin else 0)) if begin < end else 0
            # A shared prompt matches several samples: most votes decide. A quarter of the rows is more than chance gives.
            if place in decided or votes[i] < max(_MIN_ROWS, searched / 4):
                continue
            decided.add(place)
            offsets[begin:end][offsets[begin:end] == 0] = offset
        # Where b has the lengths of a, rows of b may come after the last sample, and are in none.
        offsets[max(0, int(self.samples.starts[-1]) - self.first) :] = 0
        # Rows that are a part of their sample, there or here, are a row fact.
        fits, is_different = self.near(offsets, self.column).mean(axis=1), False
        lengths = np.diff(self.samples.starts, append=np.inf)
        for of_source, place, source in self._moved_samples(offsets):
            if fits[of_source].sum() < _FITS * max(len(of_source), lengths[place]):
                offsets[of_source] = 0
            else:
                is_different |= place != source
        # So are rows that moved in their own samples, or because an earlier sample has a different length.
        return offsets if is_different else np.zeros_like(offsets)

    def _moved_samples(self, offsets: Array) -> Iterator[tuple[Array, int, int]]:
        """Yield the rows of b that lie in one sample of a at one offset, their sample in b, and that of a."""
        moved = np.flatnonzero(offsets)
        sources = self.samples_a.of_rows(moved + offsets[moved] + self.first)
        # A sample of a may lie in several places of b, each with an offset of its own.
        for source, offset in np.unique(np.stack([sources, offsets[moved]]), axis=1).T.tolist():
            rows = moved[(sources == source) & (offsets[moved] == offset)]
            yield rows, self.samples.at(self.first + int(rows[0] + rows[-1]) // 2), source

    def _moved(self, each: _Explanation, cells: Array) -> Iterator[tuple[Fact, Array, Array]]:
        """Yield one fact about all samples of b that match different samples of a."""
        # A piece may have rows of two samples, so whole samples are stated.
        taken = self.per_row(np.any(cells, axis=1))
        moved: dict[int, int] = {}
        rows: list[Array] = []
        for of_source, place, source in self._moved_samples(each.values):
            if taken[of_source].any():
                moved |= {place: source} if place != source else {}
                rows.append(of_source)
        if not moved:
            return
        a, b, (places, from_a) = self.a.name, self.b.name, zip(*sorted(moved.items()))
        text = f"{_words('sample', places)} of {b} {_match(places)} {_words('sample', from_a)} of {a}"
        if len(places) == 2 and places == from_a[::-1]:
            text = f"samples {places[0]} and {places[1]} of {b} changed places"
        yield self._fact(each, np.sort(np.concatenate(rows)), _common_layers(cells), text)

    def _regions(self, each: _Explanation, cells: Array) -> Iterator[tuple[Fact, Array, Array]]:
        """Yield a fact, its rows and its layers for each run of neighbouring pieces with one explanation, [P, L]."""
        bounds = np.append(self.starts, len(self.ids_b))
        pieces = np.flatnonzero(cells.any(axis=1))
        for run in np.split(pieces, np.flatnonzero(np.diff(pieces) > 1) + 1) if len(pieces) else ():
            layers = _common_layers(cells[run])
            # A run may begin and end inside the pieces next to it.
            begin, end = int(bounds[max(0, run[0] - 1)]), int(bounds[min(len(bounds) - 1, run[-1] + 2)])
            found = self._region(each, layers, begin, end)
            regions = [] if found is None else [found]
            if each.kind == "nothing":
                # Each sample may have its own beginning, such as different answers to the same prompts.
                inside = self.samples.starts - self.first
                cuts = pairwise([begin, *inside[(inside > begin) & (inside < end)].tolist(), end])
                split = [region for cut in cuts if (region := self._region(each, layers, *cut)) is not None]
                left = (
                    np.setdiff1d(found[1], np.concatenate([rows for _, rows, _ in split])) if found and split else None
                )
                if found is None or (
                    left is not None and len(left) and self.in_place[np.ix_(left, layers)].mean() > _FITS
                ):
                    regions = split or regions
            yield from regions

    def _region(self, each: _Explanation, layers: Array, begin: int, end: int) -> tuple[Fact, Array, Array] | None:
        """Return the fact of the rows in begin..end-1 with the greatest gain; None: too few of them fit."""
        fits, in_place = (of[begin:end][:, layers].mean(axis=1) for of in (each.fitting, self.in_place))
        gains = np.where(self.routed_b[begin:end], fits - np.maximum(in_place, 0.5), 0.0)
        # Cells have bounds of pieces; the fault begins and ends at the rows with the greatest gain.
        first, last = _best_run(gains)
        rows = begin + np.arange(first, last + 1)
        rows = rows[self.routed_b[rows]]
        held = each.fitting[np.ix_(rows, layers)]
        least = _MIN_UNRELATED if each.kind == "nothing" else 0
        if len(rows) < _MIN_ROWS or held.mean() < _FITS or held.sum() < least:
            return None
        return self._fact(each, rows, layers)

    def _fact(self, each: _Explanation, rows: Array, layers: Array, text: str = "") -> tuple[Fact, Array, Array]:
        """Return a fact with its sentence, its rows and its layers; a given text is followed by layers and counts alone."""
        a, b, kind = self.a.name, self.b.name, each.kind
        numbers = tuple(self.b.layer_numbers[layer] for layer in layers)
        where = "in all layers" if numbers == self.b.layer_numbers else f"in {_words('layer', numbers)}"
        first, last = self.first + int(rows[0]), self.first + int(rows[-1])
        samples = self.samples.touched(first, last)
        position = first - int(self.samples.starts[samples[0]]) if len(samples) == 1 else 0
        named = f" ({_words('sample', samples)}{f', from position {position}' if position else ''})" if samples else ""
        is_all = (first, last) == (0, self.b.num_tokens - 1)
        place = f"all {last + 1:,} rows of {b}" if is_all else f"rows {first}..{last}{named} of {b}"
        if kind == "row":
            offset = each.values
            step = f"{abs(offset):,} {'row' if abs(offset) == 1 else 'rows'} {'earlier' if offset < 0 else 'later'}"
            text = f"{place} match {a}'s rows {first + offset}..{last + offset} ({step})"
        elif kind == "layer":
            from_a = [self.a.layer_numbers[column] for column in each.values[layers]]
            text = f"{_words('layer', numbers)} of {b} {_match(numbers)} {_words('layer', from_a)} of {a}"
            where = f"in {place}"
        elif kind == "names":
            num_experts = self.a.num_experts
            added, times = np.unique(
                (each.values[layers[0]] - np.arange(num_experts)) % num_experts, return_counts=True
            )
            # The names of rare experts may be wrong.
            is_sum = times.max() >= 0.9 * num_experts
            ids = f"its id plus {added[times.argmax()]} (modulo {num_experts})" if is_sum else "a different id"
            text = f"{place} name each expert by {ids}"
        elif kind == "constant":
            text = f"{place} repeat one route"
        elif kind == "nothing":
            text = text or f"{place} {_UNLIKE}"
            text = text.replace("{a}", a)
        if kind == "names":
            where += self._later_layers(rows, layers)
        held = each.fitting[np.ix_(rows, layers)]
        # The range of a fact may be too small where a part of the rows was read.
        read = "" if len(self.ids_b) >= self.b.num_tokens else " that were read"
        text = f"{text}, {where}: {int(held.sum()):,} of {held.size:,} decisions{read}."
        return Fact(kind=kind, text=text, layer_numbers=numbers, rows=(first, last), decisions=held.size), rows, layers

    def _later_layers(self, rows: Array, layers: Array) -> str:
        """Return whether layers after those with different names agree: experts that moved with their router do no harm."""
        later = np.arange(layers.max() + 1, self.different.shape[1])
        later = later[self.column[later] >= 0]
        if not len(later):
            return ""
        before = np.setdiff1d(np.flatnonzero(self.column >= 0), np.arange(layers.min(), self.different.shape[1]))
        noise = self.different[np.ix_(rows, before)].mean(axis=0).max() if len(before) else 0.0
        differ = self.different[np.ix_(rows, later)]
        agree = differ.mean(axis=0).max() <= 0.1 + 3 * noise
        return (
            f", and later layers {'agree' if agree else 'differ'} ({percent(float(differ.mean()))} of decisions differ)"
        )


def _read(source: TraceSource, start: int, num_rows: int) -> tuple[Array, Array, Array]:
    """Return the rows from `start` on: experts [num_rows, num_layers, topk], which have a route, token ids (-1: unknown)."""
    rows = source.read(start, start + num_rows)
    missing = num_rows - rows.num_tokens
    ids, routed = rows.topk_indices.numpy(), rows.replay_mask.numpy()
    tokens = np.full(num_rows, -1) if rows.token_ids is None else np.pad(rows.token_ids.numpy(), (0, missing))
    return np.pad(ids, ((0, missing), (0, 0), (0, 0))), np.pad(routed, (0, missing)), tokens


def _common_layers(cells: Array) -> Array:
    """Return the layers of [pieces, L] that have at least half as many pieces as the layer with most."""
    times = cells.sum(axis=0)
    layers: Array = np.flatnonzero(2 * times >= times.max())
    return layers


def _keys(sets: Array) -> Array:
    """Return one number for each row and the two rows after it, [n] -> [n - 2]."""
    num_keys = max(0, len(sets) - _KEY_ROWS + 1)
    keys: Array = np.zeros(num_keys, np.uint64)
    for step in range(_KEY_ROWS):
        keys = keys * np.uint64(0x9E3779B97F4A7C15) ^ sets[step : step + num_keys]
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


def _match(numbers: Sequence[int]) -> str:
    return "match" if len(numbers) > 1 else "matches"


def _words(noun: str, numbers: Sequence[int]) -> str:
    """Return "layer 5", or "layers 2..4, 9"."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {number_words(numbers)}"
