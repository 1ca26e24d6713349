"""The differences of two traces as a record, and its text and tables for terminals, notebooks and pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.diagnostics.counting import Difference
from megatron_router_replay.diagnostics.fact import Fact, plain
from megatron_router_replay.diagnostics.source import Provenance
from megatron_router_replay.tables import Table, percent, printable, share

_MOST_FACTS = 12  # fits a screen; `diff.facts` has all


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TraceDiff:
    """The differences of two traces; `print(diff)` and a notebook show them.

    Args:
        name_a, name_b: the names of the two in texts.
        provenance_a, provenance_b: their files, steps and weight versions.
        layer_numbers: compared layers. layers_only_a, layers_only_b: layers of only one trace.
        topk, num_experts: of both.
        rows_compared: rows with a route in both; rows_only_a, rows_only_b: with a route in only one.
        rows_other_token: compared rows with known, different token_ids.
        rows_all_same: rows that agree in every layer.
        overlap_counts: [num_layers, topk + 1] int64, decisions by the number of shared experts.
        other_order: [num_layers] int64, decisions that agree and list their experts in a different order.
        position_width: positions in a bin of the two below.
        compared_by_position: [bins] int64, rows compared. Positions count within samples, or all rows without samples.
        different_by_position: [num_layers, bins] int64, decisions that differ.
        first_by_layer: the first row of the lowest layer that differs: where a deviation begins within a forward.
        first_by_row: the lowest layer of the first row that differs.
        facts: the coverage of the traces, and which rows of a the routes of b match; empty: noise alone, or no difference.
        differences: the first decision that differs in each layer and bin of positions.
    """

    name_a: str
    name_b: str
    provenance_a: Provenance
    provenance_b: Provenance
    layer_numbers: tuple[int, ...]
    layers_only_a: tuple[int, ...]
    layers_only_b: tuple[int, ...]
    topk: int
    num_experts: int
    rows_compared: int
    rows_only_a: int
    rows_only_b: int
    rows_other_token: int
    rows_all_same: int
    overlap_counts: Tensor
    other_order: Tensor
    position_width: int
    compared_by_position: Tensor
    different_by_position: Tensor
    first_by_layer: Difference | None
    first_by_row: Difference | None
    facts: tuple[Fact, ...]
    differences: tuple[Difference, ...]

    @property
    def decisions(self) -> int:
        return self.rows_compared * len(self.layer_numbers)

    @property
    def decisions_different(self) -> int:
        """Decisions in which the traces do not agree."""
        return int(self.overlap_counts[:, :-1].sum())

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
    def agreement_by_layer(self) -> Tensor:
        """Share of decisions that agree, [num_layers] float64. It is NaN where nothing was compared."""
        return self.overlap_counts[:, -1].double() / self.rows_compared

    @property
    def overlap_by_layer(self) -> Tensor:
        """Mean overlap as a share of topk, [num_layers] float64. It is NaN where nothing was compared."""
        shared = torch.arange(self.topk + 1, dtype=torch.float64) / self.topk
        return (self.overlap_counts.double() @ shared) / self.rows_compared

    def to_dict(self) -> dict[str, Any]:
        """Return all but `differences` as values that `json.dumps` takes. Shares of nothing are None."""
        derived = ("decisions", "decisions_different", "decisions_other_order", "same", "same_in_common")
        by_layer = ("agreement_by_layer", "overlap_by_layer")
        values: dict[str, Any] = plain(self) | {name: plain(getattr(self, name)) for name in (*derived, *by_layer)}
        del values["differences"]
        return values

    def __str__(self) -> str:
        return diff_text(self)

    # A notebook or a debugger would print twenty fields with tensors.
    __repr__ = __str__


def diff_text(diff: TraceDiff, *, max_layers: int | None = 10, hint: str = "") -> str:
    """Return the text of `print(diff)`.

    Args:
        max_layers: how many of the layers that differ to list, those that differ most; None: list every layer.
        hint: follows the count of layers that are not listed: how to see them.
    """
    layers = layers_table(diff, max_layers=max_layers, hint=hint)
    lines = [
        *source_lines(diff),
        headline(diff),
        summary_table(diff).text(),
        *(f"  {line}" for line in first_differences(diff)),
        *fact_lines(diff),
        noise_words(diff),
        layers.text() if layers.rows and diff.rows_compared else "",
        verdict(diff),
    ]
    return "\n".join(line for line in lines if line)


def fact_lines(diff: TraceDiff) -> list[str]:
    """Return the facts as lines; those that a screen has no room for are counted."""
    left_out = len(diff.facts) - _MOST_FACTS
    lines = [f"fact: {fact}" for fact in diff.facts[:_MOST_FACTS]]
    return [*lines, *([f"{left_out} more facts about fewer rows are left out here."] if left_out > 0 else [])]


def verdict(diff: TraceDiff) -> str:
    """Return the result of the comparison, without a full stop."""
    if diff.same:
        return "the traces are the same"
    if diff.same_in_common and diff.decisions:
        return "the traces differ in what they cover; what both cover is the same"
    return "the traces differ"


def headline(diff: TraceDiff) -> str:
    """Return the numbers of rows, layers and experts compared."""
    return (
        f"{diff.rows_compared:,} rows with a route in both, {len(diff.layer_numbers)} layers, "
        f"top-{diff.topk} of {diff.num_experts} experts"
    )


def noise_words(diff: TraceDiff) -> str:
    """Return how routing differs if no fact explains it; empty if one does, or nothing differs.

    Rounding exchanges one expert in a near-tie. It begins near 0 and grows, because hidden states drift apart layer by
    layer. A share that jumps, or that only one layer has, has a different cause.
    """
    different = diff.overlap_counts[:, :-1].sum(dim=1).tolist()
    if not any(different) or any(fact.rows is not None for fact in diff.facts):
        return ""
    one_expert = int(diff.overlap_counts[:, -2].sum()) / sum(different)
    exchange = "all" if one_expert == 1 else f"{percent(one_expert)} of these"
    counted = f"{share(sum(different), diff.decisions)} of decisions differ, and {exchange} exchange one expert"
    shares = [count / diff.rows_compared for count in different]
    jump = _jump(different, shares)
    if jump is not None:
        layer, before = diff.layer_numbers[jump], f"layer {diff.layer_numbers[jump - 1]}" if jump else "the embedding"
        by_depth = f"{percent(max([0.0, *shares[:jump]]))} at most before layer {layer}, {percent(shares[jump])} in it"
        return f"something between {before} and layer {layer} changed: weights, or this router: {counted}; {by_depth}."
    half = (len(shares) + 1) // 2
    lower, upper = sum(shares[:half]) / half, sum(shares[-half:]) / half
    rounding = one_expert >= 0.8 and upper >= lower
    return (
        f"{'looks like rounding' if rounding else 'no rows or layers stand out'}: {counted}; {percent(lower)} in the lower "
        f"half of the layers, {percent(upper)} in the upper half."
    )


def _jump(different: list[int], shares: list[float]) -> int | None:
    """Return the first layer with a share that does not continue the layers before it; None: there is none."""
    for i, each in enumerate(shares):
        others = [*shares[:i], *shares[i + 1 :]]
        # A router that changed alone leaves later layers as they were. Few decisions show nothing.
        alone = different[i] >= 20 and i + 1 < len(shares) and each > 3 * max(others)
        if alone or each > 0.05 + 3 * max([0.0, *shares[:i]]):
            return i
    return None


def first_differences(diff: TraceDiff) -> list[str]:
    """Return the first difference along the layers, and the first along the rows."""
    if diff.first_by_layer is None or diff.first_by_row is None:
        return []
    if diff.first_by_layer == diff.first_by_row:
        return [f"first that differs: {diff.first_by_layer.text(diff.name_a, diff.name_b)}"]
    return [
        f"lowest layer that differs: {diff.first_by_layer.text(diff.name_a, diff.name_b)}",
        f"first row that differs: {diff.first_by_row.text(diff.name_a, diff.name_b)}",
    ]


def source_lines(diff: TraceDiff) -> list[str]:
    """Return the origin of both traces: "trainer: runs/7, step 7, 2 files, weights 6"."""
    return [_source(diff.name_a, diff.provenance_a), _source(diff.name_b, diff.provenance_b)]


def _source(name: str, provenance: Provenance) -> str:
    words = [provenance.path or ("in memory" if not provenance.files else "parts")]
    if provenance.step is not None:
        words.append(f"step {provenance.step}")
    if len(provenance.files) > 1:
        words.append(f"{len(provenance.files)} files")
    if versions := provenance.weight_versions:
        # A trace of an asynchronous run may have many, in increasing order.
        shown = ", ".join(map(str, versions)) if len(versions) <= 4 else f"{versions[0]}..{versions[-1]}"
        words.append(f"weights {shown}")
    return printable(f"{name}: {', '.join(words)}")


def summary_table(diff: TraceDiff) -> Table:
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


def layers_table(diff: TraceDiff, *, max_layers: int | None = None, hint: str = "") -> Table:
    """Return the differences layer by layer.

    Args:
        max_layers: of those that differ, list only so many, those that differ most; None: list every layer.
        hint: follows the count of those that are not listed.
    """
    different = diff.overlap_counts[:, :-1].sum(dim=1).tolist()
    differing = [i for i, count in enumerate(different) if count]
    shown, left_out = list(range(len(different))), 0
    if max_layers is not None:
        shown = sorted(sorted(differing, key=lambda i: -different[i])[:max_layers])
        left_out = len(differing) - len(shown)
    agreement, overlap = diff.agreement_by_layer.tolist(), diff.overlap_by_layer.tolist()
    return Table(
        head=("layer", "differ", "agreement", "overlap", "different order"),
        rows=[
            (
                f"{diff.layer_numbers[i]}",
                f"{different[i]:,}",
                *("-" if value != value else percent(value) for value in (agreement[i], overlap[i])),
                f"{int(diff.other_order[i]):,}",
            )
            for i in shown
        ],
        left_out=f"{left_out} more layers differ less{hint}" if left_out else "",
    )
