"""Find the trace rows of a forward's tokens by keys of their prefixes.

    a trace's tokens and samples                -> PrefixIndex    sorted keys, once a trace
    [b, s], cu_seqlens, padding_mask, ranks     -> Places         segments, and the positions of each rank
    PrefixIndex, Places, tokens                 -> Located        the sample of each segment, the row of each position

All of it is tensor arithmetic on one device. It does not synchronize a GPU; on the CPU, it skips work that a batch does not
need.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_router_replay.errors import LayoutError

_BASE = 6364136223846793005
"""5 modulo 8: the period of its powers is the longest, 2 ** 62. Source: the multiplier of Knuth's MMIX generator."""

_MAX_SEGMENTS = 4096
"""The most segments that restarts of position_ids may add on a GPU, where the host cannot count them."""

Partition = Literal["zigzag", "contiguous"]


# Routing is causal, so the tokens up to a position identify its row. The key of a prefix that begins at position a is
#     sum of hash(token[i]) * _BASE ** (i - a) for i >= a,         in 64 bits, wrapping.
# A key only finds a row: the session compares every token with the trace's, so a collision raises.
class _PrefixSums:
    """Compute the keys of ranges of tokens from a cumulative sum of hashes.

    Args:
        tokens: [n] integers, n > 0.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._size = tokens.numel()
        # BASE ** 1, BASE ** 2, ...
        self._powers = torch.full_like(tokens, _BASE, dtype=torch.int64).cumprod(0)
        # The constant keeps the hash of token 0 from being 0; the product mixes upwards, the shift downwards.
        hashes = torch.rsub(tokens.to(torch.int64), 0x3D4D51C2D82B14B1, alpha=0x61C8864680B583EB)
        hashes ^= hashes >> 32
        hashes *= -0x40A7B892E31B1A47
        hashes *= self._powers
        self._sums = hashes.new_zeros(self._size + 1)
        torch.cumsum(hashes, 0, out=self._sums[1:])

    def origin(self, begin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum before `begin`, and the factor that removes it from keys."""
        # _BASE ** (size - begin) * _BASE ** (-size - 1) is _BASE ** (-begin - 1): one inverse for all begins.
        factor = pow(_BASE, -self._size - 1, 1 << 64)
        factor -= (factor >> 63) << 64  # as int64
        return self._sums.take(begin), self._powers.take((self._size - 1 - begin).clamp_(min=0)).mul_(factor)

    def keys(self, origin: tuple[Tensor, Tensor], end: Tensor) -> Tensor:
        """Return the keys of the tokens from an origin to flat positions `end`."""
        return (self._sums.take(end) - origin[0]).mul_(origin[1])

    def keys_by_segment(self, starts: Tensor, lengths: Tensor) -> Tensor:
        """Return the key of every prefix, [n], of segments that cover all tokens without gaps."""
        # Without output_size, repeat_interleave would synchronize a GPU to add up the lengths.
        base, factor = (torch.repeat_interleave(each, lengths, output_size=self._size) for each in self.origin(starts))
        return (self._sums[1:] - base).mul_(factor)


