"""The first decisions that differ in each cell of layers and positions, kept while blocks go by, for a person to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.diagnostics.plain import plain_record
from megatron_router_replay.trace import RoutingTrace

_MOST_KEPT = 8192
"""Decisions kept in all, at one a cell or more: a page of them stays below two megabytes."""

_MOST_IN_A_CELL = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A decision that two traces made differently.

    Args:
        row, layer_number: whose and where.
        experts_a, experts_b: the experts of each, in the order of the trace.
        sample, position: where the row lies in its sample, both from 0; None where samples are unknown.
        token_a, token_b: the token's id in each trace; None where unknown.
    """

    row: int
    layer_number: int
    experts_a: tuple[int, ...]
    experts_b: tuple[int, ...]
    sample: int | None = None
    position: int | None = None
    token_a: int | None = None
    token_b: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values that `json.dumps` takes."""
        return plain_record(self)

    def __str__(self) -> str:
        place = "" if self.sample is None else f" (sample {self.sample}, position {self.position})"
        return (
            f"layer {self.layer_number}, row {self.row}{place}\n"
            f"    a: experts {list(self.experts_a)}\n    b: experts {list(self.experts_b)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptDecisions:
    """Decisions that were kept, n of them, by cell and then by row.

    Args:
        cell, row: [n] int64. routes_a, routes_b: [n, topk]. tokens_a, tokens_b: [n] int64, -1 where unknown.
    """

    cell: Tensor
    row: Tensor
    routes_a: Tensor
    routes_b: Tensor
    tokens_a: Tensor
    tokens_b: Tensor


class DifferenceKeeper:
    """Keeps the first rows that differ in each cell.

    Args:
        num_cells: cells are numbered from 0.
    """

    def __init__(self, num_cells: int) -> None:
        self.num_cells = num_cells
        self.per_cell = max(1, min(_MOST_IN_A_CELL, _MOST_KEPT // max(1, num_cells)))
        self._held = torch.zeros(num_cells, dtype=torch.int64)
        self._kept: list[KeptDecisions] = []

    def add(self, a: RoutingTrace, b: RoutingTrace, start: int, cell: Tensor, row: Tensor, layer: Tensor) -> None:
        """Look at the decisions of one block that differ; blocks come in the order of their rows.

        Args:
            a, b: the block of each trace; row r of them is row start + r.
            cell, row, layer: [n] int64, each decision's cell, and its row and layer index in the block.
        """
        for _ in range(self.per_cell):
            wanted = self._held[cell] < self.per_cell
            cell, row, layer = cell[wanted], row[wanted], layer[wanted]
            if not cell.numel():
                return
            # One pass for each place of a cell: sorting a block's millions of decisions would cost more than counting them.
            lowest = torch.full((self.num_cells,), len(a)).scatter_reduce_(0, cell, row, "amin")
            first = lowest[cell] == row
            self._keep(a, b, start, cell[first], row[first], layer[first])
            cell, row, layer = cell[~first], row[~first], layer[~first]

    def kept(self, topk: int) -> KeptDecisions:
        """Return all that were kept.

        Args:
            topk: of the traces, for the shape where nothing differs.
        """
        none = torch.zeros(0, dtype=torch.int64)
        routes = torch.zeros(0, topk, dtype=torch.int64)
        parts = [
            KeptDecisions(cell=none, row=none, routes_a=routes, routes_b=routes, tokens_a=none, tokens_b=none),
            *self._kept,
        ]
        values = {name: torch.cat([getattr(part, name) for part in parts]) for name in KeptDecisions.__slots__}
        # Kept in the order of rows; a stable sort keeps that inside each cell.
        order = values["row"].argsort(stable=True)
        order = order[values["cell"][order].argsort(stable=True)]
        return KeptDecisions(**{name: value[order] for name, value in values.items()})

    def _keep(self, a: RoutingTrace, b: RoutingTrace, start: int, cell: Tensor, row: Tensor, layer: Tensor) -> None:
        self._held[cell] += 1
        self._kept.append(
            KeptDecisions(
                cell=cell,
                row=row + start,
                routes_a=a.topk_indices[row, layer].to(torch.int64),
                routes_b=b.topk_indices[row, layer].to(torch.int64),
                tokens_a=_tokens(a, row),
                tokens_b=_tokens(b, row),
            )
        )


def _tokens(block: RoutingTrace, row: Tensor) -> Tensor:
    return torch.full_like(row, -1) if block.token_ids is None else block.token_ids[row].to(torch.int64)


def as_differences(
    kept: KeptDecisions, layer_of_cell: Sequence[int], position: Tensor, sample: Tensor | None
) -> tuple[Difference, ...]:
    """Return kept decisions as records, by cell and then by row.

    Args:
        layer_of_cell: [num_cells] layer number of each cell.
        position, sample: [n] of each kept row; sample is None where samples are unknown.
    """
    samples = [None] * len(kept.row) if sample is None else sample.tolist()
    columns = (kept.cell, kept.row, kept.routes_a, kept.routes_b, kept.tokens_a, kept.tokens_b, position)
    return tuple(
        Difference(
            row=row,
            layer_number=layer_of_cell[cell],
            experts_a=tuple(experts_a),
            experts_b=tuple(experts_b),
            sample=sample,
            position=None if sample is None else position,
            token_a=None if token_a < 0 else token_a,
            token_b=None if token_b < 0 else token_b,
        )
        for cell, row, experts_a, experts_b, token_a, token_b, position, sample in zip(
            *(column.tolist() for column in columns), samples
        )
    )
