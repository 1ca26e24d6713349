"""The router chooses, and the session keeps it, from whole micro-batches to a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_router_replay.checks import with_checked_options
from megatron_router_replay.errors import LayoutError, TraceError
from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.batches.forward_counts import ForwardCounts
from megatron_router_replay.mcore.batches.inputs import ForwardInputs, TokenReader
from megatron_router_replay.mcore.batches.lookup import number_tokens
from megatron_router_replay.mcore.batches.microbatch import Microbatch, UsedExperts
from megatron_router_replay.mcore.batches.row_inputs import RowInputs, check_padding, check_range
from megatron_router_replay.mcore.batches.segments import CpPartition
from megatron_router_replay.mcore.core.call import RoutingCall, TopKRequest
from megatron_router_replay.mcore.core.streams import current_stream
from megatron_router_replay.mcore.judge.group_check import GroupCheck
from megatron_router_replay.mcore.model.find import Models, unwrap
from megatron_router_replay.mcore.sessions.gathering import Replica, gather_trace
from megatron_router_replay.mcore.sessions.microbatches import Microbatches, make_chunks
from megatron_router_replay.mcore.sessions.routers import SessionRouters
from megatron_router_replay.mcore.sessions.session import Session, open_session
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.ids import check_topk_indices, empty_routes, fill_unrouted, index_dtype
from megatron_router_replay.trace.rows import joined_rows, put_rows, take_rows
from megatron_router_replay.trace.runs import neighbour_runs
from megatron_router_replay.trace.values import as_sequence_lengths

_MAX_ROWS = 1 << 31
"""A higher number is no row of a step: its trace would be larger than a disk."""


class _Recorded(NamedTuple):
    """A forward of a chunk, its routes on their way to the host.

    Args:
        rows: [n] int64, -1: padding.
        routes: [n, layers, topk].
        token_ids: [n]; None: the forward got none.
        lengths: [S], tokens of each sample of the forward, if its rows count from 0; None: they are rows of the whole batch.
    """

    rows: Tensor
    routes: Tensor
    token_ids: Tensor | None
    lengths: Tensor | None

    @property
    def num_rows(self) -> int:
        """Rows of the samples of this forward, over all ranks that share it."""
        return 0 if self.lengths is None else int(self.lengths.sum())


class RecordedRoutes(Microbatches):
    """The experts of a session's forwards, on their way to a trace.

    Args:
        routers: of the session.
        chunks, group_check: see `Microbatches`.
        reader: of the forwards' tokens.
    """

    kind = "record"

    def __init__(
        self, routers: SessionRouters, chunks: list[Chunk], group_check: GroupCheck, reader: TokenReader
    ) -> None:
        super().__init__(routers, chunks, group_check)
        self.numbers_itself = False  # by the tokens of the forwards, without rows by hand
        self._reader = reader
        self._recorded: dict[int, list[_Recorded]] = {chunk.index: [] for chunk in chunks}
        self._highest: list[int] = []  # row of each micro-batch that was given by hand
        self._copied: dict[Any, torch.cuda.Event] = {}  # stream -> the event after which its copies are on the host

    # ---- rows of a forward
    def check_rows(self, chunk: Chunk, inputs: RowInputs) -> None:
        """Check rows that were given by hand: rows of the whole batch."""
        if self.numbers_itself:
            raise LayoutError(
                "MRR406: rows were given for this forward and none before, so the recording numbered those tokens itself. "
                "Give rows for all forwards of a recording, or for none."
            )
        check_padding(inputs)
        check_range(inputs, _MAX_ROWS)
        if inputs.rows.numel():
            # Of the whole batch: this rank may route a part of it. Last, because rows that were refused lengthen no trace.
            self._highest.append(inputs.highest)

    def locate_rows(self, chunk: Chunk, inputs: ForwardInputs) -> RowInputs | None:
        """Return the tokens of a forward, numbered from 0 in the order of its samples; None: rows are given by hand."""
        if self.has_rows_by_hand:
            return None  # the chunk raises, because rows are missing
        found = number_tokens(self._reader, chunk.module, inputs, f"{chunk.where}, micro-batch {chunk.num_begun}")
        self.numbers_itself = True  # not before: the error of a forward without tokens advises rows by hand
        return found

    def make_microbatch(self, chunk: Chunk, inputs: RowInputs) -> Microbatch:
        """Return the micro-batch that keeps the experts of these rows."""
        rows = inputs.rows
        router_rows = chunk.router_view(rows)
        num_rows = router_rows.numel()
        num_padding = 0 if inputs.padding is None else int(chunk.router_view(inputs.padding).sum())
        shape = rows.shape[0], rows.shape[1]
        return Microbatch(
            shape=chunk.router_shape(shape),
            batch_shape=shape,
            counts=ForwardCounts(microbatches=1, rows_live=num_rows - num_padding, rows_padding=num_padding),
            num_routers=len(chunk.replayed_routers),
            rows=router_rows,
            token_ids=inputs.token_ids,
            lengths=inputs.lengths,
            used=UsedExperts(len(chunk.replayed_routers), index_dtype(self._sizes[0])),
        )

    # ---- one forward
    def _experts(self, call: RoutingCall, request: TopKRequest) -> None:
        """Let the router choose."""

    def keep(self, chunk: Chunk, microbatch: Microbatch) -> None:
        """Keep rows, experts and tokens of a forward that returned; experts are copied to the host without a wait."""
        assert microbatch.rows is not None, "a recorded micro-batch has them"
        assert microbatch.used is not None, "a recorded micro-batch has them"
        assert microbatch.used.topk_indices is not None, "a chunk that takes micro-batches has routers"
        tokens = None if microbatch.token_ids is None else chunk.router_view(microbatch.token_ids)
        routes = self._to_host(microbatch.used.topk_indices)
        self._recorded[chunk.index].append(_Recorded(microbatch.rows, routes, tokens, microbatch.lengths))

    def _to_host(self, values: Tensor) -> Tensor:
        """Copy values into page-locked memory without device synchronization; `wait_for_copies` waits for them."""
        if (stream := current_stream(values.device)) is None:
            return values
        copied = values.to("cpu", non_blocking=True)
        self._copied[stream] = stream.record_event()
        return copied

    def wait_for_copies(self) -> None:
        """Wait for the copies."""
        for copied in self._copied.values():
            if not copied.query():  # type: ignore[no-untyped-call]  # counts were read after it, where one stream did all
                copied.synchronize()
        self._copied = {}

    # ---- the trace
    @property
    def num_rows(self) -> int:
        """The highest row that was given by hand, plus 1."""
        return max(self._highest, default=-1) + 1

    @property
    def has_rows_by_hand(self) -> bool:
        return bool(self._highest)

    def sample_lengths(self) -> list[int] | None:
        """Return the lengths of the samples that were recorded; None: rows were given by hand, or nothing was recorded.

        Raises:
            TraceError: chunks recorded different samples.
        """
        of_chunk: dict[int, list[int]] = {}
        for index, recorded in self._recorded.items():
            of_forwards = [each.lengths for each in recorded if each.lengths is not None]
            if of_forwards:
                of_chunk[index] = [length for each in of_forwards for length in each.tolist() if length]
        first = next(iter(of_chunk.values()), None)
        for index, lengths in of_chunk.items():
            if lengths != first:
                raise TraceError(
                    f"MRR422: chunk {index} recorded samples of other lengths than the first chunk. Did a forward fail in "
                    "one of them? Record the batch again."
                )
        return first

    def trace(self, length: int, sample_lengths: list[int] | None) -> RoutingTrace:
        """Return the recorded rows of this rank as a trace of this many rows; see `RecordSession.trace`."""
        rows_of = [self._rows_of(chunk.index) for chunk in self.chunks]
        highest = max((int(rows.max()) for each in rows_of for rows in each if rows.numel()), default=-1)
        if length <= highest:
            raise TraceError(
                f"MRR422: cannot return {length} rows: row {highest} was recorded. Give num_tokens of the whole batch."
            )
        layer_numbers = tuple(sorted(each.layer_number for chunk in self.chunks for each in chunk.replayed_routers))
        num_experts, topk = self._sizes
        indices = empty_routes(length, len(layer_numbers), topk, num_experts=num_experts)
        mask: Tensor | None = None
        for chunk, rows in zip(self.chunks, rows_of):
            columns = [layer_numbers.index(each.layer_number) for each in chunk.replayed_routers]
            seen = torch.zeros(length, dtype=torch.bool)
            for forward_rows, recorded in zip(rows, self._recorded[chunk.index]):
                _place(forward_rows, recorded.routes, columns, indices, seen)
            if mask is not None and not torch.equal(seen, mask):
                row = int((seen != mask).nonzero()[0])
                raise TraceError(
                    f"MRR422: row {row} was routed in some of this rank's chunks only: run every chunk, then read."
                )
            mask = seen
        mask = torch.ones(length, dtype=torch.bool) if mask is None else mask
        fill_unrouted(indices, mask, num_experts=num_experts)  # with legal ids, so that all rows are checked alike
        check_topk_indices(indices, num_experts=num_experts, layer_numbers=layer_numbers)
        return RoutingTrace.from_checked(
            topk_indices=indices,
            layer_numbers=layer_numbers,
            num_experts=num_experts,
            replay_mask=mask,
            token_ids=self._token_ids(length),
            sequence_lengths=as_sequence_lengths(sample_lengths, length),
        )

    @property
    def _sizes(self) -> tuple[int, int]:
        """(num_experts, topk) of the model."""
        for state in self._states.values():
            return int(state.found.router.num_experts), int(state.found.router.topk)
        config: Any = unwrap(self._modules[0]).config  # of a stage without MoE layers
        return int(config.num_moe_experts), int(config.moe_router_topk)

    def _rows_of(self, index: int) -> list[Tensor]:
        """Return the rows of each forward of a chunk; those that the session numbered follow one another."""
        rows, first = [], 0
        for each in self._recorded[index]:
            rows.append(torch.where(each.rows >= 0, each.rows + first, -1))
            first += each.num_rows
        return rows

    def _token_ids(self, length: int) -> Tensor | None:
        token_ids = torch.full((length,), -1, dtype=torch.int32)
        any_known = False
        for index, microbatches in self._recorded.items():
            for rows, tokens in zip(self._rows_of(index), [each.token_ids for each in microbatches]):
                if tokens is not None:
                    any_known = True
                    known = (rows >= 0) & (tokens >= 0)
                    at, ids = rows[known], tokens[known].to(torch.int32)
                    before, token_ids[at] = token_ids[at], ids
                    differ = ((before >= 0) & (before != ids)) | (token_ids[at] != ids)
                    if bool(differ.any()):
                        raise TraceError(
                            f"MRR422: row {int(at[differ][0])} was routed for two different tokens, last in chunk {index}: "
                            "run the micro-batches of all chunks in one order, and give each token a row of its own."
                        )
        return token_ids if any_known else None


class RecordSession(Session):
    """A session that records: `trace` and `gather` are all that it adds to a session. See `record`."""

    def __init__(self, routers: SessionRouters, recorded: RecordedRoutes) -> None:
        super().__init__(recorded.kind, routers, recorded)
        self._recorded = recorded

    def trace(self, *, num_tokens: int | None = None) -> RoutingTrace:
        """Return this rank's part of the recording. It has the rank's layers, and the routes of the rows that it routed.

        Its samples are the sequences of the forwards, in order; a forward that failed is not recorded.

        Rows that this rank did not route (sequence, context or data parallelism) have replay_mask False and, where the
        forwards got input_ids, no token id, so that replaying them raises; `merge_traces` joins the parts of all ranks, and
        `gather` does so over process groups. A rank without MoE layers returns a trace
        of no layers.

        Args:
            num_tokens: rows of the whole batch, where rows were given by hand; None: up to the highest row that this rank
                gave.

        Raises:
            TraceError: the same row was routed twice to different experts, or in some layers only; a row is num_tokens
                or more.
        """
        self._read()
        sample_lengths = self._recorded.sample_lengths()
        if num_tokens is None:
            num_tokens = self._recorded.num_rows if sample_lengths is None else sum(sample_lengths)
        return self._recorded.trace(num_tokens, sample_lengths)

    def gather(self, *groups: dist.ProcessGroup | None) -> RoutingTrace:
        """Return all rows and layers of the recording, on every rank of these groups.

        A collective: every rank of each group calls it, in this order of groups. It is needed wherever a trace is replayed
        by ranks that did not record all of its rows: regrouped micro-batches under sequence, context or data parallelism.
        Ranks of one data-parallel rank recorded parts of the same samples; those of different ones follow in order.
        A rank sends the rows that it routed, and needs memory for the whole and for 32 MB of messages.

        Args:
            groups: for example the tensor-, context-, pipeline- and data-parallel groups; none given: all ranks of the job.

        Raises:
            TraceError: as `trace`; or two ranks recorded the same row with different experts, or other samples of one
                data-parallel rank; or another rank has no part.
        """
        replica: Replica = None if self._recorded.has_rows_by_hand else (_data_parallel_rank(),)
        trace: RoutingTrace | Exception
        try:
            trace = self.trace()
        except Exception as error:  # also one that finds no memory
            trace = error
        for group in groups or (None,) if dist.is_initialized() else ():
            try:
                trace, replica = gather_trace(trace, group, replica)
            except Exception as error:
                trace = error  # raised at the end: the ranks of the next group wait for this one
        if isinstance(trace, Exception):
            raise trace
        return trace


def _place(rows: Tensor, routes: Tensor, columns: Sequence[int], indices: Tensor, seen: Tensor) -> None:
    """Write the routes of a forward into the trace, and note its rows.

    Args:
        rows: [n] int64, -1: padding.
        routes: [n, layers of the chunk, topk].
        columns: of these layers in the trace.
        indices: [length, layers, topk], of the trace.
        seen: [length] bool, True: the chunk has routed this row.

    Raises:
        TraceError: a row was recorded twice with different experts.
    """
    if bool((rows < 0).any()):
        kept = (rows >= 0).nonzero()[:, 0]
        rows, routes = rows[kept], take_rows(routes, joined_rows(kept))
    at = joined_rows(rows)
    before = seen[rows]
    is_repeated = bool(before.any()) or (isinstance(at, Tensor) and len(np.unique(rows.numpy())) < len(rows))
    for first, column, count in neighbour_runs(columns).tolist():
        memory, written = indices[:, column : column + count], routes[:, first : first + count]
        if is_repeated:
            _check_same_experts(memory, rows[before], written[before])
        put_rows(memory, at, written)
        if is_repeated:  # a row that came twice in this forward keeps one of the two, with which both are compared
            _check_same_experts(memory, rows, written)
    seen[at] = True


def _check_same_experts(memory: Tensor, rows: Tensor, routes: Tensor) -> None:
    """Raise if a row of the trace has other experts than these routes, in any order."""
    differ = (memory[rows].sort(dim=2).values != routes.sort(dim=2).values).flatten(1).any(dim=1)
    if bool(differ.any()):
        raise TraceError(
            f"MRR422: row {int(rows[differ][0])} was routed twice, to different experts: record each row once, or "
            "use one recording a pass."
        )


@with_checked_options
def record(
    model_chunks: Models,
    *,
    padding_token_ids: Sequence[int] | None = None,
    cp_partition_mode: CpPartition | None = None,
    group: dist.ProcessGroup | None = None,
) -> RecordSession:
    """Record which experts the model uses; `recording.trace()` returns them.

    The trace has the tokens and samples of the forwards, in order, so that a replay finds them however batches are cut.
    `recording.gather()` joins the parts of several ranks. A model that gets embeddings takes rows from
    `recording.microbatch(rows, model)`, called right before each forward of each chunk. Under activation checkpointing the
    forward is recorded, and its recompute uses the same experts. Multi-token-prediction layers are not recorded; their
    recomputes use their forward's experts, too.

    Args:
        model_chunks: the model or its chunks on this rank.
        padding_token_ids: the tokens of padding, [] for none; those at the ends of a sequence are padding, also a sample's
            own first or last one. Rows of a batch need it, unless the forward gets `padding_mask`; so do packed sequences
            that end in equal tokens, unless it gets unpadded `cu_seqlens_q`.
        cp_partition_mode: as for `replay`.
        group: the ranks that all raise or none when the session ends; all of them must have such a session.
            None: every rank of the job. No rank waits for one that raised inside its block.

    Raises:
        UnsupportedRouterError: a router's selection cannot be recorded exactly; names the config field.
        LayoutError: the model has no experts.
        ReplayStateError: the model is under another session, or RouterReplay objects of its own have an action.
    """

    def make(group_check: GroupCheck) -> RecordSession:
        routers = SessionRouters(model_chunks)
        chunks = make_chunks(routers, "rows, so which tokens it recorded is not known")
        reader = TokenReader(padding_token_ids=padding_token_ids, cp_partition_mode=cp_partition_mode)
        return RecordSession(routers, RecordedRoutes(routers, chunks, group_check, reader))

    return open_session(make, group)


def _data_parallel_rank() -> int:
    """Return which replica of the model this rank is a part of; without Megatron's groups, each rank is one."""
    if parallel_state.is_initialized():
        return int(parallel_state.get_data_parallel_rank())
    return dist.get_rank() if dist.is_initialized() else 0
