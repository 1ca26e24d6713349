"""A diff -> one HTML page that works offline: what differs and where, and both sets of experts under the pointer.

Everything is inside the page: styles, a short script, the data. `page.html` is its frame; what stands in it as
`<!-- name -->` is filled in here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import megatron_router_replay
from megatron_router_replay.diagnostics.counting import Difference
from megatron_router_replay.diagnostics.fact import facts_html
from megatron_router_replay.diagnostics.trace_diff import (
    TraceDiff,
    first_differences,
    headline,
    layers_table,
    noise_words,
    samples_table,
    source_lines,
    summary_table,
    verdict,
)
from megatron_router_replay.errors import TraceError
from megatron_router_replay.tables import Table, replace_text

TokenText = Callable[[int], str]
"""Token id -> its text, such as `tokenizer.decode`."""

_MAX_TABLE_ROWS = 2000


def save_page(
    diff: TraceDiff, path: str | os.PathLike[str], *, title: str = "", token_text: TokenText | None = None
) -> Path:
    """Write the page of a diff and return its path.

    Args:
        title: heading; by default the names of both traces.
        token_text: shows tokens as text, where the traces know token ids.

    Raises:
        TraceError: the two are exchanged.
        OSError: the file cannot be written; one that was there stays as it is.
    """
    if not isinstance(diff, TraceDiff):
        raise TraceError(
            f"MRR101: save_page takes a diff and then a path, got {type(diff).__name__} and {type(path).__name__}: "
            'save_page(mrr.diff_traces(a, b), "diff.html").'
        )
    first = "".join(f"<pre>{escape(line)}</pre>" for line in first_differences(diff))
    noise = noise_words(diff)
    parts = {
        "title": escape(title or f"Routing of {diff.name_a} and {diff.name_b}"),
        "verdict": f'<p class="verdict {"same" if diff.same else "differ"}" id="verdict">{verdict(diff).capitalize()}.</p>',
        "headline": escape(headline(diff)),
        "facts": facts_html(diff.facts)
        or (f'<p id="noise">{noise[0].upper()}{escape(noise[1:])}</p>' if noise else ""),
        "sources": "".join(f"<p>{escape(line)}</p>" for line in source_lines(diff)),
        "summary": _scrolled(summary_table(diff)),
        "first": f"<h2>Where they part first</h2>{first}" if first else "",
        "layers": _scrolled(layers_table(diff)),
        "samples": f"<h2>By sample</h2>{_scrolled(samples_table(diff))}" if diff.compared_by_sample is not None else "",
        "version": megatron_router_replay.__version__,
        # As text of a script: whatever names and tokens hold, no "<" ends it.
        "cells": json.dumps(_cells(diff, token_text)).replace("<", "\\u003c"),
    }
    frame = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return replace_text(path, re.sub("<!-- ([a-z]+) -->", lambda name: parts[name[1]], frame))


def _scrolled(table: Table) -> str:
    left_out = len(table.rows) - _MAX_TABLE_ROWS
    if left_out > 0:
        table = replace(table, rows=table.rows[:_MAX_TABLE_ROWS], left_out=f"{left_out:,} more rows are left out here.")
    return f'<div class="scroll" tabindex="0">{table.html()}</div>'


def _cells(diff: TraceDiff, token_text: TokenText | None) -> dict[str, Any]:
    """Return what the page's script draws and shows of the cells: numbers in lists, because there are thousands."""
    bins, width = len(diff.compared_by_position), diff.position_width
    examples: dict[str, list[Any]] = {}
    for each in diff.differences:
        place = each.row if each.position is None else each.position
        cell = f"{each.layer_number},{min(place // width, bins - 1)}"
        values = (each.row, each.sample, each.position, each.experts_a, each.experts_b, _token(each, token_text))
        examples.setdefault(cell, []).append(values)
    return {
        "a": diff.name_a,
        "b": diff.name_b,
        "where": "row" if diff.compared_by_sample is None else "position in the sample",
        "layers": diff.layer_numbers,
        "bins": [f"{i}" if width == 1 else f"{i * width}..{(i + 1) * width - 1}" for i in range(bins)],
        "rows": diff.compared_by_position.tolist(),
        "differ": diff.different_by_position.tolist(),
        "examples": examples,
    }


def _token(difference: Difference, token_text: TokenText | None) -> str | None:
    """Return the token in words, both if the traces hold different ones; None where unknown."""
    ids = [token for token in (difference.token_a, difference.token_b) if token is not None]
    words = [f"{token}" if token_text is None else f"{token_text(token)!r} ({token})" for token in dict.fromkeys(ids)]
    return " and ".join(words) or None
