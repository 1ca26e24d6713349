"""Make `moe_enable_routing_replay=True` build this package's RouterReplay, and take that back."""

from importlib import import_module
from types import ModuleType

from megatron_router_replay.mcore.compat import check_router_replay
from megatron_router_replay.router_replay import RouterReplay, RouterReplayAction

_REPLACEMENTS = {"RouterReplay": RouterReplay, "RouterReplayAction": RouterReplayAction}
_MODULES = tuple(f"megatron.core.transformer.moe.{name}" for name in ("router_replay", "router", "moe_utils"))
_originals: dict[tuple[ModuleType, str], object] = {}


def install() -> None:
    """Let models built from now on use our RouterReplay where Megatron-Core would use its own; twice is once.

    Sessions do not need it: they work on any model, with the config flag on or off.

    Raises:
        UnsupportedRouterError: this Megatron-Core has no router replay.
    """
    check_router_replay()
    for module in map(import_module, _MODULES):
        for name, ours in _REPLACEMENTS.items():
            if hasattr(module, name) and (module, name) not in _originals:
                _originals[module, name] = getattr(module, name)
                setattr(module, name, ours)


def uninstall() -> None:
    """Put Megatron-Core's own classes back; models already built keep what they have."""
    while _originals:
        (module, name), original = _originals.popitem()
        setattr(module, name, original)
