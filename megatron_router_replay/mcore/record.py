"""Record: keep which experts every forward chose, in global rows and layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import ReplayStateError, TraceError
from megatron_router_replay.ids import index_dtype
from megatron_router_replay.mcore.chunk import Chunk, Microbatch, choose_live
from megatron_router_replay.mcore.find import unwrap
from megatron_router_replay.mcore.session import Models, Session
from megatron_router_replay.trace import RoutingTrace


class RecordSession(Session):
    """Forwards are recorded, recomputes use what their forward chose; see `record`."""

    kind = "record"
    choose = staticmethod(choose_live)
    needs_queue = True

    def _setup(self) -> None:
        self._recorded: dict[int, list[tuple[Tensor, list[Tensor]]]] = {chunk.index: [] for chunk in self._chunks}
        self._tokens: list[tuple[Tensor, Tensor]] = []

    def _queue(self, chunk: Chunk, rows: Tensor, token_ids: Tensor | None) -> None:
        padded = self._may_be_padded(rows)
        view = self._router_view(chunk, rows)
        padding = (view < 0).sum() if padded else rows.new_zeros(())
        self._count(torch.stack([torch.zeros_like(padding), view.numel() - padding, padding]))
        if token_ids is not None:
            self._tokens.append((view, self._router_view(chunk, token_ids)))
        chunk.queue(rows=view)

    def _microbatch_done(self, chunk: Chunk, microbatch: Microbatch) -> None:
        super()._microbatch_done(chunk, microbatch)
        rows, used = microbatch.rows, [indices for indices in microbatch.used if indices is not None]
        assert rows is not None, "a recorded micro-batch is queued with rows"
        if rows.numel() != used[0].shape[0]:
            raise ReplayStateError(
                f"{chunk.where(microbatch, chunk.routers[0])}: the router routed {used[0].shape[0]} tokens, routing_rows "
                f"has {rows.numel()} on this rank."
            )
        used = used[: len(chunk.in_trace)]
        self._recorded[chunk.index].append((rows, used))

    def trace(self, *, num_tokens: int | None = None) -> RoutingTrace:
        """Return this rank's part of the recording: its layers, and the routes of the rows that it routed.

        Rows that this rank did not route (sequence or context parallelism) have replay_mask False; `merge_traces` joins
        the parts of all ranks. A rank without MoE layers returns a trace of no layers.

        Args:
            num_tokens: rows of the whole batch; None: up to the last row seen here.

        Raises:
            TraceError: the same row was routed twice to different experts, or in some layers only; a row is num_tokens
                or more.
        """
        parts = [self._part(chunk) for chunk in self._chunks if chunk.in_trace]
        length = max((int(rows.max()) + 1 for rows, _ in parts if rows.numel()), default=0)
        if num_tokens is not None and num_tokens < length:
            raise TraceError(f"cannot return {num_tokens} rows: row {length - 1} was recorded.")
        length = length if num_tokens is None else num_tokens
        placed = [_place(rows, used, length) for rows, used in parts]
        for _, seen in placed[1:]:
            if not torch.equal(seen, placed[0][1]):
                row = int((seen != placed[0][1]).nonzero()[0])
                raise TraceError(
                    f"row {row} was routed in some of this rank's chunks only: run every chunk, then read."
                )
        numbers = [router.found.layer_number for router in self._routers() if router.in_trace]
        indices = torch.cat([self._empty(length), *(part for part, _ in placed)], dim=1)
        return RoutingTrace(
            topk_indices=indices[:, sorted(range(len(numbers)), key=numbers.__getitem__)],
            layer_numbers=tuple(sorted(numbers)),
            num_experts=self._config.num_moe_experts,
            replay_mask=placed[0][1] if placed else torch.ones(length, dtype=torch.bool),
            token_ids=self._token_ids(length),
        )

    @property
    def _config(self) -> Any:
        return unwrap(self._chunks[0].module).config

    def _empty(self, length: int) -> Tensor:
        config = self._config
        return torch.empty(length, 0, config.moe_router_topk, dtype=index_dtype(config.num_moe_experts))

    def _part(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return what a chunk recorded: rows [n] int64 and routes [n, its layers, topk], padding left out, on the CPU."""
        microbatches = self._recorded[chunk.index]
        if not microbatches:
            return torch.empty(0, dtype=torch.int64), self._empty(0).expand(0, len(chunk.in_trace), -1)
        rows = torch.cat([rows for rows, _ in microbatches]).cpu()
        used = torch.cat([torch.stack(layers, dim=1) for _, layers in microbatches]).cpu()
        return rows[rows >= 0], used[rows >= 0]

    def _token_ids(self, length: int) -> Tensor | None:
        if not self._tokens:
            return None
        token_ids = torch.full((length,), -1, dtype=torch.int32)
        for rows, tokens in self._tokens:
            known = (rows >= 0).cpu()
            token_ids[rows.cpu()[known]] = tokens.cpu()[known].to(torch.int32)
        return token_ids


def _place(rows: Tensor, used: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Put routes at their rows: ([length, layers, topk], seen [length] bool).

    Raises:
        TraceError: a row was recorded twice with different experts.
    """
    placed = torch.zeros(length, *used.shape[1:], dtype=used.dtype)
    placed[rows] = used
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


def record(model_chunks: Models, *, mtp: bool = False, verify: bool = False) -> RecordSession:
    """Record which experts the model uses; `recording.trace()` returns them.

    Call `recording.microbatch(rows, model)` before each forward of each chunk. Under activation checkpointing the forward
    is recorded and its recompute uses the same experts.

    Args:
        model_chunks: the model or its chunks on this rank.
        mtp: also record multi-token-prediction layers, as layer_number num_layers + 1, ...; their recomputes use what
            the forward chose either way.
        verify: compare every routing map that leaves a router with what is recorded.

    Raises:
        UnsupportedRouterError: a router's selection cannot be recorded exactly; names the config field.
        ReplayStateError: the model is under another session.
    """
    return RecordSession(model_chunks, mtp=mtp, verify=verify)
