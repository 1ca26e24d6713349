"""Write a diff as one HTML page that works offline: facts, a map of layers by positions, and the text of the diff.

The map is an SVG in the page. The pointer shows the counts of a cell and its first decision that differs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from html import escape
from pathlib import Path

import megatron_router_replay
from megatron_router_replay.checks import with_checked_options
from megatron_router_replay.diagnostics.counting import Difference
from megatron_router_replay.diagnostics.trace_diff import TraceDiff, counts_text, fact_lines, verdict
from megatron_router_replay.errors import TraceError
from megatron_router_replay.store.atomic import replacing

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --text: #1b1b1b; --dim: #5c5c5c; --page: #fff; --cell: #e9edf0; --differ: #b3261e;
  --note: #fff4e5 }}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: #e6e6e6; --dim: #a3a3a3; --page: #16181b; --cell: #2a2e33; --differ: #ff8a80; --note: #33270f }}
}}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 70rem; margin: 0 auto;
  padding: 1.5rem 1rem }}
h1 {{ font-size: 1.5rem; overflow-wrap: anywhere }} h2 {{ font-size: 1.15rem }}
.note {{ background: var(--note); border-left: 4px solid #e08600; padding: .5rem .8rem; margin: .5rem 0;
  overflow-wrap: anywhere }}
.map {{ overflow-x: auto }}
.scroll {{ display: none }}
@media (max-width: {scrolls_below}px) {{ .scroll {{ display: inline }} }}
.legend {{ display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; align-items: center }}
.legend svg {{ vertical-align: -2px; margin-right: .4rem }}
svg text {{ font: 12px system-ui, sans-serif; fill: var(--dim) }}
rect {{ fill: var(--cell) }} rect.none {{ fill: none; stroke: var(--cell) }} rect.differ {{ fill: var(--differ) }}
rect.differ:hover {{ stroke: var(--text); stroke-width: 2 }}
pre {{ font-size: clamp(.55rem, 2.4vw, .85rem); white-space: pre-wrap; overflow-wrap: anywhere }}
footer, .dim {{ color: var(--dim); font-size: .85rem }}
</style>
<h1>{title}</h1>
<p><strong>{verdict}</strong></p>
{notes}
<h2>Decisions that differ, by layer and position</h2>
<p class="dim">Point at a cell for its first decision that differs. <span class="scroll">The map is wider than the screen:
it scrolls sideways.</span></p>
<p class="dim legend">{legend}</p>
<div class="map">{map}</div>
<h2>Numbers</h2>
<pre>{text}</pre>
<footer>megatron_router_replay {version}</footer>
</html>
"""
_LEFT, _HEIGHT = 58, 14
_LEAST_HIGHEST = 8  # differences of the reddest cell, so that one of a few stays pale


