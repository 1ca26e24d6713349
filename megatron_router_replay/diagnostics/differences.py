"""The first decisions that differ in each cell of layers and positions, kept while blocks go by, for a person to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.diagnostics.plain import plain_record
from megatron_router_replay.diagnostics.samples import Samples
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


class DifferenceKeeper:
    """Keeps the first rows that differ in each cell: a layer at one bin of positions.

    Args:
        layers: numbers of the compared layers. bins: of positions; cells are numbered by layer and then by bin.
    """

    def __init__(self, layers: Sequence[int], bins: int) -> None:
        self._layers, self._bins = layers, bins
        num_cells = len(layers) * bins
        self._per_cell = max(1, min(_MOST_IN_A_CELL, _MOST_KEPT // max(1, num_cells)))
        self._held = torch.zeros(num_cells, dtype=torch.int64)
        # Of each call that kept something: cell, row, routes in a and in b, tokens in a and in b.
        self._kept: list[tuple[Tensor, ...]] = []

    def add(self, a: RoutingTrace, b: RoutingTrace, start: int, cell: Tensor, row: Tensor, layer: Tensor) -> None:
        """Look at the decisions of one block that differ; blocks come in the order of their rows.

        Args:
            a, b: the block of each trace; row r of them is row start + r.
            cell, row, layer: [n] int64, each decision's cell, and its row and layer index in the block.
        """
        for _ in range(self._per_cell):
            wanted = self._held[cell] < self._per_cell
            cell, row, layer = cell[wanted], row[wanted], layer[wanted]
            if not cell.numel():
                return
            # One pass for each place of a cell: sorting a block's millions of decisions would cost more than counting them.
            lowest = torch.full((len(self._held),), len(a)).scatter_reduce_(0, cell, row, "amin")
            first = lowest[cell] == row
            at, kept = row[first], layer[first]
            self._held[cell[first]] += 1
            routes = (block.topk_indices[at, kept].to(torch.int64) for block in (a, b))
            self._kept.append((cell[first], at + start, *routes, _tokens(a, at), _tokens(b, at)))
            cell, row, layer = cell[~first], row[~first], layer[~first]

    def records(self, samples: Samples) -> tuple[Difference, ...]:
        """Return what was kept, by cell and then by row."""
        if not self._kept:
            return ()
        columns = [torch.cat(parts) for parts in zip(*self._kept)]
        # Kept in the order of rows; a stable sort keeps that inside each cell.
        order = columns[0].argsort(stable=True)
        columns = [column[order] for column in columns]
        position, sample = samples.places(columns[1])
        return tuple(
            Difference(
                row=row,
                layer_number=self._layers[cell // self._bins],
                experts_a=tuple(experts_a),
                experts_b=tuple(experts_b),
                sample=sample if samples.known else None,
                position=position if samples.known else None,
                token_a=None if token_a < 0 else token_a,
                token_b=None if token_b < 0 else token_b,
            )
            for cell, row, experts_a, experts_b, token_a, token_b, position, sample in zip(
                *(column.tolist() for column in (*columns, position, sample))
            )
        )


def _tokens(block: RoutingTrace, row: Tensor) -> Tensor:
    return torch.full_like(row, -1) if block.token_ids is None else block.token_ids[row].to(torch.int64)
