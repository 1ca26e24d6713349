"""Record which experts a Mixture-of-Experts model used, and make Megatron-Core use exactly those again.

Importing this package loads torch and numpy only; everything else is loaded when its name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.trace import RoutingTrace, concat_traces

if TYPE_CHECKING:
    from megatron_router_replay import engines
    from megatron_router_replay.diagnostics import diff_traces
    from megatron_router_replay.mcore import explain, freeze_recompute, install, record, replay, uninstall
    from megatron_router_replay.merge import merge_traces
    from megatron_router_replay.router_replay import RouterReplay, RouterReplayAction
    from megatron_router_replay.store import load_trace, save_trace

__version__ = "0.1.0"

_LAZY = {
    "RouterReplay": "router_replay",
    "RouterReplayAction": "router_replay",
    "diff_traces": "diagnostics",
    "engines": "engines",
    "explain": "mcore",
    "freeze_recompute": "mcore",
    "install": "mcore",
    "load_trace": "store",
    "merge_traces": "merge",
    "record": "mcore",
    "replay": "mcore",
    "save_trace": "store",
    "uninstall": "mcore",
}
"""Public name -> the module that has it."""

__all__ = [
    "RouterReplay",
    "RouterReplayAction",
    "RouterReplayError",
    "RoutingTrace",
    "concat_traces",
    "diff_traces",
    "engines",
    "explain",
    "freeze_recompute",
    "install",
    "load_trace",
    "merge_traces",
    "record",
    "replay",
    "save_trace",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_LAZY[name]}")
    return module if name == _LAZY[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
