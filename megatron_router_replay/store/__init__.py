"""RoutingTrace <-> files and JSON: one file, a folder of files by step and rank, one trace of many ranks' parts."""

from megatron_router_replay.merge import merge_traces
from megatron_router_replay.store.directory import TraceStore
from megatron_router_replay.store.envelope import decode_envelope, encode_envelope
from megatron_router_replay.store.file import load_trace, save_trace
from megatron_router_replay.store.part import StoredPart

__all__ = [
    "StoredPart",
    "TraceStore",
    "decode_envelope",
    "encode_envelope",
    "load_trace",
    "merge_traces",
    "save_trace",
]
