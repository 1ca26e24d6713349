"""Name wrong rows by sample and token, and say what can be read off the trace about their cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from megatron_router_replay.mcore.sessions.blocks import Block
from megatron_router_replay.trace import RoutingTrace


@dataclass(frozen=True, slots=True)
class RowNames:
    """Where compared rows are, in the order of micro-batches, sequences and positions.

    Args:
        parts: (chunk, micro-batch) and (positions, sequences) of each micro-batch.
        rows: [n], of the trace; -1: none; None: not known.
        rank: this process.
        trace: of the session; None: not known.
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
    ) -> RowNames:
        """Make names from each micro-batch's name, shape and s-major rows."""
        rows = None
        if trace is not None and all(each is not None for *_, each in parts):
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

    def describe(self, block: Block, layers: Sequence[int]) -> str:
        """Return which tokens a block is, and what its rows look like."""
        layer = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        return f"rank {self.rank}, {self._place(block)}, {layer}: routes of other tokens"

    def _place(self, block: Block) -> str:
        if self.rows is not None and self.trace is not None:
            rows = self.rows[block.first : block.stop]
            rows = rows[rows >= 0]
            if len(rows):
                return self._tokens(int(rows[0]), int(rows[-1]))
        for name, begin, end in self.sequences():
            if block.first < end:
                chunk, number, sequence = name.split(".")
                last = min(block.stop, end) - 1
                return (
                    f"chunk {chunk}, micro-batch {number}, sequence {sequence}, positions {block.first - begin} to "
                    f"{last - begin}"
                )
        return "no row"

    def _tokens(self, first: int, last: int) -> str:
        assert self.trace is not None, "rows are known"
        if self.trace.sequence_lengths is None:
            return f"rows {first} to {last} of the trace"
        ends = list(accumulate(self.trace.sequence_lengths))
        one, other = (int(np.searchsorted(ends, row, side="right")) for row in (first, last))
        begin = ends[one] - self.trace.sequence_lengths[one]
        name = f"sample {one}"
        if self.trace.sample_ids is not None:
            name += f" ({self.trace.sample_ids[one]!r})"
        if one == other:
            return f"{name}, tokens {first - begin} to {last - begin}"
        return f"{name}, tokens from {first - begin} on, to sample {other}"
