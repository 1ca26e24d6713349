"""Find the sample of a sequence by its tokens, among the samples of a trace in the order of their tokens.

Routing is causal, so the tokens up to a position name its row. The key of a sample is its tokens as big-endian bytes, and
bytes in order are tokens in order: of all samples, a neighbour of a sequence's own place shares the longest prefix with it.
Keys are compared byte by byte.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from megatron_router_replay.errors import TraceError
from megatron_router_replay.trace import RoutingTrace

_BYTES = 4
"""Bytes of a token in a key."""

_PAST = b"\xff"
"""Sorts after every token, because a token is less than 2 ** 31."""


def keys_of(tokens: Any) -> bytes:
    """Return the key of tokens, [n] integers of 0 to 2 ** 31 - 1."""
    return np.asarray(tokens).astype(">u4").tobytes()


class Reading(NamedTuple):
    """The sample of a sequence.

    Args:
        start: positions of padding before the sequence.
        known: tokens that are the beginning of a sample.
        row: the trace row of the first of them; -1 where known is 0.
        live: tokens after them that are no padding.
        is_whole: they are all of a sample.
        first, past: places, in the order of tokens, of the samples that begin with them; of those that end there, if any do.
        ended: lengths of shorter samples that end where padding may begin.
    """

    start: int
    known: int
    row: int
    live: int
    is_whole: bool = False
    first: int = 0
    past: int = 0
    ended: tuple[int, ...] = ()

    @property
    def is_explained(self) -> bool:
        """True if every token is a sample's or padding; one token more may follow a whole sample."""
        return self.live <= self.is_whole

    @property
    def is_ambiguous(self) -> bool:
        """True if several samples fit."""
        return self.past - self.first > 1 or bool(self.ended)


PADDING_ALONE = Reading(0, 0, -1, 0)


