"""A diff -> the tables that its text, its page, notebooks and the command line show, and the sentences around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_router_replay.diagnostics.finding import finding_lines, findings_html
from megatron_router_replay.diagnostics.load import imbalance
from megatron_router_replay.tables import Table, printable, share

if TYPE_CHECKING:  # which prints itself with this module
    from megatron_router_replay.diagnostics.diff import TraceDiff
    from megatron_router_replay.diagnostics.differences import Difference
    from megatron_router_replay.diagnostics.source import Provenance

_MAX_FILES_SHOWN = 4


def diff_text(diff: TraceDiff, *, max_layers: int | None = 0) -> str:
    """Return what `print(diff)` says.

    Args:
        max_layers: how many of the layers that differ to list, those that differ most; None: list every layer.
    """
    lines = [
        source_line("a", diff.name_a, diff.provenance_a),
        source_line("b", diff.name_b, diff.provenance_b),
        headline(diff),
        summary_table(diff).text(),
        *(f"  {where}: {difference}" for where, difference in first_differences(diff)),
        *finding_lines(diff.findings),
    ]
    layers = layers_table(diff, max_layers=max_layers)
    if layers.rows and diff.rows_compared:
        lines.append(layers.text())
    return "\n".join([*lines, verdict(diff)])


def diff_html(diff: TraceDiff) -> str:
    """Return a small table for a notebook: no figures, no style sheet."""
    return (
        f"<div><b>{verdict(diff)}</b><br>{printable(headline(diff))}"
        + summary_table(diff).html()
        + findings_html(diff.findings)
        + provenance_table(diff).html()
        + "</div>"
    )


def verdict(diff: TraceDiff) -> str:
    """Return what the comparison comes to, without a full stop."""
    if diff.same:
        return "the traces are the same"
    if diff.same_in_common and diff.decisions:
        return "the traces differ in what they cover; what both cover is the same"
    return "the traces differ"


def headline(diff: TraceDiff) -> str:
    """Return what was compared."""
    return (
        f"{diff.rows_compared:,} rows with a route in both, {len(diff.layer_numbers)} layers, "
        f"top-{diff.topk} of {diff.num_experts} experts"
    )


def source_line(letter: str, name: str, provenance: Provenance) -> str:
    """Return where one of the traces comes from, "a: runs/7 (trainer), step 7, written 2026-03-01 12:30 UTC"."""
    place = printable(provenance.path or name)
    # A name that says no more than the letter is left out.
    known_as = f" ({printable(name)})" if provenance.path and name != letter else ""
    return ", ".join([f"{letter}: {place}{known_as}", *_facts(provenance)])


def _facts(provenance: Provenance) -> list[str]:
    facts = [] if provenance.step is None else [f"step {provenance.step}"]
    if len(provenance.files) > 1:
        facts.append(f"{len(provenance.files)} files")
    if provenance.written:
        facts.append(f"written {provenance.written} UTC")
    if provenance.weight_versions:
        facts.append(f"weights {_versions(provenance)}")
    return facts


def _versions(provenance: Provenance) -> str:
    versions = provenance.weight_versions
    # A trace of an asynchronous run may hold many; they count up.
    return ", ".join(map(str, versions)) if len(versions) <= 4 else f"{versions[0]}..{versions[-1]}"


def provenance_table(diff: TraceDiff) -> Table:
    """Files, step, date and weight version of both."""
    both = (diff.provenance_a, diff.provenance_b)

    def row(label: str, values: Iterable[str]) -> tuple[str, ...]:
        return label, *(value or "-" for value in values)

    rows = (
        row("name", (diff.name_a, diff.name_b)),
        row("files", (_files(each) for each in both)),
        row("step", ("" if each.step is None else str(each.step) for each in both)),
        row("written", (f"{each.written} UTC" if each.written else "" for each in both)),
        row("weight version", (_versions(each) for each in both)),
    )
    # Of a trace in memory nothing is known but its name.
    known = [row for row in rows if row[1:] != ("-", "-")]
    return Table(name="provenance", head=("", "a", "b"), words=(0, 1, 2), rows=known)


def _files(provenance: Provenance) -> str:
    left_out = len(provenance.files) - _MAX_FILES_SHOWN
    shown = ", ".join(provenance.files[:_MAX_FILES_SHOWN])
    return shown + (f" and {left_out} more" if left_out > 0 else "")


def summary_table(diff: TraceDiff) -> Table:
    """Counts over all layers; what is 0 in nearly every comparison has a row only where it is not."""
    rows = []
    for name, count, layers in (
        ("a", diff.rows_only_a, diff.layers_only_a),
        ("b", diff.rows_only_b, diff.layers_only_b),
    ):
        if count:
            rows.append((f"rows with a route in {name} only", f"{count:,}", ""))
        if layers:
            rows.append((f"layers in {name} only", f"{len(layers)}", f"({', '.join(map(str, layers))})"))
    if diff.rows_other_token:
        rows.append(("rows with another token", f"{diff.rows_other_token:,}", ""))
    if diff.decisions:
        different = diff.decisions_different
        rows += [
            ("decisions that differ", f"{different:,}", f"({different / diff.decisions:.3%} of {diff.decisions:,})"),
            ("same experts, other order", f"{diff.decisions_other_order:,}", ""),
            (
                "rows that agree in every layer",
                f"{diff.rows_all_same:,}",
                f"({share(diff.rows_all_same, diff.rows_compared)})",
            ),
        ]
    return Table(name="summary", words=(0, 2), rows=rows or [("decisions compared", "0", "")])


def first_differences(diff: TraceDiff) -> list[tuple[str, Difference]]:
    """Return where the traces part, once along the layers and once along the rows."""
    found = (("lowest layer that differs", diff.first_by_layer), ("first row that differs", diff.first_by_row))
    return [(where, difference) for where, difference in found if difference is not None]


def layers_table(diff: TraceDiff, *, max_layers: int | None = None) -> Table:
    """What differs layer by layer.

    Args:
        max_layers: of those that differ, list only so many, those that differ most; None: list every layer.
    """
    different = diff.overlap_counts[:, :-1].sum(dim=1).tolist()
    differing = [i for i, count in enumerate(different) if count]
    shown, left_out = list(range(len(different))), 0
    if max_layers is not None:
        worst = sorted(differing, key=lambda i: -different[i])[:max_layers]
        shown, left_out = sorted(worst), len(differing) - len(worst)
    agreement, overlap = diff.agreement_by_layer.tolist(), diff.overlap_by_layer.tolist()
    return Table(
        name="layers",
        head=("layer", "differ", "agreement", "overlap", "other order"),
        rows=[
            (
                f"{diff.layer_numbers[i]}",
                f"{different[i]:,}",
                _share(agreement[i]),
                _share(overlap[i]),
                f"{int(diff.other_order[i]):,}",
            )
            for i in shown
        ],
        bars={1: _bars([different[i] for i in shown])},
        left_out=f"{left_out} more layers differ (--layers lists all)" if left_out else "",
    )


def positions_table(diff: TraceDiff) -> Table:
    """What differs from position to position, all layers together."""
    different = diff.different_by_position.sum(dim=0).tolist()
    compared = diff.compared_by_position.tolist()
    decisions = [rows * len(diff.layer_numbers) for rows in compared]
    return Table(
        name="positions",
        head=("position", "rows", "differ", "share"),
        rows=[
            (bin_words(diff, i), f"{rows:,}", f"{count:,}", share(count, total))
            for i, (rows, count, total) in enumerate(zip(compared, different, decisions))
        ],
        bars={3: _bars([count / total if total else 0.0 for count, total in zip(different, decisions)])},
    )


def bin_words(diff: TraceDiff, index: int) -> str:
    """Return the positions of a bin, "32" or "32..39"."""
    first = index * diff.position_width
    return f"{first}" if diff.position_width == 1 else f"{first}..{first + diff.position_width - 1}"


def samples_table(diff: TraceDiff) -> Table:
    """What differs sample by sample; no rows where samples are unknown."""
    compared, different = (
        [] if counts is None else counts.tolist() for counts in (diff.compared_by_sample, diff.different_by_sample)
    )
    names = diff.sample_ids or ()
    return Table(
        name="samples",
        head=("sample", "decisions", "differ", "agreement"),
        words=(0,),
        rows=[
            (f"{i} ({names[i]})" if names else f"{i}", f"{total:,}", f"{count:,}", share(total - count, total))
            for i, (total, count) in enumerate(zip(compared, different))
        ],
        bars={2: _bars([count / total if total else 0.0 for total, count in zip(compared, different)])},
    )


def load_table(diff: TraceDiff, loads: Mapping[str, Tensor]) -> Table:
    """The imbalance of both traces layer by layer.

    Args:
        loads: name -> [num_layers, num_experts], in the compared layers.
    """
    columns = [imbalance(load).nan_to_num(nan=0.0).tolist() for load in loads.values()]
    highest = max((value for column in columns for value in column), default=0.0)
    return Table(
        name="load",
        head=("layer", *(f"imbalance of {name}" for name in loads)),
        rows=[
            (f"{number}", *(f"{column[i]:.2f}" if column[i] else "-" for column in columns))
            for i, number in enumerate(diff.layer_numbers)
        ],
        # One scale for both, so that bars compare.
        bars={i + 1: [value / highest if highest else 0.0 for value in column] for i, column in enumerate(columns)},
    )


def _bars(values: Sequence[float]) -> list[float]:
    highest = max(values, default=0) or 1
    return [value / highest for value in values]


def _share(value: float) -> str:
    return "-" if value != value else f"{value:.2%}"
