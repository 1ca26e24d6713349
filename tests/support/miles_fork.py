"""miles' Megatron-LM in a few lines: its routing function has no `router_replay`, and asks a manager of miles for the top-k.

Facts of the fork's code, none of its text. The scores stay those of the Megatron-Core that is imported.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.router import TopKRouter

from megatron_router_replay.mcore.core import hooks
from megatron_router_replay.mcore.model.upstream import asks_manager
from megatron_router_replay.trainers.seams import source_of

_topk_routing = moe_utils.topk_routing_with_score_function

IS_IMPORTED = asks_manager(_topk_routing)
"""The Megatron-Core of this process is miles' own, and no stand-in."""


class Manager:
    """As miles' manager: it chooses how a top-k is taken, here always live."""

    enabled = False

    def __init__(self) -> None:
        self.num_requests = 0

    def get_topk_fn(self, old_topk_fn: Any, return_probs: bool) -> Any:
        assert return_probs
        self.num_requests += 1
        return old_topk_fn


class _Ask:
    """The object that Megatron-Core's own function asks, which asks on."""

    def __init__(self, choose: Callable[[Any], Any]) -> None:
        self._choose = choose

    def get_replay_topk(self, scores: Any, topk: int, num_groups: Any, group_topk: Any, compute_topk: Any) -> Any:
        return self._choose(compute_topk)(scores, topk, num_groups, group_topk)


def of_miles_main(*args: Any, is_mtp: bool = False, **options: Any) -> Any:
    """miles-main: the manager is asked, but for MTP layers."""
    from miles.utils.replay_base import routing_replay_manager

    get_topk_fn = routing_replay_manager.get_topk_fn

    def choose(compute_topk: Any) -> Any:
        return compute_topk if is_mtp else get_topk_fn(compute_topk, return_probs=True)

    return _topk_routing(*args, router_replay=_Ask(choose), **_plain(options))


def of_miles_main_20260819(*args: Any, is_mtp: bool = False, router_replay: Any = None, **options: Any) -> Any:
    """miles-main-20260819: the manager is asked first, but for MTP layers and where it is not enabled."""
    from miles.utils.replay_base import routing_replay_manager

    get_topk_fn = routing_replay_manager.get_topk_fn

    def choose(compute_topk: Any) -> Any:
        manager_topk = None if is_mtp else get_topk_fn(compute_topk, return_probs=True)
        if not is_mtp and routing_replay_manager.enabled:
            return manager_topk
        if router_replay is not None:
            return lambda *request: router_replay.get_replay_topk(*request, compute_topk)
        return compute_topk

    return _topk_routing(*args, router_replay=_Ask(choose), **_plain(options))


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    assert set(options) <= set(inspect.signature(_topk_routing).parameters)
    return options


def unknown(logits: Any, topk: int, is_mtp: bool = False, **_: Any) -> Any:
    raise AssertionError("no session asks it")


def as_advised(*args: Any, is_mtp: bool = False, router_replay: Any = None, **options: Any) -> Any:
    """The unknown fork, after MRR402's advice."""

    def choose(compute_topk: Any) -> Any:
        if router_replay is None:
            return compute_topk
        return lambda scores, topk, num_groups, group_topk: router_replay.get_replay_topk(
            scores, topk, num_groups, group_topk, compute_topk
        )

    return _topk_routing(*args, router_replay=_Ask(choose), **_plain(options))


# A fork has its own signatures: what takes any keyword would pass for Megatron-Core's own.
def _signature(function: Any, *names: str) -> Any:
    known = ("router_replay", *names)
    parameters = [each for each in inspect.signature(_topk_routing).parameters.values() if each.name not in known]
    extra = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    function.__signature__ = inspect.Signature([*parameters, *extra])
    return function


FORKS = {
    "miles-main": _signature(of_miles_main, "is_mtp"),
    "miles-main-20260819": _signature(of_miles_main_20260819, "is_mtp", "router_replay"),
    "unknown": _signature(unknown, "is_mtp"),
}


def install(patch: pytest.MonkeyPatch, name: str, manager: Manager | None = None) -> None:
    """Let Megatron-Core be a fork until `patch` is undone.

    Args:
        name: of FORKS.
        manager: of a stand-in for `miles.utils.replay_base`; None: that module is a trainer's.
    """
    if IS_IMPORTED:
        if name == "unknown":
            patch.setattr(router_module, "topk_routing_with_score_function", FORKS[name])
        return
    routing = textwrap.dedent(f"    {source_of(inspect.getsource(router_module), 'TopKRouter.routing')}")
    argument = "router_replay=self.router_replay"
    assert argument in routing
    is_mtp = "is_mtp=getattr(self, 'is_mtp_layer', False)"
    routing = routing.replace(argument, f"{argument}, {is_mtp}" if name == "miles-main-20260819" else is_mtp)
    scope = vars(router_module)
    exec(routing, scope)
    patch.setattr(TopKRouter, "routing", scope.pop("routing"))
    for module in (router_module, moe_utils):
        patch.setattr(module, "topk_routing_with_score_function", FORKS[name])
    hooks.install()
    if manager is not None:
        for package in ("miles", "miles.utils", "miles.utils.replay_base"):
            patch.setitem(sys.modules, package, ModuleType(package))
        sys.modules["miles.utils.replay_base"].routing_replay_manager = manager  # type: ignore[attr-defined]
