"""Routing replay in Megatron-Core models; of the core, the only part that imports megatron.core."""

from megatron_router_replay.mcore.core import hooks
from megatron_router_replay.mcore.core.router_replay import RouterReplay, RouterReplayAction, install, uninstall
from megatron_router_replay.mcore.core.tape import Tape
from megatron_router_replay.mcore.judge.report import SessionReport
from megatron_router_replay.mcore.model.explanation import explain
from megatron_router_replay.mcore.model.layers import layer_numbers_of, routing_info
from megatron_router_replay.mcore.sessions.freeze import FreezeSession, freeze_recompute
from megatron_router_replay.mcore.sessions.record import RecordSession, record
from megatron_router_replay.mcore.sessions.replay import replay
from megatron_router_replay.mcore.sessions.session import Session, close_sessions

# Before other code wraps a router's method: a wrapper of the method from before the hook would pass it by.
hooks.install()

__all__ = [
    "FreezeSession",
    "RecordSession",
    "RouterReplay",
    "RouterReplayAction",
    "Session",
    "SessionReport",
    "Tape",
    "close_sessions",
    "explain",
    "freeze_recompute",
    "install",
    "layer_numbers_of",
    "record",
    "replay",
    "routing_info",
    "uninstall",
]
