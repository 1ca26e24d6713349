"""The differences of two traces as terminals, notebooks and pages show them: conclusion, facts and tables."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from inspect import getmembers
from pathlib import PurePath
from typing import Any

import torch

from megatron_router_replay.diagnostics.comparison import Comparison
from megatron_router_replay.diagnostics.conclusion import conclude
from megatron_router_replay.diagnostics.fact import plain
from megatron_router_replay.tables import Table, percent, printable, share

_MOST_FACTS = 12  # fits a screen; `diff.facts` has all


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class TraceDiff(Comparison):
    """The differences of two traces; `print(diff)` and a notebook show them.

    The fields are those of `Comparison`.
    """

    @property
    def conclusion(self) -> str:
        """The cause that the facts and the counts leave, or the causes, in a few sentences."""
        return conclude(self)

    def to_dict(self) -> dict[str, Any]:
        """Return all but `differences` as values that `json.dumps` takes. Shares of nothing are None."""
        derived = [name for name, value in getmembers(TraceDiff) if isinstance(value, property)]
        values: dict[str, Any] = plain(self) | {name: plain(getattr(self, name)) for name in derived}
        del values["differences"]
        return values

    def __str__(self) -> str:
        return diff_text(self)

    # A notebook or a debugger would print twenty fields with tensors.
    __repr__ = __str__


def diff_text(diff: TraceDiff, *, max_layers: int | None = 10, hint: str = "", width: int | None = 80) -> str:
    """Return the text of `print(diff)`.

    Args:
        max_layers: how many of the layers that differ to list, those that differ most; None: list every layer.
        hint: follows the count of layers that are not listed: how to see them.
        width: of sentences, in characters; None: one line each. Tables and places stay as they are.
    """
    paragraphs = [verdict(diff), *fact_lines(diff)]
    lines = [_wrapped(printable(each), width, indent="  " if i else "") for i, each in enumerate(paragraphs)]
    return "\n".join([*lines, counts_text(diff, max_layers=max_layers, hint=hint)])


def counts_text(diff: TraceDiff, *, max_layers: int | None = None, hint: str = "") -> str:
    """Return the text below the conclusion and the facts: the traces, counts, first differences and layers."""
    layers = _layers_table(diff, max_layers, hint)
    lines = [
        _origin_line(diff.name_a, diff.origin_a),
        _origin_line(diff.name_b, diff.origin_b),
        f"{diff.rows_compared:,} rows with a route in both, {len(diff.layer_numbers)} layers, "
        f"top-{diff.topk} of {diff.num_experts} experts",
        _summary_table(diff).text(),
        *_first_differences(diff),
        layers.text() if layers.rows and diff.rows_compared else "",
    ]
    return "\n".join(line for line in lines if line)


def _origin_line(name: str, origin: str) -> str:
    """Return the name and where the trace lies; a name that is the file's is given once."""
    is_name = PurePath(origin.partition(",")[0]).stem == name
    return printable(origin if is_name else f"{name}: {origin}")


def _wrapped(paragraph: str, width: int | None, indent: str) -> str:
    if width is None:
        return paragraph
    return textwrap.fill(
        paragraph, max(40, width), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def fact_lines(diff: TraceDiff) -> list[str]:
    """Return the facts as lines; those that a screen has no room for are counted."""
    left_out = len(diff.facts) - _MOST_FACTS
    lines = [f"fact: {fact}" for fact in diff.facts[:_MOST_FACTS]]
    return [*lines, *([f"{left_out} more facts about fewer rows are left out here."] if left_out > 0 else [])]


def verdict(diff: TraceDiff) -> str:
    """Return the conclusion as sentences."""
    conclusion = diff.conclusion
    return conclusion[:1].upper() + conclusion[1:]


def _first_differences(diff: TraceDiff) -> list[str]:
    """Return the first difference along the layers, and the first along the rows, as one if they are the same."""
    if diff.first_by_layer is None or diff.first_by_row is None:
        return []
    firsts = {"lowest layer that differs": diff.first_by_layer, "first row that differs": diff.first_by_row}
    if diff.first_by_layer == diff.first_by_row:
        firsts = {"first that differs": diff.first_by_layer}
    return [f"  {words}: {each.text(diff.name_a, diff.name_b)}" for words, each in firsts.items()]


def _summary_table(diff: TraceDiff) -> Table:
    """Return the counts over all layers; rare counts have a row only if they are not 0."""
    rows = []
    for name, count, layers in (
        (diff.name_a, diff.rows_only_a, diff.layers_only_a),
        (diff.name_b, diff.rows_only_b, diff.layers_only_b),
    ):
        if count:
            rows.append((f"rows with a route in {name} only", f"{count:,}", ""))
        if layers:
            rows.append((f"layers in {name} only", f"{len(layers)}", f"({', '.join(map(str, layers))})"))
    if diff.rows_other_token:
        rows.append(("rows with a different token", f"{diff.rows_other_token:,}", ""))
    if diff.decisions:
        different, same = diff.decisions_different, diff.rows_all_same
        rows += [
            ("decisions that differ", f"{different:,}", f"({share(different, diff.decisions)} of {diff.decisions:,})"),
            ("same experts, different order", f"{diff.decisions_other_order:,}", ""),
            ("rows that agree in every layer", f"{same:,}", f"({share(same, diff.rows_compared)})"),
        ]
    return Table(words=(0, 2), rows=rows or [("decisions compared", "0", "")])


def _layers_table(diff: TraceDiff, max_layers: int | None, hint: str) -> Table:
    """Return the differences layer by layer; see `diff_text`."""
    different, same = diff.different_by_layer, diff.same_by_layer.tolist()
    shared = torch.arange(diff.topk + 1) / diff.topk
    overlap = (diff.overlap_counts.double() @ shared.double() / max(1, diff.rows_compared)).tolist()
    most = sorted((i for i, count in enumerate(different) if count), key=lambda i: -different[i])
    shown = range(len(different)) if max_layers is None else sorted(most[:max_layers])
    left_out = len(most) - len(shown)
    return Table(
        head=("layer", "differ", "same experts", "overlap", "different order"),
        rows=[
            (
                f"{diff.layer_numbers[i]}",
                f"{different[i]:,}",
                percent(same[i]),
                percent(overlap[i]),
                f"{int(diff.other_order[i]):,}",
            )
            for i in shown
        ],
        left_out=f"{left_out} more layers differ less{hint}" if left_out > 0 else "",
    )
