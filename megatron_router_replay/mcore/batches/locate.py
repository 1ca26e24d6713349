"""Find the sample of each segment of a forward, by its longest known prefix.

It is tensor arithmetic on one device. It does not synchronize a GPU; on the CPU, it skips work that a batch does not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_router_replay.mcore.batches.index import PrefixIndex, PrefixSums
from megatron_router_replay.mcore.batches.segments import PaddingRuns, Segments


class Located(NamedTuple):
    """The sample of each segment: [S] int64 each, or ints of a single segment.

    Args:
        start: positions of padding of unknown length before the sequence.
        count: tokens that are the beginning of a sample.
        row: the trace row of the first of them; meaningless where count is 0.
        is_whole: 1: they are all of a sample.
        has_rivals: 1: several samples begin with them; where one of these ends, several that end.
        extra: tokens after the `count` known ones that cannot be padding.
        padding: tokens after these that may be padding, in a segment whose length is not known.
        num_ends: samples that end at the last known token, or before it where padding may begin.
        is_explained: 1: each token is known, may be padding, or is the one token after a whole sample.
        other_starts: 1: with other padding on the left, the segment is explained as well.
        first, after, last: the first token, the first after the known ones, and the last before the segment's stop.
    """

    start: Any
    count: Any
    row: Any
    is_whole: Any
    has_rivals: Any
    extra: Any
    padding: Any
    num_ends: Any
    is_explained: Any
    other_starts: Any
    first: Any
    after: Any
    last: Any

    def segments(self) -> list[Located]:
        """Return a Located of ints for each segment; this synchronizes a GPU."""
        return [Located(*each) for each in torch.stack(list(self), 1).tolist()]

    def live(self, padding_token: Any) -> Any:
        """Return how many tokens after the known ones are no padding.

        Args:
            padding_token: a single token after a whole sample was appended to it, unless it is this one.
        """
        is_single = self.is_whole & (self.extra == 0) & (self.padding == 1)
        return self.extra + (is_single & (self.last != padding_token))


def locate(
    index: PrefixIndex, tokens: Tensor, segments: Segments, *, padding_token_ids: Sequence[int] | None = None
) -> Located:
    """Return the Located of segments.

    Args:
        tokens: [total] integers in flat order, on the index's device.
        padding_token_ids: the only tokens of padding; None: not declared, so padding repeats one token id.
    """
    search = _Search(index, tokens, segments, padding_token_ids)
    start = segments.start
    if not segments.searches_left:
        return search.locate(start)
    # If no sample begins like another one without its first tokens, a start without padding that explains a segment is the
    # only one. The index has runs of equal tokens; several declared ones make other runs.
    is_one_token = padding_token_ids is None or len(padding_token_ids) < 2
    if search.on_host and is_one_token and not index.may_lose_a_run and search.all_begin_samples():
        located = search.locate(start)
        if bool(located.is_explained.all()):
            return located
    run = search.runs.leading(start, segments.end)
    # All of the run is padding, or its last tokens are the sample's first: as many as a sample of the trace begins with.
    lengths = [run, *((run - known).clamp(min=0) for known in index.start_runs(padding_token_ids))]
    chosen = _best(search.locate(torch.stack([start, *(start + length for length in lengths)])))
    # Not before the choice, or a start whose end is undecided would leave the choice to the others.
    return search.with_decided_ends(chosen)


class _Search:
    """A call of `locate`, with the sums and runs that all its candidates share."""

    def __init__(self, index: PrefixIndex, tokens: Tensor, segments: Segments, padding: Sequence[int] | None) -> None:
        self._index, self._segments, self._padding = index, segments, padding
        # Between two that are none, so the token before and after any position exists.
        self._tokens = pad(tokens, (1, 1), value=-1)
        self._sums = PrefixSums(self._tokens)
        self.on_host = self._tokens.device.type == "cpu"

    @cached_property
    def runs(self) -> PaddingRuns:
        """Return the ranges that padding may fill."""
        return PaddingRuns(self._tokens, self._padding)

    def all_begin_samples(self) -> bool:
        """Return whether samples begin with the first token of every segment."""
        return bool(torch.isin(self._tokens.take(self._segments.begin + 1), self._index.first_tokens).all())

    def locate(self, starts: Tensor) -> Located:
        """Return the Located of segments that begin at given positions.

        Args:
            starts: [S] flat positions; or [C, S], of C candidates, and so is the result.
        """
        index, segments, stop = self._index, self._segments, self._segments.stop
        first = torch.minimum(starts, stop)
        origin = self._sums.origin(first)
        before = after = last = num_ends = zeros = torch.zeros_like(first)
        tail = padding_from = stop
        is_all_known = False
        # The CPU's shortcut: on a GPU, the test would synchronize. A shorter sample may end where padding begins.
        if self.on_host and starts.dim() == 1 and not index.has_nested_samples:
            entry, is_known, is_end = index.find(self._sums.keys(origin, stop))
            is_all_known = bool((is_known | (first == stop)).all())
        if not is_all_known:
            padding_from = self.runs.trailing(segments.start, stop)
            if segments.is_bounded is not None:
                padding_from = torch.where(segments.is_bounded, stop, padding_from)
            tail, num_ends = self._find_tail(first, origin, padding_from)
            entry, _, is_end = index.find(self._sums.keys(origin, tail))
            # The token of a position is one entry later.
            before, after, last = (self._tokens.take(each) for each in (segments.begin + 1, tail + 1, stop))
        count, extra = tail - first, (padding_from - tail).clamp_(min=0)
        is_known, padding = count > 0, stop - torch.maximum(padding_from, tail)
        is_whole = is_end & is_known
        row, has_rivals = index.read(entry)
        is_explained = extra <= is_whole  # one token more may follow a whole sample
        if starts.dim() > 1:
            # A segment of padding alone is explained by one candidate, that without padding on the left.
            is_leftmost = starts == segments.start
            is_explained &= is_known | is_leftmost
            if self._padding is None:  # left and right padding repeat the same token id
                is_appended = (is_whole > extra) & (padding == 1)
                is_explained &= is_leftmost | (padding == 0) | (last == before) | is_appended
        located = Located(
            start=first - segments.start,
            count=count,
            row=row - count + 1,
            is_whole=is_whole,
            has_rivals=has_rivals & is_known,
            extra=extra,
            padding=padding,
            num_ends=num_ends,
            is_explained=is_explained,
            other_starts=zeros,
            first=before,
            after=after,
            last=last,
        )
        return located if starts.dim() > 1 else self.with_decided_ends(located)

    def with_decided_ends(self, located: Located) -> Located:
        """Return the Located in which no segment is explained whose end is undecided."""
        # Where several samples end before declared padding, its first tokens may be a sample's.
        if self._padding is None or not self._index.has_nested_samples:
            return located
        return located._replace(is_explained=located.is_explained & (located.num_ends <= 1))

    def _find_tail(self, first: Tensor, origin: tuple[Tensor, Tensor], padding_from: Tensor) -> tuple[Tensor, Tensor]:
        """Return the flat position after known tokens, and the number of ends.

        Both have the shape of `first`. Ends are samples that end there, or before it where padding may begin.
        """
        index, stop, is_open = self._index, self._segments.stop, None
        tail, num_ends = first, torch.zeros_like(first)
        # A prefix of a known prefix is known. So on the CPU, a few lookups where a sample is likely to end decide most
        # segments. For the other segments, and on a GPU for all, every position is looked up.
        if self.on_host:
            # Where the run of padding begins; a token earlier, for one that was appended; later, for a sample's own.
            likely = torch.stack([self._segments.begin, *(padding_from + k for k in (-1, 0, 1, 2)), stop])
            likely = likely.unsqueeze(1) if first.dim() > 1 else likely
            probes = likely.maximum(first + 1).minimum(stop)
            _, found, _ = index.find(self._sums.keys(origin, probes))
            tail = torch.where(found, probes, first).amax(0)
            is_open = torch.where(found, stop + 1, probes).amin(0) > tail + 1
            if index.has_nested_samples:  # a shorter sample may end where padding begins
                is_open |= padding_from < tail
            if not bool(is_open.any()):
                return tail, num_ends
        segment = self._segments.numbers()
        at = torch.arange(self._segments.total, device=segment.device)
        if is_open is not None:
            at = is_open.view(-1, is_open.shape[-1]).any(0)[segment].nonzero().squeeze(1)
            segment = segment[at]

        def spread(values: Tensor) -> Tensor:
            return values.index_select(-1, segment)

        end = at + 1
        _, found, is_end = index.find(self._sums.keys((spread(origin[0]), spread(origin[1])), end))
        found &= (at >= spread(first)) & (at < spread(stop))
        # All shorter prefixes are known, too, so their number is the length.
        known = first.index_add(-1, segment, found.long())
        tail = known if is_open is None else torch.where(is_open, known, tail)
        if index.has_nested_samples:
            is_end = (is_end & found & (end >= spread(padding_from))).long()
            num_ends = num_ends.index_add(-1, segment, is_end)
            if self._padding is not None:  # if exactly one sample ends where padding may begin, the rest is padding
                tail = torch.where(num_ends == 1, torch.zeros_like(tail).index_add(-1, segment, is_end * end), tail)
        return tail, num_ends


def _best(found: Located) -> Located:
    """Return the best of [C, S] candidates, [S]."""
    start, is_explained, is_known = found.start, found.is_explained.long(), found.count > 0
    # Prefer, in this order: explained; explained without padding on the left; with several possible ends, so that the
    # doubt is reported; the most known tokens.
    order = 4 * is_explained + 2 * (is_explained & (start == 0)) + (found.num_ends > 1)
    best = (found.count + (order << 40)).argmax(0)
    # Of the first and last token of a segment, there is one for all candidates.
    columns = {name: each for name, each in found._asdict().items() if each.dim() > 1}
    table = torch.stack(list(columns.values()))
    chosen = found._replace(**dict(zip(columns, table.gather(1, best.expand(len(table), 1, -1))[:, 0])))
    # Another start that fits as well: the tokens between may be padding, or the beginning of a sample.
    others = (is_explained & is_known & (start != chosen.start)).amax(0)
    return chosen._replace(other_starts=others & chosen.is_explained & (chosen.count > 0))
