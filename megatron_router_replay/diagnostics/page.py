"""A diff -> one HTML page that works offline: the figures inside it, and every number of them in tables."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from torch import Tensor

import megatron_router_replay
from megatron_router_replay.diagnostics.diff import TraceDiff
from megatron_router_replay.diagnostics.metrics import imbalance
from megatron_router_replay.diagnostics.plot import diff_figures, png_bytes

_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 960px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
p.verdict { font-size: 1.1rem; font-weight: 600 }
p.same { color: #1a7f37 } p.differ { color: #b3261e }
ul.findings li { background: #fff4e5; border-left: 4px solid #e08600; padding: .4rem .8rem; margin: .4rem 0;
  list-style: none }
ul.findings { padding: 0 }
img { max-width: 100%; height: auto; display: block; margin: .8rem 0 }
div.scroll { overflow-x: auto; max-height: 30rem; overflow-y: auto; border: 1px solid #ddd }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; min-width: 60% }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #eee; text-align: right }
th { background: #f5f5f5; position: sticky; top: 0 } td:first-child, th:first-child { text-align: left }
td:first-child { white-space: nowrap } div.whole { max-height: none } #table-summary td { text-align: left }
footer { color: #666; margin: 3rem 0; font-size: .85rem }
"""

_ALT = {
    "disagreement": "Heatmap of the share of decisions that differ, layer by position.",
    "agreement": "Agreement by layer.",
    "load": "Expert load of both traces.",
}
_MAX_TABLE_ROWS = 2000


def save_page(
    diff: TraceDiff, path: str | os.PathLike[str], *, loads: Mapping[str, Tensor] | None = None, title: str = ""
) -> Path:
    """Write the page of a diff and return its path.

    Args:
        loads: name -> [num_layers, num_experts] of both traces, in the compared layers, for the load figure and table.
        title: heading; by default the names of both traces.
    """
    path = Path(path)
    path.write_text(render_page(diff, loads=loads, title=title), encoding="utf-8")
    return path


def render_page(diff: TraceDiff, *, loads: Mapping[str, Tensor] | None = None, title: str = "") -> str:
    """Return the page of a diff as HTML; see `save_page`."""
    heading = escape(title or f"Routing of {diff.name_a} and {diff.name_b}")
    figures = {name: png_bytes(figure) for name, figure in diff_figures(diff, loads).items()}
    verdict = str(diff).splitlines()[-1].capitalize() + "."
    parts = [
        f"<h1>{heading}</h1>",
        f'<p class="verdict {"same" if diff.same else "differ"}" id="verdict">{verdict}</p>',
        _findings(diff),
        "<h2>Summary</h2>",
        _table("summary", ("", ""), _summary(diff)),
        "<h2>Where routing differs</h2>",
        _image("disagreement", figures),
        _table("positions", ("position", "rows", "decisions that differ", "share"), _positions(diff)),
        "<h2>By layer</h2>",
        _image("agreement", figures),
        _table("layers", ("layer", "same set", "experts in common", "other experts", "other order"), _layers(diff)),
    ]
    if diff.agreement_by_sample is not None:
        parts += ["<h2>By sample</h2>", _table("samples", ("sample", "decisions", "differ", "same"), _samples(diff))]
    if loads:
        parts += ["<h2>Expert load</h2>", _image("load", figures)]
        parts.append(_table("load", ("layer", *(f"imbalance of {name}" for name in loads)), _loads(diff, loads)))
    parts.append(f"<footer>megatron_router_replay {megatron_router_replay.__version__}</footer>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{heading}</title><style>{_CSS}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _findings(diff: TraceDiff) -> str:
    items = "".join(f"<li>{escape(str(finding))}</li>" for finding in diff.findings)
    return f'<ul class="findings" id="findings">{items}</ul>'


def _image(name: str, figures: Mapping[str, bytes]) -> str:
    data = base64.b64encode(figures[name]).decode("ascii")
    return f'<img id="figure-{name}" alt="{_ALT[name]}" src="data:image/png;base64,{data}">'


def _table(name: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    left_out = len(rows) - _MAX_TABLE_ROWS
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[:_MAX_TABLE_ROWS]
    )
    if left_out > 0:
        body += f'<tr><td colspan="{len(head)}">{left_out:,} more rows are left out here.</td></tr>'
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head) if any(head) else ""
    return (
        f'<div class="scroll{" whole" if not top else ""}"><table id="table-{name}">'
        + (f"<thead><tr>{top}</tr></thead>" if top else "")
        + f"<tbody>{body}</tbody></table></div>"
    )


