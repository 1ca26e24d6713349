"""How two traces differ, as a record; and the text and tables that terminals, notebooks and pages show of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.diagnostics.counting import Difference
from megatron_router_replay.diagnostics.fact import Fact, fact_lines, plain
from megatron_router_replay.diagnostics.source import Provenance
from megatron_router_replay.tables import Table, percent, printable, share


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TraceDiff:
    """How two traces differ; `print(diff)` and a notebook say it.

    Args:
        name_a, name_b: how texts call the two.
        provenance_a, provenance_b: where they come from: files, step, date, weight versions.
        layer_numbers: compared layers. layers_only_a, layers_only_b: those that only one has.
        topk, num_experts: of both.
        rows_compared: rows with a route in both; rows_only_a, rows_only_b: with a route in one only.
        rows_other_token: compared rows whose token_ids are known in both and differ.
        rows_all_same: rows whose decisions agree in every layer.
        overlap_counts: [num_layers, topk + 1] int64, decisions by the number of experts that both named.
        other_order: [num_layers] int64, decisions that agree and name their experts in a different order.
        position_width: positions in a bin of the two below.
        compared_by_position: [bins] int64, rows compared. Positions count within samples, or all rows without samples.
        different_by_position: [num_layers, bins] int64, decisions that differ.
        compared_by_sample, different_by_sample: [samples] int64, decisions; None where samples are unknown.
        sample_ids: names of the samples, where known.
        first_by_layer: the first row of the lowest layer that differs: where a deviation begins within a forward.
        first_by_row: the lowest layer of the first row that differs.
        facts: what the traces cover, and where routes of b lie in a; empty: they differ by noise alone, or not at all.
        differences: the first decisions that differ in each layer and bin of positions, a few of each.
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
    compared_by_sample: Tensor | None
    different_by_sample: Tensor | None
    sample_ids: tuple[str, ...] | None
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
        """Whether both have the same rows and layers, and agree everywhere."""
        missing = self.rows_only_a or self.rows_only_b or self.layers_only_a or self.layers_only_b
        return not missing and self.same_in_common

    def __bool__(self) -> bool:
        """Return whether the traces differ, as `if diff_traces(a, b):` reads."""
        return not self.same

    @property
    def same_in_common(self) -> bool:
        """Whether the rows and layers that both have hold the same tokens and experts. An engine's trace has no route for
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

    # What a notebook or a debugger shows is what `print` says; twenty fields with tensors in them tell a person nothing.
    __repr__ = __str__


def diff_text(diff: TraceDiff, *, max_layers: int | None = 10, hint: str = "") -> str:
    """Return what `print(diff)` says.

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
        *fact_lines(diff.facts),
        noise_words(diff),
        layers.text() if layers.rows and diff.rows_compared else "",
        verdict(diff),
    ]
    return "\n".join(line for line in lines if line)


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


def noise_words(diff: TraceDiff) -> str:
    """Return how routing differs where no fact says where it comes from; empty where one does, or nothing differs."""
    different = diff.overlap_counts[:, :-1].sum(dim=1).tolist()
    if not sum(different) or any(fact.rows is not None for fact in diff.facts):
        return ""
    one_expert = int(diff.overlap_counts[:, -2].sum()) / sum(different)
    exchange = {0.0: "none exchanges just", 1.0: "all exchange"}.get(
        one_expert, f"{percent(one_expert)} of these exchange"
    )
    # Near-ties flip one expert; whatever flips whole sets, or most decisions, is not rounding.
    rounding = one_expert >= 0.8 and sum(different) <= 0.5 * diff.decisions
    return (
        f"{'looks like rounding' if rounding else 'no rows or layers stand out'}: "
        f"{share(sum(different), diff.decisions)} of decisions{_depth_words(diff.layer_numbers, different)}; "
        f"{exchange} one expert."
    )


def _depth_words(layer_numbers: tuple[int, ...], different: list[int]) -> str:
    """Return in which layers decisions differ, and how that grows with depth."""
    differing = [number for number, count in zip(layer_numbers, different) if count]
    if len(layer_numbers) > 1 and len(differing) == 1:
        return f", only in layer {differing[0]}"
    counts = different[layer_numbers.index(differing[0]) :]
    words = f"{'' if differing[0] == layer_numbers[0] else ','} from layer {differing[0]} on"
    if sum(counts) < 20:  # a few decisions show no trend
        return words
    if 2 * max(counts) > sum(counts) and len(counts) > 2:
        return f"{words}, most in layer {layer_numbers[different.index(max(counts))]}"
    # One noisy layer at an end is no trend: most pairs of layers must say the same.
    pairs = [(one > two) - (one < two) for i, two in enumerate(counts) for one in counts[i + 1 :]]
    third = max(1, len(counts) // 3)
    low, high = sum(counts[:third]), sum(counts[-third:])
    if 2 * sum(pairs) >= len(pairs) > 0 and high > 1.5 * low:
        return f"{words}, more with depth"
    return f"{words}, less with depth" if -2 * sum(pairs) >= len(pairs) > 0 and low > 1.5 * high else words


def first_differences(diff: TraceDiff) -> list[str]:
    """Return where the traces part, once along the layers and once along the rows."""
    if diff.first_by_layer is None or diff.first_by_row is None:
        return []
    if diff.first_by_layer == diff.first_by_row:
        return [f"first that differs: {diff.first_by_layer.text(diff.name_a, diff.name_b)}"]
    return [
        f"lowest layer that differs: {diff.first_by_layer.text(diff.name_a, diff.name_b)}",
        f"first row that differs: {diff.first_by_row.text(diff.name_a, diff.name_b)}",
    ]


def source_lines(diff: TraceDiff) -> list[str]:
    """Return where both traces come from: "trainer: runs/7, step 7, written 2026-03-01 12:30 UTC, weights 6"."""
    return [_source(diff.name_a, diff.provenance_a), _source(diff.name_b, diff.provenance_b)]


def _source(name: str, provenance: Provenance) -> str:
    words = [provenance.path or ("in memory" if not provenance.files else "parts")]
    if provenance.step is not None:
        words.append(f"step {provenance.step}")
    if len(provenance.files) > 1:
        words.append(f"{len(provenance.files)} files")
    if provenance.written:
        words.append(f"written {provenance.written} UTC")
    if versions := provenance.weight_versions:
        # A trace of an asynchronous run may hold many; they count up.
        shown = ", ".join(map(str, versions)) if len(versions) <= 4 else f"{versions[0]}..{versions[-1]}"
        words.append(f"weights {shown}")
    return printable(f"{name}: {', '.join(words)}")


def summary_table(diff: TraceDiff) -> Table:
    """Counts over all layers; what is 0 in nearly every comparison has a row only where it is not."""
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
    return Table(name="summary", words=(0, 2), rows=rows or [("decisions compared", "0", "")])


def layers_table(diff: TraceDiff, *, max_layers: int | None = None, hint: str = "") -> Table:
    """What differs layer by layer.

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
        name="layers",
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


def samples_table(diff: TraceDiff) -> Table:
    """What differs sample by sample; no rows where samples are unknown."""
    compared, different = (
        [] if counts is None else counts.tolist() for counts in (diff.compared_by_sample, diff.different_by_sample)
    )
    names = [f"{i} ({name})" for i, name in enumerate(diff.sample_ids or ())] or [f"{i}" for i in range(len(compared))]
    return Table(
        name="samples",
        head=("sample", "decisions", "differ", "agreement"),
        words=(0,),
        rows=[
            (name, f"{total:,}", f"{count:,}", share(total - count, total))
            for name, total, count in zip(names, compared, different)
        ],
    )
