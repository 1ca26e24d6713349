"""Traces in Ray's object store: one contiguous buffer each, read without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import ray  # type: ignore[import-not-found, unused-ignore]
import torch

from megatron_router_replay.header import TraceHeader
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.plan import ParallelLayout, Part, Place, TransportPlan, plan_routes
from megatron_router_replay.transport.rows import RowSource, TraceRows, views_of_bytes
from megatron_router_replay.transport.timing import LegTime, LegTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRef:
    """A trace in the object store: small enough to pass around.

    Args:
        buffer: a list with the one reference, so that Ray passes it on instead of fetching it.
        header: of the trace.
        leg_times: what the worker measured on the way here; counted by the sender.
    """

    buffer: list[Any]
    header: TraceHeader
    leg_times: Mapping[str, LegTime]

    def get(self, timeout: timedelta | None = None) -> RoutingTrace:
        """Return the trace, which looks into the object store and must not be written to.

        Raises:
            TransportError: the buffer is gone (its worker died) or did not come in time.
        """
        header = self.header
        try:
            array = ray.get(self.buffer[0], timeout=None if timeout is None else timeout.total_seconds())
        except ray.exceptions.RayError as error:
            raise TransportError(f"cannot get {header.num_tokens} rows of routes: {first_line(error)}") from error
        if array.nbytes != header.num_bytes:
            raise TransportError(f"{array.nbytes} bytes came, {header.num_tokens} rows take {header.num_bytes}.")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
            flat = torch.from_numpy(array)
        memory = views_of_bytes(flat, header.format, header.num_tokens, header.num_layers)
        return RoutingTrace.from_checked(
            **memory,
            layer_numbers=header.layer_numbers,
            num_experts=header.num_experts,
            sequence_lengths=header.sequence_lengths,
        )


def put_trace(trace: RoutingTrace, *, times: LegTimes | None = None) -> TraceRef:
    """Put a trace into the object store; for rollout actors, so that their manager handles references only.

    Args:
        times: where this worker counted collecting and decoding; what it has not reported yet travels with the trace.
    """
    source = TraceRows([trace])
    plan = plan_routes(
        source.sequence_lengths, layout=ParallelLayout(stage_layers=(trace.layer_numbers,)), format=source.format
    )
    return put_part(source, plan, plan.part(Place()), {} if times is None else times.take_unreported())


def put_part(source: RowSource, plan: TransportPlan, part: Part, leg_times: Mapping[str, LegTime]) -> TraceRef:
    """Gather a part's rows and put them into the object store."""
    flat = np.empty(part.nbytes, np.uint8)
    memory = views_of_bytes(torch.from_numpy(flat), plan.format, part.num_rows, part.num_layers)
    source.fill(part, 0, part.num_rows, memory)
    # A numpy array is put as one buffer beside the pickle, not through it.
    return TraceRef(buffer=[ray.put(flat)], header=part.header(plan.format), leg_times=leg_times)


def first_line(error: BaseException) -> str:
    """Return the first line of one of Ray's errors, which go on with addresses and advice."""
    return str(error).strip().split("\n")[0]
