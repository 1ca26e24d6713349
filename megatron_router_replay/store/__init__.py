"""RoutingTrace <-> files: one file, a directory of files by step and rank, one trace of many ranks' parts."""

from megatron_router_replay.store.file import load_trace, save_trace

__all__ = ["load_trace", "save_trace"]
