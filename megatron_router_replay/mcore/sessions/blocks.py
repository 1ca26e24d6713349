"""Find the rows of a layer whose replayed experts cannot be those of their tokens; arithmetic on the host.

A replayed expert is *inside* if the live router chooses it or ranks it among its best `2 * topk`. Near-ties exchange experts
there and not further away, so an expert outside is evidence that the row is another token's:

    blocks     neighbouring rows. A sum of log-likelihood ratios compares "these experts are a random row's" with "these are
               the token's own, and kernels differ": it rises through wrong rows and falls through right ones (CUSUM).
    rows       single rows with no expert inside, where they are more than noise gives
    experts    experts of a layer that are hardly ever inside where they are replayed

Tokens repeat, and a loop of tokens at a near-tie flips every time. Rows are of one *kind* if the live router ranks the same
two experts first. A kind adds to a block no more than a single row may.

Source: E. S. Page, Continuous Inspection Schemes, Biometrika 41, 1954.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

EVIDENCE = 72.0
"""Log-likelihood ratio from which on a block raises. `docs/exactness.md` has the most that legal sessions gave."""
ROW_EVIDENCE = 6.0
"""The most that one row, or all rows of one kind, add to a block."""
LEAST_NOISE, LEAST_CHANCE = 0.02, 0.02
"""The least share of right experts that is taken to be outside, and of random experts that is taken to be inside."""
NOISE_ROWS, NOISE_WINDOWS = 32, 8
"""Rows of a window in which noise is measured, and the windows below which a weight version has no noise of its own."""
LEAST_APART, NUM_APART = 0.005, 20
"""Share and number of single rows without an expert inside, up to which they are noise."""
EXPERT_NOISE, EXPERT_EVIDENCE = 0.35, 20.0
"""The most that a right expert is outside, and the evidence below which an expert does not count."""
ALIKE_ROWS = 8.0
"""Rows of one kind that count in full for a layer."""
MOST_BLOCKS = 256
"""Blocks of a layer that are searched for."""

Array = Any
"""A numpy array."""


class Block(NamedTuple):
    """Neighbouring rows with routes of other tokens: rows first to stop - 1 of those compared, and the evidence."""

    evidence: float
    first: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRows:
    """Rows of one layer, sequence after sequence.

    Args:
        experts: [n, topk], replayed.
        is_live, is_inside: [n, topk] bool, of these experts; what is live is inside.
        live_chance, chance: [n, topk], the share of the micro-batch's rows in which this expert is live, and inside.
        kinds: [n], equal for rows that are alike; -1: the row is not replayed and counts nowhere.
        versions: [n], of the weights that chose the routes; None: not known.
        num_experts: of the layer.
    """

    experts: Array
    is_live: Array
    is_inside: Array
    live_chance: Array
    chance: Array
    kinds: Array
    versions: Array | None
    num_experts: int

    @property
    def counts(self) -> Array:
        """[n] bool: the row is replayed."""
        return self.kinds >= 0

    @property
    def outside(self) -> Array:
        """[n], how many experts of the row are outside."""
        return (~self.is_inside).sum(1)

    def weights(self) -> Array:
        """Return [n]: many rows of one kind weigh no more than `ALIKE_ROWS` of them, or their part of few experts' kinds."""
        number = np.bincount(self.kinds + 1, minlength=1)[self.kinds + 1]
        most = max(ALIKE_ROWS, 600 / self.num_experts**2)
        return np.minimum(1, most / number) * self.counts

    def noise(self) -> Array:
        """Return [n], the share of right experts that is outside, where the weights were the same."""
        outside = self.outside / self.experts.shape[1]
        noise = np.full(len(outside), _noise(outside[self.counts]))
        if self.versions is not None:
            for version in np.unique(self.versions[self.counts]):
                rows = self.counts & (self.versions == version)
                if rows.sum() >= NOISE_ROWS * NOISE_WINDOWS:
                    noise[rows] = _noise(outside[rows])
        # Where most rows are wrong, noise must not explain them.
        by_chance = 1 - self.chance[self.counts].mean() if self.counts.any() else 1.0
        return np.clip(noise, LEAST_NOISE, max(LEAST_NOISE, by_chance / 2))

    def ratios(self) -> Array:
        """Return [n], how much more likely the experts of a row are as a random row's than as its token's, as a logarithm."""
        noise = self.noise()[:, None]
        chance = np.clip(self.chance, LEAST_CHANCE, 1 - noise)  # an expert inside is no evidence of a fault
        each = np.where(self.is_inside, np.log(chance / (1 - noise)), np.log((1 - chance) / noise))
        return np.where(self.counts, np.clip(each.sum(1), -ROW_EVIDENCE, ROW_EVIDENCE), 0.0)

    def apart(self) -> tuple[Array, float]:
        """Return ([n] bool, the rows without an expert inside, one of each kind; how many of them noise may give)."""
        topk = self.experts.shape[1]
        if topk == 1:  # a single expert outside is no rare thing
            return np.zeros(len(self.kinds), bool), 0.0
        outside = self.outside
        rows = np.flatnonzero(self.counts & (outside == topk))
        apart = np.zeros(len(self.kinds), bool)
        apart[rows[np.unique(self.kinds[rows], return_index=True)[1]]] = True
        # Of the rows that are right: few rows of other tokens have half of their experts inside.
        right = self.counts & (2 * outside <= topk)
        noise = outside[right].mean() / topk if right.any() else 1.0
        return apart, float(self.counts.sum() * max(LEAST_APART, 30 * noise**topk))

    def wrong_experts(self) -> tuple[Array, float]:
        """Return the experts that are outside in most kinds of rows, and their evidence; a single one is none."""
        weights = np.repeat(self.weights(), self.experts.shape[1])
        ids, inside = self.experts.ravel(), self.is_inside.ravel()
        replayed = np.bincount(ids, weights, self.num_experts)
        num_inside = np.bincount(ids, weights * inside, self.num_experts)
        chance = np.bincount(ids, weights * self.chance.ravel(), self.num_experts) / np.maximum(replayed, 1e-9)
        chance = np.clip(chance, LEAST_CHANCE, 0.5)
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


def find_blocks(ratios: Array, kinds: Array) -> list[Block]:
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