def _summary(diff: TraceDiff) -> list[tuple[str, str]]:
    rows = [
        ("a", diff.name_a),
        ("b", diff.name_b),
        ("experts", f"top-{diff.topk} of {diff.num_experts}"),
        ("layers compared", f"{len(diff.layer_numbers)}"),
        ("rows with a route in both", f"{diff.rows_compared:,}"),
        ("rows with a route in a only", f"{diff.rows_only_a:,}"),
        ("rows with a route in b only", f"{diff.rows_only_b:,}"),
        ("rows with another token", f"{diff.rows_other_token:,}"),
        ("decisions", f"{diff.decisions:,}"),
        (
            "decisions with other experts",
            _count(diff.decisions_different, diff.decisions),
        ),
        ("same experts, other order", f"{diff.decisions_other_order:,}"),
        ("rows same in every layer", _count(diff.rows_all_same, diff.rows_compared)),
    ]
    for name, layers in (("a", diff.layers_only_a), ("b", diff.layers_only_b)):
        if layers:
            rows.append((f"layers in {name} only", ", ".join(map(str, layers))))
    if diff.first_by_layer is not None and diff.first_by_row is not None:
        rows += [
            ("lowest layer that differs", str(diff.first_by_layer).replace("\n   ", ";")),
            ("first row that differs", str(diff.first_by_row).replace("\n   ", ";")),
        ]
    return rows


def _positions(diff: TraceDiff) -> Iterable[tuple[str, ...]]:
    different = diff.different_by_position.sum(dim=0).tolist()
    for i, (rows, count) in enumerate(zip(diff.compared_by_position.tolist(), different)):
        first = i * diff.position_width
        name = f"{first}" if diff.position_width == 1 else f"{first}..{first + diff.position_width - 1}"
        yield name, f"{rows:,}", f"{count:,}", _percent(count, rows * len(diff.layer_numbers))


def _layers(diff: TraceDiff) -> Iterable[tuple[str, ...]]:
    shared = diff.overlap_by_layer.tolist()
    for i, number in enumerate(diff.layer_numbers):
        counts = diff.overlap[i].tolist()
        total = sum(counts)
        common = f"{shared[i]:.2%}" if total else "-"
        yield (
            f"{number}",
            _percent(counts[-1], total),
            common,
            f"{total - counts[-1]:,}",
            f"{int(diff.other_order[i]):,}",
        )


def _samples(diff: TraceDiff) -> Iterable[tuple[str, ...]]:
    assert diff.compared_by_sample is not None, "asked for with samples only"
    assert diff.different_by_sample is not None, "asked for with samples only"
    for i, (total, count) in enumerate(zip(diff.compared_by_sample.tolist(), diff.different_by_sample.tolist())):
        name = f"{i}" if diff.sample_ids is None else f"{i} ({diff.sample_ids[i]})"
        yield name, f"{total:,}", f"{count:,}", _percent(total - count, total)


def _loads(diff: TraceDiff, loads: Mapping[str, Tensor]) -> Iterable[tuple[str, ...]]:
    columns = [imbalance(load).tolist() for load in loads.values()]
    for i, number in enumerate(diff.layer_numbers):
        yield f"{number}", *("-" if column[i] != column[i] else f"{column[i]:.2f}" for column in columns)


def _percent(count: int, total: int) -> str:
    return f"{count / total:.2%}" if total else "-"


def _count(count: int, total: int) -> str:
    return f"{count:,} ({_percent(count, total)})"
