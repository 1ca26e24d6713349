"""MicrobatchRoutes: the rows of a trace that one micro-batch uses, taken out ahead of its forward.

It stands in the core, beside RoutingTrace: `transport.prefetch` makes it and a replay session takes it, and neither loads the
other.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_router_replay.trace import RoutingTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchRoutes:
    """The routes of one micro-batch; a replay session of `source` takes them for `routing_rows`.

    Args:
        trace: the rows that the micro-batch uses, each once, in increasing order, on the device.
        routing_rows: of the shape that was given, int64 on the device, rows of `trace`; -1 stays -1.
        source: the trace that they were taken from.
    """

    trace: RoutingTrace
    routing_rows: Tensor
    source: RoutingTrace
