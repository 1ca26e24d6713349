"""State which rows, samples, layers or ids of a the routes of b match.

A cell (see `window`) is bad if fewer than half of its decisions are near those of a (see the package's docstring). Each bad
cell is compared with a few explanations: other samples of a, a's rows at another offset, another layer of a, one repeated
route, a's experts under other ids. The best one is taken if it fits three quarters of the cell. All cells with one
explanation become one fact, with the first and last row of each run of neighbouring cells found row by row. Decisions that
are left are compared with explanations of whole layers. Rows of bad cells that have none then are unrelated to a if most of
their decisions are not near.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from megatron_router_replay.diagnostics.counting import Array
from megatron_router_replay.diagnostics.explanations import FITS, MIN_ROWS, Explanation, explain_cells, explain_layers
from megatron_router_replay.diagnostics.fact import Fact
from megatron_router_replay.diagnostics.match_text import Region, match_fact
from megatron_router_replay.diagnostics.window import Window

_Match = tuple[Explanation, list[Region]]

_BETTER = 0.1  # three rows of a piece; those at the ends of a fault fit by chance
_MIN_UNRELATED = 24  # noise alone exchanges most experts of fewer neighbouring decisions


def find_matches(window: Window) -> tuple[list[Fact], Array]:
    """Search for matches.

    Returns:
        (facts, those of most decisions first; [n, L] bool, decisions that a match explains.)
    """
    matches: list[_Match] = []
    explained, named = np.zeros_like(window.in_place), np.zeros_like(window.in_place)
    # Only rows and layers that both have can be unrelated.
    # A different token has different routes, which are no fact of their own.
    unrelated = ~window.in_place & window.alike[:, None] & (window.column >= 0)
    routed = window.by_piece(window.routed_b)[:, None]
    bad = 2 * window.by_piece(window.in_place) < routed
    tried, chosen = _choose(window, bad, unrelated) if bad.any() else ([], np.full(bad.shape, -1))
    for index, each in enumerate(tried):
        find = _moved_samples if each.kind == "sample_order" else _regions
        if regions := list(find(window, each, chosen == index)):
            matches.append((each, regions))
        # A region may reach into cells that it does not explain alone: these are not unrelated.
        cells = named if each.kind == "names" else explained
        for rows, layers in regions:
            cells[np.ix_(rows, layers)] |= each.fitting[np.ix_(rows, layers)]
    for each in explain_layers(window, explained):
        if each.kind == "names":
            matches = _with_names_of_layers(window, matches, each)
        else:  # a route fits the rows that differ alone
            rows, layers = np.flatnonzero(each.fitting.any(axis=1)), np.flatnonzero(each.fitting.any(axis=0))
            runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
            matches.append((each, [(run, layers) for run in runs]))
        named |= each.fitting
    explained |= named
    facts = [match_fact(window, each, regions, explained) for each, regions in matches]
    unrelated &= ~explained
    cells = bad & (chosen < 0) & (2 * window.by_piece(unrelated) > routed)
    facts += _unrelated(window, Explanation(kind="nothing", fitting=unrelated), cells)
    return sorted(facts, key=lambda fact: -fact.decisions), explained


def _choose(window: Window, bad: Array, unrelated: Array) -> tuple[list[Explanation], Array]:
    """Return explanations, and the index of the one that fits each bad cell best, [P, L]; -1: none."""
    routed = window.by_piece(window.routed_b)[:, None]
    least, chosen = np.full(bad.shape, FITS), np.full(bad.shape, -1)
    tried: list[Explanation] = []
    for each in explain_cells(window, bad):
        fits = window.by_piece(each.fitting) / np.maximum(1, routed)
        better = bad & (fits > least)
        chosen[better] = len(tried)
        # The first explanation is the plainer one: a prompt of a group lies in many places.
        least[better] = fits[better] + _BETTER
        tried.append(each)
    # Rows that moved may fill a part of a piece: theirs is the explanation that fits these rows alone.
    moved = [index for index, each in enumerate(tried) if each.kind == "row"]
    cells = bad & (chosen < 0) & (2 * window.by_piece(unrelated) > routed)
    for rows, layers in _regions(window, Explanation(kind="nothing", fitting=unrelated), cells):
        fits_alone = [tried[index].fitting[np.ix_(rows, layers)].mean() for index in moved]
        if max(fits_alone) >= FITS:
            pieces = np.unique(np.searchsorted(window.starts, rows, side="right") - 1)
            region = np.ix_(pieces, layers)
            chosen[region] = np.where(cells[region], moved[int(np.argmax(fits_alone))], chosen[region])
    return tried, chosen


def _with_names_of_layers(window: Window, matches: list[_Match], each: Explanation) -> list[_Match]:
    """Add names that fit all rows of some layers to the matches; cells with these names join them."""
    layers = np.flatnonzero(each.fitting.any(axis=0))
    regions, others = [(np.flatnonzero(window.alike), layers)], []
    for other, at in matches:
        if other.kind != "names" or not any(np.isin(layers_of, layers).any() for _, layers_of in at):
            others.append((other, at))
            continue
        rest = [(rows, np.setdiff1d(layers_of, layers)) for rows, layers_of in at]
        regions += [region for region in rest if len(region[1])]
        in_layers = np.isin(np.arange(each.fitting.shape[1]), layers)
        each = Explanation(
            kind="names",
            fitting=np.where(in_layers, each.fitting, other.fitting),
            values=np.where(in_layers[:, None], each.values, other.values),
        )
    return [*others, (each, regions)]


def _unrelated(window: Window, each: Explanation, cells: Array) -> Iterator[Fact]:
    """Yield the facts of rows that are unrelated to a, one for all regions of the same layers."""
    by_layers: dict[bytes, list[Region]] = defaultdict(list)
    for region in _regions(window, each, cells):
        by_layers[region[1].tobytes()].append(region)
    for regions in by_layers.values():
        layers = regions[0][1]
        rows = np.unique(np.concatenate([rows for rows, _ in regions]))
        rest = np.setdiff1d(np.flatnonzero(window.alike), rows)
        # Where most decisions differ, some neighbours are unlike by chance.
        shares = [window.different[np.ix_(some, layers)].mean() if len(some) else 0.0 for some in (rest, rows)]
        if 2 * shares[0] <= shares[1]:
            yield match_fact(window, each, regions, ~each.fitting)


def _moved_samples(window: Window, each: Explanation, cells: Array) -> Iterator[Region]:
    """Yield the rows of all samples of b that match different samples of a."""
    # A piece may have rows of two samples, so whole samples are stated.
    taken = window.per_row(np.any(cells, axis=1))
    moved = [(rows, place != source) for rows, place, source in window.moved_samples(each.values) if taken[rows].any()]
    if any(is_different for _, is_different in moved):
        yield np.sort(np.concatenate([rows for rows, _ in moved])), _common_layers(cells)


def _regions(window: Window, each: Explanation, cells: Array) -> Iterator[Region]:
    """Yield the rows and layers of each run of neighbouring pieces with one explanation, [P, L]."""
    bounds = np.append(window.starts, len(window.ids_b))
    pieces = np.flatnonzero(cells.any(axis=1))
    for run in np.split(pieces, np.flatnonzero(np.diff(pieces) > 1) + 1) if len(pieces) else ():
        layers = _common_layers(cells[run])
        # A run may begin and end inside the pieces next to it.
        begin, end = int(bounds[max(0, run[0] - 1)]), int(bounds[min(len(bounds) - 1, run[-1] + 2)])
        whole = _region(window, each, layers, begin, end)
        regions = [] if whole is None else [whole]
        if each.kind == "nothing":
            # Each sample may have its own beginning, such as different answers to the same prompts.
            inside = window.samples.starts - window.first
            cuts = pairwise([begin, *inside[(inside > begin) & (inside < end)].tolist(), end])
            split = [region for cut in cuts if (region := _region(window, each, layers, *cut)) is not None]
            left = np.setdiff1d(whole[0], np.concatenate([rows for rows, _ in split])) if whole and split else None
            if whole is None or (
                left is not None and len(left) and window.in_place[np.ix_(left, layers)].mean() > FITS
            ):
                regions = split or regions
        yield from regions


def _region(window: Window, each: Explanation, layers: Array, begin: int, end: int) -> Region | None:
    """Return the rows in begin..end-1 with the greatest gain; None: too few of them fit."""
    fits, in_place = (values[begin:end][:, layers].mean(axis=1) for values in (each.fitting, window.in_place))
    gains = np.where(window.routed_b[begin:end], fits - np.maximum(in_place, 0.5), 0.0)
    # Cells have bounds of pieces; the fault begins and ends at the rows with the greatest gain.
    first, last = _best_run(gains)
    rows = begin + np.arange(first, last + 1)
    rows = rows[window.routed_b[rows]]
    held = each.fitting[np.ix_(rows, layers)]
    least = _MIN_UNRELATED if each.kind == "nothing" else 0
    if len(rows) < MIN_ROWS or held.mean() < FITS or held.sum() < least:
        return None
    return rows, layers


def _common_layers(cells: Array) -> Array:
    """Return the layers of [pieces, L] that have at least half as many pieces as the layer with most."""
    times = cells.sum(axis=0)
    layers: Array = np.flatnonzero(2 * times >= times.max())
    return layers


def _best_run(gains: Array) -> tuple[int, int]:
    """Return the first and last row of the run with the greatest sum; of equal ones a short one."""
    ends = gains.cumsum()
    starts = ends - gains
    last = int((ends - np.minimum.accumulate(starts)).argmax())
    return last - int(starts[last::-1].argmin()), last
