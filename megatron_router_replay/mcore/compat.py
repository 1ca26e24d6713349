"""Which Megatron-Core this is, and whether routes can be replayed in it: asked of the imported code, never of pip.

Every version since 0.16 passes `router.router_replay` to `topk_routing_with_score_function`, which asks it for the top-k.
That feature is the floor, whatever number a checkout bears. Up to the newest version that our tests ran with, nothing else is
asked. A newer one may have learned a way to route that nobody here has read, so there sessions also verify every routing
map, and refuse settings whose names they do not know (`support.check_supported`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

import megatron.core
import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe import router as router_module
from torch import Tensor

from megatron_router_replay.errors import UnsupportedRouterError

TESTED = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""Megatron-Core versions that our tests ran with, oldest first."""

RoutingFunction = Callable[..., tuple[Tensor, Tensor]]
"""`moe_utils.topk_routing_with_score_function`, under the name that `TopKRouter.routing` calls."""

_probed: WeakSet[RoutingFunction] = WeakSet()  # routing functions that passed; a trainer may put another in its place


def megatron_version() -> str:
    """Return the version of the Megatron-Core that is imported; pip's metadata may be another installation's."""
    return str(megatron.core.__version__)


@cache  # asked with every session
def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, "0.20.0rc1" -> (0, 20, 0); what follows them does not count."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, leading.group().split("."))) if leading else ()


def is_newer_than_tested(version: str) -> bool:
    """Return whether a version of Megatron-Core is newer than all that our tests ran with; True if it bears no number."""
    numbers = version_numbers(version)
    return not numbers or numbers > version_numbers(TESTED[-1])


# Read off the code, for a checkout between two releases bears the number of one of them.
TOPK_ORDER_FOLLOWS_GRAD = "sorted=torch.is_grad_enabled()" in inspect.getsource(
    moe_utils.topk_routing_with_score_function
)
"""The live top-k is sorted only where gradients are on, since 0.18."""


def check_version() -> None:
    """Raise unless the imported Megatron-Core asks a router's `router_replay` for its experts.

    Raises:
        UnsupportedRouterError: its routing function has no `router_replay` argument (0.15 and before), or does not do what a
            replay object says.
    """
    check_routing_function(router_module.topk_routing_with_score_function, megatron_version())


def check_routing_function(function: RoutingFunction, version: str) -> None:
    """Raise unless a routing function takes its experts from a replay object; tried out once for each function.

    Args:
        function: what `TopKRouter.routing` calls; a trainer may have put its own there.
        version: of Megatron-Core, for the message.

    Raises:
        UnsupportedRouterError: as for `check_version`.
    """
    if function in _probed:
        return
    works = f"Sessions were run with Megatron-Core {', '.join(TESTED)}: use one of these."
    parameters = inspect.signature(function).parameters.values()
    if not any(each.name == "router_replay" or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        raise UnsupportedRouterError(
            f"Megatron-Core {version} cannot replay routes: its topk_routing_with_score_function has no router_replay "
            f"argument, which came with 0.16. {works}"
        )
    # Two branches of that function: each asks by itself, so one that does says nothing of the other.
    for score_function in ("softmax", "sigmoid"):
        found = _probe(function, score_function)
        if found:
            raise UnsupportedRouterError(
                f"Megatron-Core {version} cannot replay routes exactly: tried out with {score_function} and a replay object "
                f"that {found}. {works}"
            )
    _probed.add(function)


class _Probe:
    """A replay object that asks for experts which no router would choose, and counts how often it is asked."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets
        self.calls = 0

    def get_replay_topk(self, scores: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return scores.gather(1, self.targets), self.targets


def _probe(function: RoutingFunction, score_function: str) -> str:
    """Return what a replay object asked for and got; empty if the function asked it once and routed exactly so.

    Source: moe_utils.topk_routing_with_score_function of Megatron-Core 0.16.1 to 0.19.2: (probs, map), both
    [num_tokens, num_experts], zero and False but for the chosen experts.
    """
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    probe = _Probe(torch.tensor([[3, 1], [0, 2]]))  # the last of the first row, the first of the last: never a top-2
    expected = torch.tensor([[False, True, False, True], [True, False, True, False]])
    with torch.no_grad():
        probs, routing_map = function(logits, 2, score_function=score_function, router_replay=probe)
    if probe.calls == 1 and torch.equal(routing_map, expected) and torch.equal(probs > 0, expected):
        return ""
    routed = [row.nonzero().flatten().tolist() for row in routing_map]
    return f"names experts {probe.targets.tolist()}, its routing function asked it {probe.calls} times and routed to {routed}"