class SortedSamples:
    """The samples of a trace in the order of their tokens; of equal ones, those with more routes come first.

    Args:
        token_ids: [n] integers of 0 to 2 ** 31 - 1.
        sequence_lengths: of the samples; their sum is n.
        replay_mask: [n] bool, True: the row has a route.

    Attributes:
        token_ids: as an array.
        bounds: where samples begin, and n.
    """

    def __init__(self, token_ids: Any, sequence_lengths: Any, replay_mask: Any) -> None:
        self.token_ids = np.asarray(token_ids)
        self.bounds = [0, *accumulate(sequence_lengths)]
        spans = [(begin, end) for begin, end in zip(self.bounds, self.bounds[1:]) if end > begin]
        lacking = np.zeros(len(spans), dtype=np.int64)
        if spans and not (has_route := np.asarray(replay_mask)).all():
            lacking = np.add.reduceat(~has_route, [begin for begin, _ in spans], dtype=np.int64)
        keys = keys_of(self.token_ids)
        found = sorted(
            (keys[_BYTES * begin : _BYTES * end], missing, begin)
            for (begin, end), missing in zip(spans, lacking.tolist())
        )
        self._keys = [key for key, _, _ in found]
        self._places = [(missing, begin) for _, missing, begin in found]
        self._leading_runs: dict[tuple[int, ...], set[int]] = {}

    def leading_runs(self, padding: tuple[int, ...]) -> set[int]:
        """Return the numbers of padding tokens with which samples begin, where these are any."""
        if padding not in self._leading_runs:
            runs = set()
            for key, (_, begin) in zip(self._keys, self._places):
                if self.token_ids[begin] in padding:
                    own = self.token_ids[begin : begin + len(key) // _BYTES]
                    others = np.flatnonzero(~np.isin(own, padding))
                    runs.add(int(others[0]) if others.size else own.size)
            self._leading_runs[padding] = runs
        return self._leading_runs[padding]

    def read_plain(self, start: int, key: bytes, real: int, doubt: int) -> Reading | None:
        """Return the Reading of a sequence that is the beginning of a single sample; None: call `read`.

        Args:
            start, key, real, doubt: as for `read`.
        """
        own = key[: _BYTES * real]
        first = bisect_left(self._keys, own)
        found, after = (*self._keys[first : first + 2], b"", b"")[:2]
        if not found.startswith(own) or after.startswith(own) or not real:
            return None
        if len(key) > len(own) and found.startswith(key[: len(own) + _BYTES]):
            return None  # it continues with the tokens of padding
        if doubt < real and first and self._keys[first - 1].startswith(own[: _BYTES * doubt]):
            return None  # a shorter one may end where padding may begin
        return Reading(start, real, self._places[first][1], 0, len(found) == len(own), first, first + 1)

    def read(self, start: int, key: bytes, real: int, doubt: int) -> Reading:
        """Return the Reading of a sequence that takes the most tokens for a sample's.

        Args:
            start: positions of padding before the sequence.
            key: of all of its tokens, padding after them included.
            real: tokens up to the last one that is no padding.
            doubt: tokens before the first one that may be padding.
        """
        own = key[: _BYTES * real]
        first = bisect_left(self._keys, own)
        if real and first < len(self._keys) and self._keys[first].startswith(own):
            count, prefix = real, own
            if len(key) > len(own):
                # A sample may go on with the tokens of padding.
                longer = key[: len(own) + _BYTES]
                at = bisect_left(self._keys, longer, first)
                if at < len(self._keys) and self._keys[at].startswith(longer):
                    count = self.num_known(key)
                    prefix = key[: _BYTES * count]
                    first = bisect_left(self._keys, prefix)
        else:
            count = self.num_known(own)
            prefix = key[: _BYTES * count]
            first = bisect_left(self._keys, prefix)
        if not count:
            return Reading(start, 0, -1, real)
        is_whole = self._keys[first] == prefix
        past = bisect_right(self._keys, prefix, first) if is_whole else bisect_left(self._keys, prefix + _PAST, first)
        ended: tuple[int, ...] = ()
        if doubt < count:
            # Keys from there on, up to this one, begin with the tokens before the doubtful ones.
            at = bisect_left(self._keys, key[: _BYTES * max(1, doubt)], 0, first)
            shorter = {len(other) // _BYTES for other in self._keys[at:first] if prefix.startswith(other)}
            ended = tuple(sorted(shorter))
        _, row = self._places[first] if past == first + 1 else min(self._places[first:past])
        return Reading(start, count, row, max(0, real - count), is_whole, first, past, ended)

    def num_known(self, key: bytes) -> int:
        """Return how many tokens of a key are the beginning of a sample, the most there are."""
        at = bisect_left(self._keys, key)
        return max((_num_shared(key, other) for other in self._keys[max(0, at - 1) : at + 1]), default=0)

    def rivals(self, reading: Reading, key: bytes) -> list[tuple[int, int]]:
        """Return (first row, tokens that are equal) of each other sample that fits.

        Args:
            key: of the sequence.
        """
        rivals = [(begin, reading.known) for _, begin in sorted(self._places[reading.first : reading.past])]
        for stop in reading.ended:
            _, begin = self._places[bisect_left(self._keys, key[: _BYTES * stop])]
            rivals.append((begin, stop))
        return [rival for rival in rivals if rival[0] != reading.row]

    def locate_inside(self, key: bytes) -> tuple[int, int] | None:
        """Return the first (sample, position above 0) with the tokens of a key, None: there is none; for an error."""
        for own, (_, begin) in zip(self._keys, self._places):
            at = own.find(key, 1)
            while at > 0 and at % _BYTES:
                at = own.find(key, at + 1)
            if at > 0:
                return self.name(begin + at // _BYTES)
        return None

    def name(self, row: int) -> tuple[int, int]:
        """Return (sample, position) of a row."""
        sample = bisect_right(self.bounds, row) - 1
        return sample, row - self.bounds[sample]


def _num_shared(one: bytes, other: bytes) -> int:
    """Return with how many equal tokens two keys begin."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter // _BYTES
    differs = np.frombuffer(one, np.uint32, shorter // _BYTES) != np.frombuffer(other, np.uint32, shorter // _BYTES)
    return int(differs.argmax())


def samples_of(trace: RoutingTrace) -> SortedSamples:
    """Return the SortedSamples of a trace with tokens and samples, which are made once and kept with it.

    Raises:
        TraceError: tokens of some rows are unknown.
    """
    trace.check_unchanged()  # else kept ones may be of former tokens
    if "samples" not in trace.derived:
        assert trace.token_ids is not None  # without these, no replay follows tokens
        assert trace.sequence_lengths is not None
        ids = trace.token_ids.cpu().numpy()
        if ids.size and ids.min() < 0:
            raise TraceError(
                f"MRR108: cannot find rows by tokens: {int((ids < 0).sum())} rows of the trace have no token id. Another "
                "rank routed them: join the parts with recording.gather() or merge_traces."
            )
        trace.derived["samples"] = SortedSamples(ids, trace.sequence_lengths, trace.replay_mask.cpu().numpy())
    samples: SortedSamples = trace.derived["samples"]
    return samples