@with_checked_options
def save_page(diff: TraceDiff, path: str | os.PathLike[str]) -> Path:
    """Write the page of a diff and return its path.

    A page that is there already stays until the new one is whole.

    Raises:
        TraceError: the first argument is no diff.
        OSError: the file cannot be written.
    """
    if not isinstance(diff, TraceDiff):
        raise TraceError(
            f"MRR101: cannot write a page of a {type(diff).__name__}: the diff comes first, save_page(diff, path); "
            "mrr.diff_traces(a, b) makes one."
        )
    notes = [line.removeprefix("fact: ") for line in fact_lines(diff)]
    bins = len(diff.compared_by_position)
    width = max(6, min(24, 1000 // bins))
    in_samples = any(each.sample is not None for each in diff.differences)
    page = _PAGE.format(
        title=escape(f"Routing of {diff.name_a} and {diff.name_b}"),
        verdict=escape(verdict(diff)),
        notes="\n".join(f'<p class="note">{escape(note[0].upper() + note[1:])}</p>' for note in notes),
        legend=_legend(diff),
        scrolls_below=_LEFT + bins * width + 60 + 32,  # the body's padding
        map=_map(diff, width, "position in the sample" if in_samples else "row"),
        text=escape(counts_text(diff)),
        version=megatron_router_replay.__version__,
    )
    target = Path(path)
    if target.exists() and not target.is_file():  # a device or a pipe; a folder raises
        target.write_text(page, encoding="utf-8")
        return target
    with replacing(target) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return target


def _legend(diff: TraceDiff) -> str:
    """Return the legend of the cells' colours."""
    highest = max(_LEAST_HIGHEST, *diff.different_by_position.flatten().tolist(), 0)
    colours = [
        ("<rect {box}/>", "all agree"),
        (_coloured(1, highest), "1 decision differs"),
        (_coloured(highest, highest), f"{highest:,} differ"),
        ('<rect class="none" {box}/>', "no row with a route in both"),
    ]
    box = f'x="1" y="1" width="14" height="{_HEIGHT - 2}"'
    return "\n".join(
        f'<span><svg width="16" height="{_HEIGHT}" aria-hidden="true">{cell.format(box=box)}</svg>{words}</span>'
        for cell, words in colours
    )


def _coloured(count: int, highest: int) -> str:
    """Return a cell with differences, without its end; a single one stays pale even where few rows reach."""
    # The cell's own colour lies below, so that half of a shade is no half of the page's colour.
    return f'<rect {{box}}/><rect class="differ" {{box}} fill-opacity="{0.08 + 0.92 * (count / highest) ** 0.75:.2f}"/>'


def _map(diff: TraceDiff, width: int, axis: str) -> str:
    """Return the map as SVG: a row of cells for each layer, and an axis of positions below."""
    bins = len(diff.compared_by_position)
    bottom = len(diff.layer_numbers) * _HEIGHT
    middle, height = _LEFT + bins * width / 2, bottom + 38
    return "\n".join(
        [
            f'<svg width="{_LEFT + bins * width + 60}" height="{height}" role="img" aria-label="layers by {axis}s">',
            *_cells(diff, width),
            *(
                f'<text x="{_LEFT + i * width}" y="{bottom + 15}">{i * diff.position_width:,}</text>'
                for i in range(0, bins, max(1, 80 // width))
            ),
            f'<text class="axis" x="{min(middle, _LEFT + 150):.0f}" y="{bottom + 32}">{axis}</text>',
            f'<text class="axis" x="12" y="{bottom / 2:.0f}" transform="rotate(-90 12 {bottom / 2:.0f})" '
            'text-anchor="middle">layer</text>',
            "</svg>",
        ]
    )


def _cells(diff: TraceDiff, width: int) -> Iterator[str]:
    compared, positions = diff.compared_by_position.tolist(), diff.position_width
    highest = max([_LEAST_HIGHEST, *diff.different_by_position.flatten().tolist()])
    first: dict[tuple[int, int], Difference] = {}
    for each in diff.differences:
        place = each.row if each.position is None else each.position
        first[each.layer_number, min(place // positions, len(compared) - 1)] = each
    for i, (number, counts) in enumerate(zip(diff.layer_numbers, diff.different_by_position.tolist())):
        y = i * _HEIGHT
        yield f'<text x="{_LEFT - 6}" y="{y + 11}" text-anchor="end">{number}</text>'
        for j, (count, rows) in enumerate(zip(counts, compared)):
            box = f'x="{_LEFT + j * width}" y="{y}" width="{width - 1}" height="{_HEIGHT - 1}"'
            if not count:
                yield f"<rect {box}/>" if rows else f'<rect class="none" {box}/>'
                continue
            places = f"{j * positions}..{(j + 1) * positions - 1}" if positions > 1 else f"{j}"
            text = f"layer {number}, {places}: {count} of {rows} decisions differ.\nFirst: {_words(first[number, j], diff)}"
            yield f"{_coloured(count, highest).format(box=box).removesuffix('/>')}><title>{escape(text)}</title></rect>"


def _words(each: Difference, diff: TraceDiff) -> str:
    tokens = dict.fromkeys(token for token in (each.token_a, each.token_b) if token is not None)
    return each.text(diff.name_a, diff.name_b) + (f"\n    token {' and '.join(map(str, tokens))}" if tokens else "")
