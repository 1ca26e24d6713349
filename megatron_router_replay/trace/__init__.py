"""RoutingTrace, the one record that everything passes on, and traces that are joined or merged."""

from megatron_router_replay.trace.merge import concat_traces, merge_traces
from megatron_router_replay.trace.routing_trace import RoutingTrace

__all__ = ["RoutingTrace", "concat_traces", "merge_traces"]
