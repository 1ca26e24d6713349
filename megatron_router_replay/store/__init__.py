"""Save and load traces: one file, or a folder of files by step, run and rank."""

from megatron_router_replay.store.directory import TraceStore
from megatron_router_replay.store.file import load_trace, save_trace
from megatron_router_replay.trace.merge import merge_traces

__all__ = ["TraceStore", "load_trace", "merge_traces", "save_trace"]
