"""The micro-batches of a session: found or given, used by the routers of a forward, counted, and checked with the group.

    give                          rows by hand, right before a forward
    on_forward                    a forward begins: its tokens find their rows, or are compared with those of rows by hand
    _routing_state, _on_routed    before and after a call of a router in a forward; a recompute reads its tape instead
    finish                        the session's end: this rank's numbers, checked over the group

`record` and `replay` are its two classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from megatron_router_replay.checks import warn
from megatron_router_replay.errors import LayoutError, ReplayStateError
from megatron_router_replay.layout.rows import differing_tokens
from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.batches.forward_counts import ForwardCounts
from megatron_router_replay.mcore.batches.inputs import ForwardInputs
from megatron_router_replay.mcore.batches.microbatch import Microbatch
from megatron_router_replay.mcore.batches.row_inputs import RowInputs
from megatron_router_replay.mcore.core import hooks, tape
from megatron_router_replay.mcore.core.call import RouterCounts, RoutingCall, TopKRequest
from megatron_router_replay.mcore.core.streams import to_host
from megatron_router_replay.mcore.judge.agreement import Agreement
from megatron_router_replay.mcore.judge.group_check import GroupCheck
from megatron_router_replay.mcore.judge.group_result import GroupResult, RankSummary
from megatron_router_replay.mcore.judge.report import SessionReport
from megatron_router_replay.mcore.model.find import FoundRouter, wrappers
from megatron_router_replay.mcore.sessions.routers import SessionRouters


class Microbatches(ABC):
    """The micro-batches of a session; the hooks call it as the source of its routers' experts.

    Args:
        routers: of the session.
        chunks: those that take micro-batches, see `make_chunks`.
        group_check: of the ranks that are checked together.

    Attributes:
        kind: of the session.
        agreement: of the live router with replayed routes; None: they are not compared.
        num_pauses: blocks of `paused` that are open; while there are any, forwards run live.
        result: of the group, once the session is closed in order.
    """

    kind: str
    agreement: Agreement | None = None
    _takes_microbatches = True
    _announces_recomputes = _may_be_captured = False
    had_inner = False  # and never has: only a freeze may surround a session

    def __init__(self, routers: SessionRouters, chunks: list[Chunk], group_check: GroupCheck) -> None:
        self.chunks, self.group_check = chunks, group_check
        self.num_pauses = 0
        self.result: GroupResult | None = None
        self._states, self._modules, self._rank = routers.states, routers.modules, routers.rank
        # By id, because the session keeps the modules alive; None: none of the module's routers replays.
        self._chunk_of: dict[int, Chunk | None] = dict.fromkeys(
            id(level) for walked in routers.walks for level in walked.levels
        )
        self._chunk_of |= {id(level): chunk for chunk in chunks for level in chunk.levels}
        self._unregistered_forwards = 0  # when the session began
        self._stage = chunks[0].stage if chunks else None

    # ---- what `record` and `replay` differ in
    @abstractmethod
    def check_rows(self, chunk: Chunk, inputs: RowInputs) -> None:
        """Check rows that were given by hand, and count them."""

    @abstractmethod
    def locate_rows(self, chunk: Chunk, inputs: ForwardInputs) -> RowInputs | None:
        """Return the rows of a forward's tokens; None: they must be given by hand."""

    @abstractmethod
    def make_microbatch(self, chunk: Chunk, inputs: RowInputs) -> Microbatch:
        """Return the micro-batch of these rows."""

    @abstractmethod
    def _experts(self, call: RoutingCall, request: TopKRequest) -> Tensor | None:
        """Return the experts of a call, see `ExpertSource`; None: the router chooses."""

    def summary(self) -> dict[str, Any]:
        """Return fields of this rank's `RankSummary`, of a replay alone."""
        return {}

    def keep(self, chunk: Chunk, microbatch: Microbatch) -> None:  # noqa: B027  # a trace is kept already
        """Keep a micro-batch, after its forward returned."""

    def wait_for_copies(self) -> None:  # noqa: B027
        """Wait for copies to the host."""

    # ---- the session
    def begin(self, session: Any) -> None:
        """Wrap the forwards of the chunks."""
        # A session that was dropped lasts until `close_sessions`, which finds it by the source.
        self._opened_by = session
        for chunk in self.chunks:
            chunk.wrap(self)
        self._unregistered_forwards = hooks.unregistered_forwards

    def end(self) -> None:
        """Put the forwards back, and forget the micro-batches."""
        for chunk in self.chunks:
            chunk.unwrap()

    # ---- rows of a forward
    def give(self, rows: Any, model: nn.Module | None, *, token_ids: Any, padding: Any) -> None:
        """Keep rows that a caller gives for the next forward of a chunk; see `Session.microbatch`."""
        recompute, in_backward, _ = tape.checkpoint_state()
        if self.num_pauses or recompute is not None:
            return
        if in_backward:
            raise ReplayStateError(
                "MRR407: rows were given in a backward, and no forward runs there: call "
                "session.microbatch(rows, model) right before each forward."
            )
        hooks.check_routing()
        hooks.check_runs_python("a micro-batch that is given")  # before CUDA refuses the memory that it takes
        chunk = self._find_chunk(model)
        inputs = RowInputs.checked(rows, token_ids=token_ids, padding=padding)
        if chunk is not None:
            chunk.check_none_given()  # before rows that are refused count
            self.check_rows(chunk, inputs)
            self._give(chunk, inputs, is_by_hand=True)

    def _give(self, chunk: Chunk, inputs: RowInputs, *, is_by_hand: bool) -> None:
        microbatch = self.make_microbatch(chunk, inputs)
        microbatch.is_by_hand = is_by_hand
        if self._stage is not None:
            # Those that number themselves have tokens on every stage.
            tokens = b"" if inputs.lengths is None or inputs.token_ids is None else inputs.token_ids.numpy().tobytes()
            microbatch.digest = crc32(inputs.rows.numpy().tobytes(), crc32(tokens))
        chunk.give(microbatch)

    def is_new_forward(self) -> bool:
        """Return whether what runs now is a forward of the session: no recompute, and not paused."""
        return not (self.num_pauses or tape.checkpoint_state().repeats)

    def look_up_rows(self, chunk: Chunk, inputs: ForwardInputs) -> None:
        """Find the rows of a forward's tokens, unless rows were given by hand."""
        given = chunk.given
        if (given is None or not given.is_by_hand) and (found := self.locate_rows(chunk, inputs)) is not None:
            self._give(chunk, found, is_by_hand=False)

    def on_forward(self, chunk: Chunk, inputs: ForwardInputs) -> None:
        """Begin the next micro-batch of a chunk, and compare rows by hand with the tokens that the forward gets."""
        self.look_up_rows(chunk, inputs)
        microbatch = chunk.begin(is_running=True)
        if microbatch.is_by_hand and getattr(chunk.module, "pre_process", True):
            try:
                # What gets hidden states may get tokens in another layout, as they were before packing.
                if inputs.input_ids is not None and inputs.hidden is None:
                    self._compare_tokens(chunk, microbatch, inputs.input_ids)
                elif microbatch.must_compare:
                    raise LayoutError(
                        f"MRR202: {names_again(microbatch.must_compare)}, and micro-batch {microbatch.number} of chunk "
                        f"{chunk.index} embeds no input_ids to compare. If a batch has a sample twice, give its tokens: "
                        "session.microbatch(rows, model, token_ids=...)."
                    )
            except BaseException:
                chunk.leave(failed=True)
                raise

    def _compare_tokens(self, chunk: Chunk, microbatch: Microbatch, tokens: Tensor) -> None:
        if tuple(tokens.shape) != microbatch.batch_shape:
            raise LayoutError(
                f"MRR201: the forward of micro-batch {microbatch.number} gets input_ids {list(tokens.shape)}, its "
                f"routes are for {list(microbatch.batch_shape)}: they must have the shape of the tokens."
            )
        expected = microbatch.token_ids
        if expected is None and microbatch.used is None:
            return
        (array,) = to_host([tokens])
        own = torch.from_numpy(array)
        if expected is None:
            # A copy: trainers reuse the buffer, and a recording keeps it until the trace is made.
            microbatch.token_ids = own.clone()
        elif not torch.equal(expected, own):  # one pass; counting the tokens that differ takes five
            # -1: not known, for the position has no row, or the trace was recorded without input_ids there.
            why = "move tokens and rows by the same code, and call session.microbatch right before its forward."
            if text := differing_tokens(own, expected, microbatch.batch_rows, why=why):
                raise LayoutError(f"MRR203: micro-batch {microbatch.number} of chunk {chunk.index}: {text}")

    def _find_chunk(self, model: nn.Module | None) -> Chunk | None:
        """Return a model's chunk; None: none of its routers replays.

        Raises:
            LayoutError: the model is none of this session's, or there are several and none is given.
        """
        if model is None and len(self._modules) > 1:
            raise LayoutError(
                f"MRR403: this rank has {len(self._modules)} model chunks: pass the one that runs, as the forward step "
                "gets it."
            )
        called = self._modules[0] if model is None else model
        if id(called) in self._chunk_of:
            return self._chunk_of[id(called)]
        levels = wrappers(called) if isinstance(called, nn.Module) else []
        known = [id(level) for level in levels if id(level) in self._chunk_of]
        if not known:
            raise LayoutError(
                f"MRR403: {type(model).__name__} is none of this session's {len(self._modules)} model chunks. "
                "Rows come first: session.microbatch(rows, model)."
            )
        return self._chunk_of[known[0]]

    # ---- calls of routers, see `RoutingSource`
    def _session(self) -> Any:
        return self._opened_by

    def _routing_state(self, router: Any, shape: torch.Size) -> tuple[RouterCounts, Microbatch | None]:
        state = self._states[router]
        if state.chunk is None or self.num_pauses:
            return state.counter, None
        microbatch = state.chunk.microbatch_of(state.position)
        if shape != microbatch.shape:
            microbatch.check_shape(f"{state.chunk.where}, {state.found}", tuple(shape))
        return state.counter, microbatch

    def _on_routed(self, call: RoutingCall) -> None:
        microbatch: Microbatch | None = call.microbatch
        if microbatch is None:
            return
        state = self._states[call.router]
        assert state.chunk is not None, "it takes part"
        if microbatch.used is not None:
            assert call.used is not None, "the call is over"
            microbatch.used.put(state.position, call.used if call.kept is None else call.kept)
        state.chunk.routed(microbatch, state.position)

    def on_done(self, chunk: Chunk, microbatch: Microbatch) -> None:
        """Count a micro-batch that every router has routed, after its forward returned."""
        self.keep(chunk, microbatch)  # first, because what finds no memory to be kept is not counted
        chunk.counts += microbatch.counts

    # ---- the end
    def report(self, report: SessionReport) -> SessionReport:
        """Return a report of the routers with the counts of micro-batches and rows."""
        at = {
            chunk.index: (chunk.replayed_routers[0].layer_number, chunk.row_sharing[0], chunk.forward_part)
            for chunk in self.chunks
        }
        first = min(at.values(), default=None)
        # Later chunks of a virtual pipeline have the same rows.
        chunks = [chunk for chunk in self.chunks if at[chunk.index] == first]
        agreement = self.agreement
        return replace(
            report,
            counted_at=first,
            **ForwardCounts.total(chunk.counts for chunk in chunks)._asdict(),
            agreement=None if agreement is None else agreement.report(),
            wrong_rows=None
            if agreement is None or self.result is None
            else agreement.wrong_rows(self.result.wrong_rows),
        )

    def problems(self) -> list[str]:
        """Return the faults of the chunks: micro-batches that some routers have not routed, or a model that never ran."""
        problems = [problem for chunk in self.chunks for problem in chunk.problems()]
        elsewhere = hooks.unregistered_forwards - self._unregistered_forwards
        if self.chunks and elsewhere and not any(each.counter.forwards for each in self._states.values()):
            problems.append(
                f"rank {self._rank}: no router of this session's model ran, but other routers ran {elsewhere} forwards in "
                "training mode: the session was opened on another model than the one that trains (was it rebuilt?)"
            )
        return problems

    def finish(self, problems: list[str]) -> list[str]:
        """Return the problems of this rank and of its group."""
        at_fault = bool(problems)
        summary = RankSummary(
            at_fault=at_fault,
            chunks=len(self.chunks),
            stage=None if self._stage is None else [*self._stage, [chunk.digest for chunk in self.chunks]],
            counts=ForwardCounts.total(chunk.counts for chunk in self.chunks),
            **self.summary(),
        )
        try:
            # Also where this rank is at fault, because all ranks wait for its numbers.
            result = self.group_check.finish(summary)
        except ReplayStateError as error:  # a rank never came: this rank's own problems are raised with it
            return [*problems, str(error)]
        self.result = result
        for cause, text in result.warnings.items():
            warn(cause, text)
        return [*problems, *result.problems_of(self._rank, at_fault=at_fault)]


