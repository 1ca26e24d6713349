"""Sample lengths, a partition and the parallel layout -> which rows and layers each training rank gets.

A plan is computed, never negotiated: the same sample lengths give the same plan in every process.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Literal, NamedTuple

from megatron_router_replay.errors import RouterReplayError, listed
from megatron_router_replay.trace.header import TraceFormat

Runs = Sequence[tuple[int, int]]
"""(start, stop) of runs of neighbouring rows."""

Partition = Literal["round_robin"] | Sequence[Sequence[int]]
"""The rule, or the samples of each data-parallel rank, given outright; samples of no rank are not sent."""


class TransportError(RouterReplayError):
    """Routes did not reach a training rank, or processes disagree on what to send."""


class Place(NamedTuple):
    """Name the coordinates of a training rank."""

    dp_rank: int = 0
    pp_rank: int = 0
    cp_rank: int = 0
    tp_rank: int = 0

    def __str__(self) -> str:
        return f"dp{self.dp_rank}/pp{self.pp_rank}/cp{self.cp_rank}/tp{self.tp_rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """The parallel layout of training, as far as routes depend on it. Expert-parallel ranks are data-parallel ones here.

    Args:
        stage_layers: layer numbers (global, from 1) of the MoE layers of each pipeline stage, over all its virtual
            stages; () for a stage without any, which takes part all the same.
        dp_size, cp_size, tp_size: sizes of the other groups.

    Raises:
        TransportError: a size is below 1, or a layer is on two stages.
    """

    stage_layers: tuple[tuple[int, ...], ...]
    dp_size: int = 1
    cp_size: int = 1
    tp_size: int = 1

    def __post_init__(self) -> None:
        try:
            stages = tuple(tuple(sorted(map(operator.index, stage))) for stage in self.stage_layers)
        except TypeError as error:
            raise TransportError(
                f"MRR601: stage_layers={self.stage_layers!r} must be a list of layer numbers for each stage: {error}."
            ) from None
        numbers = [number for stage in stages for number in stage]
        if not stages or min(self.dp_size, self.cp_size, self.tp_size) < 1:
            raise TransportError(f"MRR601: a layout needs a stage and sizes of 1 or more: {self}.")
        if len(set(numbers)) != len(numbers):
            raise TransportError(f"MRR601: stage_layers {stages} names a layer twice: a layer is on one stage.")
        object.__setattr__(self, "stage_layers", stages)

    @property
    def num_copies(self) -> int:
        """Count the ranks with the same rows and layers, which are neighbours in `places`."""
        return self.cp_size * self.tp_size

    def places(self) -> list[Place]:
        """Return all places in the order of their global ranks.

        Source: Megatron-Core 0.16.1, parallel_state.initialize_model_parallel, order "tp-cp-ep-dp-pp".
        """
        sizes = (len(self.stage_layers), self.dp_size, self.cp_size, self.tp_size)
        return [
            Place(dp_rank, pp_rank, cp_rank, tp_rank)
            for pp_rank, dp_rank, cp_rank, tp_rank in product(*map(range, sizes))
        ]

    def place_of(self, rank: int) -> Place:
        """Return the place of a global training rank.

        Raises:
            TransportError: there is no such rank.
        """
        places = self.places()
        if not 0 <= rank < len(places):
            raise TransportError(f"MRR601: rank {rank} is not in a layout of {len(places)} ranks.")
        return places[rank]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Rows and layers of a place; the same for all its tensor- and context-parallel ranks.

    Args:
        runs: the rows of its samples as rows of the batch, in order, one run a sample.
        format: of the rows, with the stage's MoE layers alone.
    """

    runs: Runs
    format: TraceFormat

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.runs)

    @property
    def num_rows(self) -> int:
        return sum(self.sequence_lengths)

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.format.row_bytes()


