"""Find one row of routes over neighbouring tokens that differ: a capture that repeated a row, in place of the tokens' own.

Two tokens may choose the same experts by chance, in few layers with few experts even often. So a run counts only if chance
would make it once in 2 ** 40 traces of this length. A loop, which repeats a few tokens, is evidence once for each of them.

Source: sgl-project/sglang pull request 36467 (one row over 67 tokens at a chunked-prefill boundary).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_BITS = 40
"""A run is no chance if it is rarer than once in 2 ** _BITS traces."""

_LEAST_BITS_OF_A_PAIR = 4
"""Where two tokens share a row more often than once in 16 times, long runs are no fault: a text may stay with one expert."""

_COMPARED_ROWS = 4096
"""Rows that are compared at a time, so that the comparison takes little memory."""

_COMPARED_FIRST = 16
"""Ids of a row that are compared first: hardly any neighbours are equal in these, so the rest is hardly ever read."""


class StaleRows(NamedTuple):
    """Rows start..stop - 1 are one row, over `num_tokens` different tokens."""

    start: int
    stop: int
    num_tokens: int

    def describe(self, first_row: int = 0) -> str:
        """Return the fault as the beginning of a message."""
        return (
            f"rows {first_row + self.start} to {first_row + self.stop - 1} are one and the same row in every layer, over "
            f"{self.num_tokens} different tokens: a stale row that a capture repeated (SGLang before #36467), or filler in "
            "place of lost rows."
        )


def find_stale_rows(
    indices: npt.NDArray[Any], token_ids: npt.NDArray[Any], replay_mask: npt.NDArray[np.bool_]
) -> list[StaleRows]:
    """Return the runs of equal rows that cannot be chance.

    Args:
        indices: [num_tokens, num_layers, topk] of a sample, any integer dtype.
        token_ids: [num_tokens].
        replay_mask: [num_tokens] bool; rows without a route end a run.
    """
    num_tokens, num_layers, topk = indices.shape
    same = same_as_before(indices, replay_mask)
    if not same.any() or not num_layers * topk:
        return []
    edges = np.diff(np.concatenate([[0], same.view(np.int8), [0]]))
    runs = [
        StaleRows(start, stop + 1, len(np.unique(token_ids[start : stop + 1])))
        for start, stop in zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist())
    ]
    # The load of experts without the repetitions, which would make a stale row look popular.
    kept = replay_mask.copy()
    kept[1:] &= ~same
    bits = _bits_of_layers(indices[kept])
    differs, longest = token_ids[1:] != token_ids[:-1], max(runs, key=lambda run: run.num_tokens)
    # Layers are not independent, so half of the bits count, and at most as many as the pairs outside of the run show.
    outside = np.ones(num_tokens - 1, np.bool_)
    outside[longest.start : longest.stop - 1] = False
    pairs = outside & differs & replay_mask[1:] & replay_mask[:-1]
    seen = math.log2((pairs.sum() + 1) / ((pairs & same).sum() + 1))
    if not (pairs & same).any():  # a short sample has too few pairs to show how rare equal ones are
        seen = max(seen, _LEAST_BITS_OF_A_PAIR)
    bits = min(bits / 2, seen)
    if bits < _LEAST_BITS_OF_A_PAIR:
        return []
    needed = _BITS + math.log2(num_tokens)
    return [run for run in runs if (run.num_tokens - 1) * bits >= needed]


def same_as_before(indices: npt.NDArray[Any], replay_mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return [num_tokens - 1] bool, True: row i + 1 is the same in every layer as row i, and both are routes."""
    flat = indices.reshape(len(indices), indices.shape[1] * indices.shape[2])
    same = replay_mask[1:] & replay_mask[:-1]
    for start in range(0, len(same), _COMPARED_ROWS):
        block = flat[start : start + _COMPARED_ROWS + 1, :_COMPARED_FIRST]
        same[start : start + _COMPARED_ROWS] &= (block[1:] == block[:-1]).all(axis=1)
    at = np.flatnonzero(same)
    for start in range(0, len(at), _COMPARED_ROWS):
        block = at[start : start + _COMPARED_ROWS]
        same[block] = (flat[block + 1] == flat[block]).all(axis=1)
    return same


def _bits_of_layers(rows: npt.NDArray[Any]) -> float:
    """Return how rare equal rows of two tokens would be, -log2 of the chance, if layers were independent.

    The chance of a layer is at most (topk / experts) ** topk, with the number of experts that its load spreads over.
    """
    topk, bits = rows.shape[2], 0.0
    for layer in range(rows.shape[1]):
        load = np.bincount(rows[:, layer].reshape(-1)).astype(np.float64)
        spread = load.sum() ** 2 / np.square(load).sum()
        bits += topk * max(0.0, math.log2(spread / topk))
    return bits
