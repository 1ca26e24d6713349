"""RoutingTrace, the one record that everything passes on, and traces that are joined or merged."""

from megatron_router_replay.lazy import lazy_names
from megatron_router_replay.trace.merge import merge_traces
from megatron_router_replay.trace.routing_trace import RoutingTrace, concat_traces
from megatron_router_replay.trace.seal import stamp, stamp_batch

__all__ = ["RoutingTrace", "concat_traces", "merge_traces", "stamp", "stamp_batch"]

_OLD_ROUTES = "trace.without_routes(mask), with a mask of trace.weight_version (docs/options.md)."
__getattr__, _ = lazy_names(__name__, {}, withdrawn={"stale_rows": _OLD_ROUTES})
