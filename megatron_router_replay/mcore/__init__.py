"""Routing replay in Megatron-Core models; of the core, the only part that imports megatron.core."""

from megatron_router_replay.mcore import seam
from megatron_router_replay.mcore.attaching import attach, broadcast_routing_rows
from megatron_router_replay.mcore.driven import RouterReplay, RouterReplayAction, install, uninstall
from megatron_router_replay.mcore.fed import stamp
from megatron_router_replay.mcore.freezing import FreezeSession, freeze_recompute
from megatron_router_replay.mcore.layers import layer_numbers_of, routing_info
from megatron_router_replay.mcore.recording import RecordSession, record
from megatron_router_replay.mcore.replaying import ReplaySession, microbatch, replay
from megatron_router_replay.mcore.report import SessionReport
from megatron_router_replay.mcore.session import close_sessions
from megatron_router_replay.mcore.support import explain
from megatron_router_replay.mcore.tape import Tape

# Before anybody wraps a router's method: a wrapper that holds the method from before the seam would pass it by.
seam.install()

__all__ = [
    "FreezeSession",
    "RecordSession",
    "ReplaySession",
    "RouterReplay",
    "RouterReplayAction",
    "SessionReport",
    "Tape",
    "attach",
    "broadcast_routing_rows",
    "close_sessions",
    "explain",
    "freeze_recompute",
    "install",
    "layer_numbers_of",
    "microbatch",
    "record",
    "replay",
    "routing_info",
    "stamp",
    "uninstall",
]
