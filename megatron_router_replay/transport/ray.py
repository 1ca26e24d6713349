"""Routes over Ray's object store: references in the arguments and results of your own remote calls.

    refs = put_parts(traces, layout=layout)                 # in the rollout manager, or in each worker for its own samples
    ray.get([rank.train.remote(batch, refs[place]) for place, rank in ranks.items()])
    trace = refs_place.get()                                # in the training rank

A rank's part is its data-parallel samples and its stage's layers, in one contiguous buffer that is read without a copy. On
one machine the ranks of a TP group share it; between machines Ray fetches it once a machine. Ray frees the memory after the
last reference and the last trace that looks into it. `get` raises if the owner of the memory died.

Call `ray.init` first; this module never does. Any process that reaches the cluster can read and replace routes: Ray has no
authentication unless you turn it on.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import ray  # type: ignore[import-not-found, unused-ignore]
import torch

from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.header import views_of_bytes
from megatron_router_replay.transport.gather import TraceRows, trace_of_memory
from megatron_router_replay.transport.plan import ParallelLayout, Part, Partition, Place, TransportError, plan_routes
from megatron_router_replay.transport.timing import TransportTimes

__all__ = ["TraceRef", "put_parts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRef:
    """A trace in the object store: small enough to pass around.

    Args:
        buffer: a list with the one reference, so that Ray passes it on instead of fetching it.
        part: of the batch.
        times: seconds by activity, measured in the process that put it.
    """

    buffer: list[Any]
    part: Part
    times: Mapping[str, float]

    def get(self, timeout: timedelta | None = None, *, times: TransportTimes | None = None) -> RoutingTrace:
        """Return the trace, which looks into the object store and must not be written to.

        Args:
            timeout: for the buffer to come from another machine; None: as long as it takes.
            times: counts "receive", and the seconds of the rollout side.

        Raises:
            TransportError: the buffer is gone (its owner died) or did not come in time.
        """
        times = TransportTimes("training") if times is None else times
        times.add(self.times)
        format, rows = self.part.format, self.part.num_rows
        with times.measure("receive"):
            try:
                array = ray.get(self.buffer[0], timeout=None if timeout is None else timeout.total_seconds())
            except ray.exceptions.RayError as error:
                text = str(error).strip().split("\n")[0]  # further lines are addresses and advice
                raise TransportError(
                    f"MRR603: cannot get {rows} rows of routes: {type(error).__name__}: {text}"
                ) from error
        # Ray's memory is read-only, and so is the trace: torch's warning adds nothing.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
            flat = torch.from_numpy(array)
        return trace_of_memory(views_of_bytes(flat, format, rows), format, self.part.sequence_lengths)


def put_parts(
    traces: RoutingTrace | Sequence[RoutingTrace],
    *,
    layout: ParallelLayout,
    partition: Partition = "round_robin",
    times: TransportTimes | None = None,
) -> dict[Place, TraceRef]:
    """Put every place's part into the object store and return the references.

    The ranks of a tensor- and context-parallel group share one.

    Args:
        traces: the batch, or this worker's samples of it.
        partition: of these samples, see `partition_samples`.
        times: counts "send"; seconds that it has not reported yet travel with the references.

    Raises:
        TransportError: the traces differ in kind or do not fit the layout.
    """
    times = TransportTimes("rollout") if times is None else times
    with times.measure("send"):
        source = TraceRows([traces] if isinstance(traces, RoutingTrace) else traces)
        plan = plan_routes(source.sequence_lengths, layout=layout, format=source.format, partition=partition)
        buffers: dict[int, Any] = {}
        for part in plan.values():
            if id(part) not in buffers:  # the ranks of a tensor- or context-parallel group share a part
                flat = np.empty(part.nbytes, np.uint8)
                memory = views_of_bytes(torch.from_numpy(flat), part.format, part.num_rows)
                source.fill(part.runs, part.format.layer_numbers, memory)
                buffers[id(part)] = ray.put(flat)  # Ray stores a numpy array as one buffer, outside of its pickle
    unreported = times.take()
    return {place: TraceRef(buffer=[buffers[id(part)]], part=part, times=unreported) for place, part in plan.items()}
