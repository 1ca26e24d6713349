"""Two open traces -> one pass over both: what differs, counted by layer, position, sample and piece.

A decision (defined in this package's docstring) is *far* if the traces share less than half of its experts, which near-ties
do not bring about. A piece is a run of neighbouring rows inside one sample; far decisions by piece and layer tell where to
look for faults. A cell is one layer at one bin of positions; the first decisions that differ in each are kept.
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
"""Numbers or flags in numpy, in which the search for faults is written: it indexes and sorts more than it adds."""

_MAX_POSITION_BINS = 128
_MOST_KEPT = 8192
"""Decisions kept in all, at one a cell or more: a page of them stays below two megabytes."""

_MOST_IN_A_CELL = 3
_AT_ONCE = 1 << 14  # decisions counted at a time, so that their planes stay in the cache
_PIECE_ROWS = 64  # short enough that a fault in half a sample fills a piece, long enough that chance does not
_MAX_PIECES = 4096  # bounds the counts by piece and layer: of a longer trace, pieces are longer
_MAX_SAMPLES = 1 << 14  # each sample has a piece of its own at least


def shared_experts(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many experts two blocks of routes share, decision by decision.

    Args:
        a, b: [num_tokens, num_layers, topk], the same dtype, distinct ids in each row.

    Returns:
        (overlap [num_tokens, num_layers] uint8, 0..topk; same_order [num_tokens, num_layers] bool).
    """
    # The widest integer that a row of ids is a multiple of: few long comparisons instead of many of one byte.
    itemsize = gcd(a.shape[2] * a.element_size(), 8)
    wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
    equal = a.contiguous().view(wide) == b.contiguous().view(wide)
    same = equal[..., 0]
    for word in range(1, equal.shape[2]):
        same = same & equal[..., word]
    overlap = torch.full(same.shape, a.shape[2], dtype=torch.uint8 if a.shape[2] < 256 else torch.int16)
    # Most decisions are the same to the byte: only the others are compared as sets.
    different = (~same).nonzero(as_tuple=True)
    if different[0].numel():
        counted = count_shared(a[different].numpy(), b[different].numpy())
        overlap[different] = torch.from_numpy(counted).to(overlap.dtype)
    return overlap, same


def count_shared(a: Array, b: Array) -> Array:
    """Return how many ids the rows of a and b share, [n] int16.

    Args:
        a, b: [n, topk], distinct ids in each row.
    """
    shared = np.zeros(len(a), dtype=np.int16)
    for start in range(0, len(a), _AT_ONCE):
        columns_a = np.ascontiguousarray(a[start : start + _AT_ONCE].T)
        columns_b = np.ascontiguousarray(b[start : start + _AT_ONCE].T)
        hits: Array = np.zeros(columns_a.shape[1], dtype=np.uint8 if a.shape[1] < 256 else np.uint16)
        # Ids are distinct in a row, so each pair of columns that is equal is one expert more that both name.
        for one in columns_a:
            for other in columns_b:
                np.add(hits, one == other, out=hits)
        shared[start : start + _AT_ONCE] = hits
    return shared


