"""Cut a forward's positions into segments, on the host: rows of a batch, or packed sequences.

Context-parallel ranks share a forward. Flat positions count over all of them, segment after segment; each rank has some.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.checks import shown
from megatron_router_replay.errors import LayoutError

CpPartition = Literal["zigzag", "contiguous"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """The segments of a forward, [S] int64 flat positions each.

    Args:
        shape: [b, s] of a rank's input_ids.
        begin, end: of each segment; segments follow one another. Of packed sequences, the last one is the rest of the row.
        start, stop: of its tokens, where their number is known; else begin and end. All of the rest is padding.
        lengths_known: the number of tokens is known, from a mask or from unpadded cu_seqlens.
        may_pad: declared padding may be inside of them, because an attention mask gave their number.
        searches_left: padding of unknown length may precede the tokens.
        flat: [cp_size, n] int64, the flat position of each position of each rank; None: one rank has all, in order.
        jumps: flat positions with a position id that does not follow the one before, and that begin no segment.
        is_cut: position ids cut rows of the batch.
    """

    shape: tuple[int, int]
    begin: Any
    end: Any
    start: Any
    stop: Any
    lengths_known: bool = False
    may_pad: bool = False
    searches_left: bool = False
    flat: Any = None
    jumps: Any = ()
    is_cut: bool = False

    @classmethod
    def of(
        cls,
        shape: tuple[int, int],
        cu_seqlens: Any = None,
        *,
        unpadded: Any = None,
        cp_size: int = 1,
        partition: CpPartition = "zigzag",
    ) -> Segments:
        """Return the Segments of a forward.

        Args:
            shape: [b, s] of this rank's input_ids.
            cu_seqlens: [num_seqs + 1] integers, where packed sequences start, over all ranks, padding counted; None: each
                row of the batch is a segment.
            unpadded: [num_seqs + 1], the same without padding; None: not known. It is ignored if it equals cu_seqlens
                everywhere: some trainers pass the padded one twice.

        Raises:
            LayoutError: cu_seqlens are not of a single row, reach beyond it, or split a sequence unevenly; or unpadded are of
                another number of sequences, or longer.
        """
        length, total = shape[1] * cp_size, shape[0] * shape[1] * cp_size
        # Zigzag gives each rank two of 2 * cp_size equal chunks.
        multiple = 2 * cp_size if cp_size > 1 and partition == "zigzag" else 1
        lengths_known = False
        if cu_seqlens is None:
            _check_starts([0, length], length, multiple)
            bounds = np.arange(shape[0] + 1) * length
            begin, end = bounds[:-1], bounds[1:]
            stop = end
        elif shape[0] != 1:
            raise LayoutError(f"MRR201: packed sequences come as input_ids [1, total], got {list(shape)}.")
        else:
            begin = np.asarray(cu_seqlens, dtype=np.int64)
            _check_starts(begin.tolist(), total, multiple)
            bounds = np.append(begin, total)
            end = bounds[1:]
            stop = np.minimum(end, begin[-1])
            if unpadded is not None:
                real = np.asarray(unpadded, dtype=np.int64)
                _check_lengths(real, begin)
                lengths_known = not np.array_equal(real, begin)
                stop = np.append(begin[:-1] + np.diff(real), begin[-1])
        flat = (
            None
            if cp_size == 1
            else _flat_positions(bounds, shape, cp_size, partition, is_packed=cu_seqlens is not None)
        )
        return cls(
            shape=shape, begin=begin, end=end, start=begin, stop=stop, lengths_known=lengths_known,
            searches_left=cu_seqlens is None, flat=flat,
        )  # fmt: skip

    def cut(self, position_ids: Any) -> Segments:
        """Return the Segments of a padded batch, cut wherever positions restart at 0.

        A 0 after a 0 begins no segment: it may be padding. Positions that are all equal say nothing: they are a dummy.

        Args:
            position_ids: [total] integers in flat order.
        """
        rows = position_ids.reshape(self.shape[0], -1)
        is_step = np.diff(rows, axis=1) == 1
        if is_step.all() or (rows == rows[0, 0]).all():
            return self
        restarts, jumps = np.zeros(rows.shape, bool), np.zeros(rows.shape, bool)
        restarts[:, 1:] = (rows[:, 1:] == 0) & (rows[:, :-1] > 0)
        jumps[:, 1:] = ~(is_step | restarts[:, 1:])
        begin = np.sort(np.concatenate([self.begin, np.flatnonzero(restarts)]))
        end = np.append(begin[1:], rows.size)
        return replace(
            self, begin=begin, end=end, start=begin, stop=end, jumps=np.flatnonzero(jumps), is_cut=bool(restarts.any())
        )

    def with_lengths(self, padding_mask: Any) -> Segments:
        """Return the Segments with the lengths that a padding mask gives.

        A segment's tokens are those from the first to the last one outside of the mask.

        Args:
            padding_mask: [total] bool in flat order, True: padding.
        """
        tokens = np.flatnonzero(~padding_mask)
        first, past = np.searchsorted(tokens, self.begin), np.searchsorted(tokens, self.end)
        start, stop = self.begin.copy(), self.begin.copy()
        some = past > first
        start[some], stop[some] = tokens[first[some]], tokens[past[some] - 1] + 1
        return replace(self, start=start, stop=np.minimum(stop, self.stop), lengths_known=True, searches_left=False)

    @property
    def total(self) -> int:
        """Return the number of flat positions."""
        return self.shape[0] * self.shape[1] if self.flat is None else self.flat.size

    def place(self, position: int) -> str:
        """Return where a flat position is, as input_ids[b, s] of a rank."""
        at, of_rank = min(position, self.total - 1), ""  # past the end: the last one
        if self.flat is not None:
            rank, at = divmod(int(np.flatnonzero(self.flat == at)[0]), self.flat.shape[1])
            of_rank = f" of context-parallel rank {rank}"
        row, column = divmod(at, self.shape[1])
        return f"input_ids[{row}, {column}]{of_rank}"

    def rows(self, first: Any, count: Any, row: Any, live: Any) -> tuple[Any, Any]:
        """Return the trace rows and padding of all flat positions, [total] each.

        Args:
            first: [S], the flat position of each segment's first token with a row.
            count: [S], tokens with rows that follow one another.
            row: [S], the first of these.
            live: [S], tokens after them that are routed live. All of the rest is padding.

        Returns:
            The rows, -1: none, and a mask of padding; None: no position is padding.
        """
        rows = np.arange(self.total)
        if int(count.sum()) == self.total:  # most packed batches have no padding
            rows += np.repeat(row - first, count)
            return rows, None
        # Each segment has four pieces: padding, rows, live tokens, padding.
        pieces = np.stack([first - self.begin, count, live, self.end - first - count - live], axis=1).ravel()
        offsets, kinds = np.zeros((2, len(pieces)), np.int64)
        offsets[1::4] = row - first
        kinds[0::4], kinds[2::4], kinds[3::4] = 2, 1, 2
        kind = np.repeat(kinds.astype(np.int8), pieces)
        rows += np.repeat(offsets, pieces)
        rows[kind > 0] = -1
        padding = kind == 2
        return rows, padding if padding.any() else None

    def in_order(self, of_ranks: Any) -> Any:
        """Return all ranks' values, [cp_size, n], in flat order, [total]."""
        if self.flat is None:
            return of_ranks.reshape(-1)
        values = np.empty_like(of_ranks.reshape(-1))
        values[self.flat.reshape(-1)] = of_ranks.reshape(-1)
        return values

    def of_rank(self, values: Any, rank: int) -> Tensor:
        """Return one rank's part of flat values, [b, s]."""
        return torch.from_numpy(values if self.flat is None else values[self.flat[rank]]).view(self.shape)


