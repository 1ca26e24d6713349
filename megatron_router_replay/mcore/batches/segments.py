"""Cut a forward's positions into segments: rows of a batch, or packed sequences.

Context-parallel ranks share a forward. Flat positions count over all of them, segment after segment; each rank has some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_router_replay.checks import shown
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.mcore.core.streams import to_device

_MAX_RESTARTS = 4096
"""The most segments that restarts of position_ids may add on a GPU, where the host cannot count them."""

_LIVE, _PADDING = -(1 << 40), -(1 << 41)
"""What positions without a row add to their flat position: less than any row."""

Partition = Literal["zigzag", "contiguous"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """The segments of a forward, [S] int64 flat positions each.

    The last one is the rest of a packed row, or empty.

    Args:
        shape: [b, s] of one rank's input_ids.
        begin, end: of each segment; segments follow one another.
        start, stop: of its tokens, where their number is known; else begin and end. All of the rest is padding.
        is_bounded: bool, [S] or a scalar, True: the number of tokens is known; None: of no segment.
        searches_left: padding of unknown length may precede the tokens.
        flat: [cp_size, n] int64, the flat position of each position of each rank; None: one rank has all, in order.
        is_jump: [total] bool, True: by its position id, a position does not follow the one before, and it begins no segment;
            None: no position does so.
    """

    shape: tuple[int, int]
    begin: Tensor
    end: Tensor
    start: Tensor
    stop: Tensor
    is_bounded: Tensor | None = None
    searches_left: bool
    flat: Tensor | None
    is_jump: Tensor | None = None

    @classmethod
    def of(
        cls,
        shape: tuple[int, int],
        cu_seqlens: Tensor | None = None,
        *,
        unpadded: Tensor | None = None,
        device: torch.device | None = None,
        cp_size: int = 1,
        partition: Partition = "zigzag",
    ) -> Segments:
        """Return the Segments of a forward.

        Args:
            shape: [b, s] of this rank's input_ids.
            cu_seqlens: [num_seqs + 1] integers, where packed sequences start, over all ranks, padding counted; None: each
                row of the batch is a segment.
            unpadded: [num_seqs + 1], the same without padding; None: not known. It is ignored if it equals cu_seqlens
                everywhere: some trainers pass the padded one twice.
            device: of the segments; None: that of cu_seqlens.

        Raises:
            LayoutError: cu_seqlens are not of one row, or unpadded are of another number of sequences; or, on the CPU, they
                reach beyond it, or split a sequence unevenly, or unpadded are longer.
        """
        length, total = shape[1] * cp_size, shape[0] * shape[1] * cp_size
        # Zigzag gives each rank two of 2 * cp_size equal chunks.
        multiple = 2 * cp_size if cp_size > 1 and partition == "zigzag" else 1
        if cu_seqlens is None:
            starts = torch.arange(0, total + 1, max(1, length), device=device)
            _check_starts([0, length], length, multiple)
        elif shape[0] != 1:
            raise LayoutError(f"MRR201: packed sequences come as input_ids [1, total], got {list(shape)}.")
        else:
            starts = cu_seqlens.to(device, torch.int64)
            if starts.device.type == "cpu":  # on a GPU, the check would synchronize
                _check_starts(starts.tolist(), total, multiple)
        bounds = pad(starts, (0, 1), value=total)
        begin, end = starts, bounds[1:]
        stop, is_bounded = torch.minimum(end, starts[-1:]), None
        if cu_seqlens is not None and unpadded is not None and unpadded is not cu_seqlens:
            real = unpadded.to(starts.device, torch.int64)
            _check_lengths(real, starts)
            is_bounded = (real != starts).any()
            stop[:-1] = torch.minimum(starts[:-1] + real.diff(), stop[:-1])
        return cls(
            shape=shape,
            begin=begin,
            end=end,
            start=begin,
            stop=stop,
            is_bounded=is_bounded,
            searches_left=cu_seqlens is None,
            flat=None if cp_size == 1 else _flat_positions(bounds, shape, cp_size, partition),
        )

    def cut(self, position_ids: Tensor) -> Segments:
        """Return the Segments of a padded batch, cut wherever positions restart at 0.

        A 0 after a 0 begins no segment: it may be padding.

        Args:
            position_ids: [total] integers in flat order.
        """
        total, by_row = position_ids.numel(), position_ids.view(self.shape[0], -1)
        is_step = by_row.diff(dim=1) == 1
        on_host = is_step.device.type == "cpu"
        if on_host and bool(is_step.all()):
            return self
        restarts = pad((by_row[:, 1:] == 0) & (by_row[:, :-1] > 0), (1, 0)).flatten()
        is_jump = ~(pad(is_step, (1, 0), value=True).flatten() | restarts)
        if on_host:
            begin = torch.cat([self.begin, restarts.nonzero().squeeze(1)]).sort().values
        else:
            # Without a synchronization, the number of restarts is not known. Surplus segments are empty: they begin at
            # `total`. The last one holds the restarts above the limit, and its tokens are of no sample.
            at = torch.where(restarts, torch.arange(total, device=restarts.device), total)
            begin = torch.cat([self.begin, at]).sort().values[: self.begin.numel() + _MAX_RESTARTS]
        end = pad(begin[1:], (0, 1), value=total)
        return replace(self, begin=begin, end=end, start=begin, stop=end, is_jump=is_jump)

    def bound(self, padding_mask: Tensor) -> Segments:
        """Return the Segments with the lengths that a padding mask gives.

        A segment's tokens are those from the first to the last one outside of the mask.

        Args:
            padding_mask: [total] bool in flat order, True: padding.
        """
        before = pad((~padding_mask).cumsum(0), (1, 0))  # tokens before each position
        first, past = before.take(self.begin), before.take(self.end)
        # `before` rises by 1 after each token, so a search finds a segment's first and last token.
        start = torch.searchsorted(before, first + 1) - 1
        stop = torch.minimum(torch.searchsorted(before, past), self.stop)
        start, stop = (torch.where(past > first, each, self.begin) for each in (start, stop))
        is_bounded = torch.ones_like(stop, dtype=torch.bool)
        return replace(self, start=start, stop=stop, is_bounded=is_bounded, searches_left=False)

    @property
    def total(self) -> int:
        """Return the number of flat positions."""
        return self.shape[0] * self.shape[1] if self.flat is None else self.flat.numel()

    def place(self, position: int) -> str:
        """Return where a flat position is, as input_ids[b, s] of a rank; this synchronizes a GPU."""
        at, of_rank = min(position, self.total - 1), ""  # past the end: the last one
        if self.flat is not None:
            rank, at = divmod(int((self.flat.view(-1) == at).nonzero()), self.flat.shape[1])
            of_rank = f" of context-parallel rank {rank}"
        row, column = divmod(at, self.shape[1])
        return f"input_ids[{row}, {column}]{of_rank}"

    def rows(self, first: Tensor, count: Tensor, row: Tensor, live: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the trace rows and padding of all flat positions, [total] each.

        Args:
            first: [S], the flat position of each segment's first token with a row.
            count: [S], tokens with rows that follow one another.
            row: [S], the first of these.
            live: [S], tokens after them that are routed live. All of the rest is padding.

        Returns:
            The rows, -1: none, and a mask of padding; None: no position is padding, as far as the host knows.
        """
        at = torch.arange(self.total, device=first.device)
        on_host = first.device.type == "cpu"
        # Most packed batches have no padding.
        if on_host and int(count.sum()) == self.total:
            return at.add_(torch.repeat_interleave(row - first, count, output_size=self.total)), None
        # Each segment has four pieces.
        padding, live_offset = torch.full_like(first, _PADDING), torch.full_like(first, _LIVE)
        lengths = torch.stack([first - self.begin, count, live, self.end - first - count - live], 1).view(-1)
        offsets = torch.stack([padding, row - first, live_offset, padding], 1).view(-1)
        rows = at.add_(torch.repeat_interleave(offsets, lengths, output_size=self.total))
        is_padding = rows < _LIVE
        return rows.clamp_(min=-1), None if on_host and not bool(is_padding.any()) else is_padding

    def numbers(self) -> Tensor:
        """Return the segment of each flat position, [total] int64."""
        return torch.repeat_interleave(self.end - self.begin, output_size=self.total)

    def in_order(self, of_ranks: Tensor) -> Tensor:
        """Return all ranks' values, [cp_size, n], in flat order, [total]."""
        if self.flat is None:
            return of_ranks[0]
        return torch.empty_like(of_ranks).view(-1).index_copy_(0, self.flat.view(-1), of_ranks.reshape(-1))

    def of_rank(self, values: Tensor, rank: int) -> Tensor:
        """Return one rank's part of flat values, [b, s]."""
        return (values if self.flat is None else values[self.flat[rank]]).view(self.shape)


