"""Find rows with the routes of different tokens, by arithmetic on the host.

A replayed expert is *inside* if the live router chooses it or ranks it among its best `2 * topk`. Near-ties exchange experts
there and not further away, so an expert *outside* is evidence that the row has the route of a different token:

    blocks     neighbouring rows. A sum of log-likelihood ratios compares "these experts are a random row's" with "these are
               the token's own, and kernels differ": it rises through wrong rows and falls through right ones (CUSUM).
    rows       single rows with no expert inside, where they are more than noise gives
    experts    experts of a layer that are hardly ever inside where they are replayed

Tokens repeat, and a loop of tokens at a near-tie flips in every turn. Rows have the same *kind* if the live router ranks the
same two experts first. All rows of a kind together add no more to a block than a single row may.

The package's docstring has a table of all limits.

Source: E. S. Page, Continuous Inspection Schemes, Biometrika 41, 1954.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

EVIDENCE = 72.0
"""Log-likelihood ratio from which on a block raises. `docs/exactness.md` has the most that legal sessions gave."""
ROW_EVIDENCE = 6.0
"""The most that a row adds to a block, or all of its rows of the same kind."""
LEAST_NOISE, LEAST_CHANCE = 0.02, 0.02
"""The least share of right experts that is taken to be outside, and of random experts that is taken to be inside."""
NOISE_ROWS, NOISE_WINDOWS = 32, 8
"""Rows of a window in which noise is measured; a weight version with fewer windows has the noise of all rows."""
LEAST_APART, NUM_APART, APART_NOISE = 0.005, 20, 30.0
"""Share and number of single rows without an expert inside, up to which they are noise; and by how much more often than
independent noise all experts of a row are outside together."""
EXPERT_NOISE, EXPERT_EVIDENCE, MOST_CHANCE = 0.35, 20.0, 0.5
"""The most that a right expert is outside, the evidence below which an expert does not count, and the most of its chance."""
ALIKE_ROWS, FEW_EXPERTS = 8.0, 600.0
"""Rows of a kind that count in full for a layer; `FEW_EXPERTS / num_experts**2` of them, where that is more."""
MOST_BLOCKS = 256
"""Blocks of a layer above which the search ends."""

Array = Any
"""A numpy array."""


class Block(NamedTuple):
    """Neighbouring rows with routes of different tokens: compared rows `first` to `stop - 1`, and the evidence."""

    evidence: float
    first: int
    stop: int


class ComparedRows:
    """Compared rows of a layer, sequence after sequence.

    Args:
        codes: [topk, n] integers, `3 * expert + level` of the replayed experts. Level 2: the live router chooses the expert;
            1: the expert is inside; 0: it is outside.
        kinds: [n], equal for rows that are alike; -1: the row is not replayed and counts nowhere.
        ends: [num_microbatches], where the rows of each micro-batch end.
        live_chance, chance: [num_microbatches, num_experts], the share of rows in which an expert is live, and inside.
        versions: [n], of the weights that chose the routes; None: unknown.

    Attributes:
        counts: [n] bool, the row is replayed.
        outside: [n], how many experts of the row are outside.
        number, weight: [num_microbatches, num_experts, 3], of the rows with an expert at a level: how many there are, and
            the sum of their `weights`.
    """

    def __init__(
        self, *, codes: Array, kinds: Array, ends: Array, live_chance: Array, chance: Array, versions: Array | None
    ) -> None:
        self.codes, self.kinds, self.versions = codes, kinds, versions
        self.live_chance, self.chance = live_chance, chance
        self.topk, self.num_experts = len(codes), chance.shape[1]
        self.counts = kinds >= 0
        self._microbatches = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends)]
        is_outside = np.arange(3 * self.num_experts) % 3 == 0
        self.outside = np.concatenate(
            [is_outside[codes[:, part]].sum(0, dtype=np.int16) for part in self._microbatches]
        )
        self.number = self._add_up(None if self.counts.all() else self.counts)
        self.weight = self._add_up(self._weights())

    def _weights(self) -> Array:
        """Return [n]: the rows of a kind weigh as much as `ALIKE_ROWS` of them, or as more where experts are few."""
        number = np.bincount(self.kinds + 1, minlength=1)
        most = max(ALIKE_ROWS, FEW_EXPERTS / self.num_experts**2)
        of_kinds = np.minimum(1, most / np.maximum(1, number))
        of_kinds[0] = 0
        return of_kinds[self.kinds + 1]

    def _add_up(self, weights: Array | None) -> Array:
        """Return the sum of the weights of rows, [num_microbatches, num_experts, 3], by their codes; None: each is 1."""
        sums = np.zeros((len(self._microbatches), 3 * self.num_experts))
        for one, part in zip(sums, self._microbatches):
            codes = self.codes[:, part]
            of_codes = None if weights is None else np.broadcast_to(weights[part], codes.shape).ravel()
            one += np.bincount(codes.ravel(), of_codes, len(one))
        return sums.reshape(len(sums), self.num_experts, 3)

    def shared(self, sums: Array) -> tuple[float, float]:
        """Return (experts that the live router chooses too, beyond chance; the most that these could be).

        Args:
            sums: `number` or `weight`.
        """
        replayed = sums.sum(2)
        by_chance = float((replayed * self.live_chance).sum())
        return float(sums[..., 2].sum()) - by_chance, float(replayed.sum()) - by_chance

    def noise(self) -> tuple[Array, Array]:
        """Return (the share of right experts outside, by version of the weights; [n], which of these is a row's)."""
        outside = self.outside / self.topk
        noise, which = [_noise(outside[self.counts])], np.zeros(len(outside), np.intp)
        if self.versions is not None:
            for version in np.unique(self.versions[self.counts]):
                rows = self.counts & (self.versions == version)
                if rows.sum() >= NOISE_ROWS * NOISE_WINDOWS:
                    which[rows] = len(noise)
                    noise.append(_noise(outside[rows]))
        # Where most rows are wrong, noise must not explain them.
        replayed = self.number.sum(2)
        by_chance = 1 - float((replayed * self.chance).sum()) / replayed.sum() if replayed.any() else 1.0
        return np.clip(noise, LEAST_NOISE, max(LEAST_NOISE, by_chance / 2)), which

    def ratios(self) -> Array:
        """Return [n], the log of how much more likely a row's experts are as a random row's than as its token's."""
        noise, which = self.noise()
        noise, which = noise[:, None], which * (3 * self.num_experts)
        is_inside = np.arange(3 * self.num_experts) % 3 > 0
        ratios = np.empty(len(self.kinds))
        for of_experts, part in zip(self.chance, self._microbatches):
            # An expert inside is no evidence of a fault.
            chance = np.clip(np.repeat(of_experts, 3), LEAST_CHANCE, 1 - noise)
            of_codes = np.where(is_inside, np.log(chance / (1 - noise)), np.log((1 - chance) / noise))
            ratios[part] = of_codes.ravel().take(self.codes[:, part] + which[part]).sum(0)
        return np.where(self.counts, np.clip(ratios, -ROW_EVIDENCE, ROW_EVIDENCE), 0.0)

    def apart(self) -> tuple[Array, float]:
        """Return ([n] bool, the rows without an expert inside, one of each kind; how many of them noise may give)."""
        apart = np.zeros(len(self.kinds), bool)
        if self.topk == 1:  # a single expert outside is not rare
            return apart, 0.0
        rows = np.flatnonzero(self.all_outside())
        apart[rows[np.unique(self.kinds[rows], return_index=True)[1]]] = True
        # Noise is that of right rows. Few rows with routes of different tokens have half of their experts inside.
        right = self.counts & (2 * self.outside <= self.topk)
        noise = self.outside[right].mean() / self.topk if right.any() else 1.0
        return apart, float(self.counts.sum() * max(LEAST_APART, APART_NOISE * noise**self.topk))

    def all_outside(self) -> Array:
        """Return [n] bool: no expert of the row is inside."""
        return self.counts & (self.outside == self.topk)

    def wrong_experts(self) -> tuple[Array, float]:
        """Return the experts that are outside in most kinds of rows, and their evidence; a single one is none."""
        of_microbatches = self.weight.sum(2)
        replayed, num_inside = of_microbatches.sum(0), self.weight[..., 1:].sum((0, 2))
        chance = (of_microbatches * self.chance).sum(0) / np.maximum(replayed, 1e-9)
        chance = np.clip(chance, LEAST_CHANCE, MOST_CHANCE)
        ratio = (replayed - num_inside) * np.log((1 - chance) / EXPERT_NOISE)
        ratio += num_inside * np.log(chance / (1 - EXPERT_NOISE))
        wrong = np.flatnonzero(ratio > EXPERT_EVIDENCE)  # ids that were exchanged are two at least
        return (wrong, float(ratio[wrong].sum())) if len(wrong) > 1 else (wrong[:0], 0.0)


def _noise(outside: Array) -> float:
    """Return the share of experts outside in the better half of windows, so that wrong rows do not count as noise."""
    if not len(outside):
        return LEAST_NOISE
    num = max(1, len(outside) // NOISE_ROWS)
    starts = np.arange(num) * len(outside) // num
    means = np.sort(np.add.reduceat(outside, starts) / np.diff(starts, append=len(outside)))
    return float(means[: max(1, len(means) // 2)].mean())


def highest_rises(ratios: Array) -> Array:
    """Return [num_sequences], the most that a block of each sequence may have as its evidence.

    Args:
        ratios: [num_sequences, positions].
    """
    total = np.cumsum(ratios, axis=1)
    return (total - np.minimum(0, np.minimum.accumulate(total, axis=1))).max(1, initial=0.0)


def clearest_blocks(ratios: Array, kinds: Array) -> list[Block]:
    """Return disjoint blocks of rows that rise, by evidence, the most first: all that raise, and the highest that does not.

    Args:
        ratios: [n], see `ComparedRows.ratios`.
        kinds: [n].
    """
    found: list[Block] = []
    pieces = [(0, len(ratios))] if len(ratios) else []
    while pieces and len(found) < MOST_BLOCKS:
        begin, end = pieces.pop()
        total = np.cumsum(ratios[begin:end])
        low = np.minimum(0, np.minimum.accumulate(total))  # this row's fall included
        rise = total - low
        # A new rise begins after each row that falls to a new low.
        starts = np.flatnonzero(rise <= 0)
        starts = starts if len(starts) and not starts[0] else np.concatenate([[0], starts])
        peaks = np.maximum.reduceat(rise, starts)
        which = np.flatnonzero(peaks >= EVIDENCE)
        if not len(which) and not found and len(peaks):
            which = peaks.argsort()[-8:]
        stops = np.append(starts[1:], end - begin)
        for start, stop in zip(starts[which].tolist(), stops[which].tolist()):
            last = start + int(rise[start:stop].argmax())
            if not rise[last] > 0:
                continue
            first = start + int(rise[start] <= 0)
            evidence = _evidence(ratios[begin + first : begin + last + 1], kinds[begin + first : begin + last + 1])
            found.append(Block(evidence, begin + first, begin + last + 1))
            if rise[last] >= EVIDENCE and last + 1 < stop:  # there may be another block before the sum is down again
                pieces.append((begin + last + 1, begin + stop))
    found.sort(reverse=True)
    return [block for number, block in enumerate(found) if not number or block.evidence >= EVIDENCE]


def _evidence(ratios: Array, kinds: Array) -> float:
    return evidence_of(np.bincount(np.unique(kinds, return_inverse=True)[1], ratios).tolist())


def sums_of_kinds(ratios: Array, kinds: Array) -> dict[str, float]:
    """Return the sum of each kind of rows of a block; names are texts, as JSON has them."""
    names, number = np.unique(kinds, return_inverse=True)
    return dict(zip(map(str, names.tolist()), np.bincount(number, ratios).round(2).tolist()))


def evidence_of(sums: Iterable[float]) -> float:
    """Return the evidence of a block by the sums of its kinds: each adds no more than a row may."""
    values = list(sums)
    return min(sum(values), sum(min(ROW_EVIDENCE, max(-ROW_EVIDENCE, value)) for value in values))
