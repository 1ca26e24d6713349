"""Record which experts a Mixture-of-Experts model used, and make Megatron-Core use exactly those again.

Importing this package loads none of its parts, not even torch: each public name is loaded when it is first used.
"""

import logging
from typing import TYPE_CHECKING

from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_router_replay import capture, diagnostics, engines, layout, mcore, store, trainers, transport
    from megatron_router_replay.diagnostics import diff_traces
    from megatron_router_replay.mcore import (
        attach,
        close_sessions,
        explain,
        freeze_recompute,
        install,
        record,
        replay,
        uninstall,
    )
    from megatron_router_replay.merge import merge_traces
    from megatron_router_replay.router_replay import RouterReplay, RouterReplayAction
    from megatron_router_replay.store import load_trace, save_trace
    from megatron_router_replay.trace import RoutingTrace, concat_traces

__version__ = "0.2.0"

# A library says nothing until the program sets logging up, not even warnings (logging would print those by itself).
logging.getLogger(__name__).addHandler(logging.NullHandler())

_LAZY = {
    "RouterReplay": "router_replay",
    "RouterReplayAction": "router_replay",
    "RoutingTrace": "trace",
    "attach": "mcore",
    "capture": "capture",
    "close_sessions": "mcore",
    "concat_traces": "trace",
    "diagnostics": "diagnostics",
    "diff_traces": "diagnostics",
    "engines": "engines",
    "explain": "mcore",
    "freeze_recompute": "mcore",
    "install": "mcore",
    "layout": "layout",
    "load_trace": "store",
    "mcore": "mcore",
    "merge_traces": "merge",
    "record": "mcore",
    "replay": "mcore",
    "save_trace": "store",
    "store": "store",
    "trainers": "trainers",
    "transport": "transport",
    "uninstall": "mcore",
}
"""Public name -> the module that has it, or that it is."""

__all__ = [
    "RouterReplay",
    "RouterReplayAction",
    "RouterReplayError",
    "RoutingTrace",
    "attach",
    "capture",
    "close_sessions",
    "concat_traces",
    "diagnostics",
    "diff_traces",
    "engines",
    "explain",
    "freeze_recompute",
    "install",
    "layout",
    "load_trace",
    "mcore",
    "merge_traces",
    "record",
    "replay",
    "save_trace",
    "store",
    "trainers",
    "transport",
    "uninstall",
]

__getattr__, __dir__ = lazy_names(__name__, _LAZY, also=("RouterReplayError", "__version__"))
