"""What all sessions share: they hold a model's routers from `start` until they are left, and then verify.

start       the routers are held: the seam asks this session what they use
decide      one call of one router in a forward; a recompute never comes here, its tape decides
finish      the routers are released, what ran is compared with what was queued, and the ranks of a group judge together
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_router_replay.errors import LayoutError, ReplayStateError, UnsupportedRouterError
from megatron_router_replay.mcore import balance
from megatron_router_replay.mcore.attention.indexers import FoundIndexer, HeldIndexers, find_indexers
from megatron_router_replay.mcore.balance import Balance, Tokens
from megatron_router_replay.mcore.batches.attach import open_sessions
from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.batches.prefetch import MicrobatchRoutes
from megatron_router_replay.mcore.batches.queue import Microbatch
from megatron_router_replay.mcore.batches.rows import RowInputs
from megatron_router_replay.mcore.heart import seam, tape
from megatron_router_replay.mcore.heart.decision import Counter, Decision, RouterHolder
from megatron_router_replay.mcore.heart.streams import to_device
from megatron_router_replay.mcore.heart.tally import Tally
from megatron_router_replay.mcore.model.find import (
    FoundRouter,
    Models,
    as_chunks,
    check_has_experts,
    check_whole_pipeline,
    find_routers,
    router_wrappers,
    wrappers,
)
from megatron_router_replay.mcore.model.support import check_supported, is_hashed, takes_topk_again
from megatron_router_replay.mcore.model.upstream import check_version
from megatron_router_replay.mcore.sessions.meeting import Meeting
from megatron_router_replay.mcore.sessions.report import Decisions, SessionReport, log_began, log_ended, log_failed
from megatron_router_replay.trace.ids import index_dtype

S = TypeVar("S", bound="Session")

_PACKAGE = str(Path(__file__).parents[2])


@dataclass(slots=True, eq=False)
class HeldRouter:
    """One router of a session.

    Args:
        found: the router.
        counter: what the session counts of it.
        chunk_index: which chunk of the session has it.
        chunk: whose micro-batches it routes, or routes live beside; None: it is only frozen.
        position: its place among the routers that take part; -1: it is live, and frozen in recomputes.
        dtype: of the indices that are kept.
    """

    found: FoundRouter
    counter: Counter
    chunk_index: int
    chunk: Chunk | None
    position: int
    dtype: torch.dtype


class Session:
    """A model's routers, held until `close()` or the end of a `with` block.

    Made and started by `record`, `replay` and `freeze_recompute`. Leaving the block releases the routers in every case;
    without an exception it also verifies that forwards and micro-batches match one to one.

    Args:
        model_chunks: as given by the user.
        mtp, verify: see `replay`.
        flips: see `freeze_recompute`.
        choice: what balancing counts.
        group: the ranks that judge together at the end, None: all of the job.
        enabled: False: nothing is held or even looked at, and what is queued is dropped.
    """

    kind: str
    queued: bool

    def __init__(
        self,
        model_chunks: Models,
        *,
        mtp: bool,
        verify: bool,
        flips: bool = False,
        choice: Balance | None = None,
        group: dist.ProcessGroup | None = None,
        enabled: bool = True,
    ) -> None:
        self._enabled = enabled
        self._modules = as_chunks(model_chunks)
        found = self._find_routers() if enabled else []
        # In a Megatron-Core that nobody here has read, what leaves the seam is verified, whether asked for or not.
        verify_seam = enabled and check_supported([router for routers in found for router in routers])
        self.made_at = _caller()
        self._verify, self._verify_seam = verify, verify_seam
        self._indexers: HeldIndexers | None = None  # of a freeze
        self._balance = choice or Balance()
        self._meeting: Meeting | None = None
        self._group = group
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._held: dict[Any, HeldRouter] = {}
        self._chunks: list[Chunk] = []
        # By id, of what the session keeps alive; None: none of its routers takes part.
        self._chunk_of: dict[int, Chunk | None] = {id(each): None for one in self._modules for each in wrappers(one)}
        self._end: weakref.finalize[..., Session] | None = None  # what is done if nobody ends it
        for index, (module, routers) in enumerate(zip(self._modules, found)):
            self._add_chunk(index, module, [r for r in routers if not is_hashed(r.router)], mtp=mtp, flips=flips)
        self.hashed = [router for routers in found for router in routers if is_hashed(router.router)]
        if verify or verify_seam:
            self._check_verifiable()
        self._closed = False
        self._strangers = 0
        self._microbatches = 0
        self._rows = Tally()  # see `count_rows`
        self._failed = Tally()  # by message, checks that the host has not waited for

    def _find_routers(self) -> list[list[FoundRouter]]:
        check_version()
        found = [find_routers(module) for module in self._modules]
        check_has_experts(self._modules, found)
        check_whole_pipeline(self._modules)
        return found

    def start(self) -> Self:
        """Hold the routers; nothing is held before.

        Raises:
            ReplayStateError: a router is held by another session, or driven by its own RouterReplay; or this one was closed.
        """
        self._check_open()
        if not self._enabled:
            open_sessions.append(weakref.ref(self))
            return self
        if self.queued:
            self._meeting = Meeting(self._group)
        try:
            seam.install()
            seam.check_installed()
            # All of them before the first is held: a model of which a part is under a session already is left as it was.
            for router, held in self._held.items():
                self._check_free(router, held.found)
            if self._indexers is not None:
                for found in self._indexers.found:
                    self._check_free(found.attention, found)
                self._indexers.hold()
        except BaseException:
            self._abandon()
            raise
        around = {router: outer for module in self._modules for router, outer in router_wrappers(module).items()}
        for router in self._held:
            is_watched = router in around or seam.is_wrapped(router) or self._verify
            seam.hold(router, self._holder(), around.get(router, router) if is_watched else None)
        if self.queued:
            for chunk in self._chunks:
                chunk.watch()
            open_sessions.append(weakref.ref(self))
            what = f"the {self.kind} session made at {self.made_at}"
            self._end = weakref.finalize(self, _lost, what, self._chunks, list(self._held), self._meeting)
            self._end.atexit = False  # the store of a job that ends may be gone
        self._strangers = seam.strangers
        log_began(self.kind, len(self._held))
        return self

    def microbatch(
        self,
        rows: Tensor | MicrobatchRoutes | Any = None,
        model: nn.Module | None = None,
        *,
        token_ids: Tensor | Any = None,
        padding: Tensor | Any = None,
        trained: Tensor | Any = None,
        ahead: bool | None = None,
        **fed: Any,
    ) -> None:
        """Queue the routes of the next forward of a model chunk. Call it once before each forward of each chunk.

        Inside a checkpointed function its recompute calls this again: that queues nothing.

        Args:
            rows: `routing_rows`, integers of the shape of this rank's input_ids, [b, s] ([1, total] when packed): the
                trace row of each position, -1 where there is none. Split over context-parallel ranks like input_ids, not
                split over sequence-parallel ranks. On the CPU, no host sync is needed. A tensor, a numpy array, or for
                a replay what `mcore.prefetch` made of them and its trace.
            model: the chunk, as the schedule passes it to the forward step; None: there is only one.
            token_ids: the input_ids themselves, same shape; compared with the trace's token_ids now, and with the
                input_ids that the model's forward gets. A recording stores them. Without them the forward's own
                input_ids are compared and stored.
            padding: bool, same shape, True: known to be padding. Its experts are arbitrary, spread over all, and cost no
                top-k. Any other position with row -1 is decided by the live router, and counted as live.
            trained: same shape, non-zero: the position is trained on (a loss mask). Such a position without a route
                raises. One whose route was left out by choice (`trace.keep`) does not, and is counted.
            ahead: False: raise if a micro-batch waits for its forward, which would get the routes of another. None: True
                for rows, False for routes.
            fed: routes in place of rows, of a session without a trace: see `mrr.microbatch`.

        Raises:
            LayoutError: rows, masks or tokens do not fit each other or the trace; the model is none of the session's chunks,
                or the rows were prefetched from another trace.
            TraceError: they were prefetched without a layer of this chunk.
            UnsupportedRouterError: padding is given for a chunk of MTP layers alone, which the session leaves live.
            ReplayStateError: the session is closed, or takes no micro-batches; or one waits.
        """
        self._check_open()
        if not self.queued:
            raise ReplayStateError(f"MRR407: a {self.kind} session takes no micro-batches: just run the model.")
        if tape.repeats() or not self._enabled:
            return
        seam.check_installed()
        seam.check_runs_python("a micro-batch that is queued")  # before CUDA refuses the memory that it takes
        chunk = self._find_chunk(model)
        beside = {"token_ids": token_ids, "padding": padding, "trained": trained}
        if fed and rows is not None:
            raise LayoutError(
                "MRR411: routing_rows and routes= were given for one micro-batch: give rows into the session's trace, or "
                "routes to a session without one."
            )
        if chunk is None and padding is not None:
            self._check_unmasked()
        if chunk is not None and chunk.queue.num_waiting and not (not fed if ahead is None else ahead):
            raise ReplayStateError(
                f"MRR407: {chunk.queue.where}: {chunk.queue.num_waiting} micro-batches wait for their forwards already. "
                "Queue each right before its forward, by session.microbatch or by the attached model, not both; or say "
                "ahead=True."
            )
        if fed:
            if chunk is not None:
                self._queue_fed(chunk, **beside, **fed)
            return
        routes = rows if isinstance(rows, MicrobatchRoutes) else None
        inputs = RowInputs.checked(rows if routes is None else routes.routing_rows, **beside)
        if chunk is not None:
            self._queue(chunk, inputs, routes)

    @property
    def report(self) -> SessionReport:
        """What the session did so far on this rank. On a GPU, reading it waits for the device."""
        self._read()
        held = list(self._held.values())
        replayed, live, padding = self._rows_counted()
        counting = [each for each in held if each.counter.counts_flips]
        biased = [each for each in held if each.found.router.enable_expert_bias]
        decisions = Decisions()
        if counting:
            decisions["recomputed"] = sum(each.counter["recomputed"] for each in counting)
        if biased:
            decisions["counted"] = sum(each.counter["counted"] for each in biased)
        if self._verify or self._verify_seam:
            decisions["verified"] = sum(each.counter["verified"] for each in held)
            decisions["wrong"] = sum(each.counter["wrong"] for each in held)
        return SessionReport(
            kind=self.kind,
            routers=len(held),
            microbatches=self._num_microbatches(),
            rows_replayed=replayed,
            rows_live=live,
            rows_padding=padding,
            forwards=sum(each.counter["forwards"] for each in held),
            recomputes=sum(each.counter["recomputes"] for each in held),
            decisions=decisions,
            flips_of_layer={each.found.layer_number: each.counter["flips"] for each in counting},
        )

    def close(self, *, verify: bool = True) -> None:
        """Release the routers, then verify. The end of a `with` block without an exception does so. A second call does
        nothing.

        Where torch.distributed is initialised, `record` and `replay` sessions tell each other a few numbers here, over
        `group`: every rank that has such a session must leave it. So all ranks of the group raise, or none. A rank that
        left its block by an exception has said so, and nobody waits for it.

        Args:
            verify: False: only release the routers, as a block does that is left by an exception. The other ranks are told.

        Raises:
            ReplayStateError: on this rank or another one, a router forwarded more or less often than micro-batches were
                queued, nothing ran, somebody replaced what asks this session, or a routing map was not as decided; no token
                of the group was replayed, or fewer than asked for; or another rank failed.
            LayoutError: a check on the device failed.
        """
        if self._closed or not self._enabled:
            self._release()
            return
        if not verify:
            self._abandon()
            return
        problems: list[str] = []
        try:
            seam.check_installed()
        except ReplayStateError as error:
            problems.append(str(error))
        problems += [problem for chunk in self._chunks for problem in chunk.queue.problems()]
        problems += self._exchanged_routers()
        if self._indexers is not None:
            problems += self._indexers.exchanged()
        strangers = seam.strangers - self._strangers
        self._release()
        report = self.report
        failed = self._failed.positive
        problems += self._problems(report, strangers)
        if self._meeting is not None:
            # Also where this rank is at fault: the others wait for its numbers.
            problems += self._problems_of_the_group(self._meeting, at_fault=bool(problems or failed))
        if failed:
            raise LayoutError("\n  ".join([*failed, *problems]))
        if problems:
            raise ReplayStateError(f"MRR419: the {self.kind} session does not add up:\n  " + "\n  ".join(problems))
        log_ended(report)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon()
            log_failed(self.kind, error)

    def _abandon(self) -> None:
        """Release the routers without verifying. The other ranks learn that this one failed."""
        if not self._closed:
            self._release()
            if self._meeting is not None:
                self._meeting.tell(None)

    # ---- what the seam asks
    def _holder(self) -> RouterHolder:
        """Return what decides for the routers while they are held."""
        return self

    def session(self) -> Session:
        """Return itself; see `RouterHolder`."""
        return self

    def decide(self, router: Any, shape: torch.Size, is_written: bool) -> Decision | None:
        """Return what a router's forward uses; see `RouterHolder`."""
        held = self._held[router]
        tokens = Tokens(self._balance)
        microbatch = None
        if held.position >= 0:
            assert held.chunk is not None, "it takes part"
            microbatch = held.chunk.queue.microbatch_of(held.position)
            if shape != microbatch.shape:
                microbatch.check_shape(f"{held.chunk.queue.where}, {held.found}", tuple(shape))
            tokens.is_token, tokens.packed = microbatch.is_token, microbatch.packed
        elif not (is_written or held.counter.verify or balance.balances(router)):
            held.counter.add(forwards=1)
            return None  # nothing of it is needed again
        elif held.chunk is not None and held.chunk.queue.current is not None:
            tokens = held.chunk.queue.current.tokens(tokens, shape.numel(), str(held.found))
        return Decision(
            router, held.counter, held.dtype, holder=self, tokens=tokens, queued=microbatch, is_written=is_written
        )

    def choose(self, decision: Decision) -> Tensor | None:
        """Let the router choose; see `RouterHolder`."""
        return None

    def decided(self, decision: Decision) -> None:
        """Take note that a router's forward is over."""
        if decision.queued is not None:
            held = self._held[decision.router]
            assert held.chunk is not None, "it takes part"
            # Last: behind the chunk's last router this hands the micro-batch on.
            held.chunk.queue.routed(decision.queued, held.position)

    # ---- for the sessions that take micro-batches
    def _queue(self, chunk: Chunk, inputs: RowInputs, routes: MicrobatchRoutes | None) -> None:
        """Add a micro-batch to a chunk's queue; `routes` are the prefetched ones, where there are any."""
        raise AssertionError("a freeze queues none")

    def _queue_fed(self, chunk: Chunk, **fed: Any) -> None:
        raise LayoutError(
            f"MRR411: this {self.kind} session takes routing_rows. Routes themselves are for mrr.replay(model) without "
            "a trace."
        )

    def on_forward(self, chunk: Chunk, microbatch: Microbatch, input_ids: Tensor | None) -> None:
        """Compare the tokens that the model's forward gets with those of the micro-batch that was queued for it."""
        if input_ids is None:
            return
        # A packed batch may come as [total]; its rows were taken as [1, total].
        tokens = input_ids if input_ids.dim() == 2 else input_ids.reshape(1, -1)
        if tuple(tokens.shape) != microbatch.batch_shape:
            raise LayoutError(
                f"MRR201: the forward of micro-batch {microbatch.number} gets input_ids {list(input_ids.shape)}, its "
                f"routes are for {list(microbatch.batch_shape)}: they must have the shape of the tokens."
            )
        expected = microbatch.token_ids
        if expected is not None and not _same_on_host(expected, tokens):
            # -1: not known, for the position has no row, or the trace was recorded without input_ids there.
            expected = to_device(expected, tokens.device)
            self._check(
                ((expected != tokens) & (expected >= 0)).any(),
                f"MRR203: the forward of micro-batch {microbatch.number} of chunk {chunk.index} got other input_ids "
                "than were queued for it: micro-batches run in another order than they were queued, or tokens and "
                "routing_rows moved apart.",
            )

    def on_done(self, chunk: Chunk, microbatch: Microbatch) -> None:
        """Take note that every router of a chunk has routed this micro-batch."""
        self._microbatches += 1
        self._rows.add(**microbatch.counts)

    def _may_be_unrouted(self, rows: Tensor, num_tokens: int) -> bool:
        """Check the range of rows; return whether some may be -1, True also on a GPU, unasked.

        Raises:
            LayoutError: a row is below -1, or num_tokens or more.
        """
        message = f"MRR202: routing_rows reach outside the trace's rows 0..{num_tokens - 1}; padding is -1."
        if not rows.numel():
            return False
        if rows.device.type != "cpu":
            self._check(((rows < -1) | (rows >= num_tokens)).any(), message)
            return True
        lowest, highest = map(int, rows.aminmax())
        if lowest < -1 or highest >= num_tokens:
            raise LayoutError(message)
        return lowest < 0

    def _check(self, failed: Tensor, message: str) -> None:
        """Raise if `failed` (a bool scalar) holds: now on the CPU, else once at the end, to spare the host a sync."""
        if failed.device.type != "cpu":
            self._failed.add(**{message: failed})
        elif bool(failed):
            raise LayoutError(message)

    def _check_unmasked(self) -> None:
        """Raise where padding is known, but reaches no router that would balance it: of MTP layers that stand alone."""
        for held in self._held.values():
            router = held.found.router
            counts = router.enable_expert_bias and self._balance.expert_bias != "off"
            if held.chunk is None and (counts or (router.is_aux_loss_enabled() and self._balance.aux_loss != "off")):
                raise UnsupportedRouterError(
                    f"MRR401: chunk {held.chunk_index}, {held.found}: it has MTP layers alone, which take no "
                    "micro-batches, so padding would count in its expert bias and auxiliary loss: pass mtp=True, or "
                    "replay with expert_bias='off' and aux_loss='off'."
                )

    # ---- the end
    def _read(self) -> None:
        """Bring to the host what was counted on a GPU, in one wait."""
        Tally.read([self._failed, self._rows, *(held.counter for held in self._held.values())])

    def _rows_counted(self) -> list[int]:
        """Return how many rows were replayed, live, and padding."""
        live, padding = self._rows["live"], self._rows["padding"]
        return [self._rows["rows"] - live - padding, live, padding]

    def _num_microbatches(self) -> int:
        return self._microbatches

    def _problems(self, report: SessionReport, strangers: int) -> list[str]:
        """Return what is wrong with this rank's numbers at the end."""
        problems = []
        if wrong := report.decisions.get("wrong"):
            problems.append(
                f"rank {self._rank}: {wrong} of {report.decisions['verified']} decisions left their router "
                "with other experts than were decided"
            )
        if zero := sum(each.counter["zero"] for each in self._held.values()):
            problems.append(
                f"rank {self._rank}: {zero} decisions gave a chosen expert the probability 0. This model's dispatcher "
                "(DeepEP, NCCL EP) takes a top-k of the probabilities, and may have sent these tokens to different experts"
            )
        if self.queued and self._chunks and not report.forwards and strangers:
            problems.append(
                f"rank {self._rank}: no router of this session's model ran, but other routers ran {strangers} forwards in "
                "training mode: the session was opened on another model than the one that trains (was it rebuilt?)"
            )
        return problems

    def _problems_of_the_group(self, meeting: Meeting, *, at_fault: bool) -> list[str]:
        """Tell the group this rank's numbers, and return what is wrong with those of all, or with the meeting."""
        try:
            everyone = meeting.exchange({"at_fault": at_fault, **self._numbers()})
        except ReplayStateError as error:  # a rank never came: this rank's own problems are raised with it
            return [str(error)]
        left = [rank for rank, numbers in everyone.items() if numbers is None]
        if left:
            return [f"ranks {left} left their session by an exception, or could not open it; their own errors say why"]
        told = {rank: numbers for rank, numbers in everyone.items() if numbers is not None}
        problems = self._judge(told)
        others = [rank for rank, numbers in told.items() if numbers["at_fault"]]
        if others and not problems and not at_fault:
            problems = [f"rank {self._rank} is in order, but ranks {others} are not; their own errors say why"]
        return problems

    def _numbers(self) -> dict[str, Any]:
        """Return what the ranks of the group tell each other at the end."""
        return {"rows": self._rows_counted()}

    def _judge(self, everyone: dict[int, dict[str, Any]]) -> list[str]:
        """Return what is wrong with the group as a whole, from `_numbers` of each rank; the same on all of them."""
        return []

    def _exchanged_routers(self) -> list[str]:
        """Return which routers the session did not reach: they were built into the model, or changed, meanwhile."""
        problems = []
        for module in self._modules:
            for found in find_routers(module):
                if is_hashed(found.router):
                    continue
                if found.router not in self._held:
                    problems.append(
                        f"{found}: the router was exchanged during the session, which did not reach the new one"
                    )
                elif seam.is_wrapped(found.router) and not seam.is_watched(found.router):
                    problems.append(f"{found}: forward or routing was replaced on the router during the session")
                elif not hasattr(type(found.router).routing, "is_seam"):
                    problems.append(
                        f"{found}: the router got the class {type(found.router).__name__}, which asks nobody"
                    )
        return problems

    def _release(self) -> None:
        if self._closed:
            return
        self._closed = True
        for router in self._held:
            seam.release(router, self._holder())
        if self._indexers is not None:
            self._indexers.release()
        for chunk in self._chunks:
            chunk.unwatch()
        if self._end is not None:
            self._end.detach()
        open_sessions[:] = [each for each in open_sessions if each() not in (None, self)]

    # ---- what the constructor does
    def _add_chunk(self, index: int, module: nn.Module, routers: list[FoundRouter], *, mtp: bool, flips: bool) -> None:
        taking_part = [found for found in routers if mtp or not found.is_mtp] if self.queued else []
        chunk = None
        if taking_part:
            chunk = Chunk(index, module, taking_part, rank=self._rank, session=self)
            self._chunks.append(chunk)
            self._chunk_of |= {id(level): chunk for level in wrappers(module)}
        for found in routers:
            if self.queued and found.router in self._held:
                first = self._held[found.router]
                raise LayoutError(
                    f"MRR404: chunk {first.chunk_index} and chunk {index} share a router, {first.found} and {found}: which "
                    "chunk's micro-batch a forward of it belongs to cannot be told. Give each model a session of its own, "
                    "one after another."
                )
            self._held[found.router] = HeldRouter(
                found=found,
                counter=Counter(
                    flips=flips,
                    verify=self._verify,
                    verify_seam=self._verify_seam,
                    topk_again=takes_topk_again(getattr(found.router, "config", None)),
                ),
                chunk_index=index,
                chunk=chunk,
                position=taking_part.index(found) if found in taking_part else -1,
                dtype=index_dtype(found.router.num_experts),
            )

    def _check_verifiable(self) -> None:
        for held in self._held.values():
            factor = held.found.router.config.moe_expert_capacity_factor
            if factor is not None:
                raise UnsupportedRouterError(
                    f"MRR401: cannot verify {held.found}: moe_expert_capacity_factor={factor} drops tokens behind the "
                    "selection, so routing maps rightly differ from it. Leave verify off."
                )

    def _check_free(self, router: Any, found: FoundRouter | FoundIndexer) -> None:
        for outer in seam.holders_of(router):
            if outer.queued or not self.queued:
                raise ReplayStateError(
                    f"MRR404: {found} is under another session already, a {outer.kind} made at {outer.made_at}: leave that "
                    "first, or end it with close_sessions(model_chunks) if its handle is lost. Only freeze_recompute may "
                    "surround record or replay."
                )
        seam.check_not_driven(router)

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

    def _check_open(self) -> None:
        if self._closed:
            raise ReplayStateError(f"MRR407: this {self.kind} session is closed: make a new one.")