class Samples:
    """Where samples begin and end; without sequence lengths, all rows are one sample that nobody named.

    Args:
        lengths: tokens of each sample, or None.
        num_rows: rows in all.
    """

    def __init__(self, lengths: tuple[int, ...] | None, num_rows: int) -> None:
        self.known, self.lengths, self.num_rows = lengths is not None, lengths or (), num_rows
        self.count = len(self.lengths)
        self.ends = torch.tensor(self.lengths, dtype=torch.int64).cumsum(0)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), self.ends])

    def places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's position in its sample, and the sample; rows behind the last sample count as one more."""
        if not self.known:
            return rows, torch.zeros_like(rows)
        sample = torch.searchsorted(self.ends, rows, right=True)
        return rows - self.starts[sample], sample

    def of_rows(self, rows: Array) -> Array:
        """Return the sample of each row."""
        sample: Array = self.places(torch.from_numpy(rows))[1].numpy()
        return sample

    def bounds(self, sample: int) -> tuple[int, int]:
        """Return the first row of a sample and the row behind its last."""
        return int(self.starts[sample]), int(self.ends[sample])

    def piece_starts(self) -> Tensor:
        """Return the first row of each piece, [pieces] int64: pieces end with samples and have about the same length."""
        size = max(_PIECE_ROWS, -(-self.num_rows // _MAX_PIECES))
        lengths = list(self.lengths) if self.count <= _MAX_SAMPLES else []
        # Rows behind the last sample, or of too many samples to cut at each, are cut as one more sample.
        if sum(lengths) < self.num_rows:
            lengths.append(self.num_rows - sum(lengths))
        starts = []
        begin = 0
        for length in lengths:
            pieces = max(1, round(length / size)) if length else 0
            starts += [begin + length * piece // pieces for piece in range(pieces)]
            begin += length
        return torch.tensor(starts, dtype=torch.int64)


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
    """The counts of one pass; `add` takes block after block, in order.

    Args:
        a, b: open traces of the same num_experts and topk.
    """

    def __init__(self, a: TraceSource, b: TraceSource) -> None:
        self.a, self.b = a, b
        self.layers = tuple(number for number in a.layer_numbers if number in b.layer_numbers)
        num_layers = len(self.layers)
        # Layers of one trace only still say which rows have a route.
        self._read_a, self._read_b = (self.layers if num_layers else source.layer_numbers for source in (a, b))
        num_rows = max(a.num_tokens, b.num_tokens)
        self.samples = Samples(a.sequence_lengths or b.sequence_lengths, num_rows)
        # Names of the samples whose lengths were taken: the other trace may be cut into others.
        self.sample_ids = a.sample_ids if a.sequence_lengths else b.sample_ids
        longest = max(self.samples.lengths, default=num_rows)
        self.width = max(1, -(-longest // _MAX_POSITION_BINS))
        self.bins = max(1, -(-longest // self.width))
        self.rows_compared = self.rows_only_a = self.rows_only_b = self.rows_different = 0
        self.rows_other_token = self.rows_with_tokens = self.first_other_token = 0
        self.weight_versions_a: set[int] = set()
        self.weight_versions_b: set[int] = set()

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64)

        # Decisions that differ, by the experts that both name: the last column stays 0.
        self.partial = zeros(num_layers, a.topk + 1)
        self.other_order = zeros(num_layers)
        self.by_position, self.different_by_position = zeros(self.bins), zeros(num_layers * self.bins)
        # Rows behind the last sample, or all where samples are unknown, are of one more.
        self._by_sample = {name: zeros(self.samples.count + 1) for name in ("rows", "different", "only_a", "only_b")}
        self.piece_starts = self.samples.piece_starts()
        self.rows_by_piece = zeros(len(self.piece_starts))
        self.far_by_piece = zeros(len(self.piece_starts), num_layers)
        self._per_cell = max(1, min(_MOST_IN_A_CELL, _MOST_KEPT // max(1, num_layers * self.bins)))
        self._held = zeros(num_layers * self.bins)
        # Of each call that kept something: cell, row, routes in a and in b, tokens in a and in b.
        self._kept: list[tuple[Tensor, ...]] = []

    @property
    def different_by_layer(self) -> Tensor:
        """Decisions in which the traces do not agree, [num_layers] int64."""
        return self.partial.sum(dim=1)

    def by_sample(self, name: str) -> Tensor:
        """Return what was counted by sample, [samples] int64: "rows", "different" decisions, rows "only_a" or "only_b"."""
        return self._by_sample[name][: self.samples.count]

    def add(self, start: int, stop: int) -> None:
        """Read and count rows start..stop-1 of both."""
        a, b = self.a.read(start, stop, self._read_a), self.b.read(start, stop, self._read_b)
        for block, versions in ((a, self.weight_versions_a), (b, self.weight_versions_b)):
            if block.weight_version is not None:
                # -1 is a row whose version nobody knows.
                versions |= set(torch.unique(block.weight_version).tolist()) - {-1}
        rows = min(len(a), len(b))
        # Rows without a route hold filler; comparing it would count chance as disagreement.
        both = a.replay_mask[:rows] & b.replay_mask[:rows]
        num_both = int(both.sum())
        self.rows_only_a += int(a.replay_mask.sum()) - num_both
        self.rows_only_b += int(b.replay_mask.sum()) - num_both
        self.rows_compared += num_both
        numbers = torch.arange(start, start + rows)
        position, sample = self.samples.places(numbers)
        _count(self._by_sample["only_a"], sample[a.replay_mask[:rows] & ~both])
        _count(self._by_sample["only_b"], sample[b.replay_mask[:rows] & ~both])
        if not num_both:
            return
        self._add_tokens(a, b, both, start)
        # Rows behind the last sample count as one more, which may be longer than any that sets the number of bins.
        position_bin = (position // self.width).clamp(max=self.bins - 1)
        piece = torch.searchsorted(self.piece_starts, numbers, right=True) - 1
        _count(self.by_position, position_bin[both])
        _count(self._by_sample["rows"], sample[both])
        _count(self.rows_by_piece, piece[both])
        if not self.layers:
            return
        topk = self.a.topk
        overlap, same_order = shared_experts(a.topk_indices[:rows], b.topk_indices[:rows])
        self.other_order += ((overlap == topk) & ~same_order & both.unsqueeze(1)).sum(dim=0)
        different = (overlap < topk) & both.unsqueeze(1)
        row, layer = different.nonzero(as_tuple=True)
        if not row.numel():  # as in most blocks of two runs of one program
            return
        self.rows_different += int(different.any(dim=1).sum())
        shared, cell = overlap[row, layer].to(torch.int64), layer * self.bins + position_bin[row]
        self._keep(a, b, start, cell, row, layer)
        _count(self.partial, layer * (topk + 1) + shared)
        _count(self.different_by_position, cell)
        _count(self._by_sample["different"], sample[row])
        # Near-ties exchange one or two experts; only decisions that lost most of theirs point to a fault.
        far = 2 * shared < topk
        _count(self.far_by_piece, piece[row[far]] * len(self.layers) + layer[far])

    def _add_tokens(self, a: RoutingTrace, b: RoutingTrace, both: Tensor, start: int) -> None:
        if a.token_ids is not None and b.token_ids is not None:
            tokens_a, tokens_b = a.token_ids[: len(both)], b.token_ids[: len(both)]
            known = both & (tokens_a >= 0) & (tokens_b >= 0)
            other = (known & (tokens_a != tokens_b)).nonzero()
            if len(other) and not self.rows_other_token:
                self.first_other_token = start + int(other[0])
            self.rows_other_token += len(other)
            self.rows_with_tokens += int(known.sum())

    def _keep(self, a: RoutingTrace, b: RoutingTrace, start: int, cell: Tensor, row: Tensor, layer: Tensor) -> None:
        """Keep the first decisions of each cell; blocks come in the order of their rows."""
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

    def differences(self) -> tuple[Difference, ...]:
        """Return what was kept, by cell and then by row."""
        if not self._kept:
            return ()
        columns = [torch.cat(parts) for parts in zip(*self._kept)]
        # Kept in the order of rows; a stable sort keeps that inside each cell.
        order = columns[0].argsort(stable=True)
        columns = [column[order] for column in columns]
        columns += self.samples.places(columns[1])
        known = self.samples.known
        return tuple(
            Difference(
                row=row,
                layer_number=self.layers[cell // self.bins],
                experts_a=tuple(experts_a),
                experts_b=tuple(experts_b),
                sample=sample if known else None,
                position=position if known else None,
                token_a=None if token_a < 0 else token_a,
                token_b=None if token_b < 0 else token_b,
            )
            for cell, row, experts_a, experts_b, token_a, token_b, position, sample in zip(
                *(column.tolist() for column in columns)
            )
        )


def _count(counts: Tensor, index: Tensor) -> None:
    """Add one to counts, flattened, at every index; an index may come several times."""
    counts += torch.bincount(index, minlength=counts.numel()).view_as(counts)


def _tokens(block: RoutingTrace, row: Tensor) -> Tensor:
    return torch.full_like(row, -1) if block.token_ids is None else block.token_ids[row].to(torch.int64)
