"""Judge all segments of a session: padding is one token, equal samples are alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_router_replay.checks import Check
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.mcore.batches.index import index_of
from megatron_router_replay.mcore.batches.locate import Located
from megatron_router_replay.mcore.batches.segments import Segments
from megatron_router_replay.trace import RoutingTrace

_WINDOW = 128
"""Positions over which the routes of equal samples are compared."""

_NOISE = 0.25
"""The share of decisions in which two runs of an engine over the same tokens may differ.

Captures of real engines differ in 0 of 5,404 decisions at equal prefixes. Engine and trainer have different kernels; they
differ in 3 % of a tiny model's decisions and about 10 % of a large one's. Unrelated texts differ in nearly all.
"""


class SegmentJudge:
    """The checks of all segments of a session.

    They raise at each forward on the CPU, when the session ends on a GPU.

    Args:
        trace: of the session.
        declares_padding: the tokens of padding are known.
        check: raises at once on the CPU, at the end of the session on a GPU.
    """

    def __init__(self, trace: RoutingTrace, *, declares_padding: bool, check: Check) -> None:
        self._trace, self._declares_padding, self._check = trace, declares_padding, check
        self._evidence = PaddingEvidence()
        self._waiting: list[tuple[_Forward, Located]] = []  # on a GPU
        self._token: Tensor | None = None  # on a GPU, the padding token that was seen, [1], -1: none
        self._compared: set[tuple[int, int, int]] = set()

    def add(self, where: str, segments: Segments, located: Located) -> Tensor:
        """Check the segments of a forward; return how many tokens of each are live, [S].

        Args:
            where: the rank, chunk and micro-batch, for messages.
            segments, located: of the forward.

        Raises:
            LayoutError: tokens are of no sample; on the CPU.
        """
        forward = _Forward(where, replace(segments, is_jump=None))
        if located.count.device.type == "cpu":
            found = located.segments()
            if problem := self._unexplained(forward, found) or self._problem_of(forward, found):
                raise LayoutError(problem)
            token = self._evidence.token
            numbers = [each.extra if self._declares_padding else each.live(token) for each in found]
            return torch.tensor(numbers, dtype=torch.int64)
        self._check(
            (located.is_explained == 0).any(),
            f"MRR206: {where}: a forward got tokens of no sample of the trace.",
            partial(self._unexplained, forward, located),
        )
        self._waiting.append((forward, located))
        # The GPU's form of `PaddingEvidence.token`. The greatest is used; if there are different ones, `problems` returns an
        # error.
        is_after = (located.padding > 1) & ((located.is_whole > 0) | (located.count == 0))
        tokens = [torch.where(is_after, located.last, -1), torch.where(located.start > 1, located.first, -1)]
        tokens += [] if self._token is None else [self._token]
        self._token = torch.cat(tokens).amax(0, keepdim=True)
        live: Tensor = located.extra if self._declares_padding else located.live(self._token)
        return live

    def problems(self) -> list[str]:
        """Return the error texts that depend on all forwards; this synchronizes a GPU."""
        found = [(forward, located.segments()) for forward, located in self._waiting]
        texts = [self._problem_of(*each) for each in found if not self._unexplained(*each)]
        return [each for each in [*dict.fromkeys(texts), self._evidence.problem(at_end=True)] if each]

    def _problem_of(self, forward: _Forward, found: list[Located]) -> str:
        """Return the error text of explained segments, "": none so far."""
        for number, segment in enumerate(found):
            place = partial(forward.place, number, segment)
            if segment.has_rivals and (problem := self._unlike_rivals(segment)):
                return f"MRR208: {place()}: {problem}"
            if segment.other_starts and (segment.start or self._declares_padding):
                return f"MRR206: {place()}: {self._undecided('before', segment)}"
            if not self._declares_padding:
                self._evidence.add(segment, place)
        return self._evidence.problem(at_end=False)

    def _unexplained(self, forward: _Forward, found: Located | list[Located]) -> str:
        """Return the error text of the first unexplained segment, "": none."""
        found = found.segments() if isinstance(found, Located) else found
        numbers = [number for number, each in enumerate(found) if not each.is_explained]
        if not numbers:
            return ""
        more = f" ({len(numbers) - 1} more sequences of this forward cannot be followed either)" if numbers[1:] else ""
        segment = found[numbers[0]]
        return f"MRR206: {forward.place(numbers[0], segment)}: {self._describe(segment)}{more}"

    def _describe(self, segment: Located) -> str:
        count, sample = segment.count, self._name(segment.row) if segment.count else ""
        declare = "mrr.replay(..., padding_token_ids=[...])"
        if not count:
            return (
                f"no sample of the trace begins with token {segment.first}, nor with what follows it. Is this batch of "
                "another rollout, or was it cut on the left? An evaluation runs inside `with session.paused():`."
            )
        if self._declares_padding and segment.num_ends > 1:
            return self._undecided("after", segment)
        if segment.extra > 1 and segment.is_whole:
            return (
                f"it holds all {count} tokens of {sample}, and from position {count} on (token {segment.after}) more than "
                f"one token that is no padding. If it is padding, give padding_mask to the model, or say {declare}."
            )
        if segment.extra > segment.is_whole:
            return (
                f"its first {count} tokens are those of {sample}, which has token {self._token_at(segment.row + count)} at "
                f"position {count}, but it has token {segment.after} there. Were the tokens of the rollout tokenized "
                "again, or changed?"
            )
        return (
            f"{sample} has token {segment.first} before it and token {segment.last} after it, and padding is one token. "
            f"Give the model padding_mask, or say {declare}."
        )

    def _undecided(self, side: str, segment: Located) -> str:
        return (
            f"tokens {side} {self._name(segment.row)} may be padding or may belong to another sample of the trace, which "
            f"also has them (the sequence begins with token {segment.first}). Give the model padding_mask, or unpadded "
            "cu_seqlens_q beside cu_seqlens_q_padded."
        )

    def _token_at(self, row: int) -> int:
        return int(index_of(self._trace).token_ids[row])

    def _name(self, row: int) -> str:
        sample, _ = index_of(self._trace).name(row)
        ids = self._trace.sample_ids
        return f"sample {sample}" + (f" ({ids[sample]!r})" if ids is not None else "")

    def _unlike_rivals(self, segment: Located) -> str:
        """Return how samples of a segment have unlike routes, "": they are alike."""
        # Micro-batches of a rollout repeat prompts: compare each prefix once in a session.
        key = (segment.row, segment.count, segment.is_whole)
        if key in self._compared:
            return ""
        self._compared.add(key)
        used = segment.row
        for other in index_of(self._trace).rivals(used, segment.count, is_whole=bool(segment.is_whole)):
            if why := unlike(self._trace, used, other, segment.count):
                return (
                    f"{self._name(used)} and {self._name(other)} of the trace begin with the same {segment.count} tokens, "
                    f"which a forward got, and {why}: which of them it holds, its tokens do not say. Replay them in "
                    "different sessions, or queue rows with session.microbatch(rows, model)."
                )
        return ""


class _Forward(NamedTuple):
    """The rank, chunk and micro-batch of a forward, for messages, and its Segments."""

    where: str
    segments: Segments

    def place(self, number: int, segment: Located) -> str:
        """Return where the first token after the known ones of a segment is; this synchronizes a GPU."""
        at = int(self.segments.start[number]) + segment.start + segment.count
        return f"{self.where}, {self.segments.place(at)}, sequence {number}"


class PaddingEvidence:
    """The tokens that forwards show as padding, each with its first place.

    Attributes:
        strong: several in a row before or after samples: it is the padding token.
        weak: one before or after a sample, or where a sequence leaves its sample: it must be the padding token.
        single: one after a whole sample, to which it may have been appended: it may be the padding token.
        excluded: a sample begins with it: it must not be the padding token.
        disputed: another sample ends before it: another token must be the padding token.
    """

    def __init__(self) -> None:
        self.strong: dict[int, str] = {}
        self.weak: dict[int, str] = {}
        self.single: dict[int, str] = {}
        self.excluded: dict[int, str] = {}
        self.disputed: dict[int, str] = {}

    @property
    def token(self) -> int:
        """Return the padding token that was seen first, -1: none."""
        return next(iter(self.strong), -1)

    def add(self, segment: Located, place: Callable[[], str]) -> None:
        """Add an explained segment; `place` returns where its first token after the known ones is."""
        shown: list[tuple[dict[int, str], int]] = []
        if segment.other_starts:
            shown.append((self.excluded, segment.first))
        if segment.num_ends > segment.is_whole:
            shown.append((self.disputed, segment.last))
        # Where other padding on the left explains the segment as well, these tokens may be a sample's.
        is_padding = segment.last == segment.first or not segment.other_starts
        if segment.padding > 1 and (segment.is_whole or not segment.count) and is_padding:
            shown.append((self.strong, segment.last))
        elif segment.is_whole and segment.padding == 1 and not segment.extra:
            shown.append((self.single, segment.last))
        elif segment.padding:
            shown.append((self.weak, segment.last))
        if segment.start:
            shown.append((self.strong if segment.start > 1 else self.weak, segment.first))
        for tokens, token in shown:
            if token not in tokens:  # a place costs more than the check
                tokens[token] = place()

    def problem(self, *, at_end: bool) -> str:
        """Return the error text if padding is not one token, "": it is."""
        declare = "Say mrr.replay(..., padding_token_ids=[...]), or give the model padding_mask."
        if len(self.strong) > 1:
            (one, first), (other, second) = list(self.strong.items())[:2]
            return (
                f"MRR207: tokens after samples are no padding: several places of {first} hold token {one}, of {second} token "
                f"{other}, and padding is one token. {declare}"
            )
        known = next(iter(self.strong), None)
        # Before the end, a later forward may still show the padding token.
        for token, where in self.weak.items() if known is not None or at_end else ():
            if token != known:
                seen_as = f"padding is token {known} elsewhere" if known is not None else "no other place shows padding"
                return (
                    f"MRR207: {where}: token {token} stands where a sequence leaves its sample, and {seen_as}, so it is "
                    f"another text than the trace's or padding that cannot be told from it. {declare}"
                )
        for token, where in (self.excluded | self.disputed).items():
            if token == known or (known is None and at_end and (token in self.disputed or token in self.single)):
                return (
                    f"MRR207: {where}: token {token} may be padding or a part of a sample: the trace has samples with and "
                    "without it. Give the model padding_mask, or unpadded cu_seqlens_q beside cu_seqlens_q_padded"
                    + ("." if token in self.excluded else "; or say mrr.replay(..., padding_token_ids=[...]).")
                )
        return ""


def unlike(trace: RoutingTrace, first: int, other: int, count: int) -> str:
    """Return how `count` rows of two samples differ beyond noise, "": they do not."""
    one, two = slice(first, first + count), slice(other, other + count)
    versions = trace.weight_version
    if versions is not None and not torch.equal(versions[one], versions[two]):
        at = int((versions[one] != versions[two]).nonzero()[0])
        return f"were generated with different weights ({int(versions[first + at])} and {int(versions[other + at])})"
    both = trace.replay_mask[one] & trace.replay_mask[two]
    # Sorted, because the order of a token's experts is no difference.
    routes = [trace.topk_indices[rows].sort(dim=2).values for rows in (one, two)]
    differ = ((routes[0] != routes[1]).any(dim=2) & both.unsqueeze(1)).sum(1)
    # By windows, because equal routes of a long prompt would hide a short part that differs.
    for begin in range(0, count, _WINDOW):
        window = slice(begin, begin + _WINDOW)
        number = int(both[window].sum()) * trace.num_layers
        different = int(differ[window].sum())
        # Three standard deviations above the share, so that a few decisions alone prove nothing.
        if different > _NOISE * number + 3 * (_NOISE * (1 - _NOISE) * number) ** 0.5:
            return f"have different routes ({different} of {number} decisions from position {begin} on)"
    return ""
