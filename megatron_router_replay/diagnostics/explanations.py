"""Propose explanations of cells that differ: other samples, rows, layers or ids of a, or one repeated route."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_router_replay.diagnostics.counting import Array, count_shared
from megatron_router_replay.diagnostics.window import Window

FITS = 0.75
"""Share of the decisions of a cell, or of a sample that moved, which an explanation fits."""

MIN_ROWS = 6
"""Rows of a match; fewer match different rows by chance."""

_MIN_DECISIONS = 12  # of a layer; of fewer, most are alike by chance
_RENAMED = 0.85  # of the rows with an expert, as another id; near-ties move a half, another precision a tenth
_MOST_NAMES = 3  # sets of a few ids that have a fact each; more have one
_KEY_ROWS = 3  # rows in a key: a single set of experts occurs too often
_MOST_OCCURRENCES = 64  # a key that occurs more often, such as filler, is ignored
_MOST_OFFSETS = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Explanation:
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


def explain_cells(window: Window, bad: Array) -> Iterator[Explanation]:
    """Yield explanations of cells, the plainer ones first.

    Args:
        bad: [P, L] bool, cells where fewer than half of the decisions are near those of a.
    """
    yield from _other_rows(window, bad)
    yield from _other_layers_and_ids(window, bad)


def _other_rows(window: Window, bad: Array) -> Iterator[Explanation]:
    layer = int(bad.sum(axis=0).argmax())  # the layer that differs in most pieces
    rows, sources = _equal_rows(window, bad, layer)
    offsets = _sample_offsets(window, rows, sources)
    # Samples come first: of two explanations that fit equally, the earlier one is taken.
    if offsets.any():
        fitting = window.near(offsets, window.column) & (offsets != 0)[:, None]
        yield Explanation(kind="sample_order", fitting=fitting, values=offsets)
    steps, votes = np.unique(sources - rows, return_counts=True)
    likely = steps[np.lexsort((np.abs(steps), -votes))][:_MOST_OFFSETS].tolist()
    for offset in dict.fromkeys([-1, 1, -2, 2, -3, 3, *filter(None, likely)]):
        yield Explanation(kind="row", fitting=window.near(offset, window.column), values=offset)


def _other_layers_and_ids(window: Window, bad: Array) -> Iterator[Explanation]:
    """Yield layers, a constant and names, which are found layer by layer from the bad rows alone."""
    bad_rows = window.per_row(bad)
    columns, constant, renamed = window.column.copy(), np.zeros_like(bad_rows), window.ids_a[:, window.column].copy()
    names = np.zeros((len(columns), window.a.num_experts), np.int64)
    for layer in np.flatnonzero(bad.any(axis=0)).tolist():
        rows = np.flatnonzero(bad_rows[:, layer] & window.routed_b)
        sets, times = np.unique(window.sets_b[rows, layer], return_counts=True)
        constant[:, layer] = (window.sets_b[:, layer] == sets[times.argmax()]) & window.routed_b
        rows = rows[window.routed_a[rows]][:4096]
        if not len(rows):
            continue
        equal = (window.sets_a[rows] == window.sets_b[rows, layer, None]).mean(axis=0)
        # Every layer chooses popular experts, so a layer must exceed the median of all layers.
        if equal.max() >= 0.2 + np.median(equal):
            columns[layer] = equal.argmax()
        if window.column[layer] >= 0 and len(rows) * window.a.topk >= 6 * window.a.num_experts:
            ids_a, ids_b = window.ids_a[rows, window.column[layer]], window.ids_b[rows, layer]
            names[layer] = _expert_names(ids_a, ids_b, window.a.num_experts)
            renamed[:, layer] = names[layer][renamed[:, layer]]
    yield Explanation(kind="layer", fitting=window.near(0, columns), values=columns)
    yield Explanation(kind="constant", fitting=constant)
    fitting = window.near(0, np.arange(len(columns)), renamed) & names.any(axis=1)
    yield Explanation(kind="names", fitting=fitting, values=names)


def explain_layers(window: Window, explained: Array) -> Iterator[Explanation]:
    """Yield what explains most differing decisions of a layer, wherever their rows lie: one route, or a few ids.

    Args:
        explained: [n, L] bool, decisions that have an explanation other than names.
    """
    left = window.different & ~explained
    yield from _repeated_route(window, left)
    yield from _renamed_experts(window, left)


def _rows_by_layer(window: Window, left: Array) -> Iterator[tuple[int, Array]]:
    """Yield the layers of b with enough decisions that are left, and their rows; a prompt of a group counts once."""
    for layer in np.flatnonzero(window.column >= 0).tolist():
        rows = np.flatnonzero(left[:, layer] & window.is_distinct)
        if len(rows) >= _MIN_DECISIONS:
            yield layer, rows


def _repeated_route(window: Window, left: Array) -> Iterator[Explanation]:
    constant = np.zeros_like(left)
    for layer, rows in _rows_by_layer(window, left):
        sets, times = np.unique(window.sets_b[rows, layer], return_counts=True)
        shared = count_shared(window.ids_a[rows, window.column[layer]], window.ids_b[rows, layer])
        # A router that prefers experts exchanges one of them for its neighbours in rank; filler follows no ranks.
        if times.max() >= FITS * len(rows) and (shared == window.a.topk - 1).mean() < 0.8:
            constant[:, layer] = left[:, layer] & (window.sets_b[:, layer] == sets[times.argmax()])
    if constant.any():
        yield Explanation(kind="constant", fitting=constant)


def _renamed_experts(window: Window, left: Array) -> Iterator[Explanation]:
    by_names: dict[bytes, list[int]] = defaultdict(list)
    fitting = np.zeros_like(left)
    values = np.zeros((left.shape[1], window.a.num_experts), np.int64)
    for layer, rows in _rows_by_layer(window, left):
        ids_a, ids_b = window.ids_a[:, window.column[layer]], window.ids_b[:, layer]
        names = _few_names(ids_a[window.is_distinct], ids_b[window.is_distinct], window.a.num_experts)
        fits = window.alike & (window.set_numbers(names[ids_a]) == window.sets_b[:, layer])
        if fits[rows].mean() >= FITS:
            fitting[:, layer], values[layer] = fits, names
            by_names[names.tobytes()].append(layer)
    groups = list(by_names.values())
    if len(groups) > _MOST_NAMES:
        groups = [[layer for group in groups for layer in group]]
    for layers in groups:
        in_layers = np.isin(np.arange(left.shape[1]), layers)
        yield Explanation(kind="names", fitting=fitting & in_layers, values=values)


def _equal_rows(window: Window, bad: Array, layer: int) -> tuple[Array, Array]:
    """Return bad rows of b, and rows of a with the same sets of experts in a layer, there and in the next two rows."""
    keys_a, keys_b = _keys(window.sets_a[:, window.column[layer]]), _keys(window.sets_b[:, layer])
    if window.column[layer] < 0:  # a has no such layer, so no row of it can be equal
        keys_a = keys_a[:0]
    rows = np.flatnonzero((window.per_row(np.any(bad, axis=1)) & window.routed_b)[: len(keys_b)])
    order = np.argsort(keys_a, kind="stable")
    left, right = (np.searchsorted(keys_a[order], keys_b[rows], side) for side in ("left", "right"))
    times = np.where(right - left > _MOST_OCCURRENCES, 0, right - left)
    index = np.repeat(left - np.cumsum(times) + times, times) + np.arange(times.sum())
    return np.repeat(rows, times), order[index]


def _sample_offsets(window: Window, rows: Array, sources: Array) -> Array:
    """Return the offset of each row of b that lies in a different sample of a, [n]; 0: in none."""
    offsets = np.zeros(len(window.ids_b), np.int64)
    if not window.samples_a.known:
        return offsets
    # A pair of a sample and an offset as one number, which is counted much faster than a column of two.
    samples = window.samples_a.of_rows(sources + window.first)
    pairs, votes = np.unique(samples << 32 | sources - rows + (1 << 31), return_counts=True)
    in_search, decided = np.bincount(np.unique(rows), minlength=len(offsets)).cumsum(), set()
    for i in np.argsort(-votes, kind="stable"):
        sample, offset = int(pairs[i]) >> 32, (int(pairs[i]) & (1 << 32) - 1) - (1 << 31)
        if sample >= len(window.samples_a.lengths):
            continue  # rows after the last sample
        begin, end = (window.samples_a.starts[sample : sample + 2] - window.first - offset).tolist()
        place, (begin, end) = (
            window.samples.at(window.first + (begin + end) // 2),
            (max(0, begin), min(end, len(offsets))),
        )
        searched = int(in_search[end - 1] - (in_search[begin - 1] if begin else 0)) if begin < end else 0
        # A shared prompt matches several samples: most votes decide. A quarter of the rows is more than chance gives.
        if place in decided or votes[i] < max(MIN_ROWS, searched / 4):
            continue
        decided.add(place)
        offsets[begin:end][offsets[begin:end] == 0] = offset
    # Where b has the lengths of a, rows of b may come after the last sample, and are in none.
    offsets[max(0, int(window.samples.starts[-1]) - window.first) :] = 0
    # Rows that are a part of their sample, there or here, are a row fact.
    fits, is_different = window.near(offsets, window.column).mean(axis=1), False
    lengths = np.diff(window.samples.starts, append=np.inf)
    for of_source, place, source in window.moved_samples(offsets):
        if fits[of_source].sum() < FITS * max(len(of_source), lengths[place]):
            offsets[of_source] = 0
        else:
            is_different |= place != source
    # So are rows that moved in their own samples, or because an earlier sample has a different length.
    return offsets if is_different else np.zeros_like(offsets)


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


def _few_names(a: Array, b: Array, num_experts: int) -> Array:
    """Return b's id of each expert of a where nearly all decisions with it exchange it for one id, [num_experts].

    Args:
        a, b: [n, topk].
    """
    names = np.arange(num_experts)
    shared = count_shared(a, b)
    one = shared == a.shape[1] - 1
    lost, gained = (
        x[one][~(x[one][:, :, None] == y[one][:, None]).any(axis=2)].astype(np.int64) for x, y in ((a, b), (b, a))
    )
    times = np.bincount(lost * num_experts + gained, minlength=num_experts**2).reshape(num_experts, num_experts)
    likely = (times.max(axis=1) >= MIN_ROWS) & (2 * times.max(axis=1) >= times.sum(axis=1))
    for expert in np.flatnonzero(likely).tolist():
        other = int(times[expert].argmax())
        # A row that exchanges several experts does not say which one has which id. Nor does one in which a third expert has
        # this one's id, and this one its new id: it looks as if the third had that.
        several = (shared < a.shape[1] - 1) | ((b == expert).any(axis=1) & (b == other).any(axis=1))
        held = (a == expert).any(axis=1) & ~(a == other).any(axis=1) & ~several
        if times[expert, other] >= _RENAMED * held.sum():
            names[expert] = other
    return names
