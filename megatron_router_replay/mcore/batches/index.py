"""Sort a trace's rows by keys of their prefixes; the tokens of forwards find them.

Routing is causal, so the tokens up to a position identify its row. The key of a prefix that begins at position a is

    sum of hash(token[i]) * BASE ** (i - a) for i >= a,         in 64 bits, wrapping,

so differences of one cumulative sum are the keys of all ranges. A key only finds a row: the session compares every token
with the trace's, so a collision raises.
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
        tokens: [1 + n + 1] integers: the tokens of positions 0 to n - 1, between two that are none.
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
        # One token comes before position 0, so entry i is the sum before position i, and a constant.
        self._sums = hashes.cumsum_(0)

    def origin(self, begin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum before `begin`, and the factor that removes it from keys."""
        # BASE ** (size - begin) * BASE ** -size is BASE ** -begin: one inverse for all begins.
        factor = pow(_BASE, -self._size, 1 << 64)
        factor -= (factor >> 63) << 64  # as int64
        return self._sums.take(begin), self._powers.take(self._size - 1 - begin).mul_(factor)

    def keys(self, origin: tuple[Tensor, Tensor], end: Tensor) -> Tensor:
        """Return the keys of the tokens from an origin to `end`, with bit 0 clear."""
        return (self._sums.take(end) - origin[0]).mul_(origin[1]).bitwise_and_(~_CONTINUES)

    def all_keys(self, starts: Tensor, lengths: Tensor) -> Tensor:
        """Return the key of every prefix, [n], of adjacent samples, with bit 0 set."""
        # Without output_size, repeat_interleave would synchronize a GPU to add up the lengths.
        base, factor = (
            torch.repeat_interleave(each, lengths, output_size=self._size - 2) for each in self.origin(starts)
        )
        return torch.sub(self._sums[1:-1], base, out=base).mul_(factor).bitwise_or_(_CONTINUES)


class PrefixIndex:
    """The rows of a trace, sorted by the keys of their prefixes.

    Of equal prefixes, those whose sample ends there come first, then the first of the trace. It has 12 bytes a row, 16 in
    traces of 2 ** 31 rows or more.

    Args:
        token_ids: [num_rows] integers, none below 0.
        sequence_lengths: of the samples; their sum is num_rows.

    Attributes:
        has_nested_samples: a sample begins with all tokens of a different one.
        first_tokens: [n] int64, the tokens that samples begin with, and -1.
        start_runs: the numbers of equal tokens that samples begin with.
        may_lose_a_run: without its first tokens, a sample may begin like a different one.
    """

    def __init__(self, token_ids: Tensor, sequence_lengths: Sequence[int]) -> None:
        device, num_rows = token_ids.device, token_ids.numel()
        self.token_ids = token_ids
        self.bounds = [0, *accumulate(sequence_lengths)]
        # Two entries more than rows, with the greatest key: a search and the entry after it always exist.
        self._keys = torch.full((num_rows + 2,), torch.iinfo(torch.int64).max, device=device)
        self._rows = torch.zeros(num_rows + 2, dtype=torch.int32 if num_rows < 1 << 31 else torch.int64, device=device)
        self.first_tokens = torch.tensor([-1], device=device)
        self.start_runs: tuple[int, ...] = ()
        self.may_lose_a_run = self.has_nested_samples = False
        if not num_rows:
            return
        lengths = torch.tensor([length for length in sequence_lengths if length], dtype=torch.int64, device=device)
        ends = lengths.cumsum(0)
        starts = ends - lengths
        tokens = pad(token_ids, (1, 1), value=-1)
        keys = PrefixSums(tokens).all_keys(starts, lengths)
        keys[ends - 1] -= _CONTINUES
        order = torch.empty_like(keys)
        torch.sort(keys, stable=True, out=(self._keys[:-2], order))
        self._rows[:-2] = order
        continued = keys[ends - 1] + _CONTINUES
        self.has_nested_samples = bool((self._keys[torch.searchsorted(self._keys, continued)] == continued).any())
        # Padding on the left may be the token that a sample begins with: `locate` tries a start for each of these numbers.
        runs = PaddingRuns(tokens, None).leading(starts, ends)
        runs = torch.where(runs == 0, lengths, runs)
        first, second = token_ids[starts], starts + runs
        begins = set(zip(first.tolist(), runs.tolist()))
        self.start_runs = tuple(sorted({run for _, run in begins}))
        self.first_tokens = torch.tensor([-1, *{token for token, _ in begins}], device=device)
        # [p, 5, 6] and [5, 6], or [p, p, 5] and [p, 5].
        loses_all = torch.isin(token_ids[second[second < ends]], first).any()
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

    def find(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Find the first entry at or after each key.

        Returns:
            The entries, a mask of known prefixes, and a mask of prefixes where a sample ends.
        """
        at = torch.searchsorted(self._keys, keys)
        there = self._keys.take(at)
        return at, (there & ~_CONTINUES) == keys, there == keys

    def read(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of entries, and a mask of those that are not the only one.

        The next entry has the same prefix then, and both samples end there, or both continue.
        """
        return self._rows.take(at).to(torch.int64), self._keys.take(at + 1) == self._keys.take(at)

    def rivals(self, row: int, count: int, *, is_whole: bool) -> list[int]:
        """Return the first rows of all samples that begin with a prefix.

        Args:
            row, count: the prefix, as rows of the trace.
            is_whole: return only samples that end with this prefix.
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


def index_of(trace: RoutingTrace) -> PrefixIndex:
    """Return the PrefixIndex of a trace, which is made once and kept with it.

    Raises:
        TraceError: the trace has no token ids, or no samples, or tokens of some rows are unknown.
    """
    trace.check_unchanged()  # else a kept index may be of former tokens
    if "index" not in trace.derived:
        if trace.token_ids is None or trace.sequence_lengths is None:
            missing = [name for name in ("token_ids", "sequence_lengths") if getattr(trace, name) is None]
            raise TraceError(
                f"MRR424: cannot find rows by tokens: the trace has no {' and no '.join(missing)}. Make it with "
                "RoutingTrace.from_samples, or queue rows with session.microbatch(rows, model)."
            )
        if num_unknown := int((trace.token_ids < 0).sum()):
            raise TraceError(
                f"MRR108: cannot find rows by tokens: {num_unknown} rows of the trace have no token id. Another rank routed "
                "them: join the parts with recording.gather() or merge_traces."
            )
        trace.derived["index"] = PrefixIndex(trace.token_ids, trace.sequence_lengths)
    index: PrefixIndex = trace.derived["index"]
    return index
