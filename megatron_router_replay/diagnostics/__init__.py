"""Traces -> what differs, by how much, and where it comes from: diff, page, metrics; a live comparison too.

The words of all of them: a *decision* is what the router of one layer chose for one row (token). Two traces *agree* on a
decision if both name the same set of experts, in whatever order; otherwise the decision *differs*. The *agreement* is the
share of decisions that agree. A decision's *overlap* is how many experts both name; as a share, of topk. Two decisions are
*near* if they share more than half of their experts.

Importing this package loads none of its modules, so that a session can compare with the live router without loading the rest.
"""

from typing import TYPE_CHECKING

from megatron_router_replay.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_router_replay.diagnostics.counting import Difference
    from megatron_router_replay.diagnostics.diff import diff_traces
    from megatron_router_replay.diagnostics.fact import Fact, imbalance
    from megatron_router_replay.diagnostics.metrics import (
        LogprobMismatch,
        MismatchByRoutes,
        logprob_mismatch,
        mismatch_by_routes,
        route_checksums,
    )
    from megatron_router_replay.diagnostics.source import open_source
    from megatron_router_replay.diagnostics.trace_diff import TraceDiff

__all__ = [
    "Difference",
    "Fact",
    "LogprobMismatch",
    "MismatchByRoutes",
    "TraceDiff",
    "diff_traces",
    "imbalance",
    "logprob_mismatch",
    "mismatch_by_routes",
    "open_source",
    "route_checksums",
]

_MODULES = {
    "Difference": "counting",
    "Fact": "fact",
    "TraceDiff": "trace_diff",
    "diff_traces": "diff",
    "imbalance": "fact",
    "open_source": "source",
}
"""Public name -> the module that has it; every other name is in `metrics`."""

__getattr__, __dir__ = lazy_names(__name__, {name: _MODULES.get(name, "metrics") for name in __all__})