class PaddingRuns:
    """Find the ranges that padding of unknown length may fill.

    Args:
        tokens: [1 + n + 1] integers: the tokens of positions 0 to n - 1, between two that are none.
        declared: the tokens of padding; None: any one token.
    """

    def __init__(self, tokens: Tensor, declared: Sequence[int] | None) -> None:
        # Up to each token, the number of those that are no padding; or, undeclared, of changes of the token id.
        if declared is None:
            is_end = tokens != tokens.roll(1)
        else:
            padding = torch.tensor(declared, dtype=torch.int64)  # torch would make floats of an empty list
            is_end = ~torch.isin(tokens, to_device(padding, tokens.device))
        self._counts = is_end.cumsum(0)
        self._shift = 1 if declared is None else 0

    def trailing(self, begin: Tensor, stop: Tensor) -> Tensor:
        """Return the flat position where padding up to `stop` may begin."""
        # The counts are constant over a run, so a search finds its first position.
        return torch.maximum(torch.searchsorted(self._counts, self._counts.take(stop)) - self._shift, begin)

    def leading(self, begin: Tensor, end: Tensor) -> Tensor:
        """Return the length of possible padding from `begin` on; 0 if it reaches `end`."""
        past = torch.searchsorted(self._counts, self._counts.take(begin + self._shift), right=True) - 1
        # Where all of a segment may be padding, `trailing` finds it.
        return torch.where(past >= end, 0, past - begin)


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


