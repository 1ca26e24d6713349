"""Where b's routes come from in a: claims are proposed by what pieces of rows have in common, and proven by counting.

A claim says of every row and layer of b what it holds: another row of a, another layer, one route again and again. Decisions
that are near what it says, and not near a's decision in place, speak for it; decisions that are not near what it says speak
against it. The run of rows and the layers with the greatest sum are its place, and it stands if nine tenths of the decisions
there are as it says. The claim that explains most comes first; what it explains is taken out, and the rest is looked at
again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from megatron_router_replay.diagnostics.counting import Array, count_shared
from megatron_router_replay.diagnostics.evidence import Evidence, set_numbers

MIN_ROWS = 6
"""Rows that a fact holds for at least: fewer look like another's by chance."""

_NEARBY = 64
"""Rows around a suspect row in which its route is looked for first, without reading the rest of a."""

_SURE = 40.0
"""Bits by which a claim must be likelier than chance."""

_TRUE = 0.9
"""Share of the decisions that a fact names which must be as it says."""

_AGAINST = 4.0
"""Weight of a decision that speaks against a claim: less, and a run takes in too much; more, and noise breaks it up."""

_MOST_FACTS = 40
_MOST_OFFSETS = 24
_MOST_LAYERS = 16  # in which rows are looked up in all of a: more take longer and say the same


@dataclass(eq=False, kw_only=True)
class Claim:
    """What rows and layers of b hold; the search narrows `layers`, `first` and `last` to where it is so.

    Args:
        kind: "row", "layer", "constant", "row_order", "names" or "nothing".
        layers: [m] indices of b's layers. holds: [n, m] bool, decisions of b that are as it says.
        weights: [n, m] in favour of it, negative against it; None: from `holds` and what is explained already.
        offset: row r holds a's row r + offset; None: not one number.
        source_rows: [n] rows of a, each row's own. source_layers: [m] layer numbers of a.
        names: [num_experts] the expert of b that stands for each of a, -1 unknown.
        silent: [n, m] bool, decisions that say nothing although they are as it says.
        scattered: whether rows in between may hold what they should.
        first, last: the rows it is true of, as indices of the evidence.
    """

    kind: str
    layers: Array
    holds: Array
    weights: Array | None = None
    offset: int | None = None
    source_rows: Array | None = None
    source_layers: tuple[int, ...] = ()
    names: Array | None = None
    silent: Array | None = None
    scattered: bool = False
    first: int = 0
    last: int = 0
    gain: float = field(default=np.inf)  # at most; bits


def search(evidence: Evidence) -> list[Claim]:
    """Return what b holds of a, what explains most first; rows and layers that differ by noise yield nothing."""
    return _Search(evidence).run() if len(evidence.rows) >= MIN_ROWS else []


