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
        close_sessions,
        freeze_recompute,
        install,
        record,
        replay,
        uninstall,
    )
    from megatron_router_replay.mcore.model.explanation import explain
    from megatron_router_replay.store import load_trace, save_trace
    from megatron_router_replay.trace import RoutingTrace, concat_traces, merge_traces
    from megatron_router_replay.trainers.audit import audit

__version__ = "0.3.0"

# Without this handler, logging would print the warnings of a library to stderr before a program sets logging up.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "RouterReplayError",
    "RoutingTrace",
    "audit",
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

_MODULES = {
    "RoutingTrace": "trace",
    "audit": "trainers.audit",
    "close_sessions": "mcore",
    "concat_traces": "trace",
    "diff_traces": "diagnostics",
    "explain": "mcore",
    "freeze_recompute": "mcore",
    "install": "mcore",
    "load_trace": "store",
    "merge_traces": "trace",
    "record": "mcore",
    "replay": "mcore",
    "save_trace": "store",
    "uninstall": "mcore",
}
"""Public name -> the module that has it; every other public name is a module itself."""

# RouterReplayError, imported above, never reaches __getattr__.
__getattr__, __dir__ = lazy_names(
    __name__,
    {name: _MODULES.get(name, name) for name in __all__},
    also=("__version__",),
)
