"""RoutingTrace, the one record that everything passes on, and what is made of traces: joined, merged, aged."""

from megatron_router_replay.trace.merge import merge_traces
from megatron_router_replay.trace.routing_trace import RoutingTrace, concat_traces
from megatron_router_replay.trace.seal import stamp, stamp_batch
from megatron_router_replay.trace.stale import stale_rows

__all__ = ["RoutingTrace", "concat_traces", "merge_traces", "stale_rows", "stamp", "stamp_batch"]