def names_again(num_repeated: int) -> str:
    """Return how rows by hand name rows twice, for the error where no token can be compared."""
    return (
        f"rows by hand name {num_repeated} rows of the trace again in one micro-batch. Do they restart in each sample? "
        "Row i of the trace is its token i, so the rows of a sample begin where those of the sample before it end"
    )


def make_chunks(routers: SessionRouters, missing: str) -> list[Chunk]:
    """Return the chunks that take micro-batches, and give each router its place in its chunk.

    Args:
        missing: names the rows of a forward that has none, in a message.

    Raises:
        LayoutError: two chunks share a router.
    """
    chunks: list[Chunk] = []
    seen: dict[Any, tuple[int, FoundRouter]] = {}
    for index, (walked, found) in enumerate(zip(routers.walks, routers.found)):
        for each in found:
            first_index, first = seen.setdefault(each.router, (index, each))
            if first_index != index:
                raise LayoutError(
                    f"MRR404: chunk {first_index} and chunk {index} share a router, {first} and {each}: its forwards "
                    "could belong to the micro-batch of either chunk. Give each model a session of its own, one after "
                    "another."
                )
        replayed = [each for each in found if not each.is_mtp]
        if not replayed:
            continue
        chunks.append(Chunk(index, walked.levels, replayed, rank=routers.rank, missing=missing))
        for position, each in enumerate(replayed):
            state = routers.states[each.router]
            state.chunk, state.position = chunks[-1], position
    return chunks
