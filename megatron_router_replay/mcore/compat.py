"""What differs between versions of Megatron-Core, in one place."""

import inspect

import megatron.core
from megatron.core.transformer.moe import moe_utils

from megatron_router_replay.errors import UnsupportedRouterError


def check_version() -> None:
    """Raise unless this Megatron-Core lets a router replay its selection.

    Raises:
        UnsupportedRouterError: `topk_routing_with_score_function` has no `router_replay` argument (0.15 and before).
    """
    if "router_replay" not in inspect.signature(moe_utils.topk_routing_with_score_function).parameters:
        raise UnsupportedRouterError(
            f"Megatron-Core {megatron.core.__version__} cannot replay routes: its topk_routing_with_score_function has "
            "no router_replay argument. Use 0.16.1 or later."
        )
