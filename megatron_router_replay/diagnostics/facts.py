"""State what two traces cover, and which rows, samples, layers or ids of a the routes of b match, one sentence each.

Rows are cut into pieces of 32 that end with samples; a piece of one layer is a cell. A cell is bad if fewer than half of its
decisions are near those of a (see the package's docstring). Each bad cell is compared with a few explanations: other samples
of a, a's rows at another offset, another layer of a, one repeated route, a's experts under other ids. The best one is taken
if it fits three quarters of the cell; neighbouring cells with one explanation become one fact, with its first and last row
found row by row. Bad cells without an explanation are unrelated to a if chance is likelier than noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from megatron_router_replay.diagnostics.counting import Array, Counter, Samples, count_shared
from megatron_router_replay.diagnostics.fact import Fact
from megatron_router_replay.diagnostics.source import PairedSource, TraceSource
from megatron_router_replay.tables import number_words

MAX_ROWS = 32768
"""Rows that are searched; of a longer trace, those around the block of rows that differs most."""

_PIECE_ROWS = 32  # short enough that a fault in half of a sample fills a piece
_FITS = 0.75
_MIN_ROWS = 6  # fewer rows match different rows by chance
_SURE = 40.0  # bits by which chance must be likelier than noise
_KEY_ROWS = 3  # rows in a key: a single set of experts occurs too often
_MOST_OCCURRENCES = 64  # a key that occurs more often, such as filler, is ignored
_MOST_OFFSETS = 16


def find_facts(counts: Counter) -> list[Fact]:
    """Return the coverage of two traces, and then the matches of b in a, those of most decisions first."""
    facts = list(_coverage(counts))
    differs = counts.rows_different or not counts.layers or counts.rows_only_b
    if differs and counts.b.num_tokens and counts.a.layer_numbers and counts.b.layer_numbers:
        facts += sorted(_Search(counts).facts(), key=lambda fact: -fact.decisions)
    return facts


def _coverage(counts: Counter) -> Iterator[Fact]:
    a, b = counts.a, counts.b
    if not counts.layers:
        numbers = f"{a.name} has {number_words(a.layer_numbers)}, {b.name} has {number_words(b.layer_numbers)}"
        yield Fact(kind="layers", text=f"no layer is in both: {numbers}.", layer_numbers=b.layer_numbers)
    if isinstance(b, PairedSource):
        yield _paired(a, b)
    elif a.sequence_lengths and b.sequence_lengths and a.sequence_lengths != b.sequence_lengths:
        each = [f"{s.name} has {len(s.sequence_lengths or ()):,} samples of {s.num_tokens:,} rows" for s in (a, b)]
        yield Fact(kind="samples", text=f"the samples have different lengths: {' and '.join(each)}.")
    for name, other_name, only in ((a.name, b.name, counts.only_a), (b.name, a.name, counts.only_b)):
        # Engines leave out one row a sample: the last token is sampled and never fed back.
        samples = (only > 1).nonzero().flatten().tolist() if counts.samples.known else []
        if samples:
            rows = f"{int(only[samples].sum()):,} rows of {_words('sample', samples)}"
            text = f"{rows} have a route in {name} and none in {other_name}."
            yield Fact(kind="samples", text=text, samples=tuple(samples))
    agreeing = (counts.rows_compared - counts.different_by_layer).clamp(min=1)
    # Noise exchanges the order of near-ties; nearly all decisions are reordered by a sort.
    is_sorted = (counts.other_order >= 0.9 * agreeing) & (2 * agreeing > counts.rows_compared) & (a.topk > 1)
    if listed := is_sorted.nonzero().flatten().tolist():
        layers = tuple(counts.layers[i] for i in listed)
        held, decisions = int(counts.other_order[listed].sum()), int(agreeing[listed].sum())
        text = f"{held:,} of {decisions:,} decisions that agree list their experts in a different order, in "
        text += f"{_words('layer', layers)}."
        yield Fact(kind="expert_order", text=text, layer_numbers=layers, held=held, decisions=decisions)
    if counts.rows_other_token:
        text = f"{counts.rows_other_token:,} of {counts.rows_with_tokens:,} rows hold a different token, first row "
        text += f"{counts.first_other_token:,}."
        yield Fact(kind="tokens", text=text, held=counts.rows_other_token, decisions=counts.rows_with_tokens)


def _paired(a: TraceSource, b: PairedSource) -> Fact:
    moved = [(place, partner) for place, partner in enumerate(b.partners) if partner not in (-1, place)]
    missing = [place for place, partner in enumerate(b.partners) if partner < 0]
    text = f"samples are matched by their tokens, and rows of {b.name} are numbered as in {a.name}"
    if moved:
        places, partners = zip(*moved)
        text += f"; {_words('sample', places)} of {a.name} are {_words('sample', partners)} of {b.name}"
    if missing:
        text += f"; {_words('sample', missing)} of {a.name} have no equal in {b.name}"
    return Fact(kind="samples", text=f"{text}.", samples=tuple(missing))


class _Search:
    """The searched rows of both traces: n rows, L layers of b, P pieces.

    Attributes:
        first: number of the first row that is searched.
        starts: [P] index of the first row of each piece, counted from `first`.
        ids_a, ids_b: [n, layers, topk]. routed_a, routed_b: [n] bool. sets_a, sets_b: [n, layers] a number for each set.
        column: [L] index of b's layer in a's layers, -1: a has no such layer.
        in_place: [n, L] bool, decisions near those of a in the same row.
    """

    def __init__(self, counts: Counter) -> None:
        self.a, self.b = a, b = counts.a, counts.b
        self.samples_a = Samples(a.sequence_lengths or b.sequence_lengths, a.num_tokens)
        self.samples = Samples(b.sequence_lengths or a.sequence_lengths, b.num_tokens)
        worst = counts.worst_row()
        self.first = max(0, min(worst - MAX_ROWS // 2, b.num_tokens - MAX_ROWS))
        stop = min(b.num_tokens, self.first + MAX_ROWS)
        # A sentence says that a part of the rows was read, for its range may then be too small.
        self.complete = stop - self.first == b.num_tokens
        self.ids_b, self.routed_b = _read(b, self.first, stop)
        # Rows of a that match lie in the same window: a search of all of a would read it once for each offset.
        self.ids_a, self.routed_a = _read(a, self.first, self.first + MAX_ROWS)
        layers = {number: i for i, number in enumerate(a.layer_numbers)}
        self.column = np.array([layers.get(number, -1) for number in b.layer_numbers])
        # A set of experts as one number: the sum of random numbers.
        numbers = np.random.default_rng(1).integers(1 << 63, size=a.num_experts, dtype=np.uint64)
        self.sets_a, self.sets_b = (numbers[ids].sum(axis=2, dtype=np.uint64) for ids in (self.ids_a, self.ids_b))
        # A piece never crosses the end of a sample, because faults often begin or end there.
        ends = self.samples.starts - self.first
        bounds = np.unique([0, *ends[(ends > 0) & (ends < len(self.ids_b))], len(self.ids_b)])
        # The pieces of a sample have nearly equal lengths.
        pieces = [
            np.linspace(begin, end, max(1, round((end - begin) / _PIECE_ROWS)) + 1).astype(np.int64)[:-1]
            for begin, end in pairwise(bounds.tolist())
        ]
        self.starts = np.concatenate(pieces)
        self.in_place = self.near(0, self.column)

    def near(self, offset: int | Array, columns: Array, ids_a: Array | None = None) -> Array:
        """Return which decisions of b share more than half of their experts with rows of a, [n, L] bool.

        Args:
            offset: of a's row, one or [n].
            columns: [L] of a's layers.
            ids_a: the experts of a under other ids.
        """
        rows, topk = np.arange(len(self.ids_b)) + offset, self.ids_b.shape[2]
        if not len(self.ids_a):
            return np.zeros(self.ids_b.shape[:2], bool)
        inside = (rows >= 0) & (rows < len(self.ids_a))
        rows = np.where(inside, rows, 0)
        ids_a = self.ids_a if ids_a is None else ids_a
        shared = count_shared(ids_a[rows][:, columns].reshape(-1, topk), self.ids_b.reshape(-1, topk))
        routed = (inside & self.routed_a[rows] & self.routed_b)[:, None] & (columns >= 0)
        near: Array = routed & (2 * shared > topk).reshape(routed.shape)
        return near

    def by_piece(self, values: Array) -> Array:
        """Return the sums of each piece, [n, ...] -> [P, ...]."""
        sums: Array = np.add.reduceat(values, self.starts, axis=0, dtype=np.result_type(values, np.int64))
        return sums

    def per_row(self, by_piece: Array) -> Array:
        """Return the value of each row's piece, [P, ...] -> [n, ...]."""
        values: Array = np.repeat(by_piece, np.diff(self.starts, append=len(self.ids_b)), axis=0)
        return values

    def facts(self) -> Iterator[Fact]:
        """Yield the facts about rows."""
        routed = self.by_piece(self.routed_b)[:, None]
        here = self.by_piece(self.in_place) / np.maximum(1, routed)
        bad = (here < 0.5) & (routed > 0)
        if not bad.any():
            return
        best, chosen = np.full(bad.shape, _FITS), np.full(bad.shape, -1)
        tried: list[tuple[str, Array, Array]] = []
        for kind, values, fitting in self._explanations(bad):
            fits = self.by_piece(fitting) / np.maximum(1, routed)
            chosen = np.where(bad & (fits > best), len(tried), chosen)
            best = np.maximum(best, np.where(bad, fits, 0.0))
            tried.append((kind, values, fitting))
        # The rows of a fact may reach into cells that it does not explain alone: these are not unrelated.
        explained = np.zeros_like(self.in_place)
        for index, (kind, values, fitting) in enumerate(tried):
            found = self._moved if kind == "sample_order" else self._regions
            for fact, rows, layers in found(kind, values, fitting, chosen == index):
                explained[np.ix_(rows, layers)] |= fitting[np.ix_(rows, layers)]
                yield fact
        bits = self._bits_of_chance()
        bits[explained] = -4.0
        unexplained = bad & (chosen < 0) & (self.by_piece(bits) > 0)
        nothing = self.routed_b[:, None] & ~self.in_place
        yield from (fact for fact, _, _ in self._regions("nothing", self.column, nothing, unexplained, bits))

    def _explanations(self, bad: Array) -> Iterator[tuple[str, Array, Array]]:
        """Yield kinds, their values (offsets, columns of a or names) and the decisions that they fit, [n, L]."""
        layer = int(bad.sum(axis=0).argmax())  # the layer that differs in most pieces
        rows, sources = self._equal_rows(bad, layer)
        moves = self._sample_offsets(rows, sources)
        # Samples come first: of two explanations that fit equally, the earlier one is taken.
        if moves.any():
            yield "sample_order", moves, self.near(moves, self.column) & (moves != 0)[:, None]
        found, votes = np.unique(sources - rows, return_counts=True)
        likely = found[np.lexsort((np.abs(found), -votes))][:_MOST_OFFSETS].tolist()
        for offset in dict.fromkeys([-1, 1, -2, 2, -3, 3, *filter(None, likely)]):
            yield "row", np.array(offset), self.near(offset, self.column)
        # Layers, a constant and names are found layer by layer, from the bad rows alone.
        bad_rows = self.per_row(bad)
        columns, constant, renamed = (
            self.column.copy(),
            np.zeros(bad_rows.shape, bool),
            self.ids_a[:, self.column].copy(),
        )
        names = np.zeros((len(columns), self.a.num_experts), np.int64)
        for layer in np.flatnonzero(bad.any(axis=0)).tolist():
            rows = np.flatnonzero(bad_rows[:, layer] & self.routed_b)
            sets, times = np.unique(self.sets_b[rows, layer], return_counts=True)
            constant[:, layer] = (self.sets_b[:, layer] == sets[times.argmax()]) & self.routed_b
            rows = rows[rows < len(self.ids_a)]  # a may be shorter
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
        yield "layer", columns, self.near(0, columns)
        yield "constant", columns, constant
        yield "names", names, self.near(0, np.arange(len(columns)), renamed) & names.any(axis=1)

    def _equal_rows(self, bad: Array, layer: int) -> tuple[Array, Array]:
        """Return bad rows of b, and rows of a with the same sets of experts in a layer, there and in the next two rows."""
        keys_a, keys_b = _keys(self.sets_a[:, self.column[layer]]), _keys(self.sets_b[:, layer])
        if self.column[layer] < 0:  # a has no such layer, so nothing of it can be equal
            keys_a = keys_a[:0]
        rows = np.flatnonzero(self.per_row(np.any(bad, axis=1))[: len(keys_b)] & self.routed_b[: len(keys_b)])
        order = np.argsort(keys_a, kind="stable")
        left, right = (np.searchsorted(keys_a[order], keys_b[rows], side) for side in ("left", "right"))
        times = np.where(right - left > _MOST_OCCURRENCES, 0, right - left)
        index = np.repeat(left - np.cumsum(times) + times, times) + np.arange(times.sum())
        return np.repeat(rows, times), order[index]

    def _sample_offsets(self, rows: Array, sources: Array) -> Array:
        """Return the offset of each row of b that lies in a different sample of a, [n]; 0: in none."""
        offsets, is_different = np.zeros(len(self.ids_b), np.int64), False
        if not self.samples_a.known:
            return offsets
        # A pair of a sample and an offset as one number, which is counted much faster than a column of two.
        samples = self.samples_a.of_rows(sources + self.first)
        pairs, votes = np.unique(samples << 32 | sources - rows + (1 << 31), return_counts=True)
        pairs, votes = pairs[votes >= _MIN_ROWS], votes[votes >= _MIN_ROWS]
        for i in np.argsort(votes, kind="stable"):  # of several, the one with most votes is written last
            sample, offset = int(pairs[i]) >> 32, (int(pairs[i]) & (1 << 32) - 1) - (1 << 31)
            if sample >= len(self.samples_a.lengths):
                continue  # rows after the last sample
            begin, end = (self.samples_a.starts[sample : sample + 2] - self.first - offset).tolist()
            place = int(self.samples.of_rows(np.array(self.first + (begin + end) // 2)))
            # A shared prompt matches several samples; a quarter of the rows is more than chance gives.
            if 4 * votes[i] >= end - begin:
                offsets[max(0, begin) : max(0, end)] = offset
                is_different |= place != sample
        # Samples that moved only because an earlier one has a different length are in order: they are a row fact.
        return offsets if is_different else np.zeros_like(offsets)

    def _moved(self, kind: str, offsets: Array, fitting: Array, cells: Array) -> Iterator[tuple[Fact, Array, Array]]:
        """Yield one fact about all samples of b that match different samples of a."""
        # A piece may have rows of two samples, so whole samples are judged again, by all of their rows.
        taken = self.per_row(np.any(cells, axis=1)) & (offsets != 0)
        sources = self.samples_a.of_rows(np.arange(len(offsets)) + offsets + self.first)
        pairs = []
        for source in np.unique(sources[taken]).tolist():
            rows = np.flatnonzero((offsets != 0) & (sources == source))
            if 2 * fitting[rows].mean() >= 1:
                pairs.append(
                    (int(self.samples.of_rows(np.array(self.first + (rows[0] + rows[-1]) // 2))), source, rows)
                )
        moved = [pair[:2] for pair in pairs if pair[0] != pair[1]]
        if not moved:
            return
        places, from_a = zip(*sorted(moved))
        rows = np.sort(np.concatenate([rows for _, _, rows in pairs]))
        layers = np.flatnonzero(2 * cells.sum(axis=0) >= cells.sum(axis=0).max())
        held = fitting[np.ix_(rows, layers)]
        text = (
            f"{_words('sample', places)} of {self.b.name} {_match(places)} {_words('sample', from_a)} of {self.a.name}"
        )
        if len(places) == 2 and places == from_a[::-1]:
            text = f"samples {places[0]} and {places[1]} of {self.b.name} changed places"
        bounds = (int(rows[0]), int(rows[-1]))
        yield self._fact(kind, bounds, layers, held, text=text, samples=places, sources=from_a), rows, layers

    def _regions(
        self, kind: str, values: Array, fitting: Array, cells: Array, bits: Array | None = None
    ) -> Iterator[tuple[Fact, Array, Array]]:
        """Yield a fact, its rows and its layers for each run of neighbouring pieces with one explanation, [P, L].

        Args:
            bits: [n, L] by which chance is likelier than noise; None: the rows that an explanation fits better are taken.
        """
        bounds = np.append(self.starts, len(self.ids_b))
        pieces = np.flatnonzero(np.any(cells, axis=1))
        for run in np.split(pieces, np.flatnonzero(np.diff(pieces) > 1) + 1) if len(pieces) else ():
            layers = np.flatnonzero(2 * cells[run].sum(axis=0) >= cells[run].sum(axis=0).max())
            # A run may begin and end inside the pieces next to it.
            begin, end = bounds[max(0, run[0] - 1)], bounds[min(len(bounds) - 1, run[-1] + 2)]
            at = slice(int(begin), int(end))
            if bits is None:
                fits, in_place = (each[at][:, layers].mean(axis=1) for each in (fitting, self.in_place))
                gains = np.where(self.routed_b[at], fits - np.maximum(in_place, 0.5), 0.0)
            else:
                gains = bits[at][:, layers].sum(axis=1)
            # Cells have bounds of pieces; the fault begins and ends at the rows with the greatest gain.
            first, last = _best_run(gains)
            rows = at.start + np.arange(first, last + 1)
            rows = rows[self.routed_b[rows]]
            held = fitting[np.ix_(rows, layers)]
            if len(rows) < _MIN_ROWS or held.mean() < _FITS:
                continue
            if bits is not None and gains[first : last + 1].sum() < _SURE:
                continue
            yield self._fact(kind, (at.start + first, at.start + last), layers, held, values=values), rows, layers

    def _bits_of_chance(self) -> Array:
        """Return the bits by which chance explains each decision better than noise that changes half of all, [n, L]."""
        num_rows = min(len(self.ids_a), len(self.ids_b))
        if not num_rows:
            return np.zeros(self.in_place.shape)
        order = np.random.default_rng(2).permutation(num_rows)
        away = np.append(order - np.arange(num_rows), np.zeros(len(self.ids_b) - num_rows, np.int64))
        unrelated = self.near(away, self.column).sum(axis=0)
        # Of a few rows the share may be 0 by luck.
        chance = ((unrelated + 1) / (num_rows + 2)).clip(0.0, 0.49)
        noise = np.quantile(self.by_piece(self.in_place) / self.by_piece(np.ones_like(self.in_place)), 0.75, axis=0)
        noise = noise.clip(0.5, 0.97)
        bits: Array = np.where(self.in_place, np.log2(chance / noise), np.log2((1 - chance) / (1 - noise)))
        comparable = np.zeros(len(bits), bool)
        comparable[:num_rows] = self.routed_a[:num_rows] & self.routed_b[:num_rows]
        bits[:, self.column < 0] = bits[~comparable] = 0.0
        return bits

    def _fact(
        self,
        kind: str,
        bounds: tuple[int, int],
        layers: Array,
        held: Array,
        *,
        values: Array | None = None,
        text: str = "",
        samples: tuple[int, ...] = (),
        sources: Iterable[int] = (),
    ) -> Fact:
        """Return a fact with its sentence; a given text is followed by the layers and counts alone."""
        a, b = self.a.name, self.b.name
        numbers = tuple(self.b.layer_numbers[layer] for layer in layers)
        first, last = (self.first + bound for bound in bounds)
        samples = samples or self.samples.touched(first, last)
        where = "in all layers" if numbers == self.b.layer_numbers else f"in {_words('layer', numbers)}"
        read = "" if self.complete else " that were read"
        counted = f"{int(held.sum()):,} of {held.size:,} decisions{read}"
        position = first - int(self.samples.starts[samples[0]]) if len(samples) == 1 else 0
        named = f" ({_words('sample', samples)}{f', from position {position}' if position else ''})" if samples else ""
        rows = f"rows {first}..{last}{named} of {b}"
        if (first, last) == (0, self.b.num_tokens - 1):
            rows = f"all {last + 1:,} rows of {b}"
        offset, source_layers = None, ()
        if kind == "row":
            assert values is not None
            offset = int(values)
            step = "1 row" if abs(offset) == 1 else f"{abs(offset):,} rows"
            text = f"{rows} match {a}'s rows {first + offset}..{last + offset} ({step} "
            text += "earlier)" if offset < 0 else "later)"
        elif kind == "layer":
            assert values is not None
            source_layers = tuple(self.a.layer_numbers[column] for column in values[layers])
            text = f"{_words('layer', numbers)} of {b} {_match(numbers)} {_words('layer', source_layers)} of {a}, in {rows}"
        elif kind == "names":
            assert values is not None
            added, times = np.unique(
                (values[layers[0]] - np.arange(self.a.num_experts)) % self.a.num_experts, return_counts=True
            )
            # The names of rare experts may be wrong.
            is_sum = times.max() >= 0.9 * self.a.num_experts
            ids = (
                f"by its id plus {added[times.argmax()]} (modulo {self.a.num_experts})"
                if is_sum
                else "by a different id"
            )
            text = f"{rows} name each expert {ids}"
        elif kind == "constant":
            text = f"{rows} repeat one route"
        elif kind == "nothing":
            text = f"{rows} are as unlike {a}'s as unrelated rows"
        return Fact(
            kind=kind,
            text=f"{text}: {counted}." if kind == "layer" else f"{text}, {where}: {counted}.",
            layer_numbers=numbers,
            rows=(first, last),
            samples=samples,
            offset=offset,
            source_layers=source_layers,
            source_samples=tuple(sources),
            held=int(held.sum()),
            decisions=held.size,
        )


def _read(source: TraceSource, start: int, stop: int) -> tuple[Array, Array]:
    """Return experts [n, num_layers, topk] and which rows have a route [n], of rows start..stop-1 that are there."""
    rows = source.read(min(start, source.num_tokens), min(stop, source.num_tokens))
    return rows.topk_indices.numpy(), rows.replay_mask.numpy()


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


def _words(noun: str, numbers: Iterable[int]) -> str:
    """Return "layer 5", or "layers 2..4, 9"."""
    numbers = list(numbers)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {number_words(numbers)}"