def _check_lengths(unpadded: Tensor, padded: Tensor) -> None:
    fit = unpadded.shape == padded.shape
    if fit and padded.device.type == "cpu":  # on a GPU, the values would synchronize
        lengths = unpadded.diff()
        fit = bool(((lengths >= 0) & (lengths <= padded.diff())).all())
    if not fit:
        raise LayoutError(
            f"MRR204: cu_seqlens_q {shown(unpadded.tolist())} do not fit cu_seqlens_q_padded {shown(padded.tolist())}: they "
            "must have a length for each padded sequence, 0 up to that of the padded one."
        )


def _flat_positions(bounds: Tensor, shape: tuple[int, int], cp_size: int, partition: Partition) -> Tensor:
    """Return the flat positions of each rank, [cp_size, n].

    Args:
        bounds: [S + 1], where segments start over all ranks, and the end of the last, which is the rest of the row.
    """
    at = torch.arange(shape[0] * shape[1], device=bounds.device)
    ranks = torch.arange(cp_size, device=bounds.device).unsqueeze(1)
    if partition == "contiguous":  # ranks cut whole rows, without regard to packed sequences
        row, column = at // shape[1], at % shape[1]
        return (row * cp_size + ranks) * shape[1] + column
    # A rank has 1 / cp_size of each segment, so its local bounds are the flat ones divided.
    local = bounds // cp_size
    segment = torch.searchsorted(local[1:], at, right=True)
    length, offset = local.diff()[segment], at - local[segment]
    half = length // 2
    # Rank r has chunks r and 2 * cp_size - 1 - r. The rest of a packed row need not have a multiple of 2 * cp_size
    # positions, so it is split in turn.
    before = torch.where(offset < half, ranks * half, (2 * cp_size - 2 - ranks) * half)
    before = torch.where(segment == bounds.numel() - 2, ranks * length, before)
    return bounds[segment] + before + offset
