"""Traces -> what differs, by how much, and what it looks like: diff, metrics, plots, reports; a live comparison too.

Importing this package loads neither megatron nor matplotlib.
"""

from megatron_router_replay.diagnostics.diff import FirstDifference, TraceDiff, diff_traces
from megatron_router_replay.diagnostics.shifts import Finding
from megatron_router_replay.diagnostics.source import open_source

__all__ = ["Finding", "FirstDifference", "TraceDiff", "diff_traces", "open_source"]
