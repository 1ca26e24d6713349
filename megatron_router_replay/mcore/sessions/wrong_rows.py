"""Name wrong rows by sample and token, and find their cause in the trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from megatron_router_replay.mcore.sessions.blocks import Block
from megatron_router_replay.trace import RoutingTrace

MOST_MOVED = 128
"""The most tokens by which a moved stream is searched for."""
MOST_EQUAL = 1024
"""The most rows with equal routes among which the source of a row is searched for."""
CLEAR, CLEARLY_MORE = 0.6, 0.25
"""Share of a block's rows that a cause must explain, and how much more than the next cause of its kind."""


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


def cause_of(trace: RoutingTrace, rows: Any) -> str:
    """Return the cause of wrong rows, if the trace shows one; "" if not.

    Args:
        rows: [n] of the trace.
    """
    routes = trace.topk_indices
    block = routes[rows].reshape(len(rows), -1).cpu().numpy()
    different, number = np.unique(block, axis=0, return_counts=True)
    most = different[number.argmax()]
    if number.max() >= 0.8 * len(rows) and len(rows) > 2:
        by_layer = np.sort(most.reshape(trace.num_layers, trace.topk), axis=1)
        what = f"{number.max()} of these {len(rows)} rows are one and the same row"
        if (by_layer == np.arange(trace.topk)).all():
            return f"{what}, experts 0 to {trace.topk - 1} of every layer: a filler of lost rows"
        before = rows.min() - 1
        if before >= 0 and (routes[before].reshape(-1).cpu().numpy() == most).all():
            return f"{what}, that of the token before them: a stale capture (SGLang before #36467), or lost rows were filled"
        return f"{what}: a stale capture in the engine (SGLang before #36467)"
    return _copied_from(trace, rows, block)


def _copied_from(trace: RoutingTrace, rows: Any, block: Any) -> str:
    """Return which other rows of the trace a block repeats."""
    factors = np.random.default_rng(0).integers(1, 1 << 62, block.shape[1], dtype=np.uint64) | np.uint64(1)
    names = np.zeros(trace.num_tokens, np.uint64)
    columns = trace.topk_indices.reshape(trace.num_tokens, -1)
    for column, factor in enumerate(factors):  # no copy of the trace in eight bytes an expert
        names += columns[:, column].cpu().numpy().astype(np.uint64) * factor
    is_block = np.zeros(trace.num_tokens, bool)
    is_block[rows] = True
    order = names.argsort(kind="stable")
    order = order[~is_block[order]]
    offsets = []
    for row in rows[:: max(1, len(rows) // 32)]:
        first, stop = (np.searchsorted(names[order], names[row], side=side) for side in ("left", "right"))
        offsets.append(order[first:stop][:MOST_EQUAL] - row)
    moved, number = np.unique(np.concatenate(offsets), return_counts=True)
    if not len(moved) or len(np.unique(names[rows])) < 4:
        return ""
    source = rows + int(moved[number.argmax()])
    is_inside = (source >= 0) & (source < trace.num_tokens)
    if (names[source[is_inside]] == names[rows[is_inside]]).sum() < CLEAR * len(rows):
        return ""
    return f"they are the routes of {names_of(trace, source[is_inside])}"


def moved_by(experts: Any, first: Any, block: Block, begin: int, end: int) -> str:
    """Return by how many tokens the routes of a block are late or early; "" if they fit no neighbours.

    Args:
        experts: [n, topk], replayed.
        first: [n], the expert that the live router ranks first; -1: not compared.
        begin, end: of the sequence that the block begins in.
    """
    at = np.arange(block.first, min(block.stop, end))
    shares: dict[int, float] = {}
    for moved in (*range(-MOST_MOVED, 0), *range(1, MOST_MOVED + 1)):
        source = at - moved
        inside = (source >= begin) & (source < end)
        if inside.sum() >= max(8, len(at) // 2):
            hits = (experts[at[inside]] == first[source[inside], None]).any(1)
            shares[moved] = float(hits.mean())
    if len(shares) < 2:  # a few tokens fit by chance
        return ""
    (second, _), (share, moved) = sorted((share, moved) for moved, share in shares.items())[-2:]
    if share < CLEAR or share < second + CLEARLY_MORE:
        return ""
    places = f"{abs(moved)} place{'s' * (abs(moved) > 1)}"
    return f"they fit the tokens {places} {'before' if moved > 0 else 'after'} them"
