"""Traces -> what differs, by how much, and what it looks like: diff, metrics, plots, reports; a live comparison too.

Importing this package loads neither megatron nor matplotlib.
"""

from megatron_router_replay.diagnostics.diff import FirstDifference, TraceDiff, diff_traces
from megatron_router_replay.diagnostics.finding import Finding
from megatron_router_replay.diagnostics.metrics import (
    LogprobMismatch,
    MismatchByRoutes,
    expert_load,
    imbalance,
    logprob_mismatch,
    mismatch_by_routes,
    route_checksums,
    routes_differ,
)
from megatron_router_replay.diagnostics.source import open_source

__all__ = [
    "Finding",
    "FirstDifference",
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
    "routes_differ",
]
