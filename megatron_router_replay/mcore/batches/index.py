"""Find the trace rows of a forward's tokens: prefix keys, and the samples that segments of a batch hold.

    a trace's tokens and samples                -> PrefixIndex    sorted keys, once a trace
    [b, s], cu_seqlens, padding_mask, ranks     -> Places         segments, and where this rank's positions stand
    PrefixIndex, Places, tokens                 -> Located        the sample of each segment, the row of each position

Routing is causal, so the tokens up to a position address its row:

    key[t] = sum of mix(token[i], i) for i <= t          64 bits, wrapping: a cumulative sum

A key only finds a row. The session then compares every token with the trace's, so a collision raises. Everything here is
tensor arithmetic on one device without a host wait on a GPU; on the CPU, rare cases are skipped where they cannot occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_router_replay.errors import LayoutError

FAR = 1 << 40
"""More than any position or token."""

_WAYS = 32
"""Prefixes of a segment that one step of the search looks up: three steps find the end among 8,192 positions."""

_MAX_SEGMENTS = 4096
"""Segments that restarts of position_ids may make on a GPU, where the host cannot count them."""

Partition = Literal["zigzag", "contiguous"]


def mix(tokens: Tensor, positions: Tensor) -> Tensor:
    """Return 64 pseudo-random bits for each token at its position, int64.

    Source: the finalizer of splitmix64 (Steele, Lea, Flood, 2014); the masks make >> logical.
    """
    values = tokens.to(torch.int64) * -0x61C8864680B583EB + positions * -0x3D4D51C2D82B14B1 + 1
    for shift, multiplier in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return values ^ ((values >> 31) & ((1 << 33) - 1))


def _sums(values: Tensor) -> Tensor:
    """Return the sum before each value and the sum of all, [..., n + 1] int64: a range's sum is a difference."""
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))


