"""Record: keep which experts every forward chose, in global rows and layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.errors import LayoutError, ReplayStateError, TraceError
from megatron_router_replay.ids import index_dtype
from megatron_router_replay.mcore.chunk import Chunk
from megatron_router_replay.mcore.find import unwrap
from megatron_router_replay.mcore.ledger import Microbatch
from megatron_router_replay.mcore.session import MicrobatchInputs, Models, Session
from megatron_router_replay.mcore.targets import check_padding
from megatron_router_replay.merge import merge_traces
from megatron_router_replay.routes import MicrobatchRoutes
from megatron_router_replay.trace import RoutingTrace

_MAX_ROWS = 1 << 31
"""A row beyond is no token's of one step, but a number that means something else: the trace would be larger than a disk."""


class RecordSession(Session):
    """Forwards are recorded, recomputes use what their forward chose; see `record`."""

    kind = "record"
    queued = True

    def __init__(self, model_chunks: Models, *, mtp: bool, verify: bool, group: dist.ProcessGroup | None) -> None:
        super().__init__(model_chunks, mtp=mtp, verify=verify, group=group)
        # (rows [n], routes of each layer [n, topk], token ids [n] or None) of each micro-batch
        self._recorded: dict[int, list[tuple[Tensor, list[Tensor], Tensor | None]]] = {
            chunk.index: [] for chunk in self._chunks
        }
        self._length: int | None = None  # rows of the whole batch, agreed upon when the session is closed

    def _queue(self, inputs: MicrobatchInputs, routes: MicrobatchRoutes | None) -> None:
        chunk, rows = inputs.chunk, inputs.rows
        assert chunk.ledger is not None, "the chunk has routers to record"
        if routes is not None:
            raise LayoutError("prefetched routes are for a replay of their trace; a recording takes routing_rows.")
        check_padding(rows, inputs.padding, self._check)
        if inputs.trained is not None:
            self._check(
                (inputs.trained & (rows < 0)).any(),
                "a trained position has row -1, so its route would not be recorded.",
            )
        view = chunk.router_view(rows)
        self._may_be_unrouted(rows, _MAX_ROWS)  # last: rows that are refused shall not lengthen the trace
        at_padding = None if inputs.padding is None else chunk.router_view(inputs.padding)
        padding = rows.new_zeros(()) if at_padding is None else at_padding.sum()
        chunk.ledger.queue(
            Microbatch(
                chunk.ledger.num_queued,
                len(chunk.in_trace),
                shape=chunk.router_shape(rows),
                rows=rows,
                router_rows=view,
                token_ids=inputs.token_ids,
                is_token=chunk.is_token(at_padding),
                counts=torch.stack([torch.zeros_like(padding), view.numel() - padding, padding]),
            )
        )

    def _check_input(self, chunk: Chunk, microbatch: Microbatch, input_ids: Tensor) -> None:
        super()._check_input(chunk, microbatch, input_ids)
        if microbatch.token_ids is None:
            # A copy: trainers reuse the buffer, and this is kept until the trace is asked for.
            microbatch.token_ids = input_ids.to(torch.int64, copy=True).view(microbatch.rows.shape)

    def _microbatch_done(self, chunk: Chunk, microbatch: Microbatch) -> None:
        super()._microbatch_done(chunk, microbatch)
        assert microbatch.router_rows is not None, "a recorded micro-batch is queued with its routers' rows"
        tokens = None if microbatch.token_ids is None else chunk.router_view(microbatch.token_ids)
        used = [indices for indices in microbatch.used if indices is not None]
        # Kept where they are, on a GPU too: `trace` moves them once, and no step waits for it.
        self._recorded[chunk.index].append((microbatch.router_rows, used, tokens))

    def trace(self, *, num_tokens: int | None = None) -> RoutingTrace:
        """Return this rank's part of the recording: its layers, and the routes of the rows that it routed.

        Rows that this rank did not route (sequence, context or data parallelism) have replay_mask False and, where the
        forwards got input_ids, no token id, so that replaying them raises; `merge_traces` joins the parts of all ranks, and
        `gather` does so over process groups. A rank without MoE layers returns a trace
        of no layers.

        Args:
            num_tokens: rows of the whole batch; None: up to the highest row that any rank of the session's group queued,
                so the same on all of them. They agree on it when the session is left, so leave it first.

        Raises:
            TraceError: the same row was routed twice to different experts, or in some layers only; a row is num_tokens
                or more.
            ReplayStateError: num_tokens is None, there are several ranks, and the session is still open or was left by an
                exception.
        """
        parts = [self._part(chunk) for chunk in self._chunks if chunk.in_trace]
        length = max((int(rows.max()) + 1 for rows, _ in parts if rows.numel()), default=0)
        if num_tokens is None:
            num_tokens = self._agreed_length()
        if num_tokens < length:
            raise TraceError(f"cannot return {num_tokens} rows: row {length - 1} was recorded.")
        length = num_tokens
        placed = [_place(rows, used, length) for rows, used in parts]
        for _, seen in placed[1:]:
            if not torch.equal(seen, placed[0][1]):
                row = int((seen != placed[0][1]).nonzero()[0])
                raise TraceError(
                    f"row {row} was routed in some of this rank's chunks only: run every chunk, then read."
                )
        numbers = [router.found.layer_number for chunk in self._chunks for router in chunk.in_trace]
        indices = torch.cat([self._empty(length, 0), *(part for part, _ in placed)], dim=1)
        return RoutingTrace(
            topk_indices=indices[:, sorted(range(len(numbers)), key=numbers.__getitem__)],
            layer_numbers=tuple(sorted(numbers)),
            num_experts=self._config.num_moe_experts,
            replay_mask=placed[0][1] if placed else torch.ones(length, dtype=torch.bool),
            token_ids=self._token_ids(length),
        )

    def gather(self, *groups: dist.ProcessGroup | None, num_tokens: int | None = None) -> RoutingTrace:
        """Return the whole recording, on every rank of these groups: all of its rows and layers.

        A collective: every rank of each group calls it, in this order of groups. It is needed wherever a trace is replayed
        by ranks that did not record all of its rows: regrouped micro-batches under sequence, context or data parallelism.

        Args:
            groups: for example the tensor-, context-, pipeline- and data-parallel groups; none given: all ranks of the job.
            num_tokens: as for `trace`.

        Raises:
            TraceError: as `trace`; or two ranks recorded the same row with different experts.
        """
        trace = self.trace(num_tokens=num_tokens)
        if not dist.is_initialized():
            return trace
        for group in groups or (None,):
            parts: list[RoutingTrace | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, trace, group=group)
            trace = merge_traces([part for part in parts if part is not None], allow_gaps=True)
        return trace

    def _judge(self, everyone: dict[int, list[int]]) -> list[str]:
        self._length = max(length for *_, length in everyone.values())
        return []

    def _agreed_length(self) -> int:
        if self._length is not None:
            return self._length
        if dist.is_initialized() and dist.get_world_size(self._group) > 1:
            raise ReplayStateError(
                "the ranks agree on the recording's number of rows when the session is left: leave it before trace() or "
                "gather(), or pass num_tokens."
            )
        return int(self._num_rows)

    @property
    def _config(self) -> Any:
        return unwrap(self._chunks[0].module).config

    def _empty(self, length: int, num_layers: int) -> Tensor:
        config = self._config
        return torch.empty(length, num_layers, config.moe_router_topk, dtype=index_dtype(config.num_moe_experts))

    def _part(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return what a chunk recorded: rows [n] int64 and routes [n, its layers, topk], padding left out, on the CPU."""
        microbatches = self._recorded[chunk.index]
        if not microbatches:
            return torch.empty(0, dtype=torch.int64), self._empty(0, len(chunk.in_trace))
        rows = torch.cat([rows for rows, _, _ in microbatches]).cpu()
        used = torch.cat([torch.stack(layers, dim=1) for _, layers, _ in microbatches]).cpu()
        return rows[rows >= 0], used[rows >= 0]

    def _token_ids(self, length: int) -> Tensor | None:
        token_ids = torch.full((length,), -1, dtype=torch.int32)
        any_known = False
        for microbatches in self._recorded.values():
            for rows, _, tokens in microbatches:
                if tokens is not None:
                    any_known = True
                    known = (rows >= 0).cpu()
                    token_ids[rows.cpu()[known]] = tokens.cpu()[known].to(torch.int32)
        return token_ids if any_known else None


def _place(rows: Tensor, used: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Put routes at their rows: ([length, layers, topk], seen [length] bool).

    Raises:
        TraceError: a row was recorded twice with different experts.
    """
    placed = torch.zeros(length, *used.shape[1:], dtype=used.dtype)
    placed[rows] = used  # of a row that came twice one of both, which the other is compared with
    seen = torch.zeros(length, dtype=torch.bool)
    seen[rows] = True
    if int(seen.sum()) != rows.numel():
        differ = (placed[rows].sort(dim=2).values != used.sort(dim=2).values).flatten(1).any(dim=1)
        if bool(differ.any()):
            raise TraceError(
                f"row {int(rows[differ][0])} was routed twice, to different experts: record each row once, or use one "
                "recording a pass."
            )
    return placed, seen


def record(
    model_chunks: Models, *, mtp: bool = False, verify: bool = False, group: dist.ProcessGroup | None = None
) -> RecordSession:
    """Record which experts the model uses; `recording.trace()` returns them.

    Call `recording.microbatch(rows, model)` before each forward of each chunk. Under activation checkpointing the forward
    is recorded and its recompute uses the same experts.

    Args:
        model_chunks: the model or its chunks on this rank.
        mtp: also record multi-token-prediction layers, as layer_number num_layers + 1, ...; their recomputes use what
            the forward chose either way.
        verify: compare every routing map that leaves a router with what is recorded.
        group: the ranks that agree on the number of rows when the session is left, in one all_gather of five numbers; all
            of them must have such a session. None: every rank of the job.

    Raises:
        UnsupportedRouterError: a router's selection cannot be recorded exactly; names the config field.
        LayoutError: the model has no experts.
        ReplayStateError: the model is under another session, or its routers are driven by their own RouterReplay.
    """
    return RecordSession(model_chunks, mtp=mtp, verify=verify, group=group).start()
