"""The differences of two traces as a record, and its text and tables for terminals, notebooks and pages."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.diagnostics.conclusion import conclude
from megatron_router_replay.diagnostics.counting import Difference
from megatron_router_replay.diagnostics.fact import Fact, plain
from megatron_router_replay.tables import Table, percent, printable, share

_MOST_FACTS = 12  # fits a screen; `diff.facts` has all


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TraceDiff:
    """The differences of two traces; `print(diff)` and a notebook show them.

    Args:
        name_a, name_b: the names of the two in texts.
        origin_a, origin_b: their files, steps and weight versions, as "runs/7, step 7, 2 files, weights 6".
        layer_numbers: compared layers. layers_only_a, layers_only_b: layers of only one trace.
        topk, num_experts: of both.
        rows_compared: rows with a route in both; rows_only_a, rows_only_b: with a route in only one.
        rows_other_token: compared rows with known, different token_ids.
        rows_alike: compared rows before the first different token of their sample.
        rows_all_same: rows that agree in every layer.
        weight_versions_a, weight_versions_b: known versions of the weights.
        overlap_counts: [num_layers, topk + 1] int64, decisions by the number of shared experts.
        unexplained: [num_layers, topk + 1] int64, the same of rows_alike, where no match of rows, samples, layers or ids
            explains a differing decision; those that one explains count as equal.
        other_order: [num_layers] int64, decisions that agree and list their experts in a different order.
        position_width: positions in a bin of the two below.
        compared_by_position: [bins] int64, rows compared. Positions count within samples, or all rows without samples.
        different_by_position: [num_layers, bins] int64, decisions that differ.
        facts: the coverage of the traces, and which rows of a the routes of b match; empty: noise alone, or no difference.
        differences: the first decision that differs in each layer and bin of positions.
    """

    name_a: str
    name_b: str
    origin_a: str
    origin_b: str
    layer_numbers: tuple[int, ...]
    layers_only_a: tuple[int, ...]
    layers_only_b: tuple[int, ...]
    topk: int
    num_experts: int
    rows_compared: int
    rows_only_a: int
    rows_only_b: int
    rows_other_token: int
    rows_alike: int
    rows_all_same: int
    weight_versions_a: tuple[int, ...]
    weight_versions_b: tuple[int, ...]
    overlap_counts: Tensor
    unexplained: Tensor
    other_order: Tensor
    position_width: int
    compared_by_position: Tensor
    different_by_position: Tensor
    facts: tuple[Fact, ...]
    differences: tuple[Difference, ...]

    @property
    def decisions(self) -> int:
        return self.rows_compared * len(self.layer_numbers)

    @property
    def different_by_layer(self) -> list[int]:
        """Decisions of each layer in which the traces do not agree."""
        counts: list[int] = self.overlap_counts[:, :-1].sum(dim=1).tolist()
        return counts

    @property
    def decisions_different(self) -> int:
        return sum(self.different_by_layer)

    @property
    def decisions_other_order(self) -> int:
        return int(self.other_order.sum())

    @property
    def same(self) -> bool:
        """True if both have the same rows and layers and agree everywhere."""
        missing = self.rows_only_a or self.rows_only_b or self.layers_only_a or self.layers_only_b
        return not missing and self.same_in_common

    def __bool__(self) -> bool:
        """Return whether the traces differ, as `if diff_traces(a, b):` reads."""
        return not self.same

    @property
    def same_in_common(self) -> bool:
        """True if tokens and experts are the same in the rows and layers that both have. An engine's trace has no route for
        the last token of a sample, a trainer's recording has one.
        """
        return not self.decisions_different and not self.rows_other_token

    @property
    def first_by_layer(self) -> Difference | None:
        """The first row of the lowest layer that differs: where a deviation begins within a forward."""
        return min(self.differences, key=lambda each: (each.layer_number, each.row), default=None)

    @property
    def first_by_row(self) -> Difference | None:
        """The lowest layer of the first row that differs."""
        return min(self.differences, key=lambda each: (each.row, each.layer_number), default=None)

    @property
    def same_by_layer(self) -> Tensor:
        """Share of decisions that name the same experts, [num_layers] float64. It is NaN where nothing was compared."""
        return self.overlap_counts[:, -1].double() / self.rows_compared

    @property
    def conclusion(self) -> str:
        """The cause that the facts and the counts leave, or the causes, in a few sentences."""
        return conclude(self)

    def to_dict(self) -> dict[str, Any]:
        """Return all but `differences` as values that `json.dumps` takes. Shares of nothing are None."""
        derived = [name for name, value in vars(TraceDiff).items() if isinstance(value, property)]
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
