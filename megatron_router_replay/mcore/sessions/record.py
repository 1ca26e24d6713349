"""The router chooses, and the session keeps it, from whole micro-batches to a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_router_replay.checks import check_withdrawn
from megatron_router_replay.errors import LayoutError, ReplayStateError, TraceError
from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.batches.follow import ForwardInputs, TokenReader, number_tokens
from megatron_router_replay.mcore.batches.index import Partition
from megatron_router_replay.mcore.batches.queue import Microbatch
from megatron_router_replay.mcore.batches.rows import RowInputs, check_padding, count_rows
from megatron_router_replay.mcore.core.call import RoutingCall
from megatron_router_replay.mcore.core.streams import current_stream
from megatron_router_replay.mcore.model.find import Models, unwrap
from megatron_router_replay.mcore.sessions.gathering import Replica, gather_trace, place_after_replicas
from megatron_router_replay.mcore.sessions.group_check import Numbers
from megatron_router_replay.mcore.sessions.microbatches import MicrobatchSession, open_session
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.ids import index_dtype

_MAX_ROWS = 1 << 31
"""A higher number is no row of one step: its trace would be larger than a disk."""


class _Recorded(NamedTuple):
    """One forward of a chunk, on its way to the host.

    Args:
        rows: [n] int64, -1: padding.
        routes: [n, layers, topk].
        token_ids: [n]; None: the forward got none.
        lengths: [S], tokens of each sample of the forward, whose rows count from 0; None: rows of the whole batch were given.
    """

    rows: Tensor
    routes: Tensor
    token_ids: Tensor | None
    lengths: Tensor | None

    @property
    def num_rows(self) -> int:
        """Rows of the samples of this forward, over all ranks that share it."""
        return 0 if self.lengths is None else int(self.lengths.sum())


class RecordSession(MicrobatchSession):
    """Forwards are recorded, recomputes use what their forward chose; see `record`."""

    kind = "record"
    _lacks = "rows, so which tokens it recorded is not known"

    def __init__(
        self,
        model_chunks: Models,
        *,
        verify: bool,
        group: dist.ProcessGroup | None,
        padding_token_ids: Sequence[int] | None,
        cp_partition_mode: Partition | None,
    ) -> None:
        super().__init__(model_chunks, verify=verify, group=group)
        self._recorded: dict[int, list[_Recorded]] = {chunk.index: [] for chunk in self._chunks}
        self._highest: list[Tensor] = []  # row of each micro-batch that was queued by hand
        self._numbers_itself = False
        self._reader = TokenReader(padding_token_ids=padding_token_ids, cp_partition_mode=cp_partition_mode)
        self._copied: dict[Any, torch.cuda.Event] = {}  # stream -> after which what it copied to the host is there

    def _queue(self, chunk: Chunk, inputs: RowInputs) -> None:
        if self._numbers_itself:
            raise LayoutError(
                "MRR406: rows were given for this forward and none before, so the recording numbered those tokens itself. "
                "Give rows for all forwards of a recording, or for none."
            )
        self._record(chunk, inputs)

    def _on_unqueued(self, chunk: Chunk, inputs: ForwardInputs) -> None:
        """Number the tokens of a forward in the order of its samples."""
        if self._highest:
            return  # the queue says that rows are missing
        self._numbers_itself = True
        where = f"{chunk.queue.where}, micro-batch {chunk.queue.num_queued}"
        rows, lengths = number_tokens(self._reader, chunk.module, inputs, where, self._check)
        assert inputs.input_ids is not None, "checked"
        tokens = inputs.input_ids.to(torch.int64, copy=True)
        self._record(chunk, RowInputs(rows=rows, token_ids=tokens, padding=rows < 0, trained=None), lengths)

    def _record(self, chunk: Chunk, inputs: RowInputs, lengths: Tensor | None = None) -> None:
        """Queue a micro-batch that is recorded in these rows; with `lengths`, they count from 0 in each forward."""
        rows = inputs.rows
        check_padding(rows >= 0, inputs.padding, self._check)
        if inputs.trained is not None:
            self._check(
                (inputs.trained & (rows < 0)).any(),
                "MRR410: a trained position has row -1, so its route would not be recorded.",
            )
        view = chunk.router_view(rows)
        self._may_be_unrouted(rows, _MAX_ROWS)  # last: rows that are refused shall not lengthen the trace
        if rows.numel() and lengths is None:
            # Of the whole batch: this rank may route a part of it.
            self._highest.append(self._to_host(rows.max()))
        padding = None if inputs.padding is None else chunk.router_view(inputs.padding)
        chunk.queue.queue(
            Microbatch(
                shape=chunk.router_shape((rows.shape[0], rows.shape[1])),
                batch_shape=(rows.shape[0], rows.shape[1]),
                counts=count_rows(view.numel(), view >= -1 if padding is None else ~padding, padding),
                num_routers=len(chunk.replayed_routers),
                rows=view,
                token_ids=inputs.token_ids,
                lengths=lengths,
                is_followed=lengths is not None,
            )
        )

    def _on_routed(self, call: RoutingCall) -> None:
        """Keep what a router used; see `RoutingSource`."""
        if call.microbatch is not None:
            assert call.used is not None, "the call is over"
            # Narrowed where a tape has it so; else all layers at once, at the end, for autograd keeps it as it is.
            used = call.used if call.kept is None else call.kept
            call.microbatch.used[self._routers[call.router].position] = used
        super()._on_routed(call)

    def _on_forward(self, chunk: Chunk, microbatch: Microbatch, input_ids: Tensor | None) -> None:
        super()._on_forward(chunk, microbatch, input_ids)
        if microbatch.token_ids is None and input_ids is not None:
            # A copy: trainers reuse the buffer, and this is kept until the trace is asked for.
            microbatch.token_ids = input_ids.to(torch.int64, copy=True).view(microbatch.batch_shape)

    def _on_done(self, chunk: Chunk, microbatch: Microbatch) -> None:
        super()._on_done(chunk, microbatch)
        assert microbatch.rows is not None, "a recorded micro-batch has them"
        tokens = None if microbatch.token_ids is None else chunk.router_view(microbatch.token_ids)
        used = torch.stack([microbatch.used[position] for position in range(len(chunk.replayed_routers))], dim=1)
        dtype = index_dtype(self._sizes[0])
        rows, used = self._to_host(microbatch.rows), self._to_host(used.to(dtype))
        tokens = None if tokens is None else self._to_host(tokens)
        lengths = None if microbatch.lengths is None else self._to_host(microbatch.lengths)
        self._recorded[chunk.index].append(_Recorded(rows, used, tokens, lengths))

    def _to_host(self, values: Tensor) -> Tensor:
        """Copy values into page-locked memory while the device goes on; `_read` waits for them."""
        if (stream := current_stream(values.device)) is None:
            return values
        copied = values.to("cpu", non_blocking=True)
        self._copied[stream] = stream.record_event()
        return copied

    def _read(self) -> None:
        super()._read()
        for copied in self._copied.values():
            if not copied.query():  # type: ignore[no-untyped-call]  # the counts were read behind it, where one stream did all
                copied.synchronize()
        self._copied = {}

    def trace(self, *, num_tokens: int | None = None) -> RoutingTrace:
        """Return this rank's part of the recording. It has the rank's layers, and the routes of the rows that it routed.

        Its samples are the sequences of the forwards, in order; a forward that failed is not recorded.

        Rows that this rank did not route (sequence, context or data parallelism) have replay_mask False and, where the
        forwards got input_ids, no token id, so that replaying them raises; `merge_traces` joins the parts of all ranks, and
        `gather` does so over process groups. A rank without MoE layers returns a trace
        of no layers.

        Args:
            num_tokens: rows of the whole batch, where rows were queued by hand; None: up to the highest row that any rank of
                the session's group queued, so the same on all of them. They agree on it when the session is left, so
                leave it first.

        Raises:
            TraceError: the same row was routed twice to different experts, or in some layers only; a row is num_tokens
                or more.
            ReplayStateError: num_tokens is None, there are several ranks, and the session is still open or was left by an
                exception.
        """
        self._read()
        parts = [self._part(chunk) for chunk in self._chunks]
        length = max((int(rows.max()) + 1 for rows, _ in parts if rows.numel()), default=0)
        lengths = self._sample_lengths()
        if num_tokens is None:
            num_tokens = self._agreed_length() if lengths is None else sum(lengths)
        if num_tokens < length:
            raise TraceError(
                f"MRR422: cannot return {num_tokens} rows: row {length - 1} was recorded. Give num_tokens of the whole batch."
            )
        length = num_tokens
        placed = [_place(rows, used, length) for rows, used in parts]
        for _, seen in placed[1:]:
            if not torch.equal(seen, placed[0][1]):
                row = int((seen != placed[0][1]).nonzero()[0])
                raise TraceError(
                    f"MRR422: row {row} was routed in some of this rank's chunks only: run every chunk, then read."
                )
        numbers = [found.layer_number for chunk in self._chunks for found in chunk.replayed_routers]
        indices = torch.cat([self._empty(length, 0), *(part for part, _ in placed)], dim=1)
        return RoutingTrace(
            topk_indices=indices[:, sorted(range(len(numbers)), key=numbers.__getitem__)],
            layer_numbers=tuple(sorted(numbers)),
            num_experts=self._sizes[0],
            replay_mask=placed[0][1] if placed else torch.ones(length, dtype=torch.bool),
            token_ids=self._token_ids(length),
            sequence_lengths=lengths,
        )

    def gather(self, *groups: dist.ProcessGroup | None, num_tokens: int | None = None) -> RoutingTrace:
        """Return all rows and layers of the recording, on every rank of these groups.

        A collective: every rank of each group calls it, in this order of groups. It is needed wherever a trace is replayed
        by ranks that did not record all of its rows: regrouped micro-batches under sequence, context or data parallelism.
        Ranks of one data-parallel rank recorded parts of the same samples; those of different ones follow in order.
        A rank sends the rows that it routed, and holds the whole beside a message of 32 MB.

        Args:
            groups: for example the tensor-, context-, pipeline- and data-parallel groups; none given: all ranks of the job.
            num_tokens: as for `trace`.

        Raises:
            TraceError: as `trace`; or two ranks recorded the same row with different experts.
        """
        trace = self.trace(num_tokens=num_tokens)
        replica: Replica = (_data_parallel_rank(),) if self._numbers_itself or not self._chunks else None
        for group in groups or (None,) if dist.is_initialized() else ():
            trace, replica = place_after_replicas(trace, group, replica)
            trace = gather_trace(trace, group)
        return trace

    def _numbers(self) -> Numbers:
        return super()._numbers()._replace(num_rows=self._num_rows())

    def _num_rows(self) -> int:
        """Return the highest row that was queued by hand, plus 1."""
        return max((int(highest) + 1 for highest in self._highest), default=0)

    def _agreed_length(self) -> int:
        if self._verdict is not None:
            return self._verdict.num_rows
        if dist.is_initialized() and dist.get_world_size(self._group) > 1:
            raise ReplayStateError(
                "MRR422: the ranks agree on the recording's number of rows when the session is left: leave it before "
                "trace() or gather(), or pass num_tokens."
            )
        return self._num_rows()

    @property
    def _sizes(self) -> tuple[int, int]:
        """(num_experts, topk) of the model."""
        for router_state in self._routers.values():
            return int(router_state.found.router.num_experts), int(router_state.found.router.topk)
        config: Any = unwrap(self._modules[0]).config  # a stage without MoE layers says what its model has
        return int(config.num_moe_experts), int(config.moe_router_topk)

    def _empty(self, length: int, num_layers: int) -> Tensor:
        num_experts, topk = self._sizes
        return torch.empty(length, num_layers, topk, dtype=index_dtype(num_experts))

    def _part(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return what a chunk recorded: rows [n] int64 and routes [n, its layers, topk], padding left out, on the CPU."""
        microbatches = self._recorded[chunk.index]
        if not microbatches:
            return torch.empty(0, dtype=torch.int64), self._empty(0, len(chunk.replayed_routers))
        rows = torch.cat(self._rows_of(chunk.index))
        used = torch.cat([each.routes for each in microbatches])
        return rows[rows >= 0], used[rows >= 0]

    def _rows_of(self, index: int) -> list[Tensor]:
        """Return the rows of each forward of a chunk; those that the session numbered follow one another."""
        rows, first = [], 0
        for each in self._recorded[index]:
            rows.append(torch.where(each.rows >= 0, each.rows + first, -1))
            first += each.num_rows
        return rows

    def _sample_lengths(self) -> list[int] | None:
        """Return the lengths of the samples that were recorded; None: rows were queued by hand, or nothing was recorded."""
        recorded = next((each for each in self._recorded.values() if each), [])
        lengths = [each.lengths for each in recorded if each.lengths is not None]
        return [length for each in lengths for length in each.tolist() if length] if lengths else None

    def _token_ids(self, length: int) -> Tensor | None:
        token_ids = torch.full((length,), -1, dtype=torch.int32)
        any_known = False
        for index, microbatches in self._recorded.items():
            for rows, tokens in zip(self._rows_of(index), [each.token_ids for each in microbatches]):
                if tokens is not None:
                    any_known = True
                    known = rows >= 0
                    token_ids[rows[known]] = tokens[known].to(torch.int32)
        return token_ids if any_known else None


