"""Find the row of a token in a trace by a key of the token's prefix.

Routing is causal, so the tokens up to a position identify its row. The key of tokens a to b - 1 is

    sum of hash(token[i]) * BASE ** (i - a + 2) for a <= i < b,         in 64 bits, wrapping,

so the key of any range is the difference of two entries of a cumulative sum, times BASE ** -a. A key only finds a row: the
session compares every token with the trace's, so a collision raises.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_router_replay.errors import TraceError
from megatron_router_replay.mcore.batches.segments import PaddingRuns
from megatron_router_replay.trace import RoutingTrace

_BASE = 6364136223846793005
"""5 modulo 8: the period of its powers is the longest, 2 ** 62. Source: the multiplier of Knuth's MMIX generator."""

_CONTINUES = 1
"""Bit 0 of a key in the index: the sample continues after this prefix. Without it, the sample ends there."""


class PrefixSums:
    """Compute the keys of ranges of tokens from a cumulative sum of hashes.

    Args:
        tokens: [1 + n + 1] integers: the tokens of positions 0 to n - 1, with one filler before them and one after.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._size = tokens.numel()
        # BASE ** 1, BASE ** 2, ...
        self._powers = torch.full_like(tokens, _BASE, dtype=torch.int64).cumprod_(0)
        # The constant keeps the hash of token 0 from being 0; the product mixes upwards, the shift downwards.
        hashes = torch.rsub(tokens.to(torch.int64), 0x3D4D51C2D82B14B1, alpha=0x61C8864680B583EB)
        hashes ^= hashes >> 32
        hashes *= -0x40A7B892E31B1A47
        hashes *= self._powers
        # Entry i is the sum of all hashes before position i and of the filler, which differences cancel.
        self._sums = hashes.cumsum_(0)

    def origin(self, begin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum before `begin`, and BASE ** -begin."""
        # BASE ** (size - begin) * BASE ** -size is BASE ** -begin: one inverse for all begins.
        factor = pow(_BASE, -self._size, 1 << 64)
        factor -= (factor >> 63) << 64  # as int64
        return self._sums.take(begin), self._powers.take(self._size - 1 - begin).mul_(factor)

    def keys(self, origin: tuple[Tensor, Tensor], end: Tensor) -> Tensor:
        """Return the keys of the tokens from an origin up to, but without, `end`; bit 0 is clear."""
        return (self._sums.take(end) - origin[0]).mul_(origin[1]).bitwise_and_(~_CONTINUES)

    def all_keys(self, starts: Tensor, lengths: Tensor) -> Tensor:
        """Return the key of every prefix of every sample, [n], with bit 0 set.

        The samples fill all n positions.
        """
        # Without output_size, repeat_interleave would synchronize a GPU to add up the lengths.
        base, factor = (
            torch.repeat_interleave(each, lengths, output_size=self._size - 2) for each in self.origin(starts)
        )
        return torch.sub(self._sums[1:-1], base, out=base).mul_(factor).bitwise_or_(_CONTINUES)


