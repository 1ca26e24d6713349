"""Where b's routes come from in a: rules propose claims, and counting proves them.

A claim says of each row and layer of b what it holds: a moved row or sample of a, another layer, one route. A decision that
is near what the claim says, and not near a's decision in place, speaks for it. A decision that is not near what it says
speaks against it. The run of rows and the layers with the greatest sum are its place, and it stands if nine tenths of the
decisions there are as it says. The claim that explains most comes first; what it explains is taken out, and the rest is
searched again. A claim that holds in no run is tried on the rows that differ in most of its layers, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_router_replay.diagnostics.counting import Array, count_shared
from megatron_router_replay.diagnostics.evidence import Evidence, set_numbers

MIN_ROWS = 6
"""Rows that a fact holds for at least: fewer look like another's by chance."""

_SURE = 40.0
"""Bits by which a claim must be likelier than chance."""

_TRUE = 0.9
"""Share of the decisions that a fact names which must be as it says."""

_AGAINST = 4.0
"""Weight of a decision that speaks against a claim: less, and a run takes in too much; more, and noise breaks it up."""

_OFTEN = 40
"""Decisions of a that name an expert, from which on it is no chance that b names it never."""

_MOST_FACTS = 40
_MOST_OFFSETS = 24
_MOST_LAYERS = 16  # in which rows are looked up in all of a: more take longer and say the same


@dataclass(eq=False, kw_only=True)
class Claim:
    """What rows and layers of b hold; the search narrows `layers` and `at` to where it is so.

    Args:
        kind: a kind of `Fact`.
        layers: [m] indices of b's layers. holds: [n, m] bool, decisions of b that are as it says.
        weights: [n, m] bits in favour of it, negative against it; None: from `holds` and what is explained already.
        at: the rows that it is about, as indices of the evidence, in order.
        scattered: whether `at` leaves out rows in between.
        offset: row r holds a's row r + offset; None: not one number.
        order: of each place of a sample in b, the sample of a that lies there.
        source_layers: [m] layer numbers of a.
        names: [m, num_experts] the expert of b that stands for each of a.
        experts: [m] experts that b never names.
    """

    kind: str
    layers: Array
    holds: Array
    weights: Array | None = None
    at: Array = field(default_factory=lambda: np.empty(0, np.int64))
    scattered: bool = False
    offset: int | None = None
    order: Array | None = None
    source_layers: Array | None = None
    names: Array | None = None
    experts: Array | None = None
    gain: float = np.inf  # at most; bits


def search(evidence: Evidence) -> list[Claim]:
    """Return what b holds of a, what explains most first; rows and layers that differ by noise yield nothing."""
    return _Search(evidence).run() if len(evidence.rows) >= MIN_ROWS else []


