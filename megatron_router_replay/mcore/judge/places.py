"""Name the places of compared rows: the rows of the trace, its samples and tokens, or micro-batch and positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from megatron_router_replay.mcore.judge.blocks import Block
from megatron_router_replay.trace import RoutingTrace


@dataclass(frozen=True, slots=True)
class ComparedPlaces:
    """Places of compared rows, in the order of micro-batches, sequences and positions.

    Args:
        parts: (chunk, micro-batch) and (positions, sequences) of each micro-batch.
        rows: [n], of the trace; -1: none; None: unknown.
        rank: this process.
        trace: of the session; None: unknown.
    """

    parts: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    rows: Any
    rank: int
    trace: RoutingTrace | None

    @classmethod
    def of(
        cls,
        parts: Sequence[tuple[tuple[int, int], tuple[int, int], Tensor | None]],
        *,
        rank: int,
        trace: RoutingTrace | None,
    ) -> ComparedPlaces:
        """Take each micro-batch's name, its shape, and its s-major rows on the host."""
        rows = None
        if trace is not None and parts and all(each is not None for *_, each in parts):
            ordered = [each.numpy().reshape(shape).T.ravel() for _, shape, each in parts if each is not None]
            rows = np.concatenate(ordered)
        return cls(tuple((name, shape) for name, shape, _ in parts), rows, rank, trace)

    def sequences(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, first row and end of each sequence of a micro-batch; ranks that share it give it the same name."""
        begin = 0
        for (chunk, number), (length, num) in self.parts:
            for sequence in range(num):
                yield f"{chunk}.{number}.{sequence}", begin, begin + length
                begin += length

    def versions(self) -> Any:
        """Return [n], the version of the weights that chose a row's routes, -1 for no row; None: unknown."""
        if self.rows is None or self.trace is None or self.trace.weight_version is None:
            return None
        return np.where(self.rows >= 0, self.trace.weight_version.cpu().numpy()[self.rows], -1)

    def trace_rows(self, block: Block) -> Any:
        """Return the rows of the trace in a block, in its order; empty if they are unknown."""
        if self.rows is None:
            return np.zeros(0, np.int64)
        rows = self.rows[block.first : block.stop]
        return rows[rows >= 0]

    def name(self, block: Block) -> str:
        """Return the sample and tokens of a block, or the micro-batch and positions."""
        rows = self.trace_rows(block)
        if self.trace is not None and len(rows):
            return names_of(self.trace, rows)
        for name, begin, end in self.sequences():
            if block.first < end:
                chunk, number, sequence = name.split(".")
                last = min(block.stop, end) - 1 - begin
                return f"chunk {chunk}, micro-batch {number}, sequence {sequence}, positions {block.first - begin} to {last}"
        return "no row"


def names_of(trace: RoutingTrace, rows: Any) -> str:
    """Return "sample 3 ('req-17'), tokens 200 to 266" for rows of a trace; of several samples, the first is named."""
    if trace.sequence_lengths is None:
        return f"rows {rows.min()} to {rows.max()} of the trace"
    ends = np.cumsum(trace.sequence_lengths)
    samples = np.searchsorted(ends, rows, side="right")
    sample = int(samples[0])
    at = rows[samples == sample] - (int(ends[sample]) - trace.sequence_lengths[sample])
    name = f" ({trace.sample_ids[sample]!r})" if trace.sample_ids is not None else ""
    others = len(np.unique(samples)) - 1
    more = f" and {others} more sample{'s' * (others > 1)}" if others else ""
    return f"sample {sample}{name}, tokens {at.min()} to {at.max()}{more}"
