"""Sample lengths -> which data-parallel rank trains on which samples; the same result wherever it is computed."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

from megatron_router_replay.transport.errors import TransportError

Partition = Literal["round_robin", "balanced"] | Sequence[Sequence[int]]
"""A rule, or the samples of each data-parallel rank, given outright; samples that nobody has are not sent."""


def partition_samples(
    sequence_lengths: Sequence[int], *, dp_size: int, partition: Partition = "round_robin"
) -> tuple[tuple[int, ...], ...]:
    """Return the samples of each data-parallel rank.

    Args:
        sequence_lengths: tokens of each sample.
        partition: "round_robin": sample i goes to rank i % dp_size. "balanced": by length, see `partition_balanced`.
            Or the samples of each rank, in the order in which it wants their rows.

    Raises:
        TransportError: an unknown rule, or the given samples do not exist or go to two ranks.
    """
    if dp_size < 1:
        raise TransportError(f"cannot partition samples over dp_size={dp_size}: it must be 1 or more.")
    if isinstance(partition, str):
        if partition == "round_robin":
            return tuple(tuple(range(rank, len(sequence_lengths), dp_size)) for rank in range(dp_size))
        if partition == "balanced":
            return partition_balanced(sequence_lengths, dp_size=dp_size)
        raise TransportError(f"partition={partition!r} must be 'round_robin', 'balanced' or the samples of each rank.")
    given = tuple(tuple(int(sample) for sample in samples) for samples in partition)
    flat = [sample for samples in given for sample in samples]
    if len(given) != dp_size or len(set(flat)) != len(flat):
        raise TransportError(
            f"the partition names {len(given)} ranks and {len(flat)} samples, {len(flat) - len(set(flat))} of them twice: "
            f"give each of dp_size={dp_size} ranks its own samples."
        )
    if flat and not (0 <= min(flat) and max(flat) < len(sequence_lengths)):
        raise TransportError(
            f"the partition names samples {min(flat)}..{max(flat)}, there are {len(sequence_lengths)}, from 0."
        )
    return given


def partition_balanced(sequence_lengths: Sequence[int], *, dp_size: int) -> tuple[tuple[int, ...], ...]:
    """Return samples with about the same number of tokens on every rank, and the same number of samples up to one.

    The longest sample left goes to the rank with the fewest tokens among those that still take samples; ties go to the
    lower sample and the lower rank. A rank lists its samples in their original order.

    Source: R. L. Graham, "Bounds on Multiprocessing Timing Anomalies" (1969), longest first.
    """
    num_samples = len(sequence_lengths)
    most, with_most = -(-num_samples // dp_size), num_samples % dp_size or dp_size
    taken: list[list[int]] = [[] for _ in range(dp_size)]
    open_ranks = [(0, rank) for rank in range(dp_size)]
    full = 0
    for sample in sorted(range(num_samples), key=lambda sample: (-sequence_lengths[sample], sample)):
        tokens, rank = heapq.heappop(open_ranks)
        # with_most ranks may take `most` samples, the others one less.
        while len(taken[rank]) == most - 1 and full == with_most:
            tokens, rank = heapq.heappop(open_ranks)
        taken[rank].append(sample)
        full += len(taken[rank]) == most
        if len(taken[rank]) < most:
            heapq.heappush(open_ranks, (tokens + sequence_lengths[sample], rank))
    return tuple(tuple(sorted(samples)) for samples in taken)