class _Search:
    """The decisions that are explained, and those that a claim was `taken` for."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.explained: Array = evidence.near_in_place | ~evidence.routed[:, None]
        self.taken: Array = np.zeros_like(self.explained)
        self.bits: Array = -np.log2(evidence.by_chance)

    def run(self) -> list[Claim]:
        found: list[Claim] = []
        # Moved rows are looked for twice: what one fault left in pieces may be another.
        rules: tuple[Callable[[], list[Claim]], ...]
        rules = (self._moved, self._moved, self._scattered, self._renamed, self._unrelated, self._unused)
        for propose in rules:
            claims = propose()
            while len(found) < _MOST_FACTS and (best := self._best(claims)) is not None:
                found.append(best)
                self.taken[np.ix_(best.at, best.layers)] = True
                self.explained |= self.taken
        return found

    def _best(self, claims: list[Claim]) -> Claim | None:
        """Return the claim that explains most of what is not explained yet, narrowed to its place; None if none is sure."""
        best: Claim | None = None
        # What a claim gains only falls as others explain more, so most of them need not be looked at again.
        for claim in sorted(claims, key=lambda each: -each.gain):
            if claim.gain < _SURE or (best is not None and claim.gain <= best.gain):
                break
            place = self._placed(claim)
            claim.gain = 0.0 if place is None else place.gain
            if place is not None and (best is None or place.gain > best.gain):
                best = place
        return best

    def _placed(self, claim: Claim) -> Claim | None:
        """Return a claim narrowed to the rows and layers that it gains most from, if nine tenths of them are as it says."""
        evidence, weights = self.evidence, self._weights(claim)
        rows = np.arange(len(weights))
        if claim.scattered:
            rows = np.flatnonzero(self.explained[:, claim.layers].mean(axis=1) <= 0.5)
        if len(rows) < MIN_ROWS:
            return None
        # Rows between samples that changed places are in place, read or not.
        over_gaps = claim.scattered or claim.kind == "sample_order"
        segment = np.zeros(len(rows)) if over_gaps else evidence.segment
        gain, first, last, columns = _best_place(weights[rows], segment, whole=claim.kind in ("names", "unused"))
        at, layers = rows[first : last + 1], claim.layers[columns]
        held, counted, needed = claim.holds[at][:, columns], evidence.routed[at], _TRUE
        if claim.kind == "nothing":
            held, counted = ~held, counted & evidence.comparable[at]
            needed = min(_TRUE, 1.0 - 1.25 * float(evidence.by_chance[layers].mean()))
        elif claim.kind == "unused":
            needed = 0.0
        if gain < _SURE or (counted & held.any(axis=1)).sum() < MIN_ROWS or held[counted].mean() < needed:
            return None
        place = replace(claim, at=at, layers=layers, holds=claim.holds[:, columns], gain=gain)
        place.source_layers, place.names, place.experts = (
            None if values is None else values[columns] for values in (claim.source_layers, claim.names, claim.experts)
        )
        return place

    def _weights(self, claim: Claim) -> Array:
        """Return the bits in favour of a claim, [n, m]."""
        evidence, layers = self.evidence, claim.layers
        if claim.weights is not None:
            return np.where(self.taken[:, layers], np.minimum(claim.weights, 0.0), claim.weights)
        weights = np.where(claim.holds, np.where(self.explained[:, layers], 0.0, 1.0), -_AGAINST)
        # A row that a does not have may be anything; a row without a route is nothing.
        weights[~claim.holds & ~evidence.comparable[:, None]] = 0.0
        weights[~evidence.routed] = 0.0
        weighted: Array = weights * np.minimum(4.0, self.bits[layers])
        return weighted

    def _odd_pieces(self) -> Array:
        """Return which pieces of which layers leave much unexplained, [pieces, L] bool."""
        by_piece = self.evidence.by_piece
        odd: Array = by_piece(~self.explained) >= np.maximum(4, 0.25 * by_piece(self.evidence.routed)[:, None])
        return odd

    def _moved(self) -> list[Claim]:
        """Return moved samples and rows, other layers of the same or of a moved row, and one route again and again."""
        if not self._odd_pieces().any():
            return []
        row, source = self._lookup()
        offsets = self._offsets(row, source)
        layers = [
            claim for offset in (0, *(each.offset or 0 for each in offsets[:2])) for claim in self._layers(offset)
        ]
        return [*self._samples(row, source), *offsets, *layers, *self._constant()]

    def _scattered(self) -> list[Claim]:
        """Return what rows far apart may hold: a neighbour of the right row, another layer, one route."""
        evidence = self.evidence
        every = np.arange(len(evidence.column))
        claims = [
            Claim(kind="row", layers=every, holds=evidence.near(evidence.rows + offset, evidence.column), offset=offset)
            for offset in (-2, -1, 1, 2)
        ]
        return [replace(claim, scattered=True) for claim in (*claims, *self._layers(0), *self._constant())]

    def _samples(self, row: Array, source: Array) -> list[Claim]:
        """Return the order in which samples of a lie in b, if all of them do and side by side."""
        evidence, samples = self.evidence, self.evidence.samples_a
        if samples.count < 2 or not len(row):
            return []
        sample = samples.of_rows(source)
        starts, ends = samples.starts.numpy()[: samples.count], samples.ends.numpy()
        begin = np.append(starts, 0)
        seen, votes = np.unique(
            np.stack([sample, evidence.rows[row] - (source - samples.starts.numpy()[sample])]),
            axis=1,
            return_counts=True,
        )
        # Neighbouring rows that look alike vote for any place. The place with most votes is written last.
        order = np.argsort(votes, kind="stable")
        order = order[votes[order] >= 0.25 * np.append(ends - starts, np.inf)[seen[0, order]]]
        begin[seen[0, order]] = seen[1, order]
        begin = begin[: samples.count]
        order = np.lexsort((ends - starts, begin))
        stops = begin[order] + (ends - starts)[order]
        if begin[order[0]] != 0 or np.any(begin[order][1:] != stops[:-1]) or np.all(order == np.arange(len(order))):
            return []
        here = order[np.minimum(np.searchsorted(stops, evidence.rows, side="right"), len(order) - 1)]
        holds = evidence.near(evidence.rows - begin[here] + starts[here], evidence.column)
        return [Claim(kind="sample_order", layers=np.arange(holds.shape[1]), holds=holds, order=order)]

    def _offsets(self, row: Array, source: Array) -> list[Claim]:
        """Return the offsets at which most rows of b are found in a, those found most often first."""
        evidence = self.evidence
        offsets, which, counts = np.unique(source - evidence.rows[row], return_inverse=True, return_counts=True)
        likely = np.lexsort((np.abs(offsets), -counts))
        likely = likely[(counts[likely] >= 4) & (offsets[likely] != 0)][:_MOST_OFFSETS]
        claims = []
        for index in likely:
            pieces = np.zeros(len(evidence.starts), dtype=bool)
            pieces[np.searchsorted(evidence.starts, row[which == index], side="right") - 1] = True
            # One piece more on either side: a run may end inside it.
            pieces |= np.append(pieces[1:], False) | np.append(False, pieces[:-1])
            offset = int(offsets[index])
            holds = evidence.near(evidence.rows + offset, evidence.column, evidence.per_row(pieces))
            claims.append(Claim(kind="row", layers=np.arange(holds.shape[1]), holds=holds, offset=offset))
        return claims

    def _constant(self) -> list[Claim]:
        """Return the set that most unexplained decisions of each layer name."""
        evidence, claims = self.evidence, []
        route = np.ones(evidence.sets.shape[1], dtype=np.uint64)
        for layer in np.flatnonzero(~self.explained.all(axis=0)):
            values, counts = np.unique(evidence.sets[~self.explained[:, layer], layer], return_counts=True)
            route[layer] = values[counts.argmax()]
        holds = (evidence.sets == route) & evidence.routed[:, None]
        claims.append(Claim(kind="constant", layers=np.arange(holds.shape[1]), holds=holds))
        return claims

    def _layers(self, offset: int) -> list[Claim]:
        """Return for the layers of b the layers of a that explain most of them."""
        evidence, odd = self.evidence, self._odd_pieces()
        sets_a = evidence.sets_of_a(evidence.rows + offset)
        columns = np.full(len(evidence.column), -1)
        for layer in np.flatnonzero(odd.any(axis=0)):
            same = (sets_a == evidence.sets[:, layer, None]) & ~self.explained[:, layer, None]
            if evidence.column[layer] >= 0:
                same[:, evidence.column[layer]] = False
            share = evidence.by_piece(same) / np.maximum(1, evidence.by_piece(evidence.routed))[:, None]
            # Popular experts are chosen in every layer, so a layer must stand out from all others in some piece.
            stands_out = (share - np.median(share, axis=1, keepdims=True))[odd[:, layer]].max(axis=0)
            if stands_out.max() >= 0.2:
                columns[layer] = stands_out.argmax()
        layers = np.flatnonzero(columns >= 0)
        if not len(layers):
            return []
        holds = evidence.near(evidence.rows + offset, columns)[:, layers]
        numbers = np.array(evidence.a.layer_numbers)[columns[layers]]
        return [Claim(kind="layer", layers=layers, holds=holds, offset=offset, source_layers=numbers)]

    def _lookup(self) -> tuple[Array, Array]:
        """Return where unexplained rows of b stand in a: index of the row of b, row of a, each [pairs].

        Rows of one layer that follow each other make a key: all layers of a fault need not say the same.
        """
        evidence = self.evidence
        unexplained = ~self.explained & evidence.per_row(self._odd_pieces()) & (evidence.column >= 0)
        layers = np.sort(np.argsort(-unexplained.sum(axis=0), kind="stable")[:_MOST_LAYERS])
        # So many bits tell one row of a from all others.
        height = int(np.ceil(np.log2(max(2, evidence.a.num_tokens)) / max(1.0, float(self.bits.mean()))))
        keys_b = run_keys(evidence.sets[:, layers], height)
        follows = np.append(np.diff(evidence.rows) == 1, False) & np.append(evidence.routed[1:], False)
        wanted = unexplained[:, layers] & evidence.routed[:, None]
        for step in range(height - 1):
            wanted = wanted & np.append(follows[step:], np.zeros(step, dtype=bool))[:, None]
        row, layer = np.nonzero(wanted)
        if not len(row):
            return row, row
        flat = keys_b[row, layer]
        known = np.unique(flat)
        # Most keys of a are none of these, and a search of each would miss the cache at every step.
        low_bits = np.uint64((1 << 22) - 1)
        may_be = np.zeros(1 << 22, dtype=bool)
        may_be[known & low_bits] = True
        hits: list[tuple[Array, Array]] = []
        step = max(1024, (4 << 20) // max(1, len(layers) * evidence.a.topk))
        for start in range(0, evidence.a.num_tokens, step):
            block = evidence.a.read(start, min(start + step + height - 1, evidence.a.num_tokens))
            ids = block.topk_indices.numpy()[:, evidence.column[layers]]
            keys = run_keys(set_numbers(ids, block.replay_mask.numpy(), evidence.numbers, nothing=0), height)[:step]
            rows_a, _ = candidates = np.nonzero(may_be[keys & low_bits])
            keys = keys[candidates]
            at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
            hit = known[at] == keys
            hits.append((at[hit], rows_a[hit] + start))
        key, row_a = (np.concatenate(parts) for parts in zip(*hits))
        order = np.argsort(key, kind="stable")
        key, row_a = key[order], row_a[order]
        which = np.searchsorted(known, flat)
        first = np.searchsorted(key, which)
        count = np.searchsorted(key, which, side="right") - first
        count[count > 64] = 0  # a key that stands everywhere, as that of a filler, says nothing
        at = np.repeat(first, count) + np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        return np.repeat(row, count), row_a[at]

    def _renamed(self) -> list[Claim]:
        """Return names under which experts of b are those of a, in whole layers."""
        evidence = self.evidence
        of_a, _ = evidence.rows_a.read(evidence.rows)
        experts, free = np.arange(evidence.b.num_experts), evidence.comparable
        layers, all_names, all_holds, all_weights = [], [], [], []
        for layer in np.flatnonzero(evidence.column >= 0):
            ids_a, ids_b = of_a[:, evidence.column[layer]], evidence.ids[:, layer]
            shared = count_shared(ids_a, ids_b)
            if not np.any((shared < evidence.b.topk) & free):
                continue
            names = expert_names(ids_a[free], ids_b[free], len(experts))
            if names is None:
                continue
            offsets = (names - experts)[names >= 0] % len(experts)
            if np.all(offsets == offsets[0]):
                names = (experts + offsets[0]) % len(experts)
            # Experts that were seen too rarely keep their name if it is free, or get one that is left.
            names = np.where((names < 0) & ~np.isin(experts, names), experts, names)
            names[names < 0] = np.setdiff1d(experts, names)
            renamed = count_shared(names[ids_a].astype(ids_a.dtype), ids_b)
            holds = (2 * renamed > evidence.b.topk) & (renamed >= shared) & free
            layers.append(layer)
            all_names.append(names)
            all_holds.append(holds)
            all_weights.append(np.where(holds, np.where(renamed > shared, 1.0, 0.0), -_AGAINST) * free)
        if not layers:
            return []
        holds, weights = np.stack(all_holds, axis=1), np.stack(all_weights, axis=1)
        return [Claim(kind="names", layers=np.array(layers), holds=holds, weights=weights, names=np.stack(all_names))]

    def _unrelated(self) -> list[Claim]:
        """Return the rows and layers that are near a in place no more often than unrelated rows are."""
        evidence = self.evidence
        near, by_chance = evidence.near_in_place, evidence.by_chance
        routed = np.maximum(1, evidence.by_piece(evidence.comparable))[:, None]
        usual = np.clip(np.quantile(evidence.by_piece(near) / routed, 0.75, axis=0), 0.5, 0.97)
        usual = np.maximum(usual, by_chance + 0.01)
        weights = np.where(near, np.log2(by_chance / usual), np.log2((1 - by_chance) / (1 - usual)))
        # What a fact explains already, and rows that a does not have, are nobody's.
        weights[self.explained & ~near] = -4.0
        weights[~evidence.comparable] = 0.0
        weights[:, evidence.column < 0] = 0.0
        return [Claim(kind="nothing", layers=np.arange(near.shape[1]), holds=near, weights=weights)]

    def _unused(self) -> list[Claim]:
        """Return an expert of each layer that a names often and b never."""
        evidence = self.evidence
        of_a, _ = evidence.rows_a.read(evidence.rows)
        layers, experts, all_holds = [], [], []
        for layer in np.flatnonzero((evidence.column >= 0) & (self.taken.mean(axis=0) < 0.5)):
            ids_a = of_a[:, evidence.column[layer]]
            named_a, named_b = (
                np.bincount(ids[evidence.comparable].ravel(), minlength=evidence.b.num_experts)
                for ids in (ids_a, evidence.ids[:, layer])
            )
            expert = int(np.where(named_b == 0, named_a, 0).argmax())
            if named_b[expert] == 0 and named_a[expert] >= _OFTEN:
                layers.append(layer)
                experts.append(expert)
                all_holds.append((ids_a == expert).any(axis=1) & evidence.comparable)
        if not layers:
            return []
        holds = np.stack(all_holds, axis=1)
        weights = holds.astype(np.float64)
        return [Claim(kind="unused", layers=np.array(layers), holds=holds, weights=weights, experts=np.array(experts))]


def _best_place(weights: Array, segment: Array, *, whole: bool) -> tuple[float, int, int, Array]:
    """Return the greatest sum of a run of rows in some columns: (sum, first row, last row, columns); whole: of all rows."""
    every = np.arange(weights.shape[1])
    if whole:
        columns = np.flatnonzero(weights.sum(axis=0) > 0)
        return float(weights[:, columns].sum()), 0, len(weights) - 1, columns
    gains, _, _ = best_runs(weights, segment)
    joint, _, _ = best_runs(weights.sum(axis=1)[:, None], segment)
    columns = every if joint[0] >= gains.max() else every[[gains.argmax()]]
    for _ in range(4):
        gain, first, last = (value[0] for value in best_runs(weights[:, columns].sum(axis=1)[:, None], segment))
        in_run = weights[first : last + 1].sum(axis=0)
        # A layer takes part if it gains a good part of what the best one does.
        chosen = every[(in_run >= 0.3 * in_run.max()) & (in_run > 0)]
        if np.array_equal(chosen, columns) or not len(chosen):
            break
        columns = chosen
    return float(gain), int(first), int(last), columns


def best_runs(weights: Array, segment: Array) -> tuple[Array, Array, Array]:
    """Return the greatest sum of neighbouring rows of each column, and the first and the last of these rows, [m] each."""
    # Sums that begin before a break fall far below every other.
    penalty = -1e9 * segment[:, None].astype(np.float64)
    ends = weights.cumsum(axis=0)
    starts = ends - weights + penalty
    gains = ends + penalty - np.minimum.accumulate(starts, axis=0)
    last = gains.argmax(axis=0)
    # The last of equal starts: rows that say nothing do not belong to a run.
    first = [end - int(np.argmin(starts[: end + 1, column][::-1])) for column, end in enumerate(last)]
    return gains[last, np.arange(len(last))], np.array(first), last


def run_keys(sets: Array, height: int) -> Array:
    """Return one number for `height` rows of each layer, [n, layers] uint64; layers have numbers of their own."""
    odd = np.uint64(0x9E3779B97F4A7C15)
    keys = sets
    for step in range(1, height):
        keys = keys * odd ^ np.append(sets[step:], sets[:step], axis=0)
    return keys ^ np.arange(1, sets.shape[1] + 1, dtype=np.uint64) * odd


def expert_names(a: Array, b: Array, num_experts: int) -> Array | None:
    """Return the expert of b that stands for each expert of a, [num_experts], -1: unknown; None: all keep their names."""
    together = np.zeros(num_experts**2, dtype=np.int64)
    for column in a.T.astype(np.int64):
        for other in b.T:
            together += np.bincount(column * num_experts + other, minlength=num_experts**2)
    named = np.bincount(a.ravel(), minlength=num_experts)
    popular = np.bincount(b.ravel(), minlength=num_experts) / max(1, len(b))
    experts = np.arange(num_experts)
    # An expert that nearly every row names stands beside all others; that is no other name.
    share = together.reshape(num_experts, num_experts) / np.maximum(1, named)[:, None]
    lift = (share - popular) / np.maximum(1e-9, 1 - popular)
    best = lift.argmax(axis=1)
    names = np.where((named >= 6) & (lift[experts, best] >= 0.4), best, -1)
    values, counts = np.unique(names[names >= 0], return_counts=True)
    names[np.isin(names, values[counts > 1])] = -1
    known = named[names >= 0].sum()
    moved = (names >= 0) & (names != experts)
    return names if moved.any() and known >= 0.7 * named.sum() else None