class PrefixIndex:
    """Sort the rows of a trace by the keys of their prefixes.

    It has 12 bytes a row, 16 in traces of 2 ** 29 rows or more.

    Args:
        token_ids: [num_rows] integers, none below 0.
        sequence_lengths: of the samples; their sum is num_rows.
    """

    def __init__(self, token_ids: Tensor, sequence_lengths: Sequence[int]) -> None:
        device, num_rows = token_ids.device, token_ids.numel()
        self.token_ids = token_ids
        self.bounds = [0, *accumulate(sequence_lengths)]
        # One entry more than rows, with the greatest key, so that every search ends at an entry.
        self._keys = torch.full((num_rows + 1,), torch.iinfo(torch.int64).max, device=device)
        # An entry is row * 4, + 1 if its sample ends there, + 2 if several samples have this prefix (and end there as well).
        # Two bits are flags, so int32 suffices below 2 ** 29 rows.
        self._entries = torch.zeros(
            num_rows + 1, dtype=torch.int32 if num_rows < 1 << 29 else torch.int64, device=device
        )
        self.start_runs: tuple[int, ...] = ()
        self.may_lose_a_run = self.has_nested_samples = False
        if not num_rows:
            return
        lengths = torch.tensor([length for length in sequence_lengths if length], dtype=torch.int64, device=device)
        ends = lengths.cumsum(0)
        starts = ends - lengths
        keys = _PrefixSums(token_ids).keys_by_segment(starts, lengths)
        end_keys = keys[ends - 1]
        order = torch.empty_like(keys)
        # Stable: of equal prefixes the first of the trace comes first.
        torch.sort(keys, stable=True, out=(self._keys[:-1], order))
        order <<= 2
        order[:-1] += (self._keys[1:-1] == self._keys[:-2]).to(torch.int64) << 1
        self._entries[:-1] = order
        self._mark_ends(end_keys, ends - 1)
        self._read_starts(starts, ends)

    def _mark_ends(self, keys: Tensor, rows: Tensor) -> None:
        """Set the first entry of a key to a sample that ends there, if there is one."""
        # `find` reads the first entry alone, so a whole sample must come before samples that continue.
        keys, order = keys.sort(stable=True)
        first, end = torch.searchsorted(keys, keys), torch.searchsorted(keys, keys, right=True)
        at = torch.searchsorted(self._keys, keys)
        # Samples with equal tokens write equal entries: `first` is the trace's first of them.
        self._entries[at] = (rows[order[first]] * 4 + 1 + 2 * (end - first > 1)).to(self._entries.dtype)
        # More rows than ends have this key: a sample begins with all tokens of another.
        num_rows = torch.searchsorted(self._keys[:-1], keys, right=True) - at
        self.has_nested_samples = bool((num_rows > end - first).any())

    def _read_starts(self, starts: Tensor, ends: Tensor) -> None:
        """Set `start_runs`, the numbers of equal tokens that samples begin with."""
        # Padding on the left may be the token that a sample begins with: `locate` tries a start for each of these numbers.
        tokens = self.token_ids
        changes = (tokens[1:] != tokens[:-1]).nonzero().squeeze(1) + 1
        changes = torch.cat([changes, ends[-1:]])
        second = torch.minimum(
            changes[torch.searchsorted(changes, starts, right=True).clamp(max=len(changes) - 1)], ends
        )
        first = tokens[starts]
        begins = set(zip(first.tolist(), (second - starts).tolist()))
        self.start_runs = tuple(sorted({run for _, run in begins}))
        # Without its leading p tokens a sample may begin like another one: [p, 5, 6] and [5, 6], or [p, p, 5] and [p, 5].
        loses_all = torch.isin(tokens[second[second < ends]], first).any()
        self.may_lose_a_run = bool(loses_all) or len(begins) > len({token for token, _ in begins})

    def to(self, device: torch.device) -> PrefixIndex:
        """Return the PrefixIndex on a device."""
        # Without __init__, which would sort again.
        copied = object.__new__(PrefixIndex)
        vars(copied).update(
            {name: each.to(device) if isinstance(each, Tensor) else each for name, each in vars(self).items()}
        )
        return copied

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self._keys.device

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(each.nbytes for each in vars(self).values() if isinstance(each, Tensor))

    def find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first entry at or after each key, and a mask of equal keys."""
        at = torch.searchsorted(self._keys, keys)
        return self._entries.take(at), self._keys.take(at) == keys

    def rivals(self, row: int, count: int, *, is_whole: bool) -> list[int]:
        """Return the first rows of all samples that begin with a prefix.

        Args:
            row, count: the prefix, as rows of the trace.
            is_whole: return only samples that end with this prefix.
        """
        sums = _PrefixSums(self.token_ids[row : row + count])
        bounds = torch.tensor([0, count], device=self.device)
        key = sums.keys(sums.origin(bounds[:1]), bounds[1:])
        first, end = torch.searchsorted(self._keys, key), torch.searchsorted(self._keys, key, right=True)
        # A set, because the first entry may repeat a later one, see `_mark_ends`.
        last_rows = {each >> 2 for each in self._entries[int(first) : int(end)].tolist()}
        return [
            last + 1 - count
            for last in sorted(last_rows)
            if not is_whole or self.bounds[bisect_right(self.bounds, last)] == last + 1
        ]

    def name(self, row: int) -> tuple[int, int]:
        """Return (sample, position) of a row."""
        sample = bisect_right(self.bounds, row) - 1
        return sample, row - self.bounds[sample]


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """The segments of a forward: rows of the batch, or packed sequences.

    Flat positions count over all context-parallel ranks, segment after segment.

    Args:
        begin, end: [S] int64, the flat positions of each segment; segments follow one another.
        stop: [S] int64, the end of a segment's tokens where its length is known, else its end.
        is_bounded: bool, [S] or a scalar, True: the length is known; None: no segment's length is known.
        start: [S] int64, padding that is known to precede the sequence; None: not known.
        flat: [cp_size, n] int64, the flat position of each position of each rank; None: one rank has all, in order.
        shape: [b, s] of one rank's input_ids.
        padded_left: padding may precede a sequence: it is searched unless `start` is known.
        overflow: scalar bool, True: there are more segments than fit; None: that cannot be.
    """

    begin: Tensor
    end: Tensor
    stop: Tensor
    is_bounded: Tensor | None = None
    start: Tensor | None = None
    flat: Tensor | None
    shape: tuple[int, int]
    padded_left: bool
    overflow: Tensor | None = None

    @classmethod
    def padded(
        cls, shape: tuple[int, int], *, device: torch.device, cp_size: int = 1, partition: Partition = "zigzag"
    ) -> Places:
        """Return the Places of a [b, s] batch, a segment for each row.

        Each context-parallel rank has a part of every row.
        """
        bounds = torch.arange(shape[0] + 1, device=device) * (shape[1] * cp_size)
        return cls(
            begin=bounds[:-1],
            end=bounds[1:],
            stop=bounds[1:],
            flat=_flat_positions(bounds, shape, cp_size, partition),
            shape=shape,
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
        """Return the Places of packed sequences, a segment for each and one of padding.

        Args:
            shape: [1, n] of this rank's input_ids.
            cu_seqlens: [num_seqs + 1] integers, where the sequences start, over all ranks, padding counted.
            unpadded: [num_seqs + 1], the same without padding. It is ignored if it equals cu_seqlens everywhere: some
                trainers pass the padded one twice.

        Raises:
            LayoutError: cu_seqlens reach beyond the row, or a sequence cannot be split in zigzag; on the CPU alone.
        """
        total = shape[0] * shape[1] * cp_size
        starts = cu_seqlens.to(torch.int64)
        if starts.device.type == "cpu":  # on a GPU, the check would synchronize
            _check_bounds(starts, total, cp_size, partition)
        # The last segment is the rest of the row. It stops where it begins, so all of it is padding.
        bounds = torch.cat([starts, torch.full_like(starts[:1], total)])
        is_bounded, stop = None, torch.cat([starts[1:], starts[-1:]])
        if unpadded is not None:
            real = unpadded.to(starts.device, torch.int64)
            is_bounded = (real != starts).any()
            stop[:-1] = starts[:-1] + real.diff()
        return cls(
            begin=bounds[:-1],
            end=bounds[1:],
            stop=stop,
            is_bounded=is_bounded,
            flat=_flat_positions(bounds, shape, cp_size, partition, is_packed=True),
            shape=shape,
            padded_left=False,
        )

    def cut(self, position_ids: Tensor) -> Places:
        """Return the Places with a new segment wherever positions restart at 0.

        A 0 after a 0 begins no segment.

        Args:
            position_ids: [total] integers in flat order.
        """
        total, by_row = position_ids.numel(), position_ids.view(self.shape[0], -1)
        begins = torch.zeros_like(by_row, dtype=torch.bool)
        torch.logical_and(by_row[:, 1:] == 0, by_row[:, :-1] > 0, out=begins[:, 1:])
        begin, overflow = self.begin, None
        if begins.device.type == "cpu":
            if not bool(begins.any()):
                return self
            # Column 0: every row of the batch begins a segment.
            begin = begins.index_fill_(1, begin[:1], True).flatten().nonzero().squeeze(1)
        else:  # without a synchronization, the number of segments is not known
            at = torch.arange(total, device=begins.device)
            most = min(total, _MAX_SEGMENTS + begin.numel())
            begins = begins.view(-1).index_fill_(0, begin, True)
            # Surplus segments begin and end at `total`: they are empty.
            begin, overflow = torch.where(begins, at, total).sort().values[:most], begins.sum() > most
        end = torch.cat([begin[1:], torch.full_like(begin[:1], total)])
        return replace(self, begin=begin, end=end, stop=end, overflow=overflow)

    def bound(self, padding_mask: Tensor) -> Places:
        """Return the Places with lengths: from first to last token outside of a mask.

        Args:
            padding_mask: [total] bool in flat order, True: padding.
        """
        # Tokens before each position.
        before = torch.zeros(padding_mask.numel() + 1, dtype=torch.int64, device=padding_mask.device)
        torch.cumsum(~padding_mask, 0, out=before[1:])
        first, last = before.take(self.begin), before.take(self.end)
        # `before` rises by 1 after each token, so a search finds a segment's first and last token.
        start = torch.searchsorted(before, first + 1) - 1 - self.begin
        stop = torch.minimum(torch.searchsorted(before, last), self.stop)
        start, stop = torch.where(last > first, start, 0), torch.where(last > first, stop, self.begin)
        return replace(self, start=start, stop=stop, is_bounded=torch.ones_like(stop, dtype=torch.bool))

    def segments(self) -> Tensor:
        """Return the segment number of each flat position, [total] int64."""
        total = self.shape[0] * self.shape[1] if self.flat is None else self.flat.numel()
        return torch.repeat_interleave(self.end - self.begin, output_size=total)

    def in_order(self, of_ranks: Tensor) -> Tensor:
        """Return all ranks' values, [cp_size, n], in flat order, [total]."""
        if self.flat is None:
            return of_ranks[0]
        return torch.empty_like(of_ranks).view(-1).index_copy_(0, self.flat.view(-1), of_ranks.reshape(-1))

    def by_rank(self, at: Tensor) -> Tensor:
        """Return rank * n + local position of flat positions."""
        if self.flat is None:
            return at
        by_rank = torch.arange(self.flat.numel(), device=at.device).view_as(self.flat)
        return self.in_order(by_rank).take(at)

    def of_rank(self, values: Tensor, rank: int) -> Tensor:
        """Return one rank's part of flat values, [b, s]."""
        return (values if self.flat is None else values[self.flat[rank]]).view(self.shape)


