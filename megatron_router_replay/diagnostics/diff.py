"""Two traces -> where routing differs: by layer, by position, by sample, and what it looks like.

Rows are global names of tokens, so traces recorded under different parallel layouts compare token by token. Traces are
read in blocks: files larger than memory take a few hundred MB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.diagnostics.compare import shared_experts
from megatron_router_replay.diagnostics.shifts import MAX_SHIFT, Finding, search_shifts
from megatron_router_replay.diagnostics.source import TraceLike, TraceSource, block_rows, open_source
from megatron_router_replay.errors import TraceError

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""

MAX_POSITION_BINS = 128
_NEVER = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDifference:
    """A decision that two traces made differently: row, layer, and the experts of each.

    Args:
        sample, position: where the row lies in its sample, both from 0; None where samples are unknown.
    """

    row: int
    layer_number: int
    experts_a: tuple[int, ...]
    experts_b: tuple[int, ...]
    sample: int | None = None
    position: int | None = None

    def __str__(self) -> str:
        place = "" if self.sample is None else f" (sample {self.sample}, position {self.position})"
        return (
            f"layer {self.layer_number}, row {self.row}{place}\n"
            f"    a: experts {list(self.experts_a)}\n    b: experts {list(self.experts_b)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TraceDiff:
    """How two traces differ. A decision is one row in one layer; it is the same if it names the same set of experts.

    Args:
        name_a, name_b: how texts call the two.
        layer_numbers: compared layers. layers_only_a, layers_only_b: those that only one has.
        topk, num_experts: of both.
        rows_compared: rows with a route in both; rows_only_a, rows_only_b: with a route in one only.
        rows_other_token: compared rows whose token_ids are known in both and differ.
        overlap: [num_layers, topk + 1] int64, decisions by the number of experts that both named.
        other_order: [num_layers] int64, decisions that name the same experts in another order.
        rows_all_same: rows with the same experts in every layer.
        position_width: positions in a bin of the two below.
        compared_by_position: [bins] int64, rows compared. Positions count within samples, or all rows without samples.
        different_by_position: [num_layers, bins] int64, decisions that differ.
        compared_by_sample, different_by_sample: [samples] int64, decisions; None where samples are unknown.
        sample_ids: names of the samples, where known.
        first_by_layer: the first row of the lowest layer that differs: where a deviation begins within a forward.
        first_by_row: the lowest layer of the first row that differs.
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
    overlap: Tensor
    other_order: Tensor
    rows_all_same: int
    position_width: int
    compared_by_position: Tensor
    different_by_position: Tensor
    compared_by_sample: Tensor | None
    different_by_sample: Tensor | None
    sample_ids: tuple[str, ...] | None
    first_by_layer: FirstDifference | None
    first_by_row: FirstDifference | None
    findings: tuple[Finding, ...]

    @property
    def decisions(self) -> int:
        return self.rows_compared * len(self.layer_numbers)

    @property
    def decisions_different(self) -> int:
        """Decisions that name another set of experts."""
        return int(self.overlap[:, :-1].sum())

    @property
    def decisions_other_order(self) -> int:
        return int(self.other_order.sum())

    @property
    def same(self) -> bool:
        """Whether both have the same rows and layers, and the same experts everywhere."""
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
        """Share of decisions with the same set of experts, [num_layers] float64; NaN where nothing was compared."""
        return self.overlap[:, -1].double() / self.rows_compared

    @property
    def overlap_by_layer(self) -> Tensor:
        """Share of experts in common, [num_layers] float64; NaN where nothing was compared."""
        shared = torch.arange(self.topk + 1, dtype=torch.float64) / self.topk
        return (self.overlap.double() @ shared) / self.rows_compared

    @property
    def agreement_by_position(self) -> Tensor:
        """Share of decisions with the same set, [bins] float64; NaN where nothing was compared."""
        total = self.compared_by_position.double() * len(self.layer_numbers)
        return 1.0 - self.different_by_position.sum(dim=0).double() / total

    @property
    def agreement_by_sample(self) -> Tensor | None:
        """Share of decisions with the same set, [samples] float64; NaN where nothing was compared."""
        if self.compared_by_sample is None or self.different_by_sample is None:
            return None
        return 1.0 - self.different_by_sample.double() / self.compared_by_sample.double()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as values that `json.dumps` takes; shares of nothing are None."""
        return {
            "a": self.name_a,
            "b": self.name_b,
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
            "agreement_by_layer": _shares(self.agreement_by_layer),
            "overlap_by_layer": _shares(self.overlap_by_layer),
            "overlap_counts_by_layer": self.overlap.tolist(),
            "position_width": self.position_width,
            "agreement_by_position": _shares(self.agreement_by_position),
            "different_by_position": self.different_by_position.tolist(),
            "agreement_by_sample": _shares(self.agreement_by_sample),
            "sample_ids": None if self.sample_ids is None else list(self.sample_ids),
            "first_by_layer": _first_dict(self.first_by_layer),
            "first_by_row": _first_dict(self.first_by_row),
            "findings": [
                {
                    "kind": finding.kind,
                    "text": finding.text,
                    "layer_numbers": list(finding.layer_numbers),
                    "shift": finding.shift,
                }
                for finding in self.findings
            ],
        }

    def __str__(self) -> str:
        lines = [
            f"a: {self.name_a}",
            f"b: {self.name_b}",
            f"{self.rows_compared:,} rows with a route in both, {len(self.layer_numbers)} layers, "
            f"top-{self.topk} of {self.num_experts} experts",
        ]
        for name, rows, layers in (
            ("a", self.rows_only_a, self.layers_only_a),
            ("b", self.rows_only_b, self.layers_only_b),
        ):
            if rows:
                lines.append(f"  rows with a route in {name} only   {rows:>14,}")
            if layers:
                lines.append(f"  layers in {name} only: {', '.join(map(str, layers))}")
        if self.decisions:
            lines += [
                f"  decisions with other experts  {self.decisions_different:>14,}  "
                f"({self.decisions_different / self.decisions:.3%} of {self.decisions:,})",
                f"  same experts, other order     {self.decisions_other_order:>14,}",
                f"  rows same in every layer      {self.rows_all_same:>14,}  ({self.rows_all_same / self.rows_compared:.2%})",
            ]
        if self.first_by_layer is not None and self.first_by_row is not None:
            lines.append(f"  lowest layer that differs: {self.first_by_layer}")
            lines.append(f"  first row that differs:    {self.first_by_row}")
        lines += [f"finding: {finding}" for finding in self.findings]
        lines.append(self._verdict())
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.same:
            return "the traces are the same"
        if self.same_in_common and self.decisions:
            return "the traces differ in what they cover; what both cover is the same"
        return "the traces differ"


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
    counter = _Counter(a, b)
    total = max(a.num_tokens, b.num_tokens)
    step = block_rows(a, b)
    for start in range(0, total, step):
        stop = min(start + step, total)
        counter.add(start, stop)
        if on_rows is not None:
            on_rows(stop, total)
    return counter.result(max_shift)


class _Counter:
    """The sums of a comparison, block by block."""

    def __init__(self, a: TraceSource, b: TraceSource) -> None:
        self.a, self.b = a, b
        self.layers = [number for number in a.layer_numbers if number in b.layer_numbers]
        num_layers = len(self.layers)
        # Layers of one trace only still say which rows have a route.
        self.read_a, self.read_b = (self.layers if num_layers else source.layer_numbers for source in (a, b))
        self.lengths = a.sequence_lengths or b.sequence_lengths
        self.sample_ids = a.sample_ids if a.sequence_lengths else b.sample_ids
        longest = max(self.lengths) if self.lengths else max(a.num_tokens, b.num_tokens)
        self.width = max(1, -(-longest // MAX_POSITION_BINS))
        self.bins = max(1, -(-longest // self.width))
        self.ends = torch.tensor(self.lengths or (), dtype=torch.int64).cumsum(0)
        samples = len(self.lengths or ())
        self.rows_compared = self.rows_only_a = self.rows_only_b = self.rows_other_token = self.rows_different = 0
        self.partial = torch.zeros(num_layers, a.topk + 1, dtype=torch.int64)
        self.other_order = torch.zeros(num_layers, dtype=torch.int64)
        self.first_row = torch.full((num_layers,), _NEVER, dtype=torch.int64)
        self.by_position = torch.zeros(self.bins, dtype=torch.int64)
        self.different_by_position = torch.zeros(num_layers * self.bins, dtype=torch.int64)
        self.by_sample = torch.zeros(samples, dtype=torch.int64)
        self.different_by_sample = torch.zeros(samples, dtype=torch.int64)

    def add(self, start: int, stop: int) -> None:
        a, b = self.a.read(start, stop, self.read_a), self.b.read(start, stop, self.read_b)
        rows = min(len(a), len(b))
        self.rows_only_a += int(a.replay_mask[rows:].sum())
        self.rows_only_b += int(b.replay_mask[rows:].sum())
        mask_a, mask_b = a.replay_mask[:rows], b.replay_mask[:rows]
        both = mask_a & mask_b
        num_both = int(both.sum())
        self.rows_only_a += int(mask_a.sum()) - num_both
        self.rows_only_b += int(mask_b.sum()) - num_both
        self.rows_compared += num_both
        if not num_both:
            return
        if a.token_ids is not None and b.token_ids is not None:
            one, other = a.token_ids[:rows], b.token_ids[:rows]
            self.rows_other_token += int((both & (one != other) & (one >= 0) & (other >= 0)).sum())
        numbers = torch.arange(start, start + rows)
        position, sample = self._places(numbers)
        self.by_position += torch.bincount(position[both] // self.width, minlength=self.bins)
        if self.lengths is not None:
            self.by_sample += torch.bincount(sample[both], minlength=len(self.lengths)) * len(self.layers)
        if self.layers:
            self._add_routes(a.topk_indices[:rows], b.topk_indices[:rows], both, start, position, sample)

    def _add_routes(self, a: Tensor, b: Tensor, both: Tensor, start: int, position: Tensor, sample: Tensor) -> None:
        num_layers, topk = len(self.layers), self.a.topk
        overlap, same_order = shared_experts(a, b)
        self.other_order += ((overlap == topk) & ~same_order & both.unsqueeze(1)).sum(dim=0)
        different = (overlap < topk) & both.unsqueeze(1)
        row, layer = different.nonzero(as_tuple=True)
        if not row.numel():
            return
        kept = overlap[row, layer].to(torch.int64)
        self.partial += torch.bincount(layer * (topk + 1) + kept, minlength=num_layers * (topk + 1)).view_as(
            self.partial
        )
        self.rows_different += int(different.any(dim=1).sum())
        bins = position[row] // self.width
        self.different_by_position += torch.bincount(layer * self.bins + bins, minlength=num_layers * self.bins)
        if self.lengths is not None:
            self.different_by_sample += torch.bincount(sample[row], minlength=len(self.lengths))
        self.first_row.scatter_reduce_(0, layer, row + start, "amin")

    def _places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's position in its sample, and the sample; without samples all rows are one."""
        if self.lengths is None:
            return rows, torch.zeros_like(rows)
        sample = torch.searchsorted(self.ends, rows, right=True)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), self.ends])
        return rows - starts[sample], sample

    def result(self, max_shift: int) -> TraceDiff:
        overlap = self.partial.clone()
        overlap[:, -1] = self.rows_compared - self.partial.sum(dim=1)
        differing = [i for i, row in enumerate(self.first_row.tolist()) if row != _NEVER]
        by_layer = by_row = None
        findings: list[Finding] = []
        if self.rows_other_token:
            findings.append(
                Finding(
                    kind="other_tokens",
                    text=f"{self.rows_other_token:,} of {self.rows_compared:,} rows hold another token in {self.b.name} than "
                    f"in {self.a.name}: the rows are numbered differently, or the batches differ.",
                )
            )
        if differing:
            rows = self.first_row.tolist()
            by_layer = self._first(rows[differing[0]], differing[0])
            lowest = min(differing, key=lambda i: (rows[i], i))
            by_row = self._first(rows[lowest], lowest)
            recognised = search_shifts(self.a, self.b, max_shift=max_shift)
            findings += recognised or _outliers(overlap, self.layers, self.rows_compared, self.b.name)
        known = self.lengths is not None
        return TraceDiff(
            name_a=self.a.name,
            name_b=self.b.name,
            layer_numbers=tuple(self.layers),
            layers_only_a=tuple(n for n in self.a.layer_numbers if n not in self.layers),
            layers_only_b=tuple(n for n in self.b.layer_numbers if n not in self.layers),
            topk=self.a.topk,
            num_experts=self.a.num_experts,
            rows_compared=self.rows_compared,
            rows_only_a=self.rows_only_a,
            rows_only_b=self.rows_only_b,
            rows_other_token=self.rows_other_token,
            overlap=overlap,
            other_order=self.other_order,
            rows_all_same=self.rows_compared - self.rows_different,
            position_width=self.width,
            compared_by_position=self.by_position,
            different_by_position=self.different_by_position.view(len(self.layers), self.bins),
            compared_by_sample=self.by_sample if known else None,
            different_by_sample=self.different_by_sample if known else None,
            sample_ids=self.sample_ids,
            first_by_layer=by_layer,
            first_by_row=by_row,
            findings=tuple(findings),
        )

    def _first(self, row: int, layer_index: int) -> FirstDifference:
        number = self.layers[layer_index]
        experts = [source.read(row, row + 1).layer(number)[0].tolist() for source in (self.a, self.b)]
        position, sample = self._places(torch.tensor([row]))
        known = self.lengths is not None
        return FirstDifference(
            row=row,
            layer_number=number,
            experts_a=tuple(experts[0]),
            experts_b=tuple(experts[1]),
            sample=int(sample) if known else None,
            position=int(position) if known else None,
        )


def _outliers(overlap: Tensor, layers: list[int], rows: int, name: str) -> list[Finding]:
    """Name layers that differ far more often than the layer in the middle: a wrong capture, not a drift."""
    different = 1.0 - overlap[:, -1].double() / max(1, rows)
    middle = float(different.median()) if len(layers) else 0.0
    return [
        Finding(
            kind="layer_outlier",
            layer_numbers=(number,),
            text=f"layer {number} of {name} differs in {share:.1%} of its rows, the layer in the middle in {middle:.1%}: its "
            "routes may be of another layer, step or model.",
        )
        for number, share in zip(layers, different.tolist())
        if len(layers) >= 3 and share > 5 * middle + 0.3
    ]


def _shares(values: Tensor | None) -> list[float | None] | None:
    return None if values is None else [None if value != value else value for value in values.tolist()]


def _first_dict(first: FirstDifference | None) -> dict[str, Any] | None:
    if first is None:
        return None
    return {
        "row": first.row,
        "layer_number": first.layer_number,
        "experts_a": list(first.experts_a),
        "experts_b": list(first.experts_b),
        "sample": first.sample,
        "position": first.position,
    }
