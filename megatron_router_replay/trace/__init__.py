"""RoutingTrace, the one record that everything passes on, and traces that are joined or merged."""

from megatron_router_replay.lazy import lazy_names
from megatron_router_replay.trace.merge import concat_traces, merge_traces
from megatron_router_replay.trace.routing_trace import RoutingTrace

__all__ = ["RoutingTrace", "concat_traces", "merge_traces"]

_OLD_ROUTES = "trace.without_routes(mask), with a mask of trace.weight_version (docs/options.md)."
_BY_TOKENS = (
    "RoutingTrace.from_samples(tokens, routes, ...), then replay(model_chunks, trace): rows are found by tokens."
)
_WITHDRAWN = {"stale_rows": _OLD_ROUTES, "stamp": _BY_TOKENS, "stamp_batch": _BY_TOKENS}
__getattr__, _ = lazy_names(__name__, {}, withdrawn=_WITHDRAWN)
