"""RoutingTrace <-> bytes: one format, as a file or as a folder of files by step and rank."""

from megatron_router_replay.store.directory import TraceStore
from megatron_router_replay.store.file import load_trace, save_trace
from megatron_router_replay.trace.merge import merge_traces

__all__ = [
    "TraceStore",
    "load_trace",
    "merge_traces",
    "save_trace",
]