class PrefixIndex:
    """The prefix keys of a trace's rows, sorted: 16 bytes a row.

    Args:
        token_ids: [num_rows] integers, none below 0.
        sequence_lengths: of the samples; their sum is num_rows.
    """

    def __init__(self, token_ids: Tensor, sequence_lengths: Sequence[int]) -> None:
        device, num_rows = token_ids.device, token_ids.numel()
        self.token_ids = token_ids
        self.bounds = [0, *accumulate(sequence_lengths)]
        lengths = torch.tensor([length for length in sequence_lengths if length], dtype=torch.int64, device=device)
        starts = lengths.cumsum(0) - lengths
        sample = torch.repeat_interleave(lengths, output_size=num_rows)
        positions = torch.arange(num_rows, device=device) - starts[sample]
        terms = mix(token_ids, positions)
        sums = terms.cumsum(0)
        keys = sums - (sums - terms)[starts][sample]
        ends = starts + lengths - 1
        # Stable: of equal prefixes the first of the trace comes first.
        self.keys, self.rows = keys.sort(stable=True)
        self.end_keys, order = keys[ends].sort(stable=True)
        self.end_rows = ends[order]
        self.previous_end = self._previous_ends(keys, positions)
        self._read_starts(starts, ends)

    def _previous_ends(self, keys: Tensor, positions: Tensor) -> Tensor | None:
        """Return for each row the last earlier position of its sample at which another sample ends, -1: none; [num_rows].

        None: no sample of the trace begins with another whole sample.
        """
        number = torch.searchsorted(self.keys, self.end_keys, right=True) - torch.searchsorted(self.keys, self.end_keys)
        num_ends = torch.searchsorted(self.end_keys, self.end_keys, right=True)
        num_ends = num_ends - torch.searchsorted(self.end_keys, self.end_keys)
        if not bool((number > num_ends).any()):
            return None
        _, is_end = _find(self.end_keys, keys)
        rows = torch.arange(keys.numel(), device=keys.device)
        # The last row at or before each one at which a sample ends, taken one row earlier; other samples' rows are not it.
        last = torch.where(is_end, rows, -1).cummax(0).values
        before = torch.nn.functional.pad(last[:-1], (1, 0), value=-1)
        before = before - (rows - positions)
        return torch.where(before >= 0, before, -1).to(torch.int32)

    def _read_starts(self, starts: Tensor, ends: Tensor) -> None:
        """Set what left padding depends on: the equal tokens that samples begin with."""
        tokens = self.token_ids
        self.first_runs: tuple[int, ...] = ()
        self.may_lose_a_run = False
        if not starts.numel():
            return
        # Row of the first change of token behind each start, or the sample's end.
        changes = (tokens[1:] != tokens[:-1]).nonzero().squeeze(1) + 1
        changes = torch.nn.functional.pad(changes, (0, 1), value=tokens.numel())
        behind = torch.minimum(changes[torch.searchsorted(changes, starts, right=True)], ends + 1)
        self.first_runs = tuple(sorted(set((behind - starts).tolist())))
        # A sample without its first tokens may begin like another one: [p, 5, 6] beside [5, 6].
        second = tokens[behind.clamp(max=tokens.numel() - 1)][behind <= ends]
        self.may_lose_a_run = bool(torch.isin(second, tokens[starts]).any())

    def to(self, device: torch.device) -> PrefixIndex:
        """Return a copy on a device."""
        copied = object.__new__(PrefixIndex)
        for name, value in vars(self).items():
            setattr(copied, name, value.to(device) if isinstance(value, Tensor) else value)
        return copied

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return where each key stands among the sorted ones, and whether it is there."""
        return _find(self.keys, keys)

    def rows_of(self, at: Tensor, is_whole: Tensor) -> Tensor:
        """Return the row at places among `end_keys` (whole samples) or `keys`."""
        if not self.rows.numel():
            return torch.zeros_like(at)
        ends = self.end_rows[at.clamp(max=self.end_rows.numel() - 1)]
        return torch.where(is_whole, ends, self.rows[at.clamp(max=self.rows.numel() - 1)])

    def rivals(self, at: int, *, is_whole: bool) -> list[int]:
        """Return all rows with the key at a place among `end_keys` or `keys`, in the order of the trace."""
        keys, rows = (self.end_keys, self.end_rows) if is_whole else (self.keys, self.rows)
        key = keys[at : at + 1]
        first, last = torch.searchsorted(keys, key), torch.searchsorted(keys, key, right=True)
        return [int(row) for row in rows[int(first) : int(last)].tolist()]

    def name(self, row: int) -> tuple[int, int]:
        """Return (sample, position) of a row."""
        from bisect import bisect_right

        sample = bisect_right(self.bounds, row) - 1
        return sample, row - self.bounds[sample]


def _find(keys: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    if not keys.numel():
        return torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
    at = torch.searchsorted(keys, wanted)
    return at, keys[at.clamp(max=keys.numel() - 1)] == wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """The segments of one forward, in flat positions over all context-parallel ranks: rows of the batch, or packed sequences.

    Args:
        begin, end: [S] int64, the flat positions of each segment.
        limit: [S] int64, how many of a segment's first positions hold tokens, padding on the left counted; FAR: not known.
        flat: [cp_size, n] int64, the flat position of each position of each rank.
        shape: [b, s] of one rank's input_ids.
        longest: no segment is longer.
        padded_left: padding may precede a sequence: searched.
        start: [S] int64, padding that is known to precede the sequence; None: not known.
        overflow: scalar bool, True: there are more segments than fit; None: that cannot be.
    """

    begin: Tensor
    end: Tensor
    limit: Tensor
    flat: Tensor
    shape: tuple[int, int]
    longest: int
    padded_left: bool
    start: Tensor | None = None
    overflow: Tensor | None = None

    @classmethod
    def padded(
        cls, shape: tuple[int, int], *, device: torch.device, cp_size: int = 1, partition: Partition = "zigzag"
    ) -> Places:
        """Return the rows of a [b, s] batch, of which each context-parallel rank has a part of every row."""
        num_rows, length = shape[0], shape[1] * cp_size
        bounds = torch.arange(num_rows + 1, device=device) * length
        return cls(
            begin=bounds[:-1],
            end=bounds[1:],
            limit=torch.full_like(bounds[1:], FAR),
            flat=_flat_positions(bounds, shape[0] * shape[1], cp_size, partition),
            shape=shape,
            longest=length,
            padded_left=True,
        )

    @classmethod
    def packed(
        cls,
        shape: tuple[int, int],
        cu_seqlens: Tensor,
        *,
        unpadded: Tensor | None = None,
        cp_size: int = 1,
        partition: Partition = "zigzag",
    ) -> Places:
        """Return packed sequences, and one more segment with the positions after the last of them.

        Args:
            shape: [1, n] of this rank's input_ids.
            cu_seqlens: [num_seqs + 1] integers, where the sequences start, over all ranks, padding counted.
            unpadded: [num_seqs + 1], the same without padding. Where it equals cu_seqlens everywhere, it says nothing: some
                trainers give the padded one twice.

        Raises:
            LayoutError: cu_seqlens reach beyond the row, or a sequence cannot be split in zigzag; on the CPU alone.
        """
        bounds, total = cu_seqlens.to(torch.int64), shape[0] * shape[1] * cp_size
        if bounds.device.type == "cpu":
            _check_bounds(bounds, total, cp_size, partition)
        end = torch.nn.functional.pad(bounds[1:], (0, 1), value=total)
        limit = torch.full_like(end, FAR)
        limit[-1] = 0
        if unpadded is not None:
            real = unpadded.to(bounds.device, torch.int64)
            says_nothing = (real == bounds).all()
            limit[:-1] = torch.where(says_nothing, FAR, real.diff())
        whole = torch.nn.functional.pad(bounds, (0, 1), value=total)
        # On a GPU the host does not know the longest sequence.
        longest = int(whole.diff().max()) if whole.device.type == "cpu" else total
        return cls(
            begin=whole[:-1],
            end=end,
            limit=limit,
            flat=_flat_positions(whole, shape[0] * shape[1], cp_size, partition, is_packed=True),
            shape=shape,
            longest=longest,
            padded_left=False,
        )

    def cut(self, position_ids: Tensor) -> Places:
        """Return the places with a new segment wherever positions restart at 0 after a number above 0.

        Args:
            position_ids: [total] integers in flat order.
        """
        at = torch.arange(position_ids.numel(), device=position_ids.device)
        restarts = (position_ids[1:] == 0) & (position_ids[:-1] > 0)
        begins = torch.nn.functional.pad(restarts, (1, 0)).index_fill_(0, self.begin, True)
        overflow = None
        if begins.device.type == "cpu":
            begin = begins.nonzero().squeeze(1)
        else:  # without a wait, the number of segments is not known
            most = min(at.numel(), _MAX_SEGMENTS + self.begin.numel())
            begin, overflow = torch.where(begins, at, at.numel()).sort().values[:most], begins.sum() > most
        end = torch.nn.functional.pad(begin[1:], (0, 1), value=at.numel())
        return _replace(self, begin=begin, end=end, limit=torch.full_like(end, FAR), overflow=overflow)

    def bound(self, padding_mask: Tensor) -> Places:
        """Return the places with the lengths that a mask tells: from the first to the last position outside of it.

        Args:
            padding_mask: [total] bool in flat order, True: padding.
        """
        before = _sums(~padding_mask)
        first = torch.searchsorted(before, before[self.begin] + 1) - 1
        last = torch.searchsorted(before, before[self.end])
        has_tokens = before[self.end] > before[self.begin]
        start = torch.where(has_tokens, first - self.begin, 0)
        limit = torch.where(has_tokens, last - self.begin, 0)
        return _replace(self, start=start, limit=torch.minimum(limit, self.limit))

    def segments(self) -> Tensor:
        """Return the segment of each flat position, [total] int64."""
        lengths = self.end - self.begin
        return torch.repeat_interleave(lengths, output_size=self.flat.numel())

    def in_order(self, of_ranks: Tensor) -> Tensor:
        """Return all ranks' values, [cp_size, n], in flat order, [total]."""
        if of_ranks.shape[0] == 1:
            return of_ranks[0]  # one rank has everything, in order
        return torch.empty_like(of_ranks).view(-1).index_copy_(0, self.flat.view(-1), of_ranks.reshape(-1))

    def of_rank(self, values: Tensor, rank: int) -> Tensor:
        """Return one rank's part of flat values, [b, s]."""
        return (values if self.flat.shape[0] == 1 else values[self.flat[rank]]).view(self.shape)


