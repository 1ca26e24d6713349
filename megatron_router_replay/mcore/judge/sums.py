"""Sums over the compared rows of a layer, which give its agreement; they add up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from megatron_router_replay.mcore.judge.blocks import ComparedRows

LEAST_DECISIONS = 128.0
"""Experts beyond chance from which on a layer may raise."""


class Sums(NamedTuple):
    """Sums over the rows of a layer.

    Args:
        rows: how many there are.
        shared: experts that the live router chooses too, beyond chance.
        most: the most that `shared` could be.
        shared_of_kinds, most_of_kinds: the same, with many rows of a kind bounded.
    """

    rows: float = 0.0
    shared: float = 0.0
    most: float = 0.0
    shared_of_kinds: float = 0.0
    most_of_kinds: float = 0.0

    @property
    def agreement(self) -> float:
        return max(-1.0, self.shared / max(self.most, 1e-9))

    @property
    def layer_agreement(self) -> float | None:
        """Agreement of rows or of kinds of rows, whichever is more; None: there is too little evidence."""
        return self.agreement_from(LEAST_DECISIONS)

    def agreement_from(self, least: float) -> float | None:
        """Return the same; None: there are fewer experts beyond chance than `least`."""
        if self.most_of_kinds < least:
            return None
        return max(self.agreement, self.shared_of_kinds / self.most_of_kinds)

    @classmethod
    def of(cls, rows: ComparedRows) -> Sums:
        return cls(float(rows.counts.sum()), *rows.shared(rows.number), *rows.shared(rows.weight))


def agreement_by_layer(layers: Mapping[int, Sums]) -> dict[int, float]:
    """Return the agreement of layers with enough evidence."""
    return {number: value for number, sums in layers.items() if (value := sums.layer_agreement) is not None}


def add_up(units: Iterable[tuple[Any, Iterable[float]]]) -> dict[Any, Sums]:
    """Return the sums of (key, sums) by key."""
    places: dict[Any, int] = {}
    listed = [(places.setdefault(key, len(places)), tuple(unit)) for key, unit in units]
    sums = np.zeros((len(places), len(Sums._fields)))
    if listed:
        np.add.at(sums, [place for place, _ in listed], [unit for _, unit in listed])
    return {key: Sums(*sums[place].tolist()) for key, place in places.items()}
