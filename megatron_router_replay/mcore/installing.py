"""Make `moe_enable_routing_replay=True` build this package's RouterReplay, and take that back."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

from megatron.core.transformer.moe import router_replay as upstream
from torch import nn

from megatron_router_replay.mcore.compat import check_version
from megatron_router_replay.mcore.support import refusals
from megatron_router_replay.router_replay import RouterReplay, RouterReplayAction

_LOG = logging.getLogger(__name__)
_REPLACEMENTS = {"RouterReplay": RouterReplay, "RouterReplayAction": RouterReplayAction}
_ORIGINALS = {"RouterReplay": upstream.RouterReplay, "RouterReplayAction": upstream.RouterReplayAction}
_replaced: dict[tuple[ModuleType, str], object] = {}


def install() -> None:
    """Let our RouterReplay and RouterReplayAction be what Megatron-Core uses; a second call changes nothing more.

    Every loaded `megatron` module that holds the originals gets ours, inference modules too. Both classes then share one
    list of instances, so the static helpers of either reach all, and the instances of models that were built before become
    ours. Sessions do not need it: they work on any model, with the config flag on or off.

    Raises:
        UnsupportedRouterError: this Megatron-Core has no router replay.
        TraceError, ReplayStateError: an instance of such a model holds an illegal target or an unknown action; nothing is
            changed then.
    """
    check_version()
    _share_instances()
    RouterReplay.find_refusals = _find_refusals
    # In every module: one that did `from ... import RouterReplay` holds the original under a name of its own.
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "megatron" or module is None:
            continue
        for name, original in _ORIGINALS.items():
            # Not getattr, with which a module that loads its names lazily would import them now.
            if vars(module).get(name) is original:
                _replaced[module, name] = original
                setattr(module, name, _REPLACEMENTS[name])
    _LOG.info("installed: Megatron-Core builds our RouterReplay, %d names replaced", len(_replaced))


def uninstall() -> None:
    """Put Megatron-Core's own classes back; models already built keep what they have, and either class reaches them."""
    while _replaced:
        (module, name), original = _replaced.popitem()
        setattr(module, name, original)
    _LOG.info("uninstalled: Megatron-Core builds its own RouterReplay")


def _find_refusals(router: nn.Module) -> list[str]:
    """Return why driving a router's own RouterReplay would not decide its routes; sessions also manage fused routers."""
    fused = getattr(router.config, "moe_router_fusion", False)
    return refusals(router) + (["moe_router_fusion=True never asks for a top-k"] if fused else [])


def _share_instances() -> None:
    original: Any = _ORIGINALS["RouterReplay"]
    shared: list[Any] = original.global_router_replay_instances
    RouterReplay.adopt(instance for instance in shared if type(instance) is original)
    if RouterReplay.global_router_replay_instances is not shared:
        shared.extend(RouterReplay.global_router_replay_instances)
        RouterReplay.global_router_replay_instances = shared
