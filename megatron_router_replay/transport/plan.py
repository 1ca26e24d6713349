"""Sample lengths, a partition and the parallel layout -> which rows and layers each training rank gets, and how many bytes.

A plan is computed, never negotiated: every party that knows the sample lengths gets the same one, and `digest` proves it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_router_replay.header import TraceFormat, TraceHeader
from megatron_router_replay.runs import neighbour_runs
from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.partition import Partition, partition_samples

Runs = npt.NDArray[np.int64]
"""[n, 2] int64: (start, stop) of runs of neighbouring rows."""


class Place(NamedTuple):
    """Where a training rank stands."""

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
        stages = tuple(tuple(sorted(int(number) for number in stage)) for stage in self.stage_layers)
        numbers = [number for stage in stages for number in stage]
        if not stages or min(self.dp_size, self.cp_size, self.tp_size) < 1:
            raise TransportError(
                f"a layout needs a stage and sizes of 1 or more, got {len(stages)} stages, dp_size={self.dp_size}, "
                f"cp_size={self.cp_size}, tp_size={self.tp_size}."
            )
        if len(set(numbers)) != len(numbers):
            raise TransportError(f"stage_layers {stages} names a layer twice: a layer is on one stage.")
        object.__setattr__(self, "stage_layers", stages)

    @property
    def pp_size(self) -> int:
        return len(self.stage_layers)

    @property
    def world_size(self) -> int:
        return self.dp_size * self.pp_size * self.cp_size * self.tp_size

    def place_of(self, rank: int) -> Place:
        """Return the place of a global training rank.

        Raises:
            TransportError: there is no such rank.

        Source: Megatron-Core 0.16.1, parallel_state.initialize_model_parallel, order "tp-cp-ep-dp-pp".
        """
        if not 0 <= rank < self.world_size:
            raise TransportError(f"rank {rank} is not in a layout of {self.world_size} ranks.")
        rank, tp_rank = divmod(rank, self.tp_size)
        rank, cp_rank = divmod(rank, self.cp_size)
        pp_rank, dp_rank = divmod(rank, self.dp_size)
        return Place(dp_rank, pp_rank, cp_rank, tp_rank)

    def places(self) -> list[Place]:
        """Return all places in the order of their global ranks."""
        return [self.place_of(rank) for rank in range(self.world_size)]

    def receivers(self) -> list[Place]:
        """Return the places that the rollout side sends to: TP rank 0 of every stage."""
        return [place for place in self.places() if place.tp_rank == 0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """What one place gets (all its tensor-parallel ranks get the same).

    Args:
        samples: of the batch, in the order of the part's rows.
        runs: the part's rows as rows of the batch, in order.
        own_rows: [num_rows] the part's rows as rows of the data-parallel rank's samples, increasing; None: all of them.
        sequence_lengths: of the samples; None where context parallelism cut them.
        layer_numbers: the stage's MoE layers.
        num_rows, nbytes: predicted, and asserted by both sides of a transport.
    """

    place: Place
    samples: tuple[int, ...]
    runs: Runs
    own_rows: Tensor | None
    sequence_lengths: tuple[int, ...] | None
    layer_numbers: tuple[int, ...]
    num_rows: int
    nbytes: int

    @property
    def num_layers(self) -> int:
        return len(self.layer_numbers)

    def header(self, format: TraceFormat) -> TraceHeader:
        """Return the header of the trace that this place gets of a batch of this format."""
        of_stage = format.select_layers(self.layer_numbers)
        return TraceHeader(**of_stage.to_json(), num_tokens=self.num_rows, sequence_lengths=self.sequence_lengths)

    def local_rows(self, routing_rows: Tensor) -> Tensor:
        """Return `routing_rows` of the data-parallel rank's samples as rows of this part; -1 stays -1.

        Args:
            routing_rows: any shape, rows 0, 1, 2, ... over the data-parallel rank's samples in order, -1 on padding.

        Raises:
            TransportError: a row is not in the part.
        """
        if self.own_rows is None:
            return routing_rows
        own_rows = self.own_rows.to(routing_rows.device)
        if not own_rows.numel():
            found = torch.full_like(routing_rows, -1)
            missing = routing_rows >= 0
        else:
            found = torch.searchsorted(own_rows, routing_rows.to(torch.int64).contiguous()).clamp(
                max=own_rows.numel() - 1
            )
            missing = (own_rows[found] != routing_rows) & (routing_rows >= 0)
        if bool(missing.any()):
            raise TransportError(
                f"{self.place} was not sent row {int(routing_rows[missing][0])}: give plan_routes the rows it routes."
            )
        return torch.where(routing_rows < 0, -1, found)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TransportPlan:
    """Who gets which rows and layers of a batch; made by `plan_routes`."""

    sequence_lengths: tuple[int, ...]
    layout: ParallelLayout
    format: TraceFormat
    samples: tuple[tuple[int, ...], ...]
    parts: dict[Place, Part]
    digest: str

    def part(self, place: Place) -> Part:
        """Return what a place gets; tensor-parallel ranks share the part of their rank 0."""
        return self.parts[place._replace(tp_rank=0)]

    @property
    def nbytes(self) -> int:
        """Bytes that leave the rollout side; what tensor-parallel ranks pass on to each other is not counted."""
        return sum(part.nbytes for part in self.parts.values())


def plan_routes(
    sequence_lengths: Sequence[int],
    *,
    layout: ParallelLayout,
    format: TraceFormat,
    partition: Partition = "round_robin",
    cp_rows: Mapping[tuple[int, int], Tensor] | None = None,
) -> TransportPlan:
    """Return who gets which rows and layers.

    Args:
        sequence_lengths: tokens of each sample of the batch, in the order of its rows.
        format: of the trace; it must have every layer of the layout.
        partition: which samples each data-parallel rank trains on.
        cp_rows: (dp_rank, cp_rank) -> the rows that this context-parallel rank routes, as rows of its data-parallel rank's
            samples; any shape, any order, -1 is padding. None: every context-parallel rank gets all rows.

    Raises:
        TransportError: the trace lacks a layer, the partition or cp_rows do not fit.
    """
    lengths = tuple(int(length) for length in sequence_lengths)
    if any(length < 0 for length in lengths):
        raise TransportError(f"a sample has {min(lengths)} tokens: lengths must be 0 or more.")
    missing = [number for stage in layout.stage_layers for number in stage if number not in format.layer_numbers]
    if missing:
        raise TransportError(
            f"the layout has MoE layers {missing}, the trace has {list(format.layer_numbers)}: every stage needs its own."
        )
    samples = partition_samples(lengths, dp_size=layout.dp_size, partition=partition)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    parts: dict[Place, Part] = {}
    for dp_rank, of_rank in enumerate(samples):
        # [samples, 2]: where each sample begins and ends in the batch, in the order in which the rank wants them.
        whole = np.stack([starts[list(of_rank)], starts[[sample + 1 for sample in of_rank]]], axis=1)
        for cp_rank in range(layout.cp_size):
            own_rows = None if cp_rows is None else _own_rows(cp_rows, dp_rank, cp_rank, whole)
            runs = _join(whole) if own_rows is None else _runs_of(own_rows, whole)
            num_rows = int((runs[:, 1] - runs[:, 0]).sum())
            for pp_rank, numbers in enumerate(layout.stage_layers):
                place = Place(dp_rank, pp_rank, cp_rank)
                parts[place] = Part(
                    place=place,
                    samples=of_rank,
                    runs=runs,
                    own_rows=own_rows,
                    sequence_lengths=tuple(lengths[sample] for sample in of_rank) if own_rows is None else None,
                    layer_numbers=numbers,
                    num_rows=num_rows,
                    nbytes=num_rows * format.row_bytes(len(numbers)),
                )
    digest = _digest(lengths, layout, format, samples, parts)
    return TransportPlan(
        sequence_lengths=lengths, layout=layout, format=format, samples=samples, parts=parts, digest=digest
    )


def bucket_rows(num_rows: int, row_bytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """Return (start, stop) of buckets of whole rows, none larger than bucket_bytes unless one row is."""
    step = max(1, bucket_bytes // max(1, row_bytes))
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _own_rows(cp_rows: Mapping[tuple[int, int], Tensor], dp_rank: int, cp_rank: int, whole: Runs) -> Tensor:
    num_rows = int((whole[:, 1] - whole[:, 0]).sum())
    try:
        given = cp_rows[dp_rank, cp_rank]
    except KeyError:
        raise TransportError(f"cp_rows lacks (dp_rank, cp_rank) = ({dp_rank}, {cp_rank}): give every rank's.") from None
    # Sorted, and each once: a row that a place routes twice is sent to it once.
    rows: Tensor = torch.unique(given.detach().to(device="cpu", dtype=torch.int64))
    rows = rows[rows >= 0]
    if rows.numel() and int(rows[-1]) >= num_rows:
        raise TransportError(
            f"cp_rows of dp{dp_rank}/cp{cp_rank} reach row {int(rows[-1])}, its samples have {num_rows} rows, from 0."
        )
    return rows


def _runs_of(own_rows: Tensor, whole: Runs) -> Runs:
    """Return rows of a rank's samples as runs of rows of the batch."""
    ends = np.cumsum(whole[:, 1] - whole[:, 0])
    rows = own_rows.numpy()
    sample = np.searchsorted(ends, rows, side="right")
    in_batch = rows - (ends - whole[:, 1])[sample] if len(rows) else rows
    runs = neighbour_runs(in_batch)
    return np.stack([runs[:, 1], runs[:, 1] + runs[:, 2]], axis=1)


def _join(runs: Runs) -> Runs:
    """Return the same rows with neighbouring runs as one, empty ones left out."""
    runs = runs[runs[:, 1] > runs[:, 0]]
    if not len(runs):
        return runs
    first = np.concatenate([[True], runs[1:, 0] != runs[:-1, 1]])
    last = np.concatenate([first[1:], [True]])
    return cast(Runs, np.stack([runs[first, 0], runs[last, 1]], axis=1))


def _digest(
    lengths: tuple[int, ...],
    layout: ParallelLayout,
    format: TraceFormat,
    samples: tuple[tuple[int, ...], ...],
    parts: Mapping[Place, Part],
) -> str:
    sizes = [layout.stage_layers, layout.dp_size, layout.cp_size, layout.tp_size]
    content = json.dumps([lengths, sizes, format.to_json(), samples])
    summed = hashlib.sha256(content.encode())
    for place in sorted(parts):
        # Every stage of a rank has the same rows; which layers it has is in the layout.
        if place.pp_rank == 0:
            # Bytes in one order, so that machines of another byte order have the same digest.
            summed.update(np.ascontiguousarray(parts[place].runs, dtype="<i8").tobytes())
    return summed.hexdigest()[:32]