class PrefixIndex:
    """The rows of a trace, sorted by the keys of their prefixes.

    Among equal prefixes, those where a sample ends come first, then those of samples with fewer rows without a route; ties
    keep the order of the trace. Beside its tokens, it has 12 bytes a row, 16 in traces of 2 ** 31 rows or more.

    Args:
        token_ids: [num_rows] integers, none below 0.
        sequence_lengths: of the samples; their sum is num_rows.
        replay_mask: [num_rows] bool, True: the row has a route; None: all have. Of samples with equal prefixes, those that
            lack the fewest routes come first.

    Attributes:
        has_nested_samples: a sample begins with all tokens of a shorter one.
        first_tokens: [n] int64, the tokens that samples begin with, and -1.
        may_lose_a_run: if its first tokens were taken for padding, a sample might begin like a different one.
    """

    def __init__(self, token_ids: Tensor, sequence_lengths: Sequence[int], replay_mask: Tensor | None = None) -> None:
        device, num_rows = token_ids.device, token_ids.numel()
        self.token_ids = token_ids
        self.bounds = [0, *accumulate(sequence_lengths)]
        # Two entries more than rows, with the greatest key: a search and the entry after it always exist.
        self._keys = torch.full((num_rows + 2,), torch.iinfo(torch.int64).max, device=device)
        self._rows = torch.zeros(num_rows + 2, dtype=torch.int32 if num_rows < 1 << 31 else torch.int64, device=device)
        self.first_tokens = torch.tensor([-1], device=device)
        self._start_runs: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}  # by the declared tokens of padding
        self.may_lose_a_run = self.has_nested_samples = False
        if not num_rows:
            return
        lengths = torch.tensor([length for length in sequence_lengths if length], dtype=torch.int64, device=device)
        ends = lengths.cumsum(0)
        starts = ends - lengths
        tokens = pad(token_ids, (1, 1), value=-1)
        keys = PrefixSums(tokens).all_keys(starts, lengths)
        keys[ends - 1] -= _CONTINUES
        by_routes = None if replay_mask is None else _order_by_routes(replay_mask, starts, lengths)
        order = torch.empty_like(keys)
        torch.sort(keys if by_routes is None else keys[by_routes], stable=True, out=(self._keys[:-2], order))
        self._rows[:-2] = order if by_routes is None else by_routes[order]
        continued = keys[ends - 1] + _CONTINUES
        self.has_nested_samples = bool((self._keys[torch.searchsorted(self._keys, continued)] == continued).any())
        runs = PaddingRuns(tokens, None).leading(starts, ends)
        runs = torch.where(runs == 0, lengths, runs)  # `leading` returns 0 for a sample of one repeated token
        first, second = token_ids[starts], starts + runs
        begins = set(zip(first.tolist(), runs.tolist()))
        self._start_runs[()] = tuple(sorted({run for _, run in begins}))
        self.first_tokens = torch.tensor([-1, *{token for token, _ in begins}], device=device)
        # Without all of the run, [p, 5, 6] is like [5, 6]; without a part of it, [p, p, 5] is like [p, 5]. After a sample of
        # one repeated token, a token may be appended.
        loses_all = torch.isin(token_ids[second[second < ends]], first).any() | (second == ends).any()
        self.may_lose_a_run = bool(loses_all) or len(begins) > len(self.first_tokens) - 1

    def to(self, device: torch.device) -> PrefixIndex:
        """Return the PrefixIndex on a device."""
        moved = copy(self)  # without __init__, which would sort again
        vars(moved).update({name: each.to(device) for name, each in vars(self).items() if isinstance(each, Tensor)})
        return moved

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(each.nbytes for each in vars(self).values() if isinstance(each, Tensor))

    def start_runs(self, padding_token_ids: Sequence[int] | None) -> tuple[int, ...]:
        """Return the distinct lengths of the runs that samples begin with and that padding on the left may continue, sorted.

        A run is of equal tokens, or of declared ones where several are declared.

        Args:
            padding_token_ids: the tokens of padding; None: not declared.
        """
        declared = tuple(padding_token_ids or ())
        key = declared if len(declared) > 1 else ()
        if key not in self._start_runs:  # synchronizes a GPU, once a trace
            lengths = torch.tensor(self.bounds, device=self.token_ids.device).diff()
            lengths = lengths[lengths > 0]
            ends = lengths.cumsum(0)
            runs = PaddingRuns(pad(self.token_ids, (1, 1), value=-1), key).leading(ends - lengths, ends)
            begins = torch.isin(self.token_ids[ends - lengths], torch.tensor(key, device=lengths.device))
            runs = torch.where(runs == 0, lengths, runs)[begins]  # 0: it has no other token
            self._start_runs[key] = tuple(sorted(set(runs.tolist())))
        return self._start_runs[key]

    def find(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Find the first entry at or after each key.

        Returns:
            The entries, a mask of known prefixes, and a mask of prefixes where a sample ends.
        """
        at = torch.searchsorted(self._keys, keys)
        there = self._keys.take(at)
        return at, (there & ~_CONTINUES) == keys, there == keys

    def read(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of entries, and a mask of those with a duplicate.

        The next entry is a duplicate if it has the same prefix, and both samples end there or both continue.
        """
        return self._rows.take(at).to(torch.int64), self._keys.take(at + 1) == self._keys.take(at)

    def rivals(self, row: int, count: int, *, is_whole: bool) -> list[int]:
        """Return the first row of each sample that begins with a prefix.

        Args:
            row, count: the prefix is the tokens of `count` rows from `row` on.
            is_whole: only samples that are exactly this prefix.
        """
        sums = PrefixSums(pad(self.token_ids[row : row + count], (1, 1)))
        begin, end = torch.tensor([[0], [count]], device=self.token_ids.device)
        key = sums.keys(sums.origin(begin), end)
        first = int(torch.searchsorted(self._keys, key))
        past = int(torch.searchsorted(self._keys, key if is_whole else key | _CONTINUES, right=True))
        return sorted(last + 1 - count for last in self._rows[first:past].tolist())

    def name(self, row: int) -> tuple[int, int]:
        """Return (sample, position) of a row."""
        sample = bisect_right(self.bounds, row) - 1
        return sample, row - self.bounds[sample]


def _order_by_routes(replay_mask: Tensor, starts: Tensor, lengths: Tensor) -> Tensor | None:
    """Return the rows, [n], those of samples that lack fewer routes first; None: all samples are alike."""
    routed = pad(replay_mask.cumsum(0), (1, 0))
    lacking = lengths - routed[starts + lengths] + routed[starts]
    if bool((lacking == lacking[0]).all()):
        return None
    return torch.repeat_interleave(lacking, lengths).argsort(stable=True)


def index_of(trace: RoutingTrace) -> PrefixIndex:
    """Return the PrefixIndex of a trace with tokens and samples, which is made once and kept with it.

    Raises:
        TraceError: tokens of some rows are unknown.
    """
    trace.check_unchanged()  # else a kept index may be of former tokens
    if "index" not in trace.derived:
        assert trace.token_ids is not None  # without these, no replay follows tokens
        assert trace.sequence_lengths is not None
        if num_unknown := int((trace.token_ids < 0).sum()):
            raise TraceError(
                f"MRR108: cannot find rows by tokens: {num_unknown} rows of the trace have no token id. Another rank routed "
                "them: join the parts with recording.gather() or merge_traces."
            )
        trace.derived["index"] = PrefixIndex(trace.token_ids, trace.sequence_lengths, trace.replay_mask)
    index: PrefixIndex = trace.derived["index"]
    return index
