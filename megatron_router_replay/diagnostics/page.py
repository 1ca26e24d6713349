"""A diff -> one HTML page that works offline: what differs and where, both expert sets under the pointer, what to do next.

Everything is inside the page: styles, a short script, the data. Its template is `page.html.jinja`; jinja2, which torch brings
too, is imported when a page is rendered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

import megatron_router_replay
from megatron_router_replay.diagnostics.diff import TraceDiff
from megatron_router_replay.diagnostics.diff_tables import (
    bin_words,
    first_differences,
    headline,
    layers_table,
    load_table,
    positions_table,
    provenance_table,
    samples_table,
    summary_table,
    verdict,
)
from megatron_router_replay.diagnostics.differences import Difference
from megatron_router_replay.diagnostics.finding import findings_html
from megatron_router_replay.errors import RouterReplayError, TraceError
from megatron_router_replay.tables import Table, share

TokenText = Callable[[int], str]
"""Token id -> its text, such as `tokenizer.decode`."""

Margins = Mapping[int, Tensor]
"""layer_number -> [num_rows] how far the last chosen expert was from the next one, as `router_margin` returns it."""

_TEMPLATE = "page.html.jinja"
_MAX_TABLE_ROWS = 2000


def save_page(
    diff: TraceDiff,
    path: str | os.PathLike[str],
    *,
    loads: Mapping[str, Tensor] | None = None,
    title: str = "",
    token_text: TokenText | None = None,
    margins: Margins | None = None,
) -> Path:
    """Write the page of a diff and return its path.

    Args:
        loads: name -> [num_layers, num_experts] of both traces, in the compared layers, for the table of loads.
        title: heading; by default the names of both traces.
        token_text: shows tokens as text, where the traces know token ids.
        margins: shows how near to a tie the router was, where its scores were kept: small margins flip by rounding.

    Raises:
        TraceError: margins of a layer have no value for a row that differs.
        RouterReplayError: jinja2 is not installed.
    """
    try:
        jinja2 = import_module("jinja2")
    except ModuleNotFoundError:
        raise RouterReplayError(
            "the page needs jinja2: pip install 'megatron-router-replay[page]' brings it."
        ) from None
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(Path(__file__).with_name(_TEMPLATE).read_text(encoding="utf-8"))
    page = template.render(
        title=title or f"Routing of {diff.name_a} and {diff.name_b}",
        same=diff.same,
        verdict=verdict(diff),
        headline=headline(diff),
        findings=findings_html(diff.findings),
        provenance=provenance_table(diff),
        summary=summary_table(diff),
        first=_first_table(diff, token_text, margins),
        heat=_heat(diff),
        cells=_cells(diff, token_text, margins),
        positions=_cut(positions_table(diff)),
        layers=_cut(layers_table(diff)),
        samples=_cut(samples_table(diff)),
        load=_cut(load_table(diff, loads)) if loads else None,
        version=megatron_router_replay.__version__,
    )
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path


def _cut(table: Table) -> Table:
    left_out = len(table.rows) - _MAX_TABLE_ROWS
    if left_out <= 0:
        return table
    return replace(table, rows=table.rows[:_MAX_TABLE_ROWS], left_out=f"{left_out:,} more rows are left out here.")


def _heat(diff: TraceDiff) -> dict[str, Any]:
    """Return the map of layers and positions: of each cell the share of decisions that differ, None where none is."""
    compared = diff.compared_by_position.tolist()
    shares = [
        [count / rows if rows else None for count, rows in zip(counts, compared)]
        for counts in diff.different_by_position.tolist()
    ]
    highest = max((value for line in shares for value in line if value), default=0.0)
    rows = [
        # The worst cell has the strongest colour whatever its share: a map of shares below 1 % would be blank otherwise.
        (number, [None if value is None else value / highest if highest else 0.0 for value in line])
        for number, line in zip(diff.layer_numbers, shares)
    ]
    where = "position in the sample" if diff.compared_by_sample is not None else "row"
    last = len(compared) - 1
    return {
        "rows": rows,
        "bins": len(compared),
        "highest": share(highest, 1) if highest else "0 %",
        "where": where,
        "first_bin": bin_words(diff, 0),
        "last_bin": bin_words(diff, last),
    }


def _cells(diff: TraceDiff, token_text: TokenText | None, margins: Margins | None) -> dict[str, Any]:
    """Return what the page's script shows of the cells: numbers in lists, because there are thousands."""
    found: dict[tuple[int, int], list[Any]] = {}
    for difference in diff.differences:
        place = difference.row if difference.position is None else difference.position
        position_bin = min(place // diff.position_width, len(diff.compared_by_position) - 1)
        found.setdefault((difference.layer_number, position_bin), []).append(
            [
                difference.row,
                difference.sample,
                difference.position,
                list(difference.experts_a),
                list(difference.experts_b),
                _token(difference, token_text),
                _margin(difference, margins),
            ]
        )
    return {
        "a": diff.name_a,
        "b": diff.name_b,
        "layers": list(diff.layer_numbers),
        "bins": [bin_words(diff, i) for i in range(len(diff.compared_by_position))],
        "rows": diff.compared_by_position.tolist(),
        "differ": diff.different_by_position.tolist(),
        "examples": {f"{layer},{position_bin}": examples for (layer, position_bin), examples in found.items()},
    }


def _first_table(diff: TraceDiff, token_text: TokenText | None, margins: Margins | None) -> Table:
    """Where the traces part: the lowest layer that differs, and the first row."""
    return Table(
        name="first",
        head=("", "layer", "row", "sample, position", "experts of a", "experts of b", "token", "margin"),
        words=(0, 3, 4, 5, 6),
        rows=[
            (
                where,
                f"{found.layer_number}",
                f"{found.row:,}",
                "-" if found.sample is None else f"{found.sample}, {found.position}",
                ", ".join(map(str, found.experts_a)),
                ", ".join(map(str, found.experts_b)),
                _token(found, token_text) or "-",
                "-" if (margin := _margin(found, margins)) is None else f"{margin:.3g}",
            )
            for where, found in first_differences(diff)
        ],
    )


def _token(difference: Difference, token_text: TokenText | None) -> str | None:
    """Return the token in words, both if the traces hold different ones; None where unknown."""
    ids = [token for token in (difference.token_a, difference.token_b) if token is not None]
    words = [f"{token}" if token_text is None else f"{token_text(token)!r} ({token})" for token in dict.fromkeys(ids)]
    return " and ".join(words) or None


def _margin(difference: Difference, margins: Margins | None) -> float | None:
    if margins is None or difference.layer_number not in margins:
        return None
    layer_margins = margins[difference.layer_number]
    if layer_margins.dim() != 1 or len(layer_margins) <= difference.row:
        raise TraceError(
            f"margins of layer {difference.layer_number} have the shape {list(layer_margins.shape)}, which holds no row "
            f"{difference.row}: give [num_rows], one a row of the traces."
        )
    value = float(layer_margins[difference.row])
    # NaN is no JSON, and says that nobody knows.
    return None if value != value else value
