"""Two open traces -> one pass over both: what differs, counted by layer, position, sample and piece.

A decision (defined in this package's docstring) is *far* if the traces share less than half of its experts, which near-ties
do not bring about. A piece is a run of neighbouring rows inside one sample; far decisions by piece and layer tell where to
look for faults. A cell is one layer at one bin of positions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_router_replay.diagnostics.compare import shared_experts
from megatron_router_replay.diagnostics.differences import DifferenceKeeper
from megatron_router_replay.diagnostics.samples import Samples
from megatron_router_replay.diagnostics.source import TraceSource
from megatron_router_replay.trace import RoutingTrace

MAX_POSITION_BINS = 128
_SAMPLED_ROWS = 8192
_GOLDEN = 2654435761  # Knuth's multiplicative hash: neighbouring rows get numbers far apart


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
        self.read_a, self.read_b = (self.layers if num_layers else source.layer_numbers for source in (a, b))
        num_rows = max(a.num_tokens, b.num_tokens)
        self.samples = Samples(a.sequence_lengths or b.sequence_lengths, num_rows)
        # Names of the samples whose lengths were taken: the other trace may be cut into others.
        self.sample_ids = a.sample_ids if a.sequence_lengths else b.sample_ids
        longest = max(self.samples.lengths) if self.samples.lengths else num_rows
        self.width = max(1, -(-longest // MAX_POSITION_BINS))
        self.bins = max(1, -(-longest // self.width))
        self.rows_compared = self.rows_only_a = self.rows_only_b = self.rows_other_token = self.rows_different = 0
        # Decisions that differ, by the experts that both name: the last column stays 0.
        self.partial = torch.zeros(num_layers, a.topk + 1, dtype=torch.int64)
        self.other_order = torch.zeros(num_layers, dtype=torch.int64)
        self.by_position = torch.zeros(self.bins, dtype=torch.int64)
        self.different_by_position = torch.zeros(num_layers * self.bins, dtype=torch.int64)
        self.weight_versions_a: set[int] = set()
        self.weight_versions_b: set[int] = set()
        self.differences = DifferenceKeeper(self.layers, self.bins)
        self.by_sample = torch.zeros(self.samples.count, dtype=torch.int64)
        self.different_by_sample = torch.zeros(self.samples.count, dtype=torch.int64)
        self.piece_starts = self.samples.piece_starts()
        self.rows_by_piece = torch.zeros(len(self.piece_starts), dtype=torch.int64)
        self.far_by_piece = torch.zeros(len(self.piece_starts), num_layers, dtype=torch.int64)
        # One row in `_threshold / 2**32` is kept, wherever it lies: a fixed stride would meet the same positions only.
        self._threshold = min(1 << 32, (_SAMPLED_ROWS << 32) // max(1, num_rows))
        self._sampled: list[tuple[Tensor, Tensor]] = []

    def add(self, start: int, stop: int) -> None:
        """Read and count rows start..stop-1 of both."""
        a, b = self.a.read(start, stop, self.read_a), self.b.read(start, stop, self.read_b)
        _add_versions(self.weight_versions_a, a)
        _add_versions(self.weight_versions_b, b)
        rows = min(len(a), len(b))
        # Rows without a route hold filler; comparing it would count chance as disagreement.
        both = a.replay_mask[:rows] & b.replay_mask[:rows]
        num_both = int(both.sum())
        self.rows_only_a += int(a.replay_mask.sum()) - num_both
        self.rows_only_b += int(b.replay_mask.sum()) - num_both
        self.rows_compared += num_both
        if not num_both:
            return
        self._add_tokens(a, b, both)
        numbers = torch.arange(start, start + rows)
        position, sample = self.samples.places(numbers)
        # Rows behind the last sample count as one more, which may be longer than any that sets the number of bins.
        position_bin = (position // self.width).clamp(max=self.bins - 1)
        _count(self.by_position, position_bin[both])
        self.by_sample += self._count_by_sample(sample[both]) * len(self.layers)
        piece = torch.searchsorted(self.piece_starts, numbers, right=True) - 1
        _count(self.rows_by_piece, piece[both])
        if self.layers:
            routes_a, routes_b = a.topk_indices[:rows], b.topk_indices[:rows]
            kept = both & ((numbers * _GOLDEN) % (1 << 32) < self._threshold)
            self._sampled.append((routes_a[kept].clone(), routes_b[kept].clone()))
            row, layer, shared = self._add_overlap(routes_a, routes_b, both)
            if not row.numel():  # as in most blocks of two runs of one program
                return
            cell = layer * self.bins + position_bin[row]
            self.differences.add(a, b, start, cell, row, layer)
            self._count_different(layer, shared, cell=cell, sample=sample[row], piece=piece[row])

    @property
    def different_by_layer(self) -> Tensor:
        """Decisions in which the traces do not agree, [num_layers] int64."""
        return self.partial.sum(dim=1)

    def sampled_rows(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return some thousand rows of both, spread over all, [n, num_layers, topk] int64 each."""
        pairs = list(zip(*self._sampled)) or [(), ()]
        empty = torch.zeros(0, len(self.layers), self.a.topk, dtype=torch.int64)
        a, b = (torch.cat([empty, *(part.to(torch.int64) for part in parts)]).numpy() for parts in pairs)
        return a, b

    def _add_tokens(self, a: RoutingTrace, b: RoutingTrace, both: Tensor) -> None:
        if a.token_ids is not None and b.token_ids is not None:
            tokens_a, tokens_b = a.token_ids[: len(both)], b.token_ids[: len(both)]
            known = both & (tokens_a >= 0) & (tokens_b >= 0)
            self.rows_other_token += int((known & (tokens_a != tokens_b)).sum())

    def _add_overlap(self, a: Tensor, b: Tensor, both: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Count how many experts decisions share; return those that differ: row and layer index, and the experts shared."""
        overlap, same_order = shared_experts(a, b)
        self.other_order += ((overlap == self.a.topk) & ~same_order & both.unsqueeze(1)).sum(dim=0)
        different = (overlap < self.a.topk) & both.unsqueeze(1)
        self.rows_different += int(different.any(dim=1).sum())
        row, layer = different.nonzero(as_tuple=True)
        return row, layer, overlap[row, layer].to(torch.int64)

    def _count_different(self, layer: Tensor, shared: Tensor, *, cell: Tensor, sample: Tensor, piece: Tensor) -> None:
        """Count n decisions of a block that differ wherever they lie; all arguments are [n] int64.

        Args:
            layer: index of its layer. shared: experts that both name. cell, sample, piece: where its row lies.
        """
        topk = self.a.topk
        _count(self.partial, layer * (topk + 1) + shared)
        _count(self.different_by_position, cell)
        self.different_by_sample += self._count_by_sample(sample)
        # Near-ties exchange one or two experts; only decisions that lost most of theirs point to a fault.
        far = 2 * shared < topk
        _count(self.far_by_piece, piece[far] * len(self.layers) + layer[far])

    def _count_by_sample(self, sample: Tensor) -> Tensor:
        # Rows behind the last sample, or all where samples are unknown, are of none that is counted.
        return torch.bincount(sample, minlength=self.samples.count)[: self.samples.count]


def _count(counts: Tensor, index: Tensor) -> None:
    """Add one to counts, flattened, at every index; an index may come several times."""
    counts += torch.bincount(index, minlength=counts.numel()).view_as(counts)


def _add_versions(versions: set[int], block: RoutingTrace) -> None:
    if block.weight_version is not None:
        # -1 is a row whose version nobody knows.
        versions.update(version for version in torch.unique(block.weight_version).tolist() if version >= 0)