def open_session(make: Callable[[], S], group: dist.ProcessGroup | None) -> S:
    """Make a session that takes micro-batches and start it; if it cannot be made, tell the ranks that could make theirs."""
    try:
        session = make()
    except BaseException:
        Meeting(group).tell(None)
        raise
    return session.start()


def _lost(what: str, chunks: list[Chunk], routers: list[Any], meeting: Meeting | None) -> None:
    """End a session that nobody can end any more; its routers refuse their next forward."""
    for chunk in chunks:
        chunk.unwatch()
    for router in routers:
        seam.unwatch(router)
    try:
        if meeting is not None:
            meeting.tell(None)
    finally:  # also where the job's store is gone
        warnings.warn(
            f"{what} was lost: nobody kept it, so nothing was verified. Use `with`, or keep it until close().",
            RuntimeWarning,
            stacklevel=2,
        )


def close_sessions(model_chunks: Models) -> int:
    """End every session on these chunks, without verification. Call it if a session's handle is lost (a notebook cell run
    twice).

    Args:
        model_chunks: the model or its chunks on this rank.

    Returns:
        How many sessions were ended.
    """
    routers = [found.router for module in as_chunks(model_chunks) for found in find_routers(module)]
    routers += [found.attention for found in find_indexers(model_chunks)]
    holders = {id(holder): holder for router in routers for holder in seam.holders_of(router)}
    for session in filter(None, [holder.session() for holder in holders.values()]):
        session.close(verify=False)
    for router in routers:
        for lost in [*seam.holders_of(router), None]:
            seam.release(router, lost)
    return len(holders)


def _same_on_host(one: Tensor, other: Tensor) -> bool:
    """Return whether these are known to be the same without waiting for a GPU: one pass, where telling why not takes five."""
    return one.device.type == other.device.type == "cpu" and one.dtype == other.dtype and torch.equal(one, other)


def _caller() -> str:
    """Return file and line of the innermost call from outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