class _Search:
    """The rows and layers that are explained, and those that a claim was `taken` for."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.explained: Array = evidence.near_in_place | ~evidence.routed[:, None]
        self.taken: Array = np.zeros_like(self.explained)
        self.bits: Array = -np.log2(evidence.by_chance)

    def run(self) -> list[Claim]:
        found: list[Claim] = []
        for propose in (self._nearby, self._anywhere, self._reordered, self._renamed, self._unrelated):
            claims = propose()
            while len(found) < _MOST_FACTS and (best := self._best(claims)) is not None:
                found.append(best)
                rows = slice(best.first, best.last + 1)
                for layer, holds in zip(best.layers, best.holds[rows].T):
                    # A claim with rows in between explains only those that it holds for.
                    self.taken[rows, layer] |= holds | (not best.scattered)
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
        evidence, place = self.evidence, self._best_place(claim, self._weights(claim))
        rows = slice(place.first, place.last + 1)
        if claim.kind == "constant":
            place.holds = evidence.routed[:, None] & (evidence.sets[:, place.layers] == self._route(place))
        held, counted, needed = place.holds[rows], evidence.routed[rows], _TRUE
        if claim.kind == "nothing":
            held, counted = ~held, counted & evidence.comparable[rows]
            needed = min(_TRUE, 1.0 - 1.25 * float(evidence.by_chance[place.layers].mean()))
        shown = counted & held.any(axis=1)
        as_said = held | self.explained[rows][:, place.layers] if claim.scattered else held
        sure = place.gain >= _SURE and shown.sum() >= MIN_ROWS and as_said[counted].mean() >= needed
        return place if sure else None

    def _route(self, place: Claim) -> Array:
        """Return the set that most rows of a place hold, [m]."""
        columns = self.evidence.sets[place.first : place.last + 1][:, place.layers].T
        counted = (np.unique(column, return_counts=True) for column in columns)
        return np.array([values[counts.argmax()] for values, counts in counted])

    def _best_place(self, claim: Claim, weights: Array) -> Claim:
        every, segment = np.arange(weights.shape[1]), self.evidence.segment
        gains, _, _ = best_runs(weights, segment)
        joint, _, _ = best_runs(weights.sum(axis=1)[:, None], segment)
        columns = every if joint[0] >= gains.max() else every[[gains.argmax()]]
        for _ in range(4):
            total = weights[:, columns].sum(axis=1)
            gain, first, last = (value[0] for value in best_runs(total[:, None], segment))
            in_run = weights[first : last + 1].sum(axis=0)
            # A layer takes part if it gains a good part of what the best one does.
            chosen = every[(in_run >= 0.3 * in_run.max()) & (in_run > 0)]
            if np.array_equal(chosen, columns) or not len(chosen):
                break
            columns = chosen
        first, last = int(first), int(last)
        if claim.kind != "row_order":
            silent = total == 0.0
            if claim.kind == "nothing":
                # A row or two at the end of a sample that agree do so by chance.
                silent[max(0, first - 2) : last + 3] = True
            first, last = self._to_sample_ends(silent, first, last)
        return replace(
            claim,
            first=first,
            last=last,
            layers=claim.layers[columns],
            holds=claim.holds[:, columns],
            # Rows in between are less likely than none.
            gain=float(gain) * (0.7 if claim.scattered else 1.0),
        )

    def _to_sample_ends(self, silent: Array, first: int, last: int) -> tuple[int, int]:
        """Let a run grow over rows that say nothing, such as a shared prompt, where it then begins or ends with a sample."""
        evidence = self.evidence
        sample = evidence.samples.of_rows(evidence.rows)
        start = int(np.searchsorted(sample, sample[first]))
        stop = int(np.searchsorted(sample, sample[last], side="right"))
        inside = evidence.segment == evidence.segment[first]
        return (
            start if inside[start] and silent[start:first].all() else first,
            stop - 1 if inside[stop - 1] and silent[last + 1 : stop].all() else last,
        )

    def _weights(self, claim: Claim) -> Array:
        """Return the bits in favour of a claim, [n, m]."""
        evidence, layers = self.evidence, claim.layers
        if claim.weights is not None:
            # Likelihoods weigh both sides already.
            worse = _AGAINST if claim.kind == "names" else 1.0
            weights = np.where(claim.weights < 0, worse * claim.weights, claim.weights)
            return np.where(self.taken[:, layers], np.minimum(weights, 0.0), weights)
        in_place, holds = self.explained[:, layers], claim.holds
        says_nothing = in_place if claim.silent is None else in_place | claim.silent
        weights = np.where(holds, np.where(says_nothing, 0.0, 1.0), -_AGAINST)
        if claim.scattered:
            weights[~holds & in_place] = 0.0
        # A row that a does not have may be anything; a row without a route is nothing.
        weights[~holds & ~evidence.comparable[:, None]] = 0.0
        weights[~evidence.routed] = 0.0
        weighted: Array = weights * np.minimum(4.0, self.bits[layers])
        return weighted

    def _odd_pieces(self) -> Array:
        """Return which pieces of which layers leave much unexplained, [pieces, L] bool."""
        by_piece = self.evidence.by_piece
        odd: Array = by_piece(~self.explained) >= np.maximum(4, 0.25 * by_piece(self.evidence.routed)[:, None])
        return odd

    def _nearby(self) -> list[Claim]:
        """Return shifts by a few rows, one route again and again, and other layers of the same or a shifted row."""
        if not self._odd_pieces().any():
            return []
        shifted = self._offsets(everywhere=False)
        layers = [
            claim for offset in (0, *(each.offset or 0 for each in shifted[:2])) for claim in self._layers(offset)
        ]
        return [*shifted, self._constant(), *layers]

    def _anywhere(self) -> list[Claim]:
        """Return rows of b that hold neighbouring rows from anywhere in a."""
        return self._offsets(everywhere=True)

    def _offsets(self, *, everywhere: bool) -> list[Claim]:
        """Return the offsets at which most rows of b are found in a, those found most often first."""
        evidence = self.evidence
        unexplained = self._unexplained()
        # Rows of one layer that follow each other make a key: all layers of a fault need not say the same.
        height = int(np.ceil(self._needed() / max(1.0, float(self.bits.mean()))))
        layers = np.sort(np.argsort(-unexplained.sum(axis=0), kind="stable")[:_MOST_LAYERS])
        row, source, votes = self._lookup(unexplained, layers, 1, height, everywhere=everywhere)
        found = evidence.rows[row] if len(row) else row
        offsets, which = np.unique(source - found, return_inverse=True)
        counts = np.bincount(which, weights=votes, minlength=len(offsets))
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

    def _constant(self) -> Claim:
        """Return where rows of b repeat the row before or behind them, and those of a do not."""
        evidence = self.evidence
        silent = _still(evidence.sets_of_a(evidence.rows)[:, evidence.column])
        holds = _still(evidence.sets) & evidence.routed[:, None]
        return Claim(kind="constant", layers=np.arange(holds.shape[1]), holds=holds, silent=silent)

    def _layers(self, offset: int) -> list[Claim]:
        """Return for each layer of b the layer of a that explains most of it."""
        evidence = self.evidence
        odd = self._odd_pieces()
        sets_a = evidence.sets_of_a(evidence.rows + offset)
        claims = []
        for layer in np.flatnonzero(odd.any(axis=0)):
            same = (sets_a == evidence.sets[:, layer, None]) & ~self.explained[:, layer, None]
            if 0 <= evidence.column[layer]:
                same[:, evidence.column[layer]] = False
            share = evidence.by_piece(same) / np.maximum(1, evidence.by_piece(evidence.routed))[:, None]
            # Popular experts are chosen in every layer, so a layer must stand out from all others in some piece.
            stands_out = (share - np.median(share, axis=1, keepdims=True))[odd[:, layer]].max(axis=0)
            source = int(stands_out.argmax())
            if stands_out[source] < 0.2:
                continue
            columns = np.full(len(evidence.column), -1)
            columns[layer] = source
            claim = Claim(
                kind="layer",
                layers=np.array([layer]),
                holds=evidence.near(evidence.rows + offset, columns)[:, [layer]],
                offset=offset,
                source_layers=(evidence.a.layer_numbers[source],),
            )
            claims += [claim, replace(claim, scattered=True)]
        return claims

    def _reordered(self) -> list[Claim]:
        """Return where rows of b are found in a each for itself: neighbours need not come from neighbours."""
        evidence = self.evidence
        unexplained = self._unexplained()
        share = unexplained.sum(axis=0)
        layers = np.flatnonzero((share >= 0.5 * share.max()) & (share > 0))
        if not len(layers) or self.bits[layers].sum() < self._needed() + 8:
            return []  # any row would look like some row of so many
        unexplained &= (unexplained[:, layers].mean(axis=1) >= 0.4)[:, None]
        width = int(np.ceil(self._needed() / max(1.0, float(self.bits[layers].mean()))))
        row, source, votes = self._lookup(unexplained, layers[:_MOST_LAYERS], width, 1, everywhere=True)
        order = np.lexsort((-np.abs(source - evidence.rows[row]), votes, row)) if len(row) else row
        last = order[np.append(np.diff(row[order]) != 0, True)] if len(row) else row
        # Of a new order, some rows stay where they are.
        sources = evidence.rows.copy()
        sources[row[last]] = source[last]
        holds = evidence.near(sources, evidence.column)[:, layers]
        return [Claim(kind="row_order", layers=layers, holds=holds, source_rows=sources)] if len(row) else []

    def _needed(self) -> float:
        """Return the bits that tell one row of a from all others."""
        return float(np.log2(max(2, self.evidence.a.num_tokens)))

    def _unexplained(self) -> Array:
        """Return the decisions to look up: those of pieces that leave much unexplained, in layers that a has, too."""
        odd = self.evidence.per_row(self._odd_pieces())
        unexplained: Array = ~self.explained & odd & (self.evidence.column >= 0)
        return unexplained

    def _lookup(
        self, wanted: Array, layers: Array, width: int, height: int, *, everywhere: bool
    ) -> tuple[Array, Array, Array]:
        """Return where windows of `width` layers and `height` rows of b stand in a.

        Args:
            wanted: [n, L] bool, decisions of b that windows begin with.
            layers: [m] indices of b's layers; windows are made of neighbours in this list.
            everywhere: whether all of a is read, or rows near the wanted ones only.

        Returns:
            (index of the row of b, row of a, how many windows say so), each [pairs].
        """
        evidence = self.evidence
        keys_b = window_keys(evidence.sets[:, layers], width, height)
        follows = np.append(np.diff(evidence.rows) == 1, False) & np.append(evidence.routed[1:], False)
        wanted = wanted[:, layers[: keys_b.shape[1]]] & evidence.routed[:, None]
        for step in range(height - 1):
            wanted = wanted & np.append(follows[step:], np.zeros(step, dtype=bool))[:, None]
        row, window = np.nonzero(wanted)
        if not len(row):
            return row, row, row
        flat = keys_b[row, window]
        known = np.unique(flat)
        hits: list[tuple[Array, Array]] = []
        step = max(1024, (4 << 20) // max(1, len(layers) * evidence.a.topk))
        for begin, end in [(0, evidence.a.num_tokens)] if everywhere else self._around(row):
            for start in range(begin, end, step):
                block = evidence.a.read(start, min(start + step + height - 1, end))
                ids = block.topk_indices.numpy()[:, evidence.column[layers]]
                sets = set_numbers(ids, block.replay_mask.numpy(), evidence.numbers, nothing=0)
                keys = window_keys(sets, width, height)[:step]
                at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
                rows_a, _ = hit = np.nonzero(known[at] == keys)
                hits.append((at[hit], rows_a + start))
        key, row_a = (np.concatenate(parts) for parts in zip(*hits))
        order = np.argsort(key, kind="stable")
        key, row_a = key[order], row_a[order]
        which = np.searchsorted(known, flat)
        first = np.searchsorted(key, which)
        count = np.searchsorted(key, which, side="right") - first
        count[count > 64] = 0  # a key that stands everywhere, as that of a filler, says nothing
        at = np.repeat(first, count) + np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        pairs, votes = np.unique(np.stack([np.repeat(row, count), row_a[at]], axis=1), axis=0, return_counts=True)
        return pairs[:, 0], pairs[:, 1], votes

    def _around(self, row: Array) -> list[tuple[int, int]]:
        """Return the runs of rows of a that are near these rows of b."""
        rows = np.unique(self.evidence.rows[row])
        runs = np.split(rows, np.flatnonzero(np.diff(rows) > 2 * _NEARBY) + 1)
        stop = self.evidence.a.num_tokens
        around = [(max(0, int(run[0]) - _NEARBY), min(stop, int(run[-1]) + _NEARBY + 1)) for run in runs]
        return [(begin, end) for begin, end in around if begin < end] or [(0, min(stop, 1))]

    def _renamed(self) -> list[Claim]:
        """Return names under which experts of b are those of a, layer by layer."""
        evidence = self.evidence
        claims = []
        of_a, _ = evidence.rows_a.read(evidence.rows)
        experts = np.arange(evidence.b.num_experts)
        for layer in np.flatnonzero(evidence.column >= 0):
            ids_a, ids_b = of_a[:, evidence.column[layer]], evidence.ids[:, layer]
            shared = count_shared(ids_a, ids_b)
            # Learned where nothing else was said, in pieces that differ.
            free = evidence.comparable & (~self.explained[:, layer] | evidence.near_in_place[:, layer])
            differs = evidence.by_piece((shared < evidence.b.topk) & free)
            rows = free & evidence.per_row(differs >= 0.5 * np.maximum(1, evidence.by_piece(free)))
            names = expert_names(ids_a[rows], ids_b[rows], len(experts))
            if names is None:
                continue
            # Experts that were seen too rarely keep their name if it is free, or get one that is left.
            given = np.where((names < 0) & ~np.isin(experts, names), experts, names)
            given[given < 0] = np.setdiff1d(experts, given)
            renamed = count_shared(given[ids_a].astype(ids_a.dtype), ids_b)
            holds = (2 * renamed > evidence.b.topk) & (renamed >= shared) & free
            weights = np.where(holds, np.where(renamed > shared, 1.0, 0.0), -1.0)
            weights[~free] = 0.0
            layers = np.array([layer])
            claims.append(
                Claim(kind="names", layers=layers, holds=holds[:, None], weights=weights[:, None], names=names)
            )
        return claims

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


def window_keys(sets: Array, width: int, height: int) -> Array:
    """Return one number for `height` rows of each window of `width` layers, [n, windows] uint64."""
    odd = np.uint64(0x9E3779B97F4A7C15)
    windows = max(0, sets.shape[1] - width + 1)
    keys = np.zeros((len(sets), windows), dtype=np.uint64)
    for column in range(width):
        keys = (keys ^ sets[:, column : column + windows]) * odd
    one = keys
    for step in range(1, height):
        keys = keys * odd ^ np.append(one[step:], one[:step], axis=0)
    # Windows have keys of their own, or a layer would be found in another.
    return keys ^ np.arange(1, windows + 1, dtype=np.uint64) * odd


def _still(sets: Array) -> Array:
    """Return which rows hold the same set as the row before or behind them, [n, L] bool."""
    same, none = sets[1:] == sets[:-1], np.zeros((1, sets.shape[1]), dtype=bool)
    still: Array = np.append(none, same, axis=0) | np.append(same, none, axis=0)
    return still


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
