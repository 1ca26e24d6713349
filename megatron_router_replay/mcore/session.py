"""What all sessions share: a model's routers under control, from construction until the end, then restored and verified."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_router_replay.errors import LayoutError, ReplayStateError
from megatron_router_replay.layout import rows_for_router
from megatron_router_replay.mcore.chunk import Choose, Chunk, Microbatch, SessionRouter, choose_live
from megatron_router_replay.mcore.compat import check_version
from megatron_router_replay.mcore.find import FoundRouter, as_chunks, find_routers, unwrap, wrappers
from megatron_router_replay.mcore.report import SessionReport
from megatron_router_replay.mcore.routing_function import is_needed, routing_function
from megatron_router_replay.mcore.support import check_supported
from megatron_router_replay.mcore.verify import Verifier

Models = nn.Module | Sequence[nn.Module]
"""A model, or the list of its chunks on this rank; wrapped (DistributedDataParallel, Float16Module) or not."""


class Session:
    """A model's routers under replay control, from construction until `close()` or the end of a `with` block.

    Made by `record`, `replay` and `freeze_recompute`. Leaving the block restores the model in every case; without an
    exception it also verifies that forwards, recomputes and micro-batches match one to one.
    """

    kind: str
    choose: Choose
    needs_queue: bool

    def __init__(self, model_chunks: Models, *, mtp: bool, verify: bool) -> None:
        check_version()
        modules = as_chunks(model_chunks)
        found = [find_routers(module) for module in modules]
        routers = [router for of_chunk in found for router in of_chunk]
        check_supported(routers)
        self._check_not_nested(routers)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._chunks = [
            Chunk(index, unwrap(module), of_chunk, self.choose, self._rank, self.needs_queue, mtp)
            for index, (module, of_chunk) in enumerate(zip(modules, found))
        ]
        self._chunk_of = {
            id(level): chunk for module, chunk in zip(modules, self._chunks) for level in wrappers(module)
        }
        self._closed = False
        self._microbatches = 0
        self._counts: Tensor | None = None  # [3] int64: rows replayed, live, padding
        self._failed: dict[str, Tensor] = {}  # message -> bool on the device
        self._verifier = Verifier(self._routers()) if verify else None
        self._setup()
        self._replaces_function = any(is_needed(found.router) for found in routers)
        if self._replaces_function:
            routing_function.attach()
        try:
            for chunk in self._chunks:
                chunk.attach(self._microbatch_done)
            if self._verifier is not None:
                self._verifier.attach()
        except BaseException:
            self._detach()
            raise

    def microbatch(self, rows: Tensor, model: nn.Module | None = None, *, token_ids: Tensor | None = None) -> None:
        """Queue the routes of the next forward of a model chunk; call it once before each forward of each chunk.

        Args:
            rows: `routing_rows`, integers of the shape of this rank's input_ids, [b, s] ([1, total] when packed): the
                trace row of each position, -1 on padding. Split over context-parallel ranks like input_ids, not split
                over sequence-parallel ranks. On the CPU, no host sync is needed.
            model: the chunk, as the schedule passes it to the forward step; None: there is only one.
            token_ids: the input_ids themselves, same shape; compared with the trace's token_ids as a proof that rows
                and tokens still match. A recording stores them.

        Raises:
            LayoutError: rows are of another shape or kind, or outside the trace; a token is not the trace's; `model` is
                none of the session's chunks.
            ReplayStateError: the session is closed, or takes no micro-batches.
        """
        self._check_open()
        chunk = self._find_chunk(model)
        if rows.is_floating_point() or rows.dtype is torch.bool or rows.dim() not in (1, 2):
            raise LayoutError(
                f"routing_rows must be integers of the shape of input_ids, [b, s], got {list(rows.shape)} {rows.dtype}."
            )
        if token_ids is not None and token_ids.shape != rows.shape:
            raise LayoutError(f"routing_rows {list(rows.shape)} and token_ids {list(token_ids.shape)} differ in shape.")
        if chunk.routers:
            as_2d = (1, -1) if rows.dim() == 1 else rows.shape
            self._queue(
                chunk,
                rows.to(torch.int64).view(as_2d),
                None if token_ids is None else token_ids.to(rows.device, torch.int64).view(as_2d),
            )

    @property
    def report(self) -> SessionReport:
        """What the session did so far on this rank; on a GPU, reading it waits for the device."""
        replayed, live, padding = [0, 0, 0] if self._counts is None else self._counts.tolist()
        routers = self._routers()
        return SessionReport(
            kind=self.kind,
            routers=len(routers),
            microbatches=self._microbatches,
            tokens=replayed + live + padding,
            rows_replayed=replayed,
            rows_live=live,
            rows_padding=padding,
            forwards=sum(router.forwards for router in routers),
            recomputes=sum(router.recompute_calls for router in routers),
            recompute_flips=sum(int(router.flips) for router in routers if router.flips is not None),
            decisions_verified=0 if self._verifier is None else self._verifier.num_verified,
            decisions_wrong=0 if self._verifier is None else self._verifier.num_wrong(),
        )

    def close(self) -> None:
        """Restore the model, then verify; the end of a `with` block without an exception does this. Twice is once.

        Raises:
            ReplayStateError: a router forwarded more or less often than micro-batches were queued, a micro-batch was
                recomputed in some layers only or not yet, no token was replayed, or a routing map was not as chosen.
            LayoutError: a check on the device failed.
        """
        if self._closed:
            return
        problems = [problem for chunk in self._chunks for problem in chunk.problems()]
        self._detach()
        for message, failed in self._failed.items():
            if bool(failed):
                raise LayoutError(message)
        problems += self._problems(self.report)
        if problems:
            raise ReplayStateError(f"the {self.kind} session does not add up:\n  " + "\n  ".join(problems))

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

    def _setup(self) -> None:
        """Check what this kind of session was given, before anything of the model is touched."""

    def _queue(self, chunk: Chunk, rows: Tensor, token_ids: Tensor | None) -> None:
        raise ReplayStateError(f"a {self.kind} session takes no micro-batches: just run the model.")

    def _microbatch_done(self, chunk: Chunk, microbatch: Microbatch) -> None:
        """Take note that every router of a chunk has forwarded this micro-batch."""
        self._microbatches += 1

    def _problems(self, report: SessionReport) -> list[str]:
        """Return what is wrong with the numbers at the end."""
        if not report.decisions_wrong:
            return []
        return [
            f"rank {self._rank}: {report.decisions_wrong} of {report.decisions_verified} decisions left their router with "
            "other experts than were chosen"
        ]

    def _count(self, counts: Tensor) -> None:
        self._counts = counts if self._counts is None else self._counts + counts

    def _check(self, failed: Tensor, message: str) -> None:
        """Raise if `failed` (a bool scalar) holds: now on the CPU, else once at the end, to spare the host a sync."""
        if failed.device.type != "cpu":
            before = self._failed.get(message)
            self._failed[message] = failed if before is None else before | failed
        elif bool(failed):
            raise LayoutError(message)

    def _may_be_padded(self, rows: Tensor, num_tokens: int | None = None) -> bool:
        """Check the range of rows; return whether there is padding among them, True also where asking would wait for a GPU.

        Raises:
            LayoutError: a row is below -1, or num_tokens or more.
        """
        message = "routing_rows hold a row below -1; padding is -1."
        if num_tokens is not None:
            message = f"routing_rows reach outside the trace's rows 0..{num_tokens - 1}; padding is -1."
        if rows.device.type != "cpu":
            outside = rows < -1
            self._check((outside if num_tokens is None else outside | (rows >= num_tokens)).any(), message)
            return True
        if not rows.numel():
            return False
        lowest, highest = map(int, rows.aminmax())
        if lowest < -1 or (num_tokens is not None and highest >= num_tokens):
            raise LayoutError(message)
        return lowest < 0

    def _routers(self) -> list[SessionRouter]:
        return [router for chunk in self._chunks for router in chunk.routers]

    def _router_view(self, chunk: Chunk, values: Tensor) -> Tensor:
        """Return [b, s] values as this rank's routers see their tokens: s-major, and this rank's sequence-parallel part."""
        return rows_for_router(
            values, tp_rank=chunk.tp_rank, tp_size=chunk.tp_size, sequence_parallel=chunk.sequence_parallel
        )

    def _find_chunk(self, model: nn.Module | None) -> Chunk:
        if model is None and len(self._chunks) == 1:
            return self._chunks[0]
        if model is None:
            raise LayoutError(
                f"this rank has {len(self._chunks)} model chunks: pass the one that runs, as the forward step gets it."
            )
        for level in wrappers(model):
            if id(level) in self._chunk_of:
                return self._chunk_of[id(level)]
        raise LayoutError(f"{type(model).__name__} is none of this session's {len(self._chunks)} model chunks.")

    def _check_not_nested(self, routers: list[FoundRouter]) -> None:
        for found in routers:
            outer = getattr(found.router, "router_replay", None)
            if isinstance(outer, SessionRouter) and (not self.needs_queue or outer.chunk.needs_queue):
                raise ReplayStateError(
                    f"{found} is under another session already: leave that first. Only freeze_recompute may surround "
                    "record or replay."
                )

    def _check_open(self) -> None:
        if self._closed:
            raise ReplayStateError(f"this {self.kind} session is closed: make a new one.")

    def _detach(self) -> None:
        if self._closed:
            return
        if self._verifier is not None:
            self._verifier.detach()
        for chunk in self._chunks:
            chunk.detach()
        if self._replaces_function:
            routing_function.detach()
        self._closed = True


class FreezeSession(Session):
    """Recomputes use the experts of their forward; see `freeze_recompute`."""

    kind = "freeze_recompute"
    choose = staticmethod(choose_live)
    needs_queue = False

    def __init__(self, model_chunks: Models, *, count_flips: bool, verify: bool) -> None:
        super().__init__(model_chunks, mtp=True, verify=verify)
        for router in self._routers():
            router.counts_flips = count_flips


def freeze_recompute(model_chunks: Models, *, count_flips: bool = False, verify: bool = False) -> FreezeSession:
    """Let every recompute of activation checkpointing use the experts that its forward chose.

    One line before a training loop, for a whole run: it starts at once, needs no call per step, follows any schedule, and
    keeps `topk` bytes per token and layer (two above 256 experts) from a micro-batch's forward until its graph is freed.
    Evaluation keeps nothing. `record` and `replay` may run inside it.

    Args:
        model_chunks: the model or its chunks on this rank; multi-token-prediction routers are frozen too.
        count_flips: also take the live top-k in every recompute and report how many decisions it would have flipped.
        verify: compare every routing map that leaves a router with what was chosen.

    Raises:
        UnsupportedRouterError: a router's selection cannot be frozen; names the config field.
    """
    return FreezeSession(model_chunks, count_flips=count_flips, verify=verify)