def plan_routes(
    sequence_lengths: Sequence[int],
    *,
    layout: ParallelLayout,
    format: TraceFormat,
    partition: Partition = "round_robin",
) -> dict[Place, Part]:
    """Return which rows and layers each place gets, in the order of their global ranks; copies share one Part.

    Args:
        sequence_lengths: tokens of each sample of the batch, in the order of its rows.
        format: of the trace; it must have every layer of the layout.
        partition: which samples each data-parallel rank trains on.

    Raises:
        TransportError: a layer is not in the trace, a length is negative, or the partition does not fit.
    """
    if min(sequence_lengths, default=0) < 0:
        raise TransportError(f"MRR606: a sample has {min(sequence_lengths)} tokens: lengths must be 0 or more.")
    missing = [number for stage in layout.stage_layers for number in stage if number not in format.layer_numbers]
    if missing:
        raise TransportError(
            f"MRR606: the layout has MoE layers {missing}, the trace has [{listed(format.layer_numbers)}]: every stage "
            "needs its own."
        )
    # Rows of the batch count through the samples of all senders.
    bounds = [(end - length, end) for end, length in zip(accumulate(sequence_lengths), sequence_lengths)]
    samples = partition_samples(len(sequence_lengths), dp_size=layout.dp_size, partition=partition)
    parts: dict[Place, Part] = {}
    for place in layout.places():
        # One object for all copies, so that a caller makes its rows once.
        first = place._replace(cp_rank=0, tp_rank=0)
        parts[place] = parts.get(first) or Part(
            runs=tuple(bounds[sample] for sample in samples[place.dp_rank]),
            format=format.select_layers(layout.stage_layers[place.pp_rank]),
        )
    return parts


@dataclass(slots=True)
class Bucket:
    """Rows start..stop-1 of a place's part, all of which one sender has: `runs`, as rows of its own.

    It is the `turn`-th bucket from this sender to this place.
    """

    place: Place
    sender: int
    turn: int
    start: int
    stop: int
    runs: list[tuple[int, int]]


def plan_buckets(parts: Mapping[Place, Part], sender_ends: Sequence[int], bucket_bytes: int) -> list[Bucket]:
    """Return the buckets of some places in the order in which every process sends or takes those that concern it.

    As all follow one order, the first bucket that did not arrive yet is always sent and always expected: no circular
    wait. Senders and places take turns.

    Args:
        sender_ends: end of the rows of each sender (exclusive), as rows of the batch. A sender has whole samples.
        bucket_bytes: no bucket is larger, unless it is a single row.
    """
    result: list[Bucket] = []
    for place, part in parts.items():
        step = max(1, bucket_bytes // part.format.row_bytes())
        last: dict[int, Bucket] = {}  # of each sender
        position = 0
        for start, stop in part.runs:
            while start < stop:
                sender = bisect_right(sender_ends, start)
                first_row = sender_ends[sender - 1] if sender else 0
                bucket = last.get(sender)
                # Neighbouring samples of a sender share a bucket, also where other ranks have the samples between them.
                if bucket is None or bucket.stop != position or position - bucket.start == step:
                    bucket = Bucket(place, sender, bucket.turn + 1 if bucket else 0, position, position, [])
                    last[sender] = bucket
                    result.append(bucket)
                length = min(stop - start, step - (position - bucket.start))
                bucket.runs.append((start - first_row, start - first_row + length))
                start, position = start + length, position + length
                bucket.stop = position
    return sorted(result, key=lambda bucket: (bucket.turn, bucket.sender))


def as_partition(partition: Partition) -> Literal["round_robin"] | tuple[tuple[int, ...], ...]:
    """Return the rule, or the samples of each rank as integers.

    Raises:
        TransportError: an unknown rule, or no lists of integers.
    """
    if isinstance(partition, str):
        if partition != "round_robin":
            raise TransportError(f"MRR601: partition={partition!r} must be 'round_robin' or the samples of each rank.")
        return partition
    try:
        return tuple(tuple(map(operator.index, of_rank)) for of_rank in partition)
    except TypeError as error:
        raise TransportError(
            f"MRR601: partition={str(partition)[:200]} must be 'round_robin', or a list of samples for each rank: {error}."
        ) from None


def partition_samples(num_samples: int, *, dp_size: int, partition: Partition) -> tuple[tuple[int, ...], ...]:
    """Return the samples of each data-parallel rank; the same result wherever it is computed.

    Args:
        partition: "round_robin": sample i goes to rank i % dp_size. Or the samples of each rank, in the order in which it
            wants their rows.

    Raises:
        TransportError: an unknown rule, or the given samples do not exist or go to two ranks.
    """
    samples = as_partition(partition)
    if isinstance(samples, str):
        return tuple(tuple(range(rank, num_samples, dp_size)) for rank in range(dp_size))
    flat = [sample for of_rank in samples for sample in of_rank]
    if len(samples) != dp_size or len(set(flat)) != len(flat) or not set(flat) <= set(range(num_samples)):
        raise TransportError(
            f"MRR601: partition={str(samples)[:200]}: give each of dp_size={dp_size} ranks its own samples, each of "
            f"0..{num_samples - 1} at most once."
        )
    return samples
