"""Routing replay in Megatron-Core models; the only part of the package, with `testing`, that imports megatron.core."""

from megatron_router_replay.mcore.attaching import Attached, attach
from megatron_router_replay.mcore.find import FoundRouter, find_routers
from megatron_router_replay.mcore.freeze import FreezeSession, freeze_recompute
from megatron_router_replay.mcore.installing import install, uninstall
from megatron_router_replay.mcore.layers import layer_numbers_of
from megatron_router_replay.mcore.recording import RecordSession, record
from megatron_router_replay.mcore.replaying import ReplaySession, replay
from megatron_router_replay.mcore.report import SessionReport
from megatron_router_replay.mcore.session import Session, close_sessions
from megatron_router_replay.mcore.static import StaticTargets
from megatron_router_replay.mcore.support import Explanation, RouterSupport, explain
from megatron_router_replay.mcore.targets import broadcast_routing_rows

__all__ = [
    "Attached",
    "Explanation",
    "FoundRouter",
    "FreezeSession",
    "RecordSession",
    "ReplaySession",
    "RouterSupport",
    "Session",
    "SessionReport",
    "StaticTargets",
    "attach",
    "broadcast_routing_rows",
    "close_sessions",
    "explain",
    "find_routers",
    "freeze_recompute",
    "install",
    "layer_numbers_of",
    "record",
    "replay",
    "uninstall",
]
