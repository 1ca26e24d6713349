"""Say a match in one sentence: its rows of b, the rows, samples, layers or ids of a, and how many decisions fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_router_replay.diagnostics.counting import Array
from megatron_router_replay.diagnostics.explanations import Explanation
from megatron_router_replay.diagnostics.fact import Fact
from megatron_router_replay.diagnostics.window import Window
from megatron_router_replay.tables import numbered, percent

Region = tuple[Array, Array]
"""Rows of a window, in order, and layers of b: a match is about the decisions of all these rows in all these layers."""

_MOST_IDS = 8
"""Experts under different ids that are listed."""


def match_fact(window: Window, each: Explanation, regions: Sequence[Region], explained: Array) -> Fact:
    """Return the fact of an explanation.

    Args:
        regions: one or several.
        explained: [n, L] bool, decisions that any match explains.
    """
    rows, layers = (np.unique(np.concatenate(parts)) for parts in zip(*regions))
    a, b = window.a.name, window.b.name
    numbers = tuple(window.b.layer_numbers[layer] for layer in layers)
    where = "in all layers" if numbers == window.b.layer_numbers else f"in {numbered('layer', numbers)}"
    first, last = window.first + int(rows[0]), window.first + int(rows[-1])
    is_run = len(regions) == 1 or len(rows) == last - first + 1
    place = _rows(window, first, last) if is_run else _places(window, rows, len(regions))
    later = ""
    if each.kind == "row":
        offset = each.values
        step = f"{abs(offset):,} {'row' if abs(offset) == 1 else 'rows'} {'earlier' if offset < 0 else 'later'}"
        source = f" {first + offset}..{last + offset}" if is_run else ""
        text = f"{place} match {a}'s rows{source} ({step})"
    elif each.kind == "sample_order":
        text = _samples(window, rows, each.values)
    elif each.kind == "layer":
        from_a = [window.a.layer_numbers[column] for column in each.values[layers]]
        text = f"{numbered('layer', numbers)} of {b} {_match(numbers)} {numbered('layer', from_a)} of {a}"
        where = f"in {place}"
    elif each.kind == "names":
        text = f"{place} name {_ids(each.values[layers])}"
        later, differ = _later_layers(window, rows, layers, explained)
        where += f", and later layers {later} ({differ} of decisions differ)" if later else ""
    elif each.kind == "constant":
        text = f"{place} repeat one route"
    else:
        text = f"{place} are as unlike {a}'s as unrelated rows"
    cells = np.zeros_like(each.fitting)
    for region in regions:
        cells[np.ix_(*region)] = True
    held, decisions = int((each.fitting & cells).sum()), int(cells.sum())
    # The range of a fact may be too small where a part of the rows was read.
    read = "" if len(window.ids_b) >= window.b.num_tokens else " that were read"
    return Fact(
        kind=each.kind,
        text=f"{text}, {where}: {held:,} of {decisions:,} decisions{read}.",
        layer_numbers=numbers,
        rows=(first, last),
        decisions=decisions,
        later_layers=later,
    )


def _rows(window: Window, first: int, last: int) -> str:
    """Return the words for neighbouring rows of b."""
    if (first, last) == (0, window.b.num_tokens - 1):
        return f"all {last + 1:,} rows of {window.b.name}"
    samples = window.samples.touched(first, last)
    position = first - int(window.samples.starts[samples[0]]) if len(samples) == 1 else 0
    named = f" ({numbered('sample', samples)}{f', from position {position}' if position else ''})" if samples else ""
    return f"rows {first}..{last}{named} of {window.b.name}"


def _places(window: Window, rows: Array, regions: int) -> str:
    """Return the words for rows of several regions."""
    samples = np.unique(window.samples.of_rows(window.first + rows)).tolist() if window.samples.known else []
    where = f" of {numbered('sample', samples)}" if samples else f" in {regions:,} regions"
    return f"{len(rows):,} rows{where} of {window.b.name}"


def _samples(window: Window, rows: Array, offsets: Array) -> str:
    """Return the words for samples of b that match different samples of a."""
    stated = np.zeros_like(offsets)
    stated[rows] = offsets[rows]
    moved = {place: source for _, place, source in window.moved_samples(stated) if place != source}
    places, sources = zip(*sorted(moved.items()))
    if len(places) == 2 and places == sources[::-1]:
        return f"samples {places[0]} and {places[1]} of {window.b.name} changed places"
    matched = f"{numbered('sample', places)} of {window.b.name} {_match(places)}"
    return f"{matched} {numbered('sample', sources)} of {window.a.name}"


def _ids(by_layer: Array) -> str:
    """Return the words for b's ids of a's experts, [layers, num_experts]; those of the lowest layer represent all."""
    names, num_experts = by_layer[0], by_layer.shape[1]
    added, times = np.unique((names - np.arange(num_experts)) % num_experts, return_counts=True)
    # The names of rare experts may be wrong.
    if added[times.argmax()] and times.max() >= 0.9 * num_experts:
        return f"each expert by its id plus {added[times.argmax()]} (modulo {num_experts})"
    moved = np.flatnonzero(names != np.arange(num_experts))
    if len(moved) > _MOST_IDS:
        return "each expert by a different id"
    if (by_layer != names).any():
        return "a few experts by different ids, not the same in each layer"
    each = [f"{expert} as {names[expert]}" for expert in moved.tolist()]
    return f"expert {', '.join(each[:-1])}{' and ' if len(each) > 1 else ''}{each[-1]}"


def _later_layers(window: Window, rows: Array, layers: Array, explained: Array) -> tuple[str, str]:
    """Return whether layers after those with different ids agree, and the share of their decisions that differ.

    Experts that moved with their router do no harm. A decision with a match of its own follows from nothing.
    """
    different = window.different & ~explained
    later = np.arange(layers.max() + 1, window.different.shape[1])
    later = later[window.column[later] >= 0]
    if not len(later):
        return "", ""
    before = np.setdiff1d(np.flatnonzero(window.column >= 0), np.arange(layers.min(), window.different.shape[1]))
    noise = different[np.ix_(rows, before)].mean(axis=0).max() if len(before) else 0.0
    # Of a few ids, the rows without any of them follow less.
    renamed = rows[window.different[np.ix_(rows, layers)].any(axis=1)]
    agree = different[np.ix_(renamed, later)].mean(axis=0).max() <= 0.1 + 3 * noise
    return "agree" if agree else "differ", percent(float(different[np.ix_(rows, later)].mean()))


def _match(numbers: Sequence[int]) -> str:
    return "match" if len(numbers) > 1 else "matches"
