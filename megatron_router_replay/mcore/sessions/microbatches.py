"""Sessions that take micro-batches: every forward of a model chunk uses the one that was queued for it.

microbatch  queues what one forward shall use
decide      one call of one router in a forward; a recompute never comes here, its tape decides
close       what ran is compared with what was queued, and the ranks of a group settle their accounts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_router_replay.checks import check_withdrawn, warn
from megatron_router_replay.errors import LayoutError, ReplayStateError
from megatron_router_replay.layout.rows import count_differing_tokens
from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.batches.follow import ForwardInputs
from megatron_router_replay.mcore.batches.queue import Microbatch
from megatron_router_replay.mcore.batches.rows import RowInputs
from megatron_router_replay.mcore.core import hooks, tape
from megatron_router_replay.mcore.core.call import RoutingCall, RoutingSource, TopKRequest
from megatron_router_replay.mcore.core.counts import Counts
from megatron_router_replay.mcore.core.streams import to_device
from megatron_router_replay.mcore.model.find import FoundRouter, Models, as_chunks, wrappers
from megatron_router_replay.mcore.sessions.group_check import GroupCheck, GroupResult, Numbers
from megatron_router_replay.mcore.sessions.report import SessionReport
from megatron_router_replay.mcore.sessions.session import Session

S = TypeVar("S", bound="MicrobatchSession")


_WITHDRAWN = dict.fromkeys(
    ("routes", "stamped", "trust_layout", "filler", "missing", "layer_numbers", "split", "stale"),
    "make a trace with RoutingTrace.from_samples(tokens, routes, ...) and replay it: rows are found by tokens.",
) | {
    "ahead": "queue each micro-batch before its forward, in the order of the forwards.",
    "trained": "min_replayed= bounds the share of tokens without a route, and the report counts them.",
}
"""Option of an earlier version -> its replacement."""


class MicrobatchSession(Session):
    """A session with micro-batches: `record` and `replay`.

    Args:
        model_chunks: as given by the user.
        group: the ranks that settle together at the end, None: all of the job.
        enabled: False: nothing is held or even looked at, and what is queued is dropped.
        options: see `Session`.
    """

    _takes_microbatches = True
    _lacks = "routes"
    """What a forward lacks if no micro-batch was queued for it."""

    def __init__(
        self,
        model_chunks: Models,
        *,
        group: dist.ProcessGroup | None = None,
        enabled: bool = True,
        **options: Any,
    ) -> None:
        self._enabled, self._group = enabled, group
        self._chunks: list[Chunk] = []
        # By id, of what the session keeps alive; None: none of its routers takes part.
        self._chunk_of: dict[int, Chunk | None] = {
            id(level): None for module in as_chunks(model_chunks) for level in wrappers(module)
        }
        super().__init__(model_chunks, **options)
        self._group_check: GroupCheck | None = None
        self._verdict: GroupResult | None = None  # once it is closed in order
        self._unregistered_forwards = 0
        self._num_pauses = 0  # blocks of `paused` that are open
        self._rows = Counts()  # see `count_rows`
        self._failed = Counts()  # by message, checks that the host has not waited for
        self._details: dict[str, Callable[[], str]] = {}  # message -> what says it in more words

    def _find_routers(self) -> list[list[FoundRouter]]:
        return super()._find_routers() if self._enabled else []

    def _add_chunk(self, index: int, module: nn.Module, routers: list[FoundRouter], *, flips: bool) -> None:
        for found in routers:
            if found.router in self._routers:
                first = self._routers[found.router]
                raise LayoutError(
                    f"MRR404: chunk {first.chunk_index} and chunk {index} share a router, {first.found} and {found}: which "
                    "chunk's micro-batch a forward of it belongs to cannot be told. Give each model a session of its own, "
                    "one after another."
                )
        super()._add_chunk(index, module, routers, flips=flips)
        replayed_routers = [found for found in routers if not found.is_mtp]
        if not replayed_routers:
            return
        chunk = Chunk(index, module, replayed_routers, rank=self._rank, session=self)
        self._chunks.append(chunk)
        self._chunk_of |= {id(level): chunk for level in chunk.levels}
        for found in routers:
            self._routers[found.router].chunk = chunk
        for position, found in enumerate(replayed_routers):
            self._routers[found.router].position = position

    def _start(self) -> Self:
        self._check_open()
        if not self._enabled:
            return self
        self._group_check = GroupCheck(self._group)
        try:
            super()._start()
        except BaseException:
            self._abandon()
            raise
        for chunk in self._chunks:
            chunk.add_hooks()
        self._unregistered_forwards = hooks.unregistered_forwards
        return self

    def microbatch(
        self,
        rows: Tensor | Any = None,
        model: nn.Module | None = None,
        *,
        token_ids: Tensor | Any = None,
        padding: Tensor | Any = None,
        **withdrawn: Any,
    ) -> None:
        """Queue the routes of the next forward of a model chunk. Call it once before each forward of each chunk.

        Inside a checkpointed function its recompute calls this again: that queues nothing.

        Args:
            rows: integers of the shape of this rank's input_ids, [b, s] ([1, total] when packed): the
                trace row of each position, -1 where there is none. Split over context-parallel ranks like input_ids, not
                split over sequence-parallel ranks. On the CPU, no host sync is needed. A tensor or a numpy array.
            model: the chunk, as the schedule passes it to the forward step; None: there is only one.
            token_ids: the input_ids themselves, same shape; compared with the trace's token_ids now, and with the
                input_ids that the model's forward gets. A recording stores them. Without them the forward's own
                input_ids are compared and stored.
            padding: bool, same shape, True: known to be padding. The live router decides it, and it is counted apart. Any
                other position with row -1 is decided by the live router as well, and counted as live.

        Raises:
            LayoutError: rows, masks or tokens do not fit each other or the trace; the model is none of the session's chunks.
            ReplayStateError: the session is closed, or takes no micro-batches.
        """
        check_withdrawn("session.microbatch", withdrawn, _WITHDRAWN)
        self._check_open()
        if tape.in_recompute() or not self._enabled or self.is_paused:
            return
        hooks.check_installed()
        hooks.check_runs_python("a micro-batch that is queued")  # before CUDA refuses the memory that it takes
        chunk = self._find_chunk(model)
        row_inputs = RowInputs.checked(rows, token_ids=token_ids, padding=padding)
        if chunk is not None:
            self._queue(chunk, row_inputs)

    # ---- what the hook asks
    def _source(self) -> RoutingSource:
        return self

    def _session(self) -> MicrobatchSession:
        """Return itself; see `RoutingSource`."""
        return self

    def _routing_call(self, router: Any, shape: torch.Size, is_written: bool) -> RoutingCall | None:
        """Return what a router's forward uses; see `RoutingSource`."""
        router_state = self._routers[router]
        chunk, counter = router_state.chunk, router_state.counter
        microbatch = None
        if router_state.position >= 0 and not self._num_pauses:
            assert chunk is not None, "it takes part"
            microbatch = chunk.queue.microbatch_of(router_state.position)
            if shape != microbatch.shape:
                microbatch.check_shape(f"{chunk.queue.where}, {router_state.found}", tuple(shape))
        elif not (is_written or counter.verify or counter.balance_off):
            counter.add(forwards=1)
            return None  # nothing of it is needed again
        dtype = router_state.dtype
        return RoutingCall(router, counter, dtype, source=self, microbatch=microbatch, is_written=is_written)

    def _experts(self, call: RoutingCall, request: TopKRequest) -> Tensor | None:
        """Let the router choose; see `RoutingSource`."""
        return None

    def _on_routed(self, call: RoutingCall) -> None:
        """Take note that a router's forward is over."""
        if call.microbatch is not None:
            router_state = self._routers[call.router]
            assert router_state.chunk is not None, "it takes part"
            # Last: behind the chunk's last router this hands the micro-batch on.
            router_state.chunk.queue.routed(call.microbatch, router_state.position)

    # ---- one micro-batch
    def _queue(self, chunk: Chunk, inputs: RowInputs) -> None:
        """Add a micro-batch to a chunk's queue."""
        raise NotImplementedError

    def _on_unqueued(self, chunk: Chunk, inputs: ForwardInputs) -> None:
        """Take note that a forward begins for which no rows were queued by hand."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the model's forwards inside the block run live: an evaluation, a reference pass over other tokens.

        Nothing of them is replayed, recorded or counted; a recompute still takes the experts of its forward. Without it,
        tokens that are of no sample raise.
        """
        self._check_open()
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1

    @property
    def is_paused(self) -> bool:
        """Whether forwards run live now, inside `paused()`."""
        return self._num_pauses > 0

    def _on_forward(self, chunk: Chunk, microbatch: Microbatch, input_ids: Tensor | None) -> None:
        """Compare the tokens that the model's forward gets with those of the micro-batch that was queued for it."""
        if input_ids is None:
            return
        # A packed batch may come as [total]; its rows were taken as [1, total].
        tokens = input_ids if input_ids.dim() == 2 else input_ids.reshape(1, -1)
        if tuple(tokens.shape) != microbatch.batch_shape:
            raise LayoutError(
                f"MRR201: the forward of micro-batch {microbatch.number} gets input_ids {list(input_ids.shape)}, its "
                f"routes are for {list(microbatch.batch_shape)}: they must have the shape of the tokens. If the model "
                "inserts positions itself (images), open the session on its language model."
            )
        expected = microbatch.token_ids
        if expected is not None and not _same_on_host(expected, tokens):
            # -1: not known, for the position has no row, or the trace was recorded without input_ids there.
            expected, rows = to_device(expected, tokens.device), microbatch.batch_rows
            rows = None if rows is None else to_device(rows, tokens.device)
            why = "move tokens and rows by the same code, and run micro-batches in the order in which they were queued."
            count, detail = count_differing_tokens(tokens, expected, rows, why=why)
            where = f"micro-batch {microbatch.number} of chunk {chunk.index}"
            self._check(count, f"MRR203: {where}: {why}", lambda: f"MRR203: {where}: {detail()}")

    def _on_done(self, chunk: Chunk, microbatch: Microbatch) -> None:
        """Take note that every router of a chunk has routed this micro-batch."""
        self._count(chunk, microbatches=1, **microbatch.counts)

    def _may_be_unrouted(self, rows: Tensor, num_tokens: int) -> bool:
        """Check the range of rows; return whether some may be -1, True also on a GPU, unasked.

        Raises:
            LayoutError: a row is below -1, or num_tokens or more.
        """
        message = f"MRR202: rows reach outside the trace's rows 0..{num_tokens - 1}; padding is -1."
        if not rows.numel():
            return False
        if rows.device.type != "cpu":
            self._check(((rows < -1) | (rows >= num_tokens)).any(), message)
            return True
        lowest, highest = map(int, rows.aminmax())
        if lowest < -1 or highest >= num_tokens:
            raise LayoutError(message)
        return lowest < 0

    def _check(self, failed: Tensor, message: str, detail: Callable[[], str] | None = None) -> None:
        """Raise if `failed` (a scalar) is not 0: now on the CPU, else once at the end, to spare the host a sync.

        Args:
            message: what is wrong.
            detail: says it in more words, from what the host must wait for.
        """
        if failed.device.type != "cpu":
            self._failed.add(**{message: failed})
            if detail is not None:
                self._details[message] = detail
        elif bool(failed):
            raise LayoutError(message if detail is None else detail())

    # ---- the end
    @property
    def report(self) -> SessionReport:
        """What the session did so far on this rank. On a GPU, reading it waits for the device."""
        first, chunks = self._first_chunks()
        replayed, live, padding = self._rows_counted(chunks)
        return replace(super().report, counted_at=first, rows_replayed=replayed, rows_live=live, rows_padding=padding)

    def close(self, *, verify: bool = True) -> None:
        if self._enabled:
            super().close(verify=verify)
        else:
            self._release()

    def _abandon(self) -> None:
        """Release the routers without verifying. The other ranks learn that this one failed."""
        super()._abandon()
        if self._group_check is not None:
            self._group_check.fail()

    def _release(self) -> None:
        super()._release()
        for chunk in self._chunks:
            chunk.remove_hooks()

    def _tallies(self) -> list[Counts]:
        return [*super()._tallies(), self._failed, self._rows]

    def _count(self, chunk: Chunk, **counts: Tensor | int) -> None:
        self._rows.add(**{f"{name} {chunk.index}": count for name, count in counts.items()})

    def _counted(self, name: str, chunks: Sequence[Chunk]) -> int:
        return sum(self._rows[f"{name} {chunk.index}"] for chunk in chunks)

    def _rows_counted(self, chunks: Sequence[Chunk]) -> list[int]:
        """Return how many rows of these chunks were replayed, live, and padding."""
        rows, live, padding = (self._counted(name, chunks) for name in ("rows", "live", "padding"))
        return [rows - live - padding, live, padding]

    def _first_chunks(self) -> tuple[tuple[int, int] | None, list[Chunk]]:
        """Return `SessionReport.counted_at`, and its chunks: later ones of a virtual pipeline have the same rows."""
        at = {chunk.index: (chunk.replayed_routers[0].layer_number, chunk.row_sharing[0]) for chunk in self._chunks}
        first = min(at.values(), default=None)
        return first, [chunk for chunk in self._chunks if at[chunk.index] == first]

    def _num_microbatches(self) -> int:
        return self._counted("microbatches", self._first_chunks()[1])

    def _faults(self) -> list[str]:
        problems = super()._faults() + [problem for chunk in self._chunks for problem in chunk.queue.problems()]
        elsewhere = hooks.unregistered_forwards - self._unregistered_forwards
        if self._chunks and elsewhere and not any(each.counter["forwards"] for each in self._routers.values()):
            problems.append(
                f"rank {self._rank}: no router of this session's model ran, but other routers ran {elsewhere} forwards in "
                "training mode: the session was opened on another model than the one that trains (was it rebuilt?)"
            )
        return problems

    def _settled(self, problems: list[str]) -> list[str]:
        failed = self._failed.positive
        assert self._group_check is not None, "it was started"
        at_fault = bool(problems or failed)
        # Also where this rank is at fault: the others wait for its numbers.
        try:
            verdict = self._group_check.finish(self._numbers()._replace(at_fault=at_fault), self._judge)
        except ReplayStateError as error:  # a rank never came: this rank's own problems are raised with it
            problems = [*problems, str(error)]
        else:
            self._verdict = verdict
            problems = [*problems, *verdict.problems_of(self._rank, at_fault=at_fault)]
            for text in verdict.warnings:
                warn("agreement", text)
        if failed:
            texts = [self._details[message]() if message in self._details else message for message in failed]
            raise LayoutError("\n  ".join([*texts, *problems]))
        return problems

    def _numbers(self) -> Numbers:
        """Return what this rank tells the others at the end."""
        replayed, live, padding = self._rows_counted(self._chunks)
        return Numbers(chunks=len(self._chunks), rows_replayed=replayed, rows_live=live, rows_padding=padding)

    def _judge(self, everyone: Mapping[int, Numbers]) -> tuple[list[str], list[str]]:
        """Return what is wrong with the group as a whole, and what only looks wrong, from `_numbers` of each rank."""
        return [], []

    def _find_chunk(self, model: nn.Module | None) -> Chunk | None:
        """Return a model's chunk; None: none of its routers takes part.

        Raises:
            LayoutError: the model is none of this session's, or there are several and none is given.
        """
        if model is None and len(self._modules) > 1:
            raise LayoutError(
                f"MRR403: this rank has {len(self._modules)} model chunks: pass the one that runs, as the forward step "
                "gets it."
            )
        levels = wrappers(self._modules[0] if model is None else model) if isinstance(model, nn.Module | None) else []
        known = [id(level) for level in levels if id(level) in self._chunk_of]
        if not known:
            raise LayoutError(
                f"MRR403: {type(model).__name__} is none of this session's {len(self._modules)} model chunks. "
                "Rows come first: session.microbatch(rows, model)."
            )
        return self._chunk_of[known[0]]


def open_session(make: Callable[[], S], group: dist.ProcessGroup | None) -> S:
    """Make a session that takes micro-batches and start it; if it cannot be made, publish the failure to the others."""
    try:
        session = make()
    except BaseException:
        GroupCheck(group).fail()
        raise
    return session._start()


def _same_on_host(one: Tensor, other: Tensor) -> bool:
    """Return whether these are known to be the same without waiting for a GPU: one pass, where telling why not takes five."""
    return one.device.type == other.device.type == "cpu" and one.dtype == other.dtype and torch.equal(one, other)