def _check_starts(starts: list[int], total: int, multiple: int) -> None:
    if not starts or starts[0] or starts != sorted(starts) or starts[-1] > total:
        raise LayoutError(
            f"MRR204: cu_seqlens {starts} do not fit a packed row of {total} positions: they must rise from 0."
        )
    lengths = [end - begin for begin, end in pairwise(starts)]
    if any(length % multiple for length in lengths):
        raise LayoutError(
            f"MRR204: cannot split sequences of {lengths} positions over cp_size={multiple // 2} in zigzag: each must be a "
            f"multiple of {multiple}."
        )


def _check_lengths(unpadded: Any, padded: Any) -> None:
    lengths = np.diff(unpadded)
    if unpadded.shape != padded.shape or ((lengths < 0) | (lengths > np.diff(padded))).any():
        raise LayoutError(
            f"MRR204: cu_seqlens_q {shown(unpadded.tolist())} do not fit cu_seqlens_q_padded {shown(padded.tolist())}: they "
            "must have a length for each padded sequence, 0 up to that of the padded one."
        )


def _flat_positions(
    bounds: Any, shape: tuple[int, int], cp_size: int, partition: CpPartition, *, is_packed: bool
) -> Any:
    """Return the flat positions of each rank, [cp_size, n].

    Args:
        bounds: where segments start over all ranks, and the end of the last.
        is_packed: the last segment is the rest of the row.
    """
    at, ranks = np.arange(shape[0] * shape[1]), np.arange(cp_size)[:, None]
    if partition == "contiguous":  # ranks cut whole rows, without regard to packed sequences
        row, column = at // shape[1], at % shape[1]
        return (row * cp_size + ranks) * shape[1] + column
    # A rank has 1 / cp_size of each segment, so its local bounds are the flat ones divided.
    local = bounds // cp_size
    segment = np.searchsorted(local[1:], at, side="right")
    length, offset = np.diff(local)[segment], at - local[segment]
    half = length // 2
    # Rank r has chunks r and 2 * cp_size - 1 - r. The rest of a packed row need not have a multiple of 2 * cp_size
    # positions, so it is split in turn.
    before = np.where(offset < half, ranks * half, (2 * cp_size - 2 - ranks) * half)
    if is_packed:
        before = np.where(segment == len(bounds) - 2, ranks * length, before)
    return bounds[segment] + before + offset
