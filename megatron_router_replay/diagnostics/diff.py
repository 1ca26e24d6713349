"""Two traces -> where routing differs: by layer, by position, by sample, and what it looks like.

What a decision, agreement and overlap are stands in this package's docstring.

Rows are global names of tokens, so traces recorded under different parallel layouts compare token by token. Traces are
read in blocks: files larger than memory take a few hundred MB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.diagnostics.counting import Counter
from megatron_router_replay.diagnostics.diff_tables import diff_html, diff_text
from megatron_router_replay.diagnostics.differences import Difference
from megatron_router_replay.diagnostics.finding import Finding
from megatron_router_replay.diagnostics.plain import plain_numbers
from megatron_router_replay.diagnostics.search import MAX_SHIFT, search_faults
from megatron_router_replay.diagnostics.source import Provenance, TraceLike, TraceSource, block_rows, open_source
from megatron_router_replay.errors import TraceError

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TraceDiff:
    """How two traces differ; `print(diff)` says it, a notebook shows it as a table.

    Args:
        name_a, name_b: how texts call the two.
        provenance_a, provenance_b: where they come from: files, step, date, weight versions.
        layer_numbers: compared layers. layers_only_a, layers_only_b: those that only one has.
        topk, num_experts: of both.
        rows_compared: rows with a route in both; rows_only_a, rows_only_b: with a route in one only.
        rows_other_token: compared rows whose token_ids are known in both and differ.
        overlap_counts: [num_layers, topk + 1] int64, decisions by the number of experts that both named.
        other_order: [num_layers] int64, decisions that agree and name their experts in another order.
        rows_all_same: rows whose decisions agree in every layer.
        position_width: positions in a bin of the two below.
        compared_by_position: [bins] int64, rows compared. Positions count within samples, or all rows without samples.
        different_by_position: [num_layers, bins] int64, decisions that differ.
        compared_by_sample, different_by_sample: [samples] int64, decisions; None where samples are unknown.
        sample_ids: names of the samples, where known.
        first_by_layer: the first row of the lowest layer that differs: where a deviation begins within a forward.
        first_by_row: the lowest layer of the first row that differs.
        differences: the first decisions that differ in each layer and bin of positions, a few of each.
        findings: faults that were recognised, worst first.
    """

    name_a: str
    name_b: str
    layer_numbers: tuple[int, ...]
    layers_only_a: tuple[int, ...]
    layers_only_b: tuple[int, ...]
    topk: int
    num_experts: int
    rows_compared: int
    rows_only_a: int
    rows_only_b: int
    rows_other_token: int
    overlap_counts: Tensor
    other_order: Tensor
    rows_all_same: int
    position_width: int
    compared_by_position: Tensor
    different_by_position: Tensor
    compared_by_sample: Tensor | None
    different_by_sample: Tensor | None
    sample_ids: tuple[str, ...] | None
    first_by_layer: Difference | None
    first_by_row: Difference | None
    findings: tuple[Finding, ...]
    differences: tuple[Difference, ...]
    provenance_a: Provenance
    provenance_b: Provenance

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

    @property
    def same_in_common(self) -> bool:
        """Whether the rows and layers that both have hold the same tokens and experts; an engine's trace has no route
        for the last token of a sample, a trainer's recording has one.
        """
        return not self.decisions_different and not self.rows_other_token

    @property
    def agreement_by_layer(self) -> Tensor:
        """Share of decisions that agree, [num_layers] float64; NaN where nothing was compared."""
        return self.overlap_counts[:, -1].double() / self.rows_compared

    @property
    def overlap_by_layer(self) -> Tensor:
        """Mean overlap as a share of topk, [num_layers] float64; NaN where nothing was compared."""
        shared = torch.arange(self.topk + 1, dtype=torch.float64) / self.topk
        return (self.overlap_counts.double() @ shared) / self.rows_compared

    @property
    def agreement_by_position(self) -> Tensor:
        """Share of decisions that agree, [bins] float64; NaN where nothing was compared."""
        total = self.compared_by_position.double() * len(self.layer_numbers)
        return 1.0 - self.different_by_position.sum(dim=0).double() / total

    @property
    def agreement_by_sample(self) -> Tensor | None:
        """Share of decisions that agree, [samples] float64; NaN where nothing was compared."""
        if self.compared_by_sample is None or self.different_by_sample is None:
            return None
        return 1.0 - self.different_by_sample.double() / self.compared_by_sample.double()

    def to_dict(self) -> dict[str, Any]:
        """Return all but `differences` as values that `json.dumps` takes; shares of nothing are None."""
        by_sample = self.agreement_by_sample
        return {
            "a": self.name_a,
            "b": self.name_b,
            "provenance": {"a": self.provenance_a.to_dict(), "b": self.provenance_b.to_dict()},
            "same": self.same,
            "same_in_common": self.same_in_common,
            "topk": self.topk,
            "num_experts": self.num_experts,
            "layer_numbers": list(self.layer_numbers),
            "layers_only_a": list(self.layers_only_a),
            "layers_only_b": list(self.layers_only_b),
            "rows_compared": self.rows_compared,
            "rows_all_same": self.rows_all_same,
            "rows_only_a": self.rows_only_a,
            "rows_only_b": self.rows_only_b,
            "rows_other_token": self.rows_other_token,
            "decisions": self.decisions,
            "decisions_different": self.decisions_different,
            "decisions_other_order": self.decisions_other_order,
            "agreement_by_layer": plain_numbers(self.agreement_by_layer),
            "overlap_by_layer": plain_numbers(self.overlap_by_layer),
            "overlap_counts_by_layer": self.overlap_counts.tolist(),
            "position_width": self.position_width,
            "agreement_by_position": plain_numbers(self.agreement_by_position),
            "different_by_position": self.different_by_position.tolist(),
            "agreement_by_sample": None if by_sample is None else plain_numbers(by_sample),
            "sample_ids": None if self.sample_ids is None else list(self.sample_ids),
            "first_by_layer": None if self.first_by_layer is None else self.first_by_layer.to_dict(),
            "first_by_row": None if self.first_by_row is None else self.first_by_row.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def __str__(self) -> str:
        return diff_text(self)

    # What a notebook or a debugger shows is what `print` says; forty fields with tensors in them tell a person nothing.
    __repr__ = __str__

    def _repr_html_(self) -> str:
        return diff_html(self)


def diff_traces(
    a: TraceLike,
    b: TraceLike,
    *,
    name_a: str = "a",
    name_b: str = "b",
    step_a: int | None = None,
    step_b: int | None = None,
    max_shift: int = MAX_SHIFT,
    on_rows: Progress | None = None,
) -> TraceDiff:
    """Compare two traces row by row and layer by layer; files are read in blocks and proven by their checksums.

    Args:
        a, b: a RoutingTrace, the path of a file or folder, or a list of these (the parts of ranks). Layouts may differ:
            rows and layer numbers are global; rows without a route in one of them are not compared.
        name_a, name_b: how texts call the two.
        step_a, step_b: the step, where a or b is the folder of a `TraceStore` with several.
        max_shift: how many rows the search for shifted rows looks in either direction.
        on_rows: told the progress.

    Raises:
        TraceError: num_experts or topk differ: traces of different models.
        StoreError: a file or folder is missing, damaged or holds no trace.
    """
    with (
        open_source(a, name=name_a, step=step_a) as source_a,
        open_source(b, name=name_b, step=step_b) as source_b,
    ):
        source_a.name, source_b.name = name_a, name_b
        return diff_sources(source_a, source_b, max_shift=max_shift, on_rows=on_rows)


def diff_sources(
    a: TraceSource, b: TraceSource, *, max_shift: int = MAX_SHIFT, on_rows: Progress | None = None
) -> TraceDiff:
    """Compare two open traces; see `diff_traces`."""
    for name in ("num_experts", "topk"):
        if getattr(a, name) != getattr(b, name):
            raise TraceError(
                f"cannot compare {a.name} with {name}={getattr(a, name)} and {b.name} with {name}={getattr(b, name)}: "
                "they are of different models."
            )
    counts = Counter(a, b)
    total = max(a.num_tokens, b.num_tokens)
    step = block_rows(a, b)
    for start in range(0, total, step):
        stop = min(start + step, total)
        counts.add(start, stop)
        if on_rows is not None:
            on_rows(stop, total)
    return _result(counts, search_faults(counts, max_shift=max_shift))


def _result(counts: Counter, findings: list[Finding]) -> TraceDiff:
    overlap_counts = counts.partial.clone()
    # Decisions that agree are most of all and are not counted one by one.
    overlap_counts[:, -1] = counts.rows_compared - counts.different_by_layer
    differences = counts.differences.records(counts.samples)
    known = counts.samples.known
    return TraceDiff(
        name_a=counts.a.name,
        name_b=counts.b.name,
        provenance_a=replace(counts.a.provenance, weight_versions=tuple(sorted(counts.weight_versions_a))),
        provenance_b=replace(counts.b.provenance, weight_versions=tuple(sorted(counts.weight_versions_b))),
        layer_numbers=counts.layers,
        layers_only_a=tuple(n for n in counts.a.layer_numbers if n not in counts.layers),
        layers_only_b=tuple(n for n in counts.b.layer_numbers if n not in counts.layers),
        topk=counts.a.topk,
        num_experts=counts.a.num_experts,
        rows_compared=counts.rows_compared,
        rows_only_a=counts.rows_only_a,
        rows_only_b=counts.rows_only_b,
        rows_other_token=counts.rows_other_token,
        overlap_counts=overlap_counts,
        other_order=counts.other_order,
        rows_all_same=counts.rows_compared - counts.rows_different,
        position_width=counts.width,
        compared_by_position=counts.by_position,
        different_by_position=counts.different_by_position.view(len(counts.layers), counts.bins),
        compared_by_sample=counts.by_sample if known else None,
        different_by_sample=counts.different_by_sample if known else None,
        sample_ids=counts.sample_ids,
        # Every cell keeps its first row, so the first of all is among those kept.
        first_by_layer=min(differences, key=lambda found: (found.layer_number, found.row), default=None),
        first_by_row=min(differences, key=lambda found: (found.row, found.layer_number), default=None),
        differences=differences,
        findings=tuple(findings),
    )
