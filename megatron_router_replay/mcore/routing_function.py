"""Make routers with moe_router_fusion=True ask for their top-k while a session holds one of them.

Such a router calls one kernel of Transformer Engine that selects experts and makes probabilities of them, and asks nobody.
So the name that `TopKRouter.routing` calls is replaced: a router that a session holds runs Megatron-Core's own unfused code,
which asks; every other call goes on as it came.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_router_replay.torch_private import not_compiled

_NAME = "topk_routing_with_score_function"


def is_needed(router: TopKRouter) -> bool:
    """Return whether this TopKRouter selects experts without asking its `router_replay`."""
    return bool(router.config.moe_router_fusion)


class RoutingFunction:
    """Takes the place of Megatron-Core's routing function from `attach` to `detach`; all routers share one."""

    def __init__(self) -> None:
        self._users = 0
        self._lock = threading.Lock()

    def attach(self) -> None:
        """Count one more user; the first puts this in place."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._original = getattr(router_module, _NAME)
                # With its original: one that is left behind in another's wrapper must not call on to that wrapper.
                self._ours = partial(self._call, self._original)
                setattr(router_module, _NAME, self._ours)

    def detach(self) -> None:
        """Count one user less; the last puts the original back."""
        with self._lock:
            self._users -= 1
            # What someone else put there meanwhile stays, and finds ours passing calls on.
            if not self._users and getattr(router_module, _NAME) is self._ours:
                setattr(router_module, _NAME, self._original)

    @not_compiled
    def _call(self, original: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # Asked of the object, not by its class: a RouterReplay, or a router without any, has no `chooses`.
        if getattr(kwargs.get("router_replay"), "chooses", False):
            kwargs["fused"] = False
        routed: tuple[Tensor, Tensor] = original(*args, **kwargs)
        return routed


routing_function = RoutingFunction()
