"""Find the facts of two traces: coverage, matches of b's routes in a, and clues that the rest shares."""

from __future__ import annotations

import numpy as np

from megatron_router_replay.diagnostics.clues import Decisions, find_clues
from megatron_router_replay.diagnostics.counting import Array, Counter, count_shared
from megatron_router_replay.diagnostics.coverage import coverage
from megatron_router_replay.diagnostics.fact import Fact
from megatron_router_replay.diagnostics.matches import find_matches
from megatron_router_replay.diagnostics.window import Window


def find_facts(counts: Counter) -> tuple[list[Fact], Array]:
    """Search for facts.

    Returns:
        (the coverage of two traces, then the matches of b in a, those of most decisions first, then the clues;
        [num_layers, topk + 1] int64, differing decisions that a match explains, by the number of shared experts.)
    """
    facts = list(coverage(counts))
    by_overlap = np.zeros(tuple(counts.alike.shape), np.int64)
    differs = counts.rows_different or not counts.layers or counts.rows_only_b
    if differs and counts.b.num_tokens and counts.a.layer_numbers and counts.b.layer_numbers:
        window = Window(counts)
        matches, explained = find_matches(window)
        facts += matches
        if counts.layers:
            by_overlap = _by_overlap(window, explained)
            facts += find_clues(_unexplained(window, explained))
    return facts, by_overlap


def _by_overlap(window: Window, explained: Array) -> Array:
    """Return how many differing decisions matches explain, by layer of both and number of shared experts."""
    topk, layers = window.a.topk, window.counts.layers
    by_overlap = np.zeros((len(layers), topk + 1), np.int64)
    for i, number in enumerate(layers):
        column = window.b.layer_numbers.index(number)
        rows = np.flatnonzero(explained[:, column] & window.different[:, column])
        shared = count_shared(window.ids_a[rows, window.column[column]], window.ids_b[rows, column])
        by_overlap[i] = np.bincount(shared, minlength=topk + 1)
    return by_overlap


def _unexplained(window: Window, explained: Array) -> Decisions:
    """Return the decisions that clues are searched in."""
    rows = np.flatnonzero(window.alike)
    columns = np.array([window.b.layer_numbers.index(number) for number in window.counts.layers])
    starts = window.samples.starts[:-1] if window.samples.known else np.zeros(0, np.int64)
    return Decisions(
        layer_numbers=window.counts.layers,
        num_experts=window.a.num_experts,
        ids_a=window.ids_a[rows][:, window.column[columns]],
        ids_b=window.ids_b[rows][:, columns],
        different=(window.different & ~explained)[rows][:, columns],
        tokens=window.tokens[rows],
        is_first=np.isin(rows + window.first, starts),
        is_distinct=window.is_distinct[rows],
    )
