"""Count in one pass over two traces: decisions that differ, by layer, position and block of rows.

A decision (see the package's docstring) is *far* if the traces share less than half of its experts; near-ties exchange
one. Far decisions by block select the rows that the search for facts reads again. A cell is one layer in one bin of
positions; its first decision that differs is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_router_replay.diagnostics.source import TraceSource
from megatron_router_replay.tables import printable
from megatron_router_replay.trace import RoutingTrace

Array = npt.NDArray[Any]

_MAX_POSITION_BINS = 128
_AT_ONCE = 1 << 14  # decisions counted at a time, so that their columns stay in the cache
_BLOCK_ROWS = 1024  # rows of a block


def count_shared(a: Array, b: Array) -> Array:
    """Return how many ids the rows of a and b share, [n] int16.

    Args:
        a, b: [n, topk], distinct ids in each row.
    """
    shared = np.zeros(len(a), dtype=np.int16)
    for start in range(0, len(a), _AT_ONCE):
        stop = start + _AT_ONCE
        columns_b = np.ascontiguousarray(b[start:stop].T)
        # Ids are distinct in a row, so each pair of equal columns is one more shared expert.
        for one in np.ascontiguousarray(a[start:stop].T):
            for other in columns_b:
                shared[start:stop] += one == other
    return shared


class Samples:
    """First and last rows of samples. Without sequence lengths all rows are one unknown sample.

    Attributes:
        starts: [samples + 1] int64, the first row of each sample, and the row after the last one.
    """

    def __init__(self, lengths: tuple[int, ...] | None, num_rows: int) -> None:
        self.known, self.lengths, self.num_rows = lengths is not None, lengths or (num_rows,), num_rows
        self.starts: Array = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def of_rows(self, rows: Array) -> Array:
        """Return the sample of each row; a row after the last sample gets the number of samples."""
        sample: Array = np.searchsorted(self.starts, rows, side="right") - 1
        return sample

    def at(self, row: int) -> int:
        """Return the sample of a row."""
        return int(self.of_rows(np.array(row)))

    def touched(self, first: int, last: int) -> tuple[int, ...]:
        """Return the samples that rows first..last lie in; empty if samples are unknown."""
        return tuple(range(self.at(first), min(self.at(last) + 1, len(self.lengths)))) if self.known else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A decision on which two traces differ.

    Args:
        row, layer_number: its place.
        experts_a, experts_b: the experts of each trace, in the trace's order.
        sample, position: the row's place in its sample, both from 0; None if samples are unknown.
        token_a, token_b: the token's id in each trace; None if unknown.
    """

    row: int
    layer_number: int
    experts_a: tuple[int, ...]
    experts_b: tuple[int, ...]
    sample: int | None = None
    position: int | None = None
    token_a: int | None = None
    token_b: int | None = None

    def __str__(self) -> str:
        return self.text("a", "b")

    def text(self, name_a: str, name_b: str) -> str:
        """Return the place and both sets of experts, under the names of the traces."""
        place = "" if self.sample is None else f" (sample {self.sample}, position {self.position})"
        return (
            f"layer {self.layer_number}, row {self.row}{place}\n"
            f"    {printable(name_a)}: experts {list(self.experts_a)}\n"
            f"    {printable(name_b)}: experts {list(self.experts_b)}"
        )


