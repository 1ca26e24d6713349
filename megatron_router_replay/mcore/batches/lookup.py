"""Find the trace rows of a forward by the inputs of its model chunk, on the host.

once a trace          samples_of        its samples, sorted by their tokens
once a micro-batch    RowLookup.locate  the call's tokens -> segments -> samples -> rows
                      number_tokens     of a recording: the call's tokens -> segments -> new samples, numbered

A segment is one sequence of a forward with its padding. A `Reading` has where in a segment the sample begins, how many of
its tokens are known, and in which trace row the first one is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from megatron_router_replay.checks import warn
from megatron_router_replay.errors import LayoutError, listed
from megatron_router_replay.mcore.batches import misfit
from megatron_router_replay.mcore.batches.equal_samples import unlike
from megatron_router_replay.mcore.batches.forward_counts import ForwardCounts
from megatron_router_replay.mcore.batches.hidden_states import ForwardTokens
from megatron_router_replay.mcore.batches.inputs import ForwardInputs, TokenReader
from megatron_router_replay.mcore.batches.misfit import CUT, PADDED_LEFT, Misfit, Names
from megatron_router_replay.mcore.batches.row_inputs import RowInputs
from megatron_router_replay.mcore.batches.samples import (
    PADDING_ALONE,
    Reading,
    SortedSamples,
    keys_of,
    samples_of,
)
from megatron_router_replay.mcore.batches.segments import CpPartition, Segments
from megatron_router_replay.trace import RoutingTrace


class _Limits(NamedTuple):
    """Flat positions of each segment's tokens, [S].

    Args:
        low: the first token after declared padding on the left.
        high: one past the last token that is not declared padding.
        doubt: tokens from here on may be padding; below `high` only where no padding was declared.
    """

    low: Any
    high: Any
    doubt: Any


def _limits(segments: Segments, tokens: Any, declared: tuple[int, ...] | None) -> _Limits:
    start, stop = segments.start, segments.stop
    if (segments.lengths_known and not segments.may_pad) or not tokens.size or declared == ():
        return _Limits(start, stop, stop)
    if declared is None:
        # The last token, and all equal ones in front of it, may be padding.
        runs = np.flatnonzero(tokens[1:] != tokens[:-1]) + 1
        at = np.searchsorted(runs, stop - 1, side="right")
        return _Limits(start, stop, np.maximum(np.append(0, runs)[at], start))
    is_padding = tokens == declared[0] if len(declared) == 1 else np.isin(tokens, declared)
    others = np.flatnonzero(~is_padding)
    first, past = np.searchsorted(others, start), np.searchsorted(others, stop)
    low, high = start.copy(), start.copy()
    some = past > first
    high[some] = others[past[some] - 1] + 1
    if segments.searches_left:
        low[some] = others[first[some]]
    return _Limits(low, high, high)


class RowLookup:
    """Find the trace rows of a session's forwards.

    Args:
        trace: of the session, with tokens and samples.
        padding_token_ids: the tokens of padding; None: not declared.
        cp_partition_mode: how sequences are split over context-parallel ranks; None: that of packed_seq_params, else zigzag.

    Attributes:
        layout: facts of the layout of forwards so far, for which attention may see different tokens than the engine's.
    """

    def __init__(
        self, trace: RoutingTrace, *, padding_token_ids: Sequence[int] | None, cp_partition_mode: CpPartition | None
    ) -> None:
        self._reader = TokenReader(padding_token_ids=padding_token_ids, cp_partition_mode=cp_partition_mode)
        self._padding = self._reader.padding_token_ids
        self._trace = trace
        self._compared: set[Any] = set()
        self.layout: set[str] = set()

    def locate(self, module: nn.Module, inputs: ForwardInputs, where: str) -> RowInputs:
        """Return the rows of a forward on this rank.

        RowInputs.token_ids is None where the tokens are laid out in another way than the hidden states.

        Args:
            module: the innermost chunk.
            where: the rank, chunk and micro-batch, for messages.

        Raises:
            ReplayStateError: the call has no ids.
            LayoutError: a sequence fits no sample, or several samples with different routes, or may have padding; or tokens
                and hidden states differ in number.
        """
        read = self._reader.read(module, inputs, where)
        segments, tokens = read.segments, read.tokens
        readings = self._read(read, where)
        start, count, row, live = _columns(readings)
        first = segments.start + start
        rows, padding = segments.rows(first, count, row, live)
        if len(segments.jumps) and _jumps_inside(rows, segments.jumps):
            raise LayoutError(
                f"MRR206: {where}: position_ids restart or jump within the tokens of a sample, so this row has "
                "several sequences: give the model packed_seq_params."
            )
        positions = read.token_positions(first, first + count + live, where)
        return RowInputs(
            rows=read.of_rank(_placed(rows, positions, -1)),
            token_ids=read.of_rank(tokens) if positions is None else None,
            padding=read.of_rank(padding) if (padding := _placed_padding(padding, positions)) is not None else None,
            counts=ForwardCounts(segments_ambiguous=sum(each.is_ambiguous for each in readings)),
        )

    def _read(self, read: ForwardTokens, where: str) -> list[Reading]:
        """Return the Reading of each segment.

        Raises:
            LayoutError: a segment has none, or several.
        """
        segments, tokens = read.segments, read.tokens
        samples, keys = samples_of(self._trace), keys_of(tokens)
        limits = _limits(segments, tokens, self._padding)
        runs = samples.leading_runs(self._padding) if segments.searches_left and self._padding else set()
        readings: list[Reading] = []
        problems: list[tuple[int, Misfit]] = []
        columns = (segments.start, segments.stop, _end_to_read(segments, tokens), *limits)
        for number, (start, stop, end, low, high, doubt) in enumerate(zip(*(each.tolist() for each in columns))):
            found: Reading | Misfit | None = None
            if low >= high:
                found = PADDING_ALONE
                if segments.lengths_known:
                    found = self._masked_sample(samples, read, number, keys, where) or found
            elif (low == start or not runs) and stop == end:
                found = samples.read_plain(low - start, keys[4 * low : 4 * stop], high - low, max(0, doubt - low))
            if found is None:
                found = self._read_one(samples, segments, number, end, tokens, keys, limits, runs)
            if isinstance(found, Misfit):
                problems.append((number, found))
            else:
                readings.append(found)
        if problems:
            number, problem = problems[0]
            more = f" ({len(problems) - 1} more sequences of this forward do not fit either)" if problems[1:] else ""
            place = f"{where}, {segments.place(int(segments.start[number]) + problem.at)}, sequence {number}"
            raise LayoutError(problem.message(place) + more)
        self._warn_of_tokens_in_front(segments, tokens, readings, where)
        return readings

    def _read_one(
        self,
        samples: SortedSamples,
        segments: Segments,
        number: int,
        end: int,
        tokens: Any,
        keys: bytes,
        limits: _Limits,
        runs: set[int],
    ) -> Reading | Misfit:
        """Return the only reading of a segment, or the Misfit: there is none, or there are several."""
        start, stop, low, high, doubt = (int(each[number]) for each in (segments.start, segments.stop, *limits))
        # A sample may begin with padding tokens, so padding on the left may end at each of these places.
        starts = (
            [low, *sorted({start, *(low - run for run in runs if low - run > start)} - {low})] if low > start else [low]
        )
        found = [samples.read(at - start, keys[4 * at : 4 * stop], high - at, max(0, doubt - at)) for at in starts]
        explained = [each for each in found if each.is_explained and each.known]
        best = max(explained or found, key=lambda each: each.known)
        names = Names(samples, self._trace.sample_ids)
        if not explained:
            if segments.lengths_known and self._padding and np.isin(tokens[start:stop], self._padding).all():
                return PADDING_ALONE  # some trainers give the rest of a packed row a length of its own
            return misfit.no_sample(
                names,
                tokens[start:stop],
                best,
                declared=self._padding,
                lengths_known=segments.lengths_known,
                may_pad_left=segments.searches_left,
                runs_differ=_runs_differ(segments, tokens, int(tokens[start + best.start + best.known])),
            )
        if len(explained) > 1:
            return misfit.two_starts(names, best)
        key = keys[4 * (start + best.start) : 4 * stop]
        if best.is_ambiguous and (problem := self._unlike_rivals(names, best, key)):
            return problem
        if not best.is_whole and stop < end:
            # If the tokens after the end continue the sample, they were masked by mistake.
            number_known = samples.num_known(keys[4 * start : 4 * end])
            if number_known > best.known:
                return misfit.masked_tokens(names, best, number_known - best.known)
        return best

    def _masked_sample(
        self, samples: SortedSamples, read: ForwardTokens, number: int, keys: bytes, where: str
    ) -> Misfit | None:
        """Return the Misfit of a sequence without tokens, if an attention mask hides a sample there.

        If padding_mask alone hides it, as in the copies with which SkyRL fills a batch, there is a warning.
        """
        segments = read.segments
        begin, start, end = (int(each[number]) for each in (segments.begin, segments.start, segments.end))
        others = np.flatnonzero(np.diff(read.tokens[begin:end])) + 1
        for front in (0, *others[:1].tolist()):  # a sample may come after padding
            reading = samples.read(front, keys[4 * (begin + front) : 4 * end], end - begin - front, end - begin - front)
            if reading.known <= misfit.CHANCE and not (reading.is_whole and reading.known > 1):
                continue
            problem = misfit.masked_sample(Names(samples, self._trace.sample_ids), reading, begin + front - start)
            if read.kept is not None and not read.kept[0][number] <= front < read.kept[1][number]:
                return problem
            place = f"{where}, {segments.place(begin + front)}, sequence {number}"
            warn("a masked sample", problem.message(place), once=True)
        return None

    def _unlike_rivals(self, names: Names, reading: Reading, key: bytes) -> Misfit | None:
        """Return a Misfit if samples that fit a sequence have different routes, None: they agree."""
        # Micro-batches of a rollout repeat prompts: compare each prefix once in a session.
        compared = (reading.row, reading.known, reading.is_whole, reading.ended)
        if compared in self._compared:
            return None
        for other, count in names.samples.rivals(reading, key):
            if why := unlike(self._trace, reading.row, other, count):
                return Misfit(
                    reading.start + count,
                    f"MRR208: {names.of(reading.row)} and {names.of(other)} of the trace begin with the same {count} tokens, "
                    f"which a forward got, and {why}. The tokens do not show which sample it is. Replay the two in "
                    "different sessions, or give rows by session.microbatch(rows, model). If their inputs were equal and "
                    "only weights differ (no images), trace.without_routes(mask) may leave routes to one of them alone.",
                )
        # Not before, because a forward that is repeated after the error must raise again.
        self._compared.add(compared)
        return None

    def _warn_of_tokens_in_front(self, segments: Segments, tokens: Any, readings: list[Reading], where: str) -> None:
        """Warn if each sequence begins with the same declared tokens: a BOS token, or a second chat template.

        One token several times looks like padding.
        """
        if segments.is_cut:
            self.layout.add(CUT)
        if segments.start is segments.begin and not any(each.start for each in readings):
            return
        begins = segments.start if segments.may_pad else segments.begin  # masked tokens are padding
        fronts = {
            tuple(tokens[begin : start + each.start].tolist())
            for begin, start, each in zip(begins.tolist(), segments.start.tolist(), readings)
            if each.known
        }
        if any(fronts):
            self.layout.add(PADDED_LEFT)
        if len(fronts) != 1 or not segments.searches_left:
            return
        (front,) = fronts
        if len(front) == 1 or len(set(front)) > 1:
            first = int(segments.begin[next(number for number, each in enumerate(readings) if each.known)])
            warn(
                "a token in front",
                f"{where}, {segments.place(first)}: each sequence begins with {_listed(front)}, declared as padding. If "
                "the engine did not have that (a BOS token, a second chat template), all routes are of other prefixes: give "
                "the engine the same token ids, or leave it out in training.",
                once=True,
            )


def _end_to_read(segments: Segments, tokens: Any) -> Any:
    """Return one past the last position of each segment that its reading depends on, [S]; `stop`: its own tokens alone.

    Where its length is known, equal tokens after it are padding; different ones may be tokens that were masked by mistake.
    """
    if not segments.lengths_known or not tokens.size:
        return segments.end
    changes = np.append(0, (tokens[1:] != tokens[:-1]).cumsum())
    last = np.maximum(segments.end - 1, 0)
    varies = changes[last] > changes[np.minimum(segments.stop, last)]
    return np.where(varies, segments.end, segments.stop)


def _runs_differ(segments: Segments, tokens: Any, token: int) -> bool:
    """Return if the sequences of a forward begin with different numbers of a token."""
    others = np.append(np.flatnonzero(tokens != token), len(tokens))
    past = np.minimum(others[np.searchsorted(others, segments.begin)], segments.end)
    return len(np.unique(past - segments.begin)) > 1


def _listed(front: tuple[int, ...]) -> str:
    return f"one token {front[0]}" if len(front) == 1 else f"the tokens {listed(front)}"


def _columns(readings: list[Reading]) -> Any:
    """Return start, count, row and live of readings, [S] each."""
    return np.array([each[:4] for each in readings], dtype=np.int64).reshape(-1, 4).T


def _jumps_inside(rows: Any, jumps: Any) -> bool:
    # Jumps are inside of segments, and a segment has one sample, so tokens with neighbouring rows may not jump.
    return bool(((rows[jumps] > 0) & (rows[jumps] == rows[jumps - 1] + 1)).any())


def number_tokens(reader: TokenReader, module: nn.Module, inputs: ForwardInputs, where: str) -> RowInputs:
    """Number the tokens of a recorded forward in the order of its samples, from 0.

    Raises:
        ReplayStateError: the call has no ids.
        LayoutError: rows of a batch, or sequences that begin or end with equal tokens, may be padded; or tokens and hidden
            states differ in number.
    """
    read = reader.read(module, inputs, where)
    segments, tokens = read.segments, read.tokens
    if reader.padding_token_ids is None and not segments.lengths_known:
        # Whether a last token is padding is not to be seen, and a wrong guess makes a wrong trace: the caller decides.
        what = ""
        if segments.shape[0] > 1:
            what = f"input_ids {list(segments.shape)} are rows of a batch, which may be padded"
        elif _ends_in_equal_tokens(segments, tokens):
            what = "sequences begin or end with several equal tokens, which may be padding"
        if what:
            raise LayoutError(
                f"MRR207: {where}: {what}. Give mrr.record(..., padding_token_ids=[...]), where [] means that there is no "
                "padding, or give the model padding_mask or unpadded cu_seqlens_q."
            )
    start, stop, _ = _limits(segments, tokens, reader.padding_token_ids or ())
    count = stop - start
    count[start > stop] = 0  # padding alone
    rows, padding = segments.rows(start, count, count.cumsum() - count, np.zeros_like(count))
    positions = read.token_positions(start, start + count, where)
    rows, padding = _placed(rows, positions, -1), _placed_padding(padding, positions)
    return RowInputs(
        rows=read.of_rank(rows),
        # A copy: trainers reuse the buffer, and a recording keeps it until the trace is made. Stages may pad differently.
        token_ids=read.of_rank(np.where(rows >= 0, _placed(tokens, positions, -1), -1)),
        padding=None if padding is None else read.of_rank(padding),
        lengths=torch.from_numpy(count),
    )


def _placed(values: Any, positions: Any, fill: int) -> Any:
    """Return values of tokens as values of hidden states, `fill` where there is no token."""
    return values if positions is None else np.where(positions >= 0, values[positions], fill)


def _placed_padding(padding: Any, positions: Any) -> Any:
    """Return the mask of padding of hidden states; None: none is."""
    if positions is None:
        return padding
    placed = positions < 0
    if padding is not None:
        placed |= padding[positions]
    return placed if placed.any() else None


def _ends_in_equal_tokens(segments: Segments, tokens: Any) -> bool:
    for start, stop in zip(segments.start.tolist(), segments.stop.tolist()):
        if stop - start > 1 and (
            tokens[stop - 1] == tokens[stop - 2] or (segments.searches_left and tokens[start] == tokens[start + 1])
        ):
            return True
    return False
