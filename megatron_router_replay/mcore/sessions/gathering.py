"""Parts that ranks recorded -> the whole recording on each of them: a rank sends the rows that it routed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.errors import RouterReplayError, TraceError
from megatron_router_replay.mcore.core.streams import collective_device
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.header import TraceHeader
from megatron_router_replay.trace.ids import index_dtype, spread_experts
from megatron_router_replay.trace.merge import UNKNOWN

_PIECE_BYTES = 32 << 20
"""The size of a message at most, and of the memory on a GPU where a group takes tensors from GPUs alone."""


_FILLED_ROWS = 1 << 16
"""Rows that get filler at a time: the filler of a million rows would take half as much memory as their routes."""


Replica = tuple[int, ...] | None
"""Data-parallel ranks of the samples in a trace; None: its rows are those of the whole batch."""


class _Part(NamedTuple):
    """The part of a rank, without its rows.

    Args:
        replica: the data-parallel ranks of its samples.
        lengths: of its samples; None: it has none, as a pipeline stage without MoE layers.
        num_tokens: rows of the part; it sends those that it routed.
        header: of the rows that it sends.
    """

    replica: Replica
    lengths: tuple[int, ...] | None
    num_tokens: int
    header: TraceHeader


def gather_trace(
    trace: RoutingTrace | RouterReplayError, group: dist.ProcessGroup | None, replica: Replica = None
) -> tuple[RoutingTrace, Replica]:
    """Return the recording of a batch by all ranks of a group, as `merge_traces(parts, allow_gaps=True)` joins it.

    A collective. Each rank sends its own rows to all, in turn, so a rank needs memory for the whole and for one message.
    Samples of different replicas follow one another, and the parts of a replica have the same rows. If a rank of the group
    gave rows by hand, all rows are the whole batch's.

    Args:
        trace: this rank's part; or the error for which it has none, which is raised: no rank waits for it.
        replica: the data-parallel ranks of its samples; None: its rows were given by hand.

    Returns:
        The recording, and the data-parallel ranks of all its samples.

    Raises:
        TraceError: on every rank alike: a rank has no part; the ranks are of different models, recorded different samples
            of one replica, or two recorded one row differently.
    """
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    parts: list[Any] = [None] * len(ranks)
    if isinstance(trace, RouterReplayError):
        dist.all_gather_object(parts, str(trace), group=group)
        raise trace
    known = trace.replay_mask if trace.token_ids is None else trace.replay_mask | (trace.token_ids != UNKNOWN)
    rows = known.nonzero()[:, 0]
    routed = trace.gather_rows(rows)
    mine = _Part(replica, trace.sequence_lengths, trace.num_tokens, TraceHeader.of(routed))
    dist.all_gather_object(parts, mine, group=group)
    failed = {rank: part for rank, part in zip(ranks, parts) if isinstance(part, str)}
    if failed:
        first_error = next(iter(failed.values()))
        raise TraceError(f"MRR422: cannot gather, because ranks {list(failed)} have no part: {first_error}")
    if any(part.replica is None for part in parts):
        replica, parts = None, [part._replace(replica=None) for part in parts]
    lengths_of = _sample_lengths(ranks, parts)
    num_tokens, first, lengths = max(part.num_tokens for part in parts), 0, lengths_of.get(None)
    if replica is not None:
        if lengths_of:
            first = sum(sum(lengths_of[other]) for other in lengths_of if other < replica)
            lengths = tuple(length for each in sorted(lengths_of) for length in lengths_of[each])
            num_tokens = sum(lengths)
        replica = tuple(sorted({rank for part in parts for rank in part.replica}))
    sent = {"rows": (rows + first).int()}
    sent |= {name: getattr(routed, name) for name in ("topk_indices", *mine.header.per_token)}
    headers = [part.header for part in parts]
    whole, device = _Whole(num_tokens, headers), collective_device(group)
    for rank, header in zip(ranks, headers):
        step = max(1, _PIECE_BYTES // header.row_bytes())
        for start in range(0, header.num_tokens, step):
            piece = slice(start, min(start + step, header.num_tokens))
            memory = {"rows": torch.empty(piece.stop - start, dtype=torch.int32), **header.empty(piece.stop - start)}
            if rank == dist.get_rank():
                memory = {name: sent[name][piece] for name in memory}
            for name, values in memory.items():
                # As bytes, the one dtype that every backend carries.
                message = values.contiguous().view(-1).view(torch.uint8).to(device)
                dist.broadcast(message, src=rank, group=group)
                memory[name] = message.cpu().view(values.dtype).view(values.shape)
            whole.add(rank, header, memory)
    joined = whole.trace()
    return (joined if lengths is None else joined.with_samples(lengths)), replica


def _sample_lengths(ranks: Sequence[int], parts: Sequence[_Part]) -> dict[Any, tuple[int, ...]]:
    """Return replica -> the lengths of its samples; a replica whose ranks recorded no forward is missing.

    Raises:
        TraceError: two ranks of a replica recorded other samples.
    """
    lengths_of: dict[Any, tuple[int, ...]] = {}
    for rank, part in zip(ranks, parts):
        if part.lengths is not None and lengths_of.setdefault(part.replica, part.lengths) != part.lengths:
            raise TraceError(
                f"MRR107: cannot gather: rank {rank} recorded {len(part.lengths)} samples of {sum(part.lengths)} tokens, a "
                f"rank before it {len(lengths_of[part.replica])} of {sum(lengths_of[part.replica])}, with other "
                "sequence_lengths. Did a forward fail on one of these ranks alone? Record the batch again on all of them."
            )
    return lengths_of


class _Whole:
    """A recording while it is gathered: all rows and layers of all ranks."""

    def __init__(self, length: int, headers: list[TraceHeader]) -> None:
        models = {(header.num_experts, header.topk) for header in headers if header.num_layers}
        if len(models) > 1:
            raise TraceError(f"MRR107: cannot gather recordings of different models: (num_experts, topk) are {models}.")
        first = headers[0]
        self.num_experts, self.topk = next(iter(models), (first.num_experts, first.topk))
        self.layer_numbers = tuple(sorted({number for header in headers for number in header.layer_numbers}))
        num_layers = len(self.layer_numbers)
        self._indices = torch.empty((length, num_layers, self.topk), dtype=index_dtype(self.num_experts))
        self._seen = torch.zeros((length, num_layers), dtype=torch.bool)
        has_tokens = any(header.has_token_ids for header in headers)
        self._token_ids = torch.full((length,), UNKNOWN, dtype=torch.int32) if has_tokens else None

    def add(self, rank: int, header: TraceHeader, memory: Mapping[str, Tensor]) -> None:
        """Place some rows of a rank, and compare them with what ranks before it recorded of them."""
        rows, mask = memory["rows"].long(), memory["replay_mask"]
        columns = torch.tensor([self.layer_numbers.index(number) for number in header.layer_numbers], dtype=torch.int64)
        place, routes = (rows[mask].unsqueeze(1), columns), memory["topk_indices"][mask]
        before, seen = self._indices[place], self._seen[place]
        if bool(seen.any()):
            differ = seen & (before.sort(dim=2).values != routes.sort(dim=2).values).any(dim=2)
            self._check(rank, differ.any(dim=1), rows[mask], "routes")
            routes = torch.where(seen.unsqueeze(2), before, routes)
        self._indices[place], self._seen[place] = routes, torch.ones_like(seen)
        if header.has_token_ids:
            assert self._token_ids is not None, "a rank has them"
            before, tokens = self._token_ids[rows], memory["token_ids"]
            self._check(rank, (before != UNKNOWN) & (tokens != UNKNOWN) & (before != tokens), rows, "token ids")
            self._token_ids[rows] = torch.where(tokens != UNKNOWN, tokens, before)

    def _check(self, rank: int, differ: Tensor, rows: Tensor, what: str) -> None:
        if bool(differ.any()):
            raise TraceError(
                f"MRR109: rank {rank} and a rank before it recorded different {what} of row {int(rows[differ][0])} "
                f"({int(differ.sum())} such rows). Were they recorded in the same step, with the same rows?"
            )

    def trace(self) -> RoutingTrace:
        # With no layers at all (stages without MoE layers alone), all() would be True.
        mask = self._seen.all(dim=1) & self._seen.any(dim=1)
        for start in range(0, len(mask), _FILLED_ROWS):
            block = slice(start, start + _FILLED_ROWS)
            unrouted = ~mask[block]
            if bool(unrouted.any()):
                filler = spread_experts(start, len(unrouted), topk=self.topk, num_experts=self.num_experts)
                self._indices[block][unrouted] = filler[unrouted].unsqueeze(1)
        return RoutingTrace.from_checked(
            topk_indices=self._indices,
            layer_numbers=self.layer_numbers,
            num_experts=self.num_experts,
            replay_mask=mask,
            token_ids=self._token_ids,
        )