class Counter:
    """Counts of a pass over two traces; `add` takes blocks of rows in order.

    Args:
        a, b: open traces of the same num_experts and topk.

    Attributes:
        layers: [num_layers] numbers of the layers that both have.
        partial: [num_layers, topk + 1] int64, decisions that differ by the number of shared experts.
        far_by_block: [blocks] int64, decisions that are far, by block of rows.
        only_a, only_b: [samples] int64, rows with a route in one trace only.
        first_other_token: [samples] int64, the first row of each sample whose token differs. Routing is causal: from there on
            the routes are of different tokens.
        alike: as partial, of the rows before these alone; rows_alike is their number.
    """

    def __init__(self, a: TraceSource, b: TraceSource) -> None:
        self.a, self.b = a, b
        self.layers = tuple(number for number in a.layer_numbers if number in b.layer_numbers)
        num_layers = len(self.layers)
        num_rows = max(a.num_tokens, b.num_tokens)
        self.samples = Samples(a.sequence_lengths or b.sequence_lengths, num_rows)
        longest = max(self.samples.lengths, default=0)
        self.width = max(1, -(-longest // _MAX_POSITION_BINS))
        self.bins = max(1, -(-longest // self.width))
        self.rows_compared = self.rows_only_a = self.rows_only_b = self.rows_different = 0
        self.rows_other_token = self.rows_alike = 0
        self.weight_versions_a: set[int] = set()
        self.weight_versions_b: set[int] = set()

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64)

        self.partial, self.other_order = zeros(num_layers, a.topk + 1), zeros(num_layers)
        self.by_position, self.different_by_position = zeros(self.bins), zeros(num_layers * self.bins)
        # One more sample for rows after the last one.
        self.only_a, self.only_b = zeros(len(self.samples.lengths) + 1), zeros(len(self.samples.lengths) + 1)
        self.first_other_token = np.full(len(self.samples.lengths) + 1, np.iinfo(np.int64).max)
        self.alike = zeros(num_layers, a.topk + 1)
        self.far_by_block = zeros(num_rows // _BLOCK_ROWS + 1)
        self._differences: dict[int, Difference] = {}

    @property
    def different_by_layer(self) -> Tensor:
        """Decisions on which the traces differ, [num_layers] int64."""
        return self.partial.sum(dim=1)

    def worst_row(self) -> int:
        """Return the middle row of the block with most far decisions."""
        return int(self.far_by_block.argmax()) * _BLOCK_ROWS + _BLOCK_ROWS // 2

    def differences(self) -> tuple[Difference, ...]:
        """Return the first decision that differs of each cell, in the order of layers and positions."""
        return tuple(self._differences[cell] for cell in sorted(self._differences))

    def add(self, start: int, stop: int) -> None:
        """Read and count rows start..stop-1 of both traces."""
        a, b = self.a.read(start, stop), self.b.read(start, stop)
        if self.layers:  # without a common layer, those of each trace still decide which rows have a route
            a, b = a.select_layers(self.layers), b.select_layers(self.layers)
        for block, versions in ((a, self.weight_versions_a), (b, self.weight_versions_b)):
            if block.weight_version is not None:
                versions |= set(torch.unique(block.weight_version).tolist()) - {-1}  # -1 is unknown
        rows = min(a.num_tokens, b.num_tokens)
        # Rows without a route contain filler; comparing it would count chance as disagreement.
        both = a.replay_mask[:rows] & b.replay_mask[:rows]
        num_both = int(both.sum())
        self.rows_only_a += int(a.replay_mask.sum()) - num_both
        self.rows_only_b += int(b.replay_mask.sum()) - num_both
        self.rows_compared += num_both
        numbers = np.arange(start, start + max(a.num_tokens, b.num_tokens))
        sample = self.samples.of_rows(numbers)
        position = torch.from_numpy(numbers - self.samples.starts[sample])[:rows]
        for only, block in ((self.only_a, a), (self.only_b, b)):
            alone = block.replay_mask.clone()
            alone[:rows] &= ~both
            _count(only, torch.from_numpy(sample)[: block.num_tokens][alone])
        if not num_both:
            return
        self._add_tokens(a, b, both, start, sample[:rows])
        alike = both & torch.from_numpy(self.has_same_tokens(numbers[:rows]))
        self.rows_alike += int(alike.sum())
        # The rows after the last sample may be more than the longest sample has.
        position_bin = (position // self.width).clamp(max=self.bins - 1)
        _count(self.by_position, position_bin[both])
        if not self.layers:
            return
        topk = self.a.topk
        overlap, same_order = _shared_experts(a.topk_indices[:rows], b.topk_indices[:rows])
        self.other_order += ((overlap == topk) & ~same_order & both.unsqueeze(1)).sum(dim=0)
        different = (overlap < topk) & both.unsqueeze(1)
        row, layer = different.nonzero(as_tuple=True)
        self.rows_different += int(different.any(dim=1).sum())
        shared, cell = overlap[row, layer].to(torch.int64), layer * self.bins + position_bin[row]
        counted = layer * (topk + 1) + shared
        _count(self.partial, counted)
        _count(self.alike, counted[alike[row]])
        _count(self.different_by_position, cell)
        _count(self.far_by_block, (row[2 * shared < topk] + start) // _BLOCK_ROWS)
        # The lowest row of each cell, in one pass: a sort of a block's millions of decisions would cost more.
        lowest = torch.full((len(self.different_by_position),), rows).scatter_reduce_(0, cell, row, "amin")
        for index in (lowest < rows).nonzero().flatten().tolist():
            if index not in self._differences:
                found = self._difference(a, b, start, int(lowest[index]), index // self.bins)
                self._differences[index] = found

    def has_same_tokens(self, rows: Array) -> Array:
        """Return which rows that were counted come before the first different token of their sample, [n] bool."""
        same: Array = rows < self.first_other_token[self.samples.of_rows(rows)]
        return same

    def _add_tokens(self, a: RoutingTrace, b: RoutingTrace, both: Tensor, start: int, sample: Array) -> None:
        if a.token_ids is None or b.token_ids is None:
            return
        tokens_a, tokens_b = a.token_ids[: len(both)], b.token_ids[: len(both)]
        known = both & (tokens_a >= 0) & (tokens_b >= 0)
        other = (known & (tokens_a != tokens_b)).nonzero().flatten().numpy()
        np.minimum.at(self.first_other_token, sample[other], start + other)
        self.rows_other_token += len(other)

    def _difference(self, a: RoutingTrace, b: RoutingTrace, start: int, row: int, layer: int) -> Difference:
        sample = self.samples.at(start + row)
        known = self.samples.known
        return Difference(
            row=start + row,
            layer_number=self.layers[layer],
            experts_a=tuple(a.topk_indices[row, layer].tolist()),
            experts_b=tuple(b.topk_indices[row, layer].tolist()),
            sample=sample if known else None,
            position=start + row - int(self.samples.starts[sample]) if known else None,
            token_a=_token(a, row),
            token_b=_token(b, row),
        )


def _shared_experts(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many experts two blocks of routes share, and which decisions list them in the same order.

    Args:
        a, b: [num_tokens, num_layers, topk], the same dtype, distinct ids in each row.

    Returns:
        (overlap [num_tokens, num_layers] uint8 or int16, 0..topk; same_order [num_tokens, num_layers] bool).
    """
    # The widest integer that divides a row of ids: a few long comparisons replace many short ones.
    itemsize = gcd(a.shape[2] * a.element_size(), 8)
    wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
    same = (a.contiguous().view(wide) == b.contiguous().view(wide)).all(dim=2)
    overlap = torch.full(same.shape, a.shape[2], dtype=torch.uint8 if a.shape[2] < 256 else torch.int16)
    # Most decisions are identical; only different ones are compared as sets.
    different = (~same).nonzero(as_tuple=True)
    overlap[different] = torch.from_numpy(count_shared(a[different].numpy(), b[different].numpy())).to(overlap.dtype)
    return overlap, same


def _count(counts: Tensor, index: Tensor) -> None:
    """Add one to the flattened counts at every index; an index may come several times."""
    counts += torch.bincount(index, minlength=counts.numel()).view_as(counts)


def _token(block: RoutingTrace, row: int) -> int | None:
    return None if block.token_ids is None or block.token_ids[row] < 0 else int(block.token_ids[row])
