"""Traces -> what differs, by how much, and what it looks like: diff, metrics, plots, reports; a live comparison too.

Importing this package loads none of its modules, so that a session can compare with the live router without loading the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_LAZY = {
    "Finding": "finding",
    "FirstDifference": "diff",
    "LogprobMismatch": "metrics",
    "MismatchByRoutes": "metrics",
    "TraceDiff": "diff",
    "diff_traces": "diff",
    "expert_load": "metrics",
    "imbalance": "metrics",
    "logprob_mismatch": "metrics",
    "mismatch_by_routes": "metrics",
    "open_source": "source",
    "route_checksums": "metrics",
    "routes_differ": "metrics",
}
"""Public name -> the module that has it."""

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


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
