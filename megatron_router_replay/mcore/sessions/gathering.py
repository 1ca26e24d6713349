"""Parts that ranks recorded -> the whole recording on each of them: a rank sends the rows that it routed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.errors import TraceError
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


def gather_trace(trace: RoutingTrace, group: dist.ProcessGroup | None) -> RoutingTrace:
    """Return the recording of a batch by all ranks of a group, as `merge_traces(parts, allow_gaps=True)` joins it.

    A collective. Each rank sends its own rows to all, in turn, so a rank needs memory for the whole and for one message.

    Raises:
        TraceError: on every rank alike: the ranks are of different models, or two recorded one row differently.
    """
    known = trace.replay_mask if trace.token_ids is None else trace.replay_mask | (trace.token_ids != UNKNOWN)
    rows = known.nonzero()[:, 0]
    routed = trace.gather_rows(rows)
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    headers: list[Any] = [None] * len(ranks)
    dist.all_gather_object(headers, (trace.num_tokens, TraceHeader.of(routed)), group=group)
    header = headers[ranks.index(dist.get_rank())][1]
    sent = {"rows": rows.int()} | {name: getattr(routed, name) for name in ("topk_indices", *header.per_token)}
    whole = _Whole(headers)
    device = collective_device(group)
    for rank, (_, header) in zip(ranks, headers):
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
    # All ranks have the same rows, so the samples of each are those of all.
    return joined if trace.sequence_lengths is None else joined.with_samples(trace.sequence_lengths)


def place_after_replicas(
    trace: RoutingTrace, group: dist.ProcessGroup | None, replica: Replica
) -> tuple[RoutingTrace, Replica]:
    """Return a part with its rows after those of earlier replicas in a group, and the samples of all; a collective.

    Parts of a replica have the same rows. Where a rank of the group queued rows by hand, all rows are the whole batch's.

    Args:
        trace: this rank's part.
        replica: the data-parallel ranks of its samples; None: its rows were queued by hand.

    Returns:
        The part, and the data-parallel ranks of all samples that it has room for.
    """
    given: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(given, (replica, trace.sequence_lengths), group=group)
    if replica is None or any(each is None for each, _ in given):
        return trace, None
    lengths: dict[tuple[int, ...], tuple[int, ...]] = {}
    for each, samples in given:  # a stage without MoE layers recorded nothing
        lengths[each] = samples if samples is not None else lengths.get(each, ())
    before = sum(sum(samples) for each, samples in lengths.items() if each < replica)
    samples = tuple(length for each in sorted(lengths) for length in lengths[each])
    total, rows = sum(samples), slice(before, before + trace.num_tokens)
    indices = spread_experts(0, total, topk=trace.topk, num_experts=trace.num_experts).unsqueeze(1)
    indices = indices.repeat(1, trace.num_layers, 1)
    mask = torch.zeros(total, dtype=torch.bool)
    tokens = torch.full((total,), UNKNOWN, dtype=torch.int32)
    indices[rows], mask[rows] = trace.topk_indices, trace.replay_mask
    if trace.token_ids is not None:
        tokens[rows] = trace.token_ids
    placed = RoutingTrace.from_checked(
        topk_indices=indices,
        layer_numbers=trace.layer_numbers,
        num_experts=trace.num_experts,
        replay_mask=mask,
        token_ids=tokens,
        sequence_lengths=samples,
    )
    return placed, tuple(sorted({rank for each in lengths for rank in each}))


class _Whole:
    """A recording while it is gathered: all rows and layers of all ranks."""

    def __init__(self, headers: list[tuple[int, TraceHeader]]) -> None:
        models = {(header.num_experts, header.topk) for _, header in headers if header.num_layers}
        if len(models) > 1:
            raise TraceError(f"MRR107: cannot gather recordings of different models: (num_experts, topk) are {models}.")
        first = headers[0][1]
        self.num_experts, self.topk = next(iter(models), (first.num_experts, first.topk))
        self.layer_numbers = tuple(sorted({number for _, header in headers for number in header.layer_numbers}))
        length, num_layers = max(length for length, _ in headers), len(self.layer_numbers)
        self._indices = torch.empty((length, num_layers, self.topk), dtype=index_dtype(self.num_experts))
        self._seen = torch.zeros((length, num_layers), dtype=torch.bool)
        has_tokens = any(header.has_token_ids for _, header in headers)
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
