"""What differs between versions of Megatron-Core, in one place."""

import inspect

import megatron.core
from megatron.core.transformer.moe import moe_utils

from megatron_router_replay.errors import UnsupportedRouterError

HAS_ROUTER_REPLAY = "router_replay" in inspect.signature(moe_utils.topk_routing_with_score_function).parameters
"""Routers ask a replay object for their top-k, since 0.16; before, sessions replay at the routing function."""


TOPK_ORDER_FOLLOWS_GRAD = "sorted=torch.is_grad_enabled()" in inspect.getsource(
    moe_utils.topk_routing_with_score_function
)
"""The live top-k is sorted only where gradients are on, since 0.18."""


def check_version() -> None:
    """Raise unless routers have a routing function that sessions can replay at.

    Raises:
        UnsupportedRouterError: `topk_routing_with_score_function` does not know `fused` (0.13 and before).
    """
    if "fused" not in inspect.signature(moe_utils.topk_routing_with_score_function).parameters:
        raise UnsupportedRouterError(
            f"Megatron-Core {megatron.core.__version__} cannot replay routes. Use 0.16.1; 0.15.3 works as well."
        )


def check_router_replay() -> None:
    """Raise unless Megatron-Core has a RouterReplay to take the place of.

    Raises:
        UnsupportedRouterError: it has none (0.15 and before).
    """
    if not HAS_ROUTER_REPLAY:
        raise UnsupportedRouterError(
            f"Megatron-Core {megatron.core.__version__} has no RouterReplay to take the place of: its routing function "
            "has no router_replay argument. Use record and replay, which need none, or Megatron-Core 0.16.1."
        )
