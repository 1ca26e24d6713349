"""Two PositionTraces -> what differs by layer, in the words of `diagnostics`: a decision, agreement, overlap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.errors import TraceError
from megatron_router_replay.indexer.codes import Array
from megatron_router_replay.indexer.positions import PositionTrace, check_alike
from megatron_router_replay.tables import Table, share

_BLOCK = 1 << 20
"""Positions, or candidates of the tokens, that are compared at a time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PositionDiff:
    """How two position traces differ; `print(diff)` says it.

    Args:
        layer_numbers, topk: of both.
        rows_compared: rows known in both whose token has more than topk candidates; the others attend to all they have.
        rows_only_a, rows_only_b: rows known in one only.
        agreement_by_layer: [num_layers] float64, share of decisions that name the same set of positions; NaN of none.
        overlap_by_layer: [num_layers] float64, mean number of positions that both name, as a share of topk.
        first_by_layer: the first row of each layer that differs; None: none does.
    """

    layer_numbers: tuple[int, ...]
    topk: int
    rows_compared: int
    rows_only_a: int
    rows_only_b: int
    agreement_by_layer: Tensor
    overlap_by_layer: Tensor
    first_by_layer: tuple[int | None, ...]

    def __bool__(self) -> bool:
        """Return whether the traces differ, as `if compare_positions(a, b):` reads."""
        return bool(self.rows_only_a or self.rows_only_b or any(row is not None for row in self.first_by_layer))

    def __str__(self) -> str:
        head = ("layer", "same set", "overlap", "first row that differs")
        columns = zip(self.layer_numbers, self.agreement_by_layer, self.overlap_by_layer, self.first_by_layer)
        counted = 1.0 if self.rows_compared else 0.0
        rows = [
            (str(number), share(float(same), counted), share(float(overlap), counted), "-" if row is None else str(row))
            for number, same, overlap, row in columns
        ]
        return (
            f"{self.rows_compared} rows with more than {self.topk} candidates compared; {self.rows_only_a} rows only in a, "
            f"{self.rows_only_b} only in b\n{Table(name='layers', head=head, rows=rows).text()}"
        )


def compare_positions(a: PositionTrace, b: PositionTrace) -> PositionDiff:
    """Compare the positions of two traces of one batch, token by token.

    Raises:
        TraceError: layers, topk, the number of tokens or a token's position in its sample differ.
    """
    check_alike(a, b, "compare a trace")
    queries_a, queries_b = a.positions_in_sample, b.positions_in_sample
    known = (queries_a >= 0) & (queries_b >= 0) if len(a) == len(b) else None
    if known is None or not torch.equal(queries_a[known], queries_b[known]):
        raise TraceError(
            f"MRR107: cannot compare traces of {len(a)} and {len(b)} tokens that lie at different positions of their "
            "samples: they are of different batches, or their rows are in another order."
        )
    rows = (known & (queries_a >= a.topk)).nonzero()[:, 0]
    shared = torch.full((len(rows), len(a.layer_numbers)), a.topk, dtype=torch.int64)
    step = max(1, _BLOCK // (a.topk * max(1, len(a.layer_numbers))))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        in_a, in_b = (trace.rows(block, trace.layer_numbers).numpy() for trace in (a, b))
        # Both ascend, so most choices are told to be the same set without looking for each position.
        where = np.nonzero((in_a != in_b).any(axis=2))
        shared[start + torch.from_numpy(where[0]), torch.from_numpy(where[1])] = _count_shared(in_a[where], in_b[where])
    differs = shared != a.topk
    firsts = [int(rows[column.nonzero()[0, 0]]) if bool(column.any()) else None for column in differs.T]
    return PositionDiff(
        layer_numbers=a.layer_numbers,
        topk=a.topk,
        rows_compared=len(rows),
        rows_only_a=int((queries_a >= 0).sum() - known.sum()),
        rows_only_b=int((queries_b >= 0).sum() - known.sum()),
        agreement_by_layer=(~differs).double().mean(dim=0),
        overlap_by_layer=shared.double().mean(dim=0) / a.topk,
        first_by_layer=tuple(firsts),
    )


def _count_shared(in_a: Array, in_b: Array) -> Tensor:
    """Return how many positions each two choices share, [n] int64, of [n, topk]."""
    width = int(max(in_a.max(initial=0), in_b.max(initial=0))) + 1
    step, counts = max(1, _BLOCK // width), torch.empty(len(in_a), dtype=torch.int64)
    for start in range(0, len(in_a), step):
        part = slice(start, start + step)
        begins = np.arange(len(in_a[part]), dtype=np.int64)[:, None] * width
        named = np.zeros(len(begins) * width, np.bool_)
        named[in_a[part] + begins] = True
        counts[part] = torch.from_numpy(named[in_b[part] + begins].sum(axis=1))
    return counts
