"""moe_router_fusion=True under a session: Megatron-Core's own unfused routing function, which asks the session.

With fusion, one kernel of Transformer Engine selects experts and makes probabilities of them, and never looks at
`router_replay`. While a session holds such a router, the name that `TopKRouter.routing` calls is replaced: for routers under
a session the call goes on with fused=False, every other call as it is. So a live choice under a session, its probabilities
and their rounding are those of the installed Megatron-Core without fusion; recorded is what was used.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_router_replay.mcore.chunk import SessionRouter

_NAME = "topk_routing_with_score_function"


def is_needed(router: TopKRouter) -> bool:
    """Return whether this TopKRouter selects experts without asking its `router_replay`."""
    return bool(router.config.moe_router_fusion)


class RoutingFunction:
    """Takes the place of Megatron-Core's routing function from `attach` to `detach`; sessions share one."""

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
                self._ours = partial(_unfused_in_sessions, self._original)
                setattr(router_module, _NAME, self._ours)

    def detach(self) -> None:
        """Count one user less; the last puts the original back."""
        with self._lock:
            self._users -= 1
            # What someone else put there meanwhile stays, and finds ours passing calls on.
            if not self._users and getattr(router_module, _NAME) is self._ours:
                setattr(router_module, _NAME, self._original)


def _unfused_in_sessions(original: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    # Every version calls with names; were fused given by its place, the original would refuse the second one.
    if isinstance(kwargs.get("router_replay"), SessionRouter):
        kwargs["fused"] = False
    routed: tuple[Tensor, Tensor] = original(*args, **kwargs)
    return routed


routing_function = RoutingFunction()