def _place(rows: Tensor, used: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Put routes at their rows: ([length, layers, topk], seen [length] bool).

    Raises:
        TraceError: a row was recorded twice with different experts.
    """
    placed = torch.zeros(length, *used.shape[1:], dtype=used.dtype)
    placed[rows] = used  # a row that came twice keeps one of the two; the other is compared with it below
    seen = torch.zeros(length, dtype=torch.bool)
    seen[rows] = True
    if int(seen.sum()) != rows.numel():
        differ = (placed[rows].sort(dim=2).values != used.sort(dim=2).values).flatten(1).any(dim=1)
        if bool(differ.any()):
            raise TraceError(
                f"MRR422: row {int(rows[differ][0])} was routed twice, to different experts: record each row once, or "
                "use one recording a pass."
            )
    return placed, seen


def record(
    model_chunks: Models,
    *,
    padding_token_ids: Sequence[int] | None = None,
    cp_partition_mode: Partition | None = None,
    verify: bool = False,
    group: dist.ProcessGroup | None = None,
    **withdrawn: Any,
) -> RecordSession:
    """Record which experts the model uses; `recording.trace()` returns them.

    The trace has the tokens and samples of the forwards, in order, so that a replay finds them however batches are cut.
    `recording.gather()` joins the parts of several ranks. A model that gets embeddings takes rows from
    `recording.microbatch(rows, model)`, called before each forward of each chunk. Under activation checkpointing the forward
    is recorded, and its recompute uses the same experts. Multi-token-prediction layers are not recorded; their recomputes
    use their forward's experts, too.

    Args:
        model_chunks: the model or its chunks on this rank.
        padding_token_ids: the tokens that padding holds, [] for none. Without it, `padding_mask` or unpadded
            `cu_seqlens_q` say what is padding; where neither does and sequences end in equal tokens, the forward raises.
        cp_partition_mode: as for `replay`.
        verify: compare every routing map that a token dispatcher gets with the recorded experts.
        group: the ranks that agree on the number of rows when the session ends; all of them must have such a session.
            None: every rank of the job. The others do not wait for a rank that raised inside its block.

    Raises:
        UnsupportedRouterError: a router's selection cannot be recorded exactly; names the config field.
        LayoutError: the model has no experts.
        ReplayStateError: the model is under another session, or its routers are driven by their own RouterReplay.
    """
    check_withdrawn("record", withdrawn, {"mtp": "MTP routers are live, and no recording has their routes."})

    def make() -> RecordSession:
        return RecordSession(
            model_chunks,
            verify=verify,
            group=group,
            padding_token_ids=padding_token_ids,
            cp_partition_mode=cp_partition_mode,
        )

    return open_session(make, group)


def _data_parallel_rank() -> int:
    """Return which replica of the model this rank is a part of; without Megatron's groups, each rank is one."""
    if parallel_state.is_initialized():
        return int(parallel_state.get_data_parallel_rank())
    return dist.get_rank() if dist.is_initialized() else 0