def _check_bounds(bounds: Tensor, total: int, cp_size: int, partition: Partition) -> None:
    lengths = bounds.diff()
    if not bounds.numel() or int(bounds[0]) or bool((lengths < 0).any()) or int(bounds[-1]) > total:
        raise LayoutError(
            f"MRR204: cu_seqlens {bounds.tolist()} do not fit a packed row of {total} positions: they must rise from 0."
        )
    # Zigzag gives each rank two of 2 * cp_size equal chunks.
    multiple = 2 * cp_size if cp_size > 1 and partition == "zigzag" else 1
    if multiple > 1 and bool((lengths % multiple).any()):
        raise LayoutError(
            f"MRR204: cannot split packed sequences of {lengths.tolist()} positions over cp_size={cp_size} in zigzag: each "
            f"must be a multiple of {multiple}."
        )


def _flat_positions(
    bounds: Tensor, shape: tuple[int, int], cp_size: int, partition: Partition, *, is_packed: bool = False
) -> Tensor | None:
    """Return the flat positions of each rank, [cp_size, n]; None: one rank has all.

    Args:
        bounds: [S + 1], where segments start over all ranks; of packed sequences the last segment is the rest of the row.
    """
    if cp_size == 1:
        return None
    if not is_packed and partition == "zigzag" and shape[1] % 2:
        raise LayoutError(
            f"MRR204: a context-parallel rank has {shape[1]} positions of each sequence: zigzag needs two chunks of equal "
            "length."
        )
    num_local = shape[0] * shape[1]
    at = torch.arange(num_local, device=bounds.device)
    ranks = torch.arange(cp_size, device=bounds.device).unsqueeze(1)
    if is_packed and partition == "contiguous":  # ranks cut the whole row, without regard to sequences
        return ranks * num_local + at
    # A rank has 1 / cp_size of each segment, so its local bounds are the flat ones divided.
    segment = torch.searchsorted(bounds[1:] // cp_size, at, right=True)
    begin, length = bounds[segment], bounds[segment + 1] // cp_size - bounds[segment] // cp_size
    offset, half = at - begin // cp_size, length // 2
    in_turn = ranks * length + offset
    if partition == "contiguous":
        return begin + in_turn
    # Rank r has chunks r and 2 * cp_size - 1 - r. The rest of a packed row need not have a multiple of 2 * cp_size
    # positions, so it is split in turn.
    zigzag = torch.where(offset < half, ranks * half + offset, (2 * cp_size - 2 - ranks) * half + offset)
    return begin + (torch.where(segment == bounds.numel() - 2, in_turn, zigzag) if is_packed else zigzag)


class Located(NamedTuple):
    """The sample of each segment: [S] int64 each, or ints of a single segment.

    Args:
        start: positions of padding before the sequence.
        count: tokens that are the beginning of a sample.
        entry: the index's entry of the last of them; meaningless where count is 0.
        extra: tokens after the `count` known ones that cannot be padding.
        padding: tokens after these that may be padding, in a segment whose length is not known.
        num_ends: samples that end at the last known token, or before it where padding may begin.
        is_explained: 1: each token is known, may be padding, or is the one token after a whole sample.
        other_starts: 1: with other padding on the left, the segment is explained as well.
        first, after, last: the first token, the first after the known ones, and the last before the segment's stop.
        at: the flat position after the known tokens, by rank: rank * n + local position.
    """

    start: Any
    count: Any
    entry: Any
    extra: Any
    padding: Any
    num_ends: Any
    is_explained: Any
    other_starts: Any
    first: Any
    after: Any
    last: Any
    at: Any

    @property
    def is_whole(self) -> Any:
        """Return 1 where the known tokens are all of a sample."""
        return (self.count > 0) & self.entry & 1

    @property
    def has_rivals(self) -> Any:
        """Return 1 where several samples begin with these tokens.

        If the first of them ends here, only samples that end here count.
        """
        return (self.count > 0) & (self.entry >> 1) & 1

    @property
    def is_single(self) -> Any:
        """Return 1 where one token, padding or appended, follows a whole sample."""
        return self.is_whole * (self.extra == 0) * (self.padding == 1)

    @property
    def row(self) -> Any:
        """Return the trace row of the first known token."""
        return (self.entry >> 2) - self.count + 1

    def segments(self) -> list[Located]:
        """Return a Located of ints for each segment; this synchronizes a GPU."""
        return [Located(*each) for each in torch.stack(list(self), 1).tolist()]

    def rows(self, places: Places, live: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the trace rows and padding of all flat positions, [total] each.

        Args:
            places: of the segments; on a later pipeline stage, in another layout than that of the tokens.
            live: [S], tokens after the known ones that are routed live.

        Returns:
            The rows, -1: none, and a mask of padding; None: no position has padding, nor a row of -1.
        """
        segment, first = places.segments(), places.begin + self.start
        tail, on_host = first + self.count, segment.device.type == "cpu"
        at = torch.arange(segment.numel(), device=segment.device)

        def spread(values: Tensor) -> Tensor:
            return values.index_select(0, segment)

        rows = at + spread(self.row - first)
        # On the CPU, a sum is cheaper than the masks; on a GPU, it would synchronize.
        if on_host and int(self.count.sum()) == rows.numel():
            return rows, None
        padding = no_row = at >= spread(tail)
        if not on_host or bool(live.any()):  # live tokens have no row and are no padding
            padding = at >= spread(tail + live)
        if not on_host or bool(self.start.any()):
            before = at < spread(first)
            padding, no_row = padding | before, no_row | before
        return rows.masked_fill_(no_row, -1), padding


def locate(index: PrefixIndex, tokens: Tensor, places: Places, *, padding_token_ids: Tensor | None = None) -> Located:
    """Return the Located of segments: the sample with the longest known prefix.

    Args:
        tokens: [total] integers in flat order, on the index's device.
        padding_token_ids: [n] integers, the only tokens of padding; None: not declared, so padding repeats one token id.
    """
    search = _Search(index, tokens, places, padding_token_ids)
    zero = torch.zeros_like(places.begin)
    if places.start is not None or not places.padded_left:
        return search.locate((zero if places.start is None else places.start).unsqueeze(0))
    # If no sample begins like another one without its first tokens, a start without padding that explains a segment is the
    # only one.
    if search.on_host and not index.may_lose_a_run:
        located = search.locate(zero.unsqueeze(0))
        if bool(located.is_explained.all()):
            return located
    run = search.runs.leading(places.begin, places.end)
    # All of the run is padding, or its last tokens are the sample's first: as many as a sample of the trace begins with.
    starts = [zero, run, *((run - known).clamp(min=0) for known in index.start_runs)]
    return search.locate(torch.stack(starts))


def cut_samples(
    tokens: Tensor, places: Places, *, padding_token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return start and stop of segments' samples, and a mask of doubtful ones; [S].

    A sample is doubtful if several equal tokens at its ends may be padding.

    Args:
        tokens, places: as for `locate`.
        padding_token_ids: [n] integers, the tokens of padding; None: not declared.
    """
    runs, stop = _Runs(_never_empty(tokens), padding_token_ids), places.stop
    padding_from = runs.trailing(places.begin, stop)
    run = torch.zeros_like(stop)
    if places.padded_left and places.start is None:
        run = runs.leading(places.begin, places.end)
    start = places.begin + (0 if places.start is None else places.start)
    is_bounded = torch.zeros_like(stop, dtype=torch.bool) if places.is_bounded is None else places.is_bounded
    if padding_token_ids is None:
        # A single token at an end is the sample's; several equal ones may be padding.
        return start, stop, ~is_bounded & ((stop - padding_from > 1) | (run > 1))
    start = torch.where(is_bounded, start, start + run)
    stop = torch.where(is_bounded, stop, torch.maximum(padding_from, start))
    return start, stop, torch.zeros_like(is_bounded)


def _never_empty(tokens: Tensor) -> Tensor:
    """Return the tokens as int64, or a single one if there are none."""
    # `take` needs an element; empty segments do not use its result.
    return tokens.to(torch.int64) if tokens.numel() else torch.full((1,), -1, device=tokens.device)


class _Runs:
    """Find the ranges that padding may fill: declared tokens, or equal ones.

    Args:
        tokens: [n] int64, n > 0.
        declared: [k] integers; None: padding is one token.
    """

    def __init__(self, tokens: Tensor, declared: Tensor | None) -> None:
        # Before each position, the number of tokens that are no padding; or, undeclared, of changes of the token id.
        self._counts = tokens.new_zeros(tokens.numel() + 1)
        self._shift = 1 if declared is None else 0
        ends = tokens[1:] != tokens[:-1] if declared is None else ~torch.isin(tokens, declared.to(tokens.device))
        torch.cumsum(ends, 0, out=self._counts[1 + self._shift :])

    def trailing(self, begin: Tensor, stop: Tensor) -> Tensor:
        """Return the flat position where padding up to `stop` may begin."""
        # The counts are constant over a run, so a search finds its first position.
        return torch.maximum(torch.searchsorted(self._counts, self._counts.take(stop)) - self._shift, begin)

    def leading(self, begin: Tensor, end: Tensor) -> Tensor:
        """Return the length of possible padding from `begin` on; 0 if it reaches `end`."""
        here = (begin + self._shift).clamp_(max=self._counts.numel() - 1)
        past = torch.searchsorted(self._counts, self._counts.take(here), right=True) - 1
        # Where all of a segment may be padding, `trailing` finds it.
        return torch.where(past >= end, 0, past - begin)


class _Search:
    """A call of `locate`, with the sums and runs that all its candidates share."""

    def __init__(self, index: PrefixIndex, tokens: Tensor, places: Places, padding: Tensor | None) -> None:
        self._index, self._places, self._padding = index, places, padding
        self._tokens = _never_empty(tokens)
        self._sums = _PrefixSums(self._tokens)
        self.on_host = self._tokens.device.type == "cpu"

    @cached_property
    def runs(self) -> _Runs:
        """Return the ranges that padding may fill."""
        return _Runs(self._tokens, self._padding)

    def locate(self, starts: Tensor) -> Located:
        """Return the Located of the best candidates.

        Args:
            starts: [C, S], positions of padding on the left of each segment.
        """
        places, stop = self._places, self._places.stop
        first = torch.minimum(places.begin + starts, stop)
        origin = self._sums.origin(first)
        if (located := self._locate_known(first, origin)) is not None:
            return located
        padding_from = self.runs.trailing(places.begin, stop)
        if places.is_bounded is not None:
            padding_from = torch.where(places.is_bounded, stop, padding_from)
        tail, num_ends = self._find_tail(first, origin, padding_from)
        entry, _ = self._index.find(self._sums.keys(origin, tail))
        count, extra = tail - first, (padding_from - tail).clamp_(min=0)
        padding, is_known = stop - torch.maximum(padding_from, tail), count > 0
        before, last = self._token(places.begin), self._token(stop - 1)
        # One token more may follow a whole sample, bit 0 of its entry. A segment of padding alone is explained by one
        # candidate, that without padding on the left.
        is_explained = (extra <= (entry & is_known)) & (is_known | (starts == 0))
        # Where several samples end before declared padding, its first tokens may be a sample's.
        if self._padding is not None and self._index.has_nested_samples:
            is_explained &= num_ends <= 1
        if self._padding is None and starts.shape[0] > 1:  # left and right padding repeat the same token id
            is_explained &= (starts == 0) | (padding == 0) | (last == before)
        found = Located(
            start=first - places.begin,
            count=count,
            entry=entry.long(),
            extra=extra,
            padding=padding,
            num_ends=num_ends,
            is_explained=is_explained.long(),
            other_starts=torch.zeros_like(count),
            first=before.expand_as(first),
            after=self._token(tail),
            last=last.expand_as(first),
            at=places.by_rank(torch.minimum(tail, stop - 1).clamp_(min=0)),
        )
        return _best(found) if starts.shape[0] > 1 else Located(*(each[0] for each in found))

    def _token(self, at: Tensor) -> Tensor:
        return self._tokens.take(at.clamp(0, self._tokens.numel() - 1))

    def _locate_known(self, first: Tensor, origin: tuple[Tensor, Tensor]) -> Located | None:
        """Return the Located of a batch if all its tokens are known, else None."""
        places, stop = self._places, self._places.stop
        # The CPU's shortcut: on a GPU, the test would synchronize.
        if not self.on_host or first.shape[0] > 1:
            return None
        if self._index.has_nested_samples and (places.is_bounded is None or not bool(places.is_bounded.all())):
            return None  # a shorter sample may end where padding begins
        entry, found = self._index.find(self._sums.keys(origin, stop))
        if not bool((found | (first == stop)).all()):
            return None
        zero, at = torch.zeros_like(stop), places.by_rank((stop - 1).clamp_(min=0))
        start, count = (first - places.begin)[0], (stop - first)[0]
        return Located(start, count, entry[0].long(), zero, zero, zero, zero + 1, zero, zero, zero, zero, at)

    def _find_tail(self, first: Tensor, origin: tuple[Tensor, Tensor], padding_from: Tensor) -> tuple[Tensor, Tensor]:
        """Return the flat position after known tokens, and the number of ends; [C, S].

        Ends are samples that end there, or before it where padding may begin.
        """
        stop, tail, is_open = self._places.stop, first, None
        # A prefix of a known prefix is known. So on the CPU, a few lookups where a sample is likely to end decide most
        # segments. For the other segments, and on a GPU for all, every position is looked up.
        if self.on_host:
            likely = (padding_from, padding_from + 1, padding_from + 2, stop - 1, stop)
            least, most = (first + 1).unsqueeze(-1), stop.unsqueeze(-1)
            probes = torch.stack([each.expand_as(first) for each in likely], -1)
            probes = torch.cat([least, probes], -1).maximum(least).minimum(most)
            _, found = self._index.find(self._sums.keys((origin[0].unsqueeze(-1), origin[1].unsqueeze(-1)), probes))
            tail = torch.where(found, probes, least - 1).amax(-1)
            unknown = torch.where(found, most + 1, probes).amin(-1)
            is_open = unknown > tail + 1
            if self._index.has_nested_samples:  # a shorter sample may end where padding begins
                is_open |= padding_from < tail
            if not bool(is_open.any()):
                return tail, torch.zeros_like(tail)
        segment = self._places.segments()
        at = torch.arange(segment.numel(), device=segment.device)
        if is_open is not None:
            at = is_open.any(0).index_select(0, segment).nonzero().squeeze(1)
            segment = segment[at]

        def spread(values: Tensor) -> Tensor:
            return values.index_select(-1, segment)

        end, zeros = at + 1, torch.zeros_like(first)
        entry, found = self._index.find(self._sums.keys((spread(origin[0]), spread(origin[1])), end))
        found &= (at >= spread(first)) & (at < spread(stop))
        # All shorter prefixes are known, too, so their number is the length.
        known = first + zeros.index_add(1, segment, found.long())
        tail = known if is_open is None else torch.where(is_open, known, tail)
        if not self._index.has_nested_samples:
            return tail, zeros
        is_end = (found & (entry & 1) & (end >= spread(padding_from))).long()
        num_ends = zeros.index_add(1, segment, is_end)
        if (
            self._padding is not None
        ):  # declared ids: if exactly one sample ends where padding may begin, the rest is padding
            tail = torch.where(num_ends == 1, zeros.index_add(1, segment, is_end * end), tail)
        return tail, num_ends


def _best(found: Located) -> Located:
    """Return the best of [C, S] candidates, [S]."""
    start, count, is_explained = found.start, found.count, found.is_explained
    # Prefer, in this order: explained; explained without padding on the left; with several possible ends, so that the
    # doubt is reported; the most known tokens.
    score = count + (is_explained << 41) + ((is_explained * (start == 0)) << 40) + ((found.num_ends > 1).long() << 39)
    best = score.argmax(0, keepdim=True)
    chosen = Located(*(each.gather(0, best)[0] for each in found))
    # Another start that fits as well: the tokens between may be padding, or the beginning of a sample.
    others = (is_explained * (count > 0) * (start != chosen.start)).amax(0)
    return chosen._replace(other_starts=others * chosen.is_explained * (chosen.count > 0))
