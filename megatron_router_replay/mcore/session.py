"""What all sessions share: a model's routers under control, from construction until the end, then restored and verified."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_router_replay.errors import LayoutError, ReplayStateError, UnsupportedRouterError
from megatron_router_replay.mcore.balance import has_expert_bias
from megatron_router_replay.mcore.chunk import Chunk
from megatron_router_replay.mcore.compat import check_version
from megatron_router_replay.mcore.events import log_began, log_ended, log_failed
from megatron_router_replay.mcore.find import (
    FoundRouter,
    as_chunks,
    check_has_experts,
    check_not_shared,
    find_routers,
    wrappers,
)
from megatron_router_replay.mcore.ledger import Microbatch
from megatron_router_replay.mcore.report import SessionReport
from megatron_router_replay.mcore.router import Choose, SessionRouter, replay_objects
from megatron_router_replay.mcore.support import check_supported
from megatron_router_replay.mcore.targets import as_integers, as_mask
from megatron_router_replay.mcore.verify import Verifier
from megatron_router_replay.routes import MicrobatchRoutes

Models = nn.Module | Sequence[nn.Module]
"""A model, or the list of its chunks on this rank; wrapped (DistributedDataParallel, Float16Module) or not."""

_PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchInputs:
    """What a caller queues for one forward of one chunk; copies, for trainers reuse their buffers.

    Args:
        chunk: whose forward.
        rows: [b, s] int64.
        token_ids: [b, s] int64; None: not given.
        padding, trained: [b, s] bool; None: not given.
    """

    chunk: Chunk
    rows: Tensor
    token_ids: Tensor | None
    padding: Tensor | None
    trained: Tensor | None

    @classmethod
    def of(cls, chunk: Chunk, rows: Tensor, *, token_ids: Any, padding: Any, trained: Any) -> Self:
        """Check shapes and copy.

        Raises:
            LayoutError: rows are not [b, s] (or [n], one packed row), or something beside them has another shape or kind.
        """
        if rows.dim() not in (1, 2):
            raise LayoutError(f"routing_rows must have the shape of input_ids, [b, s], got {list(rows.shape)}.")
        # Of eight bytes it is -1 again when it is widened.
        if not rows.dtype.is_signed and rows.dtype.itemsize < 8:
            highest = torch.iinfo(rows.dtype).max
            if bool((rows.to(torch.int64) == highest).any()):
                raise LayoutError(
                    f"routing_rows are {rows.dtype} and hold {highest}, which a -1 becomes there: padding cannot be told "
                    "from that row. Give a signed dtype."
                )
        as_2d = (1, -1) if rows.dim() == 1 else rows.shape
        beside: dict[str, Tensor | None] = {}
        for name, values in (("token_ids", token_ids), ("padding", padding), ("trained", trained)):
            if values is None:
                beside[name] = None
                continue
            values = as_integers(values, name) if name == "token_ids" else as_mask(values, name)
            if values.shape != rows.shape:
                raise LayoutError(f"routing_rows {list(rows.shape)} and {name} {list(values.shape)} differ in shape.")
            dtype = torch.int64 if name == "token_ids" else torch.bool
            beside[name] = values.reshape(as_2d).to(rows.device, dtype, copy=True)
        return cls(chunk=chunk, rows=rows.reshape(as_2d).to(torch.int64, copy=True), **beside)


class Session:
    """A model's routers under replay control, from `start()` until `close()` or the end of a `with` block.

    Made and started by `record`, `replay` and `freeze_recompute`. Leaving the block restores the model in every case;
    without an exception it also verifies that forwards and micro-batches match one to one.

    Args:
        model_chunks: as given by the user.
        mtp, verify: see `replay`.
        group: the ranks that agree at the end, None: all of the job. See `close`.
    """

    kind: str
    choose: Choose | None = None  # None: live
    queued: bool

    def __init__(
        self, model_chunks: Models, *, mtp: bool, verify: bool, group: dist.ProcessGroup | None = None
    ) -> None:
        check_version()
        modules = as_chunks(model_chunks)
        found = [find_routers(module) for module in modules]
        check_has_experts(modules, found)
        if self.queued:
            check_not_shared(found)
        routers = [router for of_chunk in found for router in of_chunk]
        # A Megatron-Core that is newer than all tested ones is verified, whether asked for or not.
        verify = check_supported(routers) or verify
        self.made_at = _caller()
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._group = group
        self._chunks = [
            Chunk(
                index,
                module,
                of_chunk,
                rank=self._rank,
                choose=self.choose,
                queued=self.queued,
                mtp=mtp,
                on_input=self._check_input,
                on_done=self._microbatch_done,
            )
            for index, (module, of_chunk) in enumerate(zip(modules, found))
        ]
        self._chunk_of = {
            id(level): chunk for module, chunk in zip(modules, self._chunks) for level in wrappers(module)
        }
        self._closed = False
        self._microbatches = 0
        self._counts: Tensor | None = None  # [3] int64: rows replayed, live, padding
        self._num_rows: int | Tensor = 0  # the highest row that was queued, plus 1; [] int64 where rows are on a GPU
        self._failed: dict[str, Tensor] = {}  # message -> bool on the device
        self._verifier = Verifier(self._routers()) if verify else None

    def start(self) -> Self:
        """Take the routers; nothing of the model is touched before.

        Raises:
            ReplayStateError: a router is under another session already, or driven by its own RouterReplay; or this session
                was closed.
        """
        self._check_open()
        # All of them before the first is taken: a model of which a part is under a session already is left as it was.
        self._check_not_nested([router.found for router in self._routers()])
        try:
            for chunk in self._chunks:
                chunk.attach(self)
            if self._verifier is not None:
                self._verifier.attach()  # its hooks look at what is left of each router, so they come last
        except BaseException:
            self._detach()
            raise
        log_began(self.kind, len(self._routers()))
        return self

    def microbatch(
        self,
        rows: Tensor | MicrobatchRoutes | Any,
        model: nn.Module | None = None,
        *,
        token_ids: Tensor | Any = None,
        padding: Tensor | Any = None,
        trained: Tensor | Any = None,
    ) -> None:
        """Queue the routes of the next forward of a model chunk; call it once before each forward of each chunk.

        Args:
            rows: `routing_rows`, integers of the shape of this rank's input_ids, [b, s] ([1, total] when packed): the
                trace row of each position, -1 where there is none. Split over context-parallel ranks like input_ids, not
                split over sequence-parallel ranks. On the CPU, no host sync is needed. A tensor, a numpy array, or for
                a replay what `transport.prefetch` made of them and its trace.
            model: the chunk, as the schedule passes it to the forward step; None: there is only one.
            token_ids: the input_ids themselves, same shape; compared with the trace's token_ids now, and with the
                input_ids that the model's forward gets. A recording stores them. Without them the forward's own
                input_ids are compared and stored.
            padding: bool, same shape, True: known to be padding. Its experts are arbitrary, spread over all, and cost no
                top-k. Any other position with row -1 is decided by the live router, and counted as live.
            trained: same shape, non-zero: the position is trained on (a loss mask). Such a position without a route
                raises. One whose route was left out by choice (`trace.keep`, `trace.limit_age`) does not, and is counted.

        Raises:
            LayoutError: an array is of another shape or kind, rows are outside the trace, a token is not the trace's, a
                padding position has a route, a trained one has none, `model` is none of the session's chunks, or the rows
                were prefetched from another trace.
            TraceError: they were prefetched without a layer of this chunk.
            UnsupportedRouterError: padding is given for a chunk of MTP layers alone, which the session leaves live.
            ReplayStateError: the session is closed, or takes no micro-batches.
        """
        self._check_open()
        if not self.queued:
            raise ReplayStateError(f"a {self.kind} session takes no micro-batches: just run the model.")
        routes = rows if isinstance(rows, MicrobatchRoutes) else None
        inputs = MicrobatchInputs.of(
            self._find_chunk(model),
            as_integers(rows if routes is None else routes.routing_rows, "routing_rows"),
            token_ids=token_ids,
            padding=padding,
            trained=trained,
        )
        if inputs.chunk.ledger is not None:
            self._queue(inputs, routes)
        elif inputs.padding is not None:
            self._check_unmasked(inputs.chunk)

    @property
    def report(self) -> SessionReport:
        """What the session did so far on this rank; on a GPU, reading it waits for the device."""
        replayed, live, padding = self._rows_counted()
        routers = self._routers()
        counting = [router for router in routers if router.counts_flips]
        flips = {router.found.layer_number: 0 if router.flips is None else int(router.flips) for router in counting}
        verifier = self._verifier
        biased = [router for router in routers if has_expert_bias(router.found.router)]
        return SessionReport(
            kind=self.kind,
            routers=len(routers),
            microbatches=self._num_microbatches(),
            tokens=replayed + live + padding,
            rows_replayed=replayed,
            rows_live=live,
            rows_padding=padding,
            forwards=sum(router.forwards for router in routers),
            recomputes=sum(router.recomputes for router in routers),
            recompute_flips=sum(flips.values()) if counting else None,
            decisions_recomputed=sum(router.decisions_recomputed for router in counting) if counting else None,
            flips_of_layer=flips,
            decisions_counted=sum(int(router.decisions_counted) for router in biased) if biased else None,
            decisions_verified=None if verifier is None else verifier.num_verified,
            decisions_wrong=None if verifier is None else verifier.num_wrong(),
        )

    def close(self) -> None:
        """Restore the model, then verify; as the end of a `with` block without an exception. A second call does nothing.

        Where torch.distributed is initialised, `record` and `replay` sessions exchange a few numbers here, in one
        all_gather over `group`: every rank that has such a session must close it. So all ranks of the group raise, or none.

        Raises:
            ReplayStateError: on this rank or another one, a router forwarded more or less often than micro-batches were
                queued, a router got another replay object meanwhile, or a routing map was not as chosen; no token of the
                group was replayed, or fewer than asked for.
            LayoutError: a check on the device failed.
        """
        if self._closed:
            return
        try:
            # While the routers are still held.
            problems = [problem for chunk in self._chunks for problem in chunk.problems()]
        finally:
            # Before anything that waits for a GPU or for other ranks.
            self._detach()
        failed = [message for message, found in self._failed.items() if bool(found)]
        report = self.report
        problems += self._problems(report)
        if self.queued:
            # Also where this rank is at fault: the others wait for its numbers.
            everyone = _exchange([int(bool(problems or failed)), *self._numbers()], self._group)
            problems += self._judge({rank: numbers[1:] for rank, numbers in everyone.items()})
            at_fault = [rank for rank, numbers in everyone.items() if numbers[0]]
            if at_fault and not problems and not failed:
                problems = [f"rank {self._rank} is in order, but ranks {at_fault} are not; their own errors say why"]
        if failed:
            raise LayoutError("\n  ".join([*failed, *problems]))
        if problems:
            raise ReplayStateError(f"the {self.kind} session does not add up:\n  " + "\n  ".join(problems))
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
            self._detach()
            log_failed(self.kind, error)

    def _queue(self, inputs: MicrobatchInputs, routes: MicrobatchRoutes | None) -> None:
        """Add a micro-batch to the ledger of its chunk; `routes` are the prefetched ones, where there are any."""
        raise AssertionError("only sessions that take micro-batches queue them")

    def check_none_waits(self, model: nn.Module) -> None:
        """Raise if a micro-batch waits for a forward of this chunk; for `attach`, which queues in front of each forward.

        Raises:
            ReplayStateError: one waits, so the forward that begins would use its routes.
        """
        ledger = self._find_chunk(model).ledger
        if ledger is not None and ledger.num_waiting:
            raise ReplayStateError(
                f"{ledger.where}: the model was called with routing rows while {ledger.num_waiting} micro-batches wait for "
                "their forwards, which would get each other's routes. Queue with session.microbatch, or pass the rows to "
                "the attached model, not both."
            )

    def _check_unmasked(self, chunk: Chunk) -> None:
        """Raise where padding is known, but reaches no router that would balance it: of MTP layers that stand alone."""
        for router in chunk.routers:
            counts = has_expert_bias(router.found.router) and router.balance.expert_bias != "off"
            if counts or (router.found.router.is_aux_loss_enabled() and router.balance.aux_loss != "off"):
                raise UnsupportedRouterError(
                    f"{router.found}: chunk {chunk.index} has MTP layers alone, which take no micro-batches, so padding "
                    "would count in its expert bias and auxiliary loss: pass mtp=True, or replay with expert_bias='off' "
                    "and aux_loss='off'."
                )

    def _rows_counted(self) -> list[int]:
        return [0, 0, 0] if self._counts is None else self._counts.tolist()

    def _num_microbatches(self) -> int:
        return self._microbatches

    def _microbatch_done(self, chunk: Chunk, microbatch: Microbatch) -> None:
        """Take note that every router of a chunk has routed this micro-batch."""
        self._microbatches += 1
        self._counts = microbatch.counts if self._counts is None else self._counts + microbatch.counts

    def _check_input(self, chunk: Chunk, microbatch: Microbatch, input_ids: Tensor) -> None:
        """Compare the tokens that the model's forward gets with those of the micro-batch that was queued for it."""
        expected, rows = microbatch.token_ids, microbatch.rows
        # A packed batch may come as [total]; its rows were taken as [1, total].
        tokens = input_ids if input_ids.dim() == 2 else input_ids.reshape(1, -1)
        if tokens.shape != rows.shape:
            raise LayoutError(
                f"the forward of micro-batch {microbatch.number} gets input_ids {list(input_ids.shape)}, its routing_rows "
                f"are {list(rows.shape)}: rows must have the shape of the tokens."
            )
        if expected is not None and not _same_on_host(expected, tokens):
            # -1: not known, for the position has no row, or the trace was recorded without input_ids there.
            differ = (expected.to(tokens.device, non_blocking=True) != tokens) & (expected >= 0).to(tokens.device)
            self._check(
                differ.any(),
                f"the forward of micro-batch {microbatch.number} of chunk {chunk.index} got other input_ids than were queued "
                "for it: micro-batches run in another order than they were queued, or tokens and routing_rows moved apart.",
            )

    def _may_be_unrouted(self, rows: Tensor, num_tokens: int | None = None) -> bool:
        """Check the range of rows and note the highest; return whether some may be -1, True also on a GPU, unasked.

        Raises:
            LayoutError: a row is below -1, or num_tokens or more.
        """
        message = "routing_rows hold a row below -1; no row is -1."
        if num_tokens is not None:
            message = f"routing_rows reach outside the trace's rows 0..{num_tokens - 1}; no row is -1."
        if not rows.numel():
            return False
        if rows.device.type != "cpu":
            self._num_rows = torch.clamp(rows.max() + 1, min=self._num_rows)
            outside = rows < -1
            self._check((outside if num_tokens is None else outside | (rows >= num_tokens)).any(), message)
            return True
        lowest, highest = map(int, rows.aminmax())
        if lowest < -1 or (num_tokens is not None and highest >= num_tokens):
            raise LayoutError(message)
        self._num_rows = max(int(self._num_rows), highest + 1)
        return lowest < 0

    def _problems(self, report: SessionReport) -> list[str]:
        """Return what is wrong with this rank's numbers at the end."""
        if not report.decisions_wrong:
            return []
        return [
            f"rank {self._rank}: {report.decisions_wrong} of {report.decisions_verified} decisions left their router with "
            "other experts than were chosen"
        ]

    def _numbers(self) -> list[int]:
        """Return what the ranks of the group tell each other at the end: rows replayed, live, padding, highest row + 1."""
        return [*self._rows_counted(), int(self._num_rows)]

    def _judge(self, everyone: dict[int, list[int]]) -> list[str]:
        """Return what is wrong with the group as a whole, from `_numbers` of each rank; the same on all of them."""
        return []

    def _check(self, failed: Tensor, message: str) -> None:
        """Raise if `failed` (a bool scalar) holds: now on the CPU, else once at the end, to spare the host a sync."""
        if failed.device.type != "cpu":
            before = self._failed.get(message)
            self._failed[message] = failed if before is None else before | failed
        elif bool(failed):
            raise LayoutError(message)

    def _routers(self) -> list[SessionRouter]:
        return [router for chunk in self._chunks for router in chunk.routers]

    def _find_chunk(self, model: nn.Module | None) -> Chunk:
        if model is None and len(self._chunks) == 1:
            return self._chunks[0]
        if model is None:
            raise LayoutError(
                f"this rank has {len(self._chunks)} model chunks: pass the one that runs, as the forward step gets it."
            )
        levels = wrappers(model) if isinstance(model, nn.Module) else []
        for level in levels:
            if id(level) in self._chunk_of:
                return self._chunk_of[id(level)]
        raise LayoutError(f"{type(model).__name__} is none of this session's {len(self._chunks)} model chunks.")

    def _check_not_nested(self, routers: list[FoundRouter]) -> None:
        for found in routers:
            for outer in sessions_of(found):
                if outer.queued or not self.queued:
                    raise ReplayStateError(
                        f"{found} is under another session already, a {outer.kind} made at {outer.made_at}: leave that "
                        "first, or end it with close_sessions(model_chunks) if its handle is lost. Only freeze_recompute may "
                        "surround record or replay."
                    )

    def _check_open(self) -> None:
        if self._closed:
            raise ReplayStateError(f"this {self.kind} session is closed: make a new one.")

    def _detach(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._verifier is not None:
            self._verifier.detach()
        for chunk in self._chunks:
            chunk.detach()


def sessions_of(found: FoundRouter) -> Iterator[Session]:
    """Yield the open sessions that hold a router, the innermost first."""
    for held in replay_objects(found.router):
        # A copy of a model that was made during a session holds what the original held, and is not under it.
        if isinstance(held, SessionRouter) and held.session is not None and held.found.router is found.router:
            yield held.session


def close_sessions(model_chunks: Models) -> int:
    """End every session on these chunks, without verification; for one whose handle is lost (a notebook cell run twice).

    Args:
        model_chunks: the model or its chunks on this rank.

    Returns:
        How many sessions were ended.
    """
    routers = [found for module in as_chunks(model_chunks) for found in find_routers(module)]
    sessions = {id(session): session for found in routers for session in sessions_of(found)}
    for session in sessions.values():
        session._detach()
    return len(sessions)


def _same_on_host(one: Tensor, other: Tensor) -> bool:
    """Return whether these are known to be the same without waiting for a GPU: one pass, where telling why not takes five."""
    return one.device.type == other.device.type == "cpu" and one.dtype == other.dtype and torch.equal(one, other)


def _exchange(numbers: list[int], group: dist.ProcessGroup | None) -> dict[int, list[int]]:
    """Return the numbers of every rank of the group, by global rank; without torch.distributed, of this process."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return {dist.get_rank() if dist.is_initialized() else 0: numbers}
    device = "cpu" if "gloo" in str(dist.get_backend(group)) else f"cuda:{torch.cuda.current_device()}"
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    return {rank: theirs.tolist() for rank, theirs in zip(ranks, everyone)}


def _caller() -> str:
    """Return file and line of the innermost call from outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
