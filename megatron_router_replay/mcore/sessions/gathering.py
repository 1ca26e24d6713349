"""Parts that ranks recorded -> the whole recording on each of them: a rank sends the rows that it routed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.errors import TraceError
from megatron_router_replay.mcore.core.streams import collective_device
from megatron_router_replay.together import raise_together
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.header import TraceHeader, views_of_bytes
from megatron_router_replay.trace.join import PartJoiner, known_rows

_PIECE_BYTES, _NUM_UNDER_WAY = 4 << 20, 8
"""The size of a message at most, and how many are under way; a group that takes tensors from GPUs alone has them there."""


Replica = tuple[int, ...] | None
"""Data-parallel ranks of the samples in a trace; None: its rows are those of the whole batch."""


class _PartHeader(NamedTuple):
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
    trace: RoutingTrace | Exception, group: dist.ProcessGroup | None, replica: Replica = None
) -> tuple[RoutingTrace, Replica]:
    """Return the recording of a batch by all ranks of a group, as `merge_traces(parts, allow_gaps=True)` joins it.

    A collective. Each rank sends its known rows to all, and needs memory for the whole and for 32 MB of messages.
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
    mine: _PartHeader | Exception
    try:
        if isinstance(trace, Exception):
            raise trace
        rows = known_rows(trace)
        routed = trace.gather_rows(rows)
        mine = _PartHeader(replica, trace.sequence_lengths, trace.num_tokens, TraceHeader.of(routed))
    except Exception as error:
        mine = error
    parts = raise_together(mine, _error_of_peers, group)
    if any(part.replica is None for part in parts):
        replica, parts = None, [part._replace(replica=None) for part in parts]
    lengths_of = _sample_lengths(ranks, parts)
    num_tokens, first, lengths = max(part.num_tokens for part in parts), 0, lengths_of.get(None)
    if replica is not None:
        if lengths_of:
            first = sum(sum(lengths_of[other]) for other in lengths_of if other < replica)
            lengths = tuple(length for each in sorted(lengths_of) for length in lengths_of[each])
            num_tokens = sum(lengths)
        replica = tuple(sorted({rank for part in parts for rank in part.replica or ()}))
    headers = dict(zip(ranks, (part.header for part in parts)))
    joiner = _joiner(num_tokens, list(headers.values()))
    per_token = headers[dist.get_rank()].per_token
    sent = {"rows": (rows + first).int(), **{name: getattr(routed, name) for name in ("topk_indices", *per_token)}}
    fault: Exception | None = None
    for rank, piece in _received(headers, sent, group):
        try:
            if fault is None:
                joiner.add(f"rank {rank}", headers[rank].layer_numbers, piece.pop("rows").long(), piece)
        except Exception as error:  # also one that finds no memory: the other ranks wait for what this one sends
            fault = error
    raise_together(fault, _error_of_peers, group)
    joined = joiner.trace()
    return (joined if lengths is None else joined.with_samples(lengths)), replica


def _received(
    headers: Mapping[int, TraceHeader], sent: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield (rank, some of its rows) until all ranks have the rows of all; several ranks send at a time.

    Args:
        headers: rank -> the rows that it sends.
        sent: the values of this rank's rows, and "rows", their numbers in the whole.
    """
    device = collective_device(group)
    steps = {rank: max(1, _PIECE_BYTES // (4 + header.row_bytes())) for rank, header in headers.items()}
    # The first pieces of all ranks, then the second ones, and so on: neighbours in this order have different senders.
    pieces = sorted(
        (number, rank) for rank, header in headers.items() for number in range(-(-header.num_tokens // steps[rank]))
    )
    under_way: deque[tuple[int, int, Tensor, Any]] = deque()
    for number, rank in pieces:
        if len(under_way) == _NUM_UNDER_WAY:
            yield _finished(headers, *under_way.popleft())
        header, start = headers[rank], number * steps[rank]
        stop = min(start + steps[rank], header.num_tokens)
        message = torch.empty((stop - start) * (4 + header.row_bytes()), dtype=torch.uint8)
        if rank == dist.get_rank():
            for name, memory in _views(message, header, stop - start).items():
                memory.copy_(sent[name][start:stop])
        message = message.to(device)
        work = dist.broadcast(message, src=rank, group=group, async_op=True)
        under_way.append((rank, stop - start, message, work))
    while under_way:
        yield _finished(headers, *under_way.popleft())


def _finished(
    headers: Mapping[int, TraceHeader], rank: int, count: int, message: Tensor, work: Any
) -> tuple[int, dict[str, Tensor]]:
    work.wait()
    return rank, _views(message.cpu(), headers[rank], count)


def _views(message: Tensor, header: TraceHeader, count: int) -> dict[str, Tensor]:
    """Return the values of `count` rows and their numbers, "rows", as views of a message of bytes."""
    return {"rows": message[: 4 * count].view(torch.int32), **views_of_bytes(message[4 * count :], header, count)}


def _error_of_peers(ranks: list[int], text: str) -> TraceError:
    return TraceError(f"MRR422: cannot gather, because ranks {ranks} have no part: {text}")


def _sample_lengths(ranks: Sequence[int], parts: Sequence[_PartHeader]) -> dict[Any, tuple[int, ...]]:
    """Return replica -> the lengths of its samples; a replica without a recorded forward is missing.

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


def _joiner(num_tokens: int, headers: Sequence[TraceHeader]) -> PartJoiner:
    """Return the joiner of parts with these headers.

    Raises:
        TraceError: they are of different models.
    """
    models = {(header.num_experts, header.topk) for header in headers if header.num_layers}
    if len(models) > 1:
        raise TraceError(f"MRR107: cannot gather recordings of different models: (num_experts, topk) are {models}.")
    num_experts, topk = next(iter(models), (headers[0].num_experts, headers[0].topk))
    layer_numbers = sorted({number for header in headers for number in header.layer_numbers})
    return PartJoiner(
        num_tokens, layer_numbers, num_experts=num_experts, topk=topk, earlier=lambda *_: "an earlier rank"
    )
