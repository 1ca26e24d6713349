"""Traces -> what differs, by how much, and what it looks like: diff, metrics, plots, reports; a live comparison too.

The words of all of them: a *decision* is what the router of one layer chose for one row (token). Two traces *agree* on a
decision if both name the same set of experts, in whatever order; otherwise the decision *differs*. The *agreement* is the
share of decisions that agree. A decision's *overlap* is how many experts both name; as a share, of topk.

Importing this package loads none of its modules, so that a session can compare with the live router without loading the rest.
"""

from typing import TYPE_CHECKING

from megatron_router_replay.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_router_replay.diagnostics.diff import TraceDiff, diff_traces
    from megatron_router_replay.diagnostics.differences import Difference
    from megatron_router_replay.diagnostics.finding import Finding
    from megatron_router_replay.diagnostics.load import imbalance
    from megatron_router_replay.diagnostics.metrics import (
        LogprobMismatch,
        MismatchByRoutes,
        expert_load,
        logprob_mismatch,
        mismatch_by_routes,
        route_checksums,
        router_margin,
        routes_differ,
    )
    from megatron_router_replay.diagnostics.source import open_source

_LAZY = {
    "Difference": "differences",
    "Finding": "finding",
    "LogprobMismatch": "metrics",
    "MismatchByRoutes": "metrics",
    "TraceDiff": "diff",
    "diff_traces": "diff",
    "expert_load": "metrics",
    "imbalance": "load",
    "logprob_mismatch": "metrics",
    "mismatch_by_routes": "metrics",
    "open_source": "source",
    "route_checksums": "metrics",
    "router_margin": "metrics",
    "routes_differ": "metrics",
}
"""Public name -> the module that has it."""

__all__ = [
    "Difference",
    "Finding",
    "LogprobMismatch",
    "MismatchByRoutes",
    "TraceDiff",
    "diff_traces",
    "expert_load",
    "imbalance",
    "logprob_mismatch",
    "mismatch_by_routes",
    "open_source",
    "route_checksums",
    "router_margin",
    "routes_differ",
]

__getattr__, __dir__ = lazy_names(__name__, _LAZY)
