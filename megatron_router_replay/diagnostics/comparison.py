"""Two traces compared: counts by layer and position, facts, and first differences, as a record."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_router_replay.diagnostics.counting import Difference
from megatron_router_replay.diagnostics.fact import Fact


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Comparison:
    """The counts and facts of two traces.

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