def _replace(places: Places, **changes: Any) -> Places:
    return Places(**{name: getattr(places, name) for name in Places.__slots__} | changes)


def _check_bounds(bounds: Tensor, total: int, cp_size: int, partition: Partition) -> None:
    lengths = bounds.diff()
    if not bounds.numel() or int(bounds[0]) or bool((lengths < 0).any()) or int(bounds[-1]) > total:
        raise LayoutError(
            f"MRR204: cu_seqlens {bounds.tolist()} do not fit a packed row of {total} positions: they must rise from 0."
        )
    multiple = 2 * cp_size if cp_size > 1 and partition == "zigzag" else 1
    if bool((lengths % multiple).any()):
        raise LayoutError(
            f"MRR204: cannot split packed sequences of {lengths.tolist()} positions over cp_size={cp_size} in zigzag: each "
            f"must be a multiple of {multiple}."
        )


def _flat_positions(
    bounds: Tensor, num_local: int, cp_size: int, partition: Partition, *, is_packed: bool = False
) -> Tensor:
    """Return the flat position of each local position of each rank, [cp_size, num_local].

    Args:
        bounds: [S + 1], where segments start over all ranks; of packed sequences the last segment is what follows them.
    """
    at = torch.arange(num_local, device=bounds.device)
    ranks = torch.arange(cp_size, device=bounds.device).unsqueeze(1)
    if cp_size == 1 or (
        is_packed and partition == "contiguous"
    ):  # a contiguous stream, cut without regard to sequences
        return ranks * num_local + at
    segment = torch.searchsorted(bounds[1:] // cp_size, at, right=True)
    begin, length = bounds[segment], bounds[segment + 1] // cp_size - bounds[segment] // cp_size
    offset, half = at - begin // cp_size, length // 2
    zigzag = torch.where(offset < half, ranks * half + offset, (2 * cp_size - 2 - ranks) * half + offset)
    in_turn = ranks * length + offset
    if partition == "contiguous":
        return begin + in_turn
    return begin + (torch.where(segment == bounds.numel() - 2, in_turn, zigzag) if is_packed else zigzag)


class Problem(IntEnum):
    """Why a segment cannot be replayed."""

    NONE = 0
    NO_SAMPLE = 1  # its first token begins no sample
    LEFT = 2  # it leaves a sample in the middle
    MORE = 3  # more follows a whole sample than one token, and it is no padding
    CONTINUES = 4  # what may be padding is also how another sample goes on
    STARTS = 5  # with and without its first tokens it is a sample: they may be padding


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """The sample of each segment, [S] int64 each.

    Args:
        row: of the segment's first token; meaningless where count is 0.
        start: positions of padding before it.
        count: tokens whose rows follow one another from `row`.
        live: 1: one more token follows a whole sample.
        problem: see `Problem`.
        rivals: 1: several samples have this prefix, and end here or not as the first of them does.
        at: where the last key stands, among the index's `end_keys` if the sample is `whole`, else `keys`.
        whole: 1: the sample ends with these tokens.
        strong: a token that stands in several places of padding in order, -1: there is none; it must be the padding token.
        weak: a token that may be padding, if it is the padding token elsewhere; -1: there is none.
        single: one token after a whole sample, padding or appended; -1: there is none.
        excluded: a token that must not be the padding token, for it begins the sample; -1: there is none.
        disputed: a token that must not be the padding token, which must be known: another sample ends before it; -1.
    """

    row: Tensor
    start: Tensor
    count: Tensor
    live: Tensor
    problem: Tensor
    rivals: Tensor
    at: Tensor
    whole: Tensor
    strong: Tensor
    weak: Tensor
    single: Tensor
    excluded: Tensor
    disputed: Tensor

    def rows(self, places: Places) -> tuple[Tensor, Tensor]:
        """Return the trace row of each flat position, -1: none, and whether it is padding; [total] each."""
        at = torch.arange(places.flat.numel(), device=self.row.device)
        segment, first = places.segments(), places.begin + self.start
        offset = at - first[segment]
        has_row = (offset >= 0) & (offset < self.count[segment])
        rows = torch.where(has_row, (self.row - first)[segment] + at, -1)
        return rows, (offset < 0) | (offset >= (self.count + self.live)[segment])


def locate(index: PrefixIndex, tokens: Tensor, places: Places, *, padding_token_ids: Tensor | None = None) -> Located:
    """Return which sample each segment holds: the one that its last known prefix belongs to.

    Args:
        tokens: [total] integers in flat order, on the index's device.
        padding_token_ids: [n] integers, the only tokens that padding may hold; None: not declared, so padding is one token.
    """
    tokens = tokens.to(torch.int64)
    search = _Search(index, tokens, places, padding_token_ids)
    zero = torch.zeros_like(places.begin)
    if places.start is not None or not places.padded_left:
        return search.from_start((zero if places.start is None else places.start).unsqueeze(0))
    if tokens.device.type == "cpu" and not index.may_lose_a_run:
        located = search.from_start(zero.unsqueeze(0))
        if not bool((located.problem != 0).any()):
            return located
    run = search.leading_runs()
    starts = [zero, run, *((run - known).clamp(min=0) for known in index.first_runs[:8])]
    return search.from_start(torch.stack(starts))


def cut_samples(
    tokens: Tensor, places: Places, *, padding_token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return from where to where each segment holds a sample, [S] each, and whether its ends may be padding instead.

    Args:
        tokens, places: as for `locate`.
        padding_token_ids: [n] integers, what padding holds; None: not declared.
    """
    start = places.begin if places.start is None else places.begin + places.start
    stop = torch.minimum(places.begin + places.limit, places.end)
    is_bounded = places.limit < FAR
    search = _Search(PrefixIndex(tokens[:0], []), tokens, places, padding_token_ids)
    trailing = search.trailing_starts()
    run = search.leading_runs() if places.padded_left and places.start is None else torch.zeros_like(start)
    if padding_token_ids is not None:
        start = torch.where(is_bounded, start, start + run)
        stop = torch.where(is_bounded, stop, torch.maximum(trailing, start))
        return start, stop, torch.zeros_like(is_bounded)
    return start, stop, ~is_bounded & ((stop - trailing > 1) | (run > 1))


class _Search:
    """One call of `locate`: the cumulative sums that every candidate shares."""

    def __init__(self, index: PrefixIndex, tokens: Tensor, places: Places, padding: Tensor | None) -> None:
        self.index, self.tokens, self.places = index, tokens, places
        self.begin, self.end = places.begin, places.end
        self.stop = torch.minimum(places.begin + places.limit, places.end)
        self.is_bounded = places.limit < FAR
        self.total = tokens.numel()
        self.declared = padding is not None
        if padding is not None:
            # Tokens that are no padding, before each position.
            self.breaks = _sums(~torch.isin(tokens, padding.to(tokens.device, torch.int64)))
        else:
            # Changes of token up to each position.
            self.breaks = torch.nn.functional.pad((tokens[1:] != tokens[:-1]).cumsum(0), (1, 0))[: max(self.total, 1)]

    def at(self, positions: Tensor) -> Tensor:
        """Return the tokens at flat positions, which are clamped into the row."""
        if not self.total:
            return torch.full_like(positions, -1)
        return self.tokens[positions.clamp(0, self.total - 1)]

    def _break(self, positions: Tensor) -> Tensor:
        return self.breaks[positions.clamp(0, self.breaks.numel() - 1)]

    def is_padding(self, begin: Tensor, end: Tensor) -> Tensor:
        """Return whether [begin, end) may be padding: declared tokens, or one token everywhere. True where it is empty."""
        if self.declared:
            return self._break(end) <= self._break(begin)
        return self._break(end - 1) <= self._break(begin)

    def leading_runs(self) -> Tensor:
        """Return how many tokens at each segment's begin may be padding, [S]; 0 where all of it may be."""
        if self.declared:
            past = torch.searchsorted(self.breaks, self._break(self.begin), right=True) - 1
        else:
            past = torch.searchsorted(self.breaks, self._break(self.begin), right=True)
        run = torch.minimum(past, self.end) - self.begin
        return torch.where(past >= self.end, 0, run)

    def trailing_starts(self) -> Tensor:
        """Return from which flat position on a segment's tokens may be padding up to its end, [S]."""
        last = self._break(self.stop if self.declared else self.stop - 1)
        return torch.maximum(torch.searchsorted(self.breaks, last), self.begin)

    def from_start(self, starts: Tensor) -> Located:
        """Return the best of several candidates, [C, S] positions of padding on the left of each segment."""
        begin = torch.minimum(self.begin + starts, self.stop)
        sums = self._key_sums(begin)
        row_of_sums = torch.arange(starts.shape[0], device=begin.device).unsqueeze(1) * sums.shape[1]
        sums, base = sums.view(-1), row_of_sums + begin
        before = sums[base]
        count = self._count_known(sums, base, before, self.stop - begin)
        key = sums[base + count] - before
        at, whole = _find(self.index.end_keys, key)
        whole = whole & (count > 0)
        at = torch.where(whole, at, self.index.find(key)[0])
        row = self.index.rows_of(at, whole) - count + 1
        problem, disputed = torch.zeros_like(count), torch.full_like(count, -1)
        if self.index.previous_end is not None:
            first = self.trailing_starts() - begin  # a shorter sample with padding after it has as many tokens, or more
            is_open = self._may_end_earlier(row, count, first)
            if self.declared:
                found = self._take_shorter(is_open, first, count, at, whole, row, sums, base, before)
                count, at, whole, row, problem = found
            else:
                disputed = torch.where(is_open, self.at(self.stop - 1), -1)
        columns = self._judge_tail(starts, begin, count, whole, problem)
        rivals = self._has_rivals(at, whole) & (count > 0)
        columns |= {"row": row, "start": begin - self.begin, "count": count, "at": at, "whole": whole, "rivals": rivals}
        columns |= {"excluded": torch.full_like(count, -1), "disputed": disputed}
        if starts.shape[0] > 1:
            columns = self._best(begin, columns)
        return Located(**{name: values[0].to(torch.int64) for name, values in columns.items()})

    def _key_sums(self, begin: Tensor) -> Tensor:
        """Return the cumulative sums of the mixed tokens, counted from each candidate's begin, [C, total + 1]."""
        at = torch.arange(self.total, device=begin.device)
        # Terms before a begin have negative positions; differences of sums from the begin on never contain them.
        return _sums(mix(self.tokens, at - begin[:, self.places.segments()]))

    def _count_known(self, sums: Tensor, base: Tensor, before: Tensor, length: Tensor) -> Tensor:
        """Return how many tokens from each begin on are the beginning of a sample: a prefix of a known one is known."""
        low, high = torch.zeros_like(length), length.clamp(min=0)
        ways = torch.arange(1, _WAYS + 1, device=length.device)
        size = self.places.longest
        while size > 0:
            step = (high - low + _WAYS - 1) // _WAYS
            probes = torch.minimum(low.unsqueeze(-1) + step.unsqueeze(-1) * ways, high.unsqueeze(-1))
            _, known = self.index.find(sums[base.unsqueeze(-1) + probes] - before.unsqueeze(-1))
            # A probe of no token is known; the first unknown one ends the count.
            number = (known | (probes == 0)).to(torch.int8).cummin(-1).values.sum(-1)
            high, low = torch.minimum(low + step * (number + 1) - 1, high), torch.minimum(low + step * number, high)
            high = torch.maximum(high, low)
            size = -(-size // _WAYS) - 1
        return low

    def _may_end_earlier(self, row: Tensor, count: Tensor, first: Tensor) -> Tensor:
        """Return whether a shorter sample ends where padding may begin: [5, 6, 7] + 0 beside [5, 6, 7, 0, 9]."""
        previous = self._num_before(row, count)
        return ~self.is_bounded & (count > 0) & (previous > 0) & (previous >= first)

    def _num_before(self, row: Tensor, count: Tensor) -> Tensor:
        """Return the length of the longest sample that these tokens begin with, and that is shorter; 0: there is none."""
        assert self.index.previous_end is not None, "called for such traces alone"
        last = (row + count - 1).clamp(0, self.index.previous_end.numel() - 1)
        return self.index.previous_end[last].to(torch.int64) + 1

    def _take_shorter(
        self,
        is_open: Tensor,
        first: Tensor,
        count: Tensor,
        at: Tensor,
        whole: Tensor,
        row: Tensor,
        sums: Tensor,
        base: Tensor,
        before: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Take the shorter sample where a declared token decides: the longer one does not end with these tokens as well."""
        takes = is_open & ~whole
        shorter = torch.where(takes, self._num_before(row, count), count)
        found, _ = _find(self.index.end_keys, sums[base + shorter] - before)
        at, is_whole = torch.where(takes, found, at), whole | takes
        row = torch.where(takes, self.index.rows_of(found, is_whole) - shorter + 1, row)
        again = takes & self._may_end_earlier(row, shorter, first)
        return shorter, at, is_whole, row, torch.where(again | (is_open & whole), int(Problem.CONTINUES), 0)

    def _judge_tail(
        self, starts: Tensor, begin: Tensor, count: Tensor, whole: Tensor, problem: Tensor
    ) -> dict[str, Tensor]:
        """Say what stands after the known tokens, and before the first."""
        stop, tail = self.stop, begin + count
        rest = stop - tail
        known = count > 0
        nothing = torch.full_like(count, -1)
        if rest.device.type == "cpu" and not bool(((rest > 0) | (starts > 0)).any()):  # no padding, and no other tokens
            is_read = known | (stop <= self.begin)
            problem = torch.where(is_read, problem, int(Problem.NO_SAMPLE))
            return {"live": known & False, "problem": problem, "strong": nothing, "weak": nothing, "single": nothing}
        in_bound = self.is_bounded & (rest > 0)
        all_padding, but_one = self.is_padding(tail, stop), self.is_padding(tail + 1, stop)
        alone = ~known & all_padding & ~in_bound & (starts == 0)
        is_single = whole & (rest == 1)
        live = whole & (is_single | (~in_bound & but_one & ~(all_padding & (rest > 1))))
        if self.declared:
            live &= ~(all_padding & ~in_bound)
        live &= rest > 0
        explained = (rest <= 0) & (known | (stop <= self.begin))
        explained |= live | alone | (known & all_padding & ~in_bound)
        why = torch.where(whole, int(Problem.MORE), int(Problem.LEFT))
        why = torch.where(known, why, int(Problem.NO_SAMPLE))
        problem = torch.where(explained, problem, why)
        strong = weak = single = nothing
        if not self.declared:
            is_open = explained & ~self.is_bounded & (rest > 0)
            padding, number = self.at(stop - 1), rest - live.to(torch.int64)
            is_strong = is_open & (number > 1) & (whole | alone)
            is_weak = is_open & (number > 0) & ~is_strong
            strong, weak = torch.where(is_strong, padding, -1), torch.where(is_weak, padding, -1)
            single = torch.where(is_open & is_single & live, padding, -1)
            if self.places.padded_left and self.places.start is None:
                led, leads = self.at(self.begin), explained & (begin > self.begin)
                long = leads & (begin - self.begin > 1)
                # Both sides are padded with one token, or it is none.
                clash = leads & (((strong >= 0) & (strong != led)) | ((weak >= 0) & (weak != led)))
                problem = torch.where(clash, int(Problem.NO_SAMPLE), problem)
                strong = torch.where(long & ~clash, led, strong)
                weak = torch.where(leads & ~long & ~clash & (strong < 0), led, weak)
        return {"live": live, "problem": problem, "strong": strong, "weak": weak, "single": single}

    def _has_rivals(self, at: Tensor, whole: Tensor) -> Tensor:
        """Return whether the next entry has the same key: of whole samples two that end here, else two that go on."""

        def repeats(keys: Tensor) -> Tensor:
            if keys.numel() < 2:
                return torch.zeros_like(whole)
            here = at.clamp(max=keys.numel() - 2)
            return (keys[here] == keys[here + 1]) & (at < keys.numel() - 1)

        return torch.where(whole, repeats(self.index.end_keys), repeats(self.index.keys))

    def _best(self, begin: Tensor, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the best candidate of each segment, as one: explained, then without padding before it, then the longest."""
        is_explained, known = columns["problem"] == 0, columns["count"] > 0
        fits = is_explained & known
        score = columns["count"] + FAR * is_explained + (FAR // 2) * (columns["start"] == 0) * is_explained
        best = score.argmax(0, keepdim=True)
        chosen = {name: values.gather(0, best) for name, values in columns.items()}
        # Another begin that fits as well: then the tokens between may be padding, or the beginning of a sample.
        rival = fits & (columns["start"] != chosen["start"])
        doubtful = rival.any(0, keepdim=True) & (chosen["problem"] == 0) & (chosen["count"] > 0)
        if self.declared:
            led = self.is_padding(self.begin, self.begin + 1).unsqueeze(0)
            certain = doubtful & led
        else:
            certain = doubtful & (chosen["start"] > 0)
            chosen["excluded"] = torch.where(doubtful & ~certain, self.at(self.begin).unsqueeze(0), -1)
        chosen["problem"] = torch.where(certain, int(Problem.STARTS), chosen["problem"])
        return chosen
