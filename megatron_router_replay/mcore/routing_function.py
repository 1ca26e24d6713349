"""Replay at Megatron-Core's routing function, for routers that do not ask `router_replay` for their top-k.

These are routers with moe_router_fusion=True, where one kernel of Transformer Engine selects experts and makes probabilities
of them, and all routers of Megatron-Core 0.14 and 0.15. While a session holds one of them, the name that `TopKRouter.routing`
calls is replaced: for routers under a session the session chooses the experts and `fused.route` makes probabilities and map
of them; every other call goes on to the original. So a live choice under a session is that of Megatron-Core's unfused top-k,
also where Transformer Engine would choose; recorded is what was used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_router_replay.errors import UnsupportedRouterError
from megatron_router_replay.fused import route, selection_scores
from megatron_router_replay.mcore.chunk import SessionRouter
from megatron_router_replay.mcore.compat import HAS_ROUTER_REPLAY
from megatron_router_replay.mcore.selection import LiveSelection, select_topk
from megatron_router_replay.router_replay import not_compiled

_NAME = "topk_routing_with_score_function"


def is_needed(router: TopKRouter) -> bool:
    """Return whether this TopKRouter selects experts without asking its `router_replay`."""
    return bool(router.config.moe_router_fusion) or not HAS_ROUTER_REPLAY


class RoutingFunction:
    """Takes the place of Megatron-Core's routing function from `attach` to `detach`; sessions share one."""

    def __init__(self) -> None:
        self._users = 0
        self._lock = threading.Lock()
        self._calling = threading.local()  # .router: whose `routing` runs in this thread

    def attach(self) -> None:
        """Count one more user; the first puts this in place."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._original, self._original_routing = getattr(router_module, _NAME), TopKRouter.routing
                # With its original: one that is left behind in another's wrapper must not call on to that wrapper.
                self._ours, self._our_routing = (
                    partial(self._call, self._original),
                    self._naming_the_router(TopKRouter.routing),
                )
                setattr(router_module, _NAME, self._ours)
                if not HAS_ROUTER_REPLAY:
                    TopKRouter.routing = self._our_routing

    def detach(self) -> None:
        """Count one user less; the last puts the original back."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            # What someone else put there meanwhile stays, and finds ours passing calls on.
            if getattr(router_module, _NAME) is self._ours:
                setattr(router_module, _NAME, self._original)
            if TopKRouter.routing is self._our_routing:
                TopKRouter.routing = self._original_routing

    def _naming_the_router(self, routing: Any) -> Any:
        """Return `TopKRouter.routing`, noting whose it is: before 0.16 the routing function is not told."""

        def named(router: TopKRouter, *args: Any, **kwargs: Any) -> Any:
            with self._noted(router):
                return routing(router, *args, **kwargs)

        return named

    @contextmanager
    def _noted(self, router: TopKRouter) -> Iterator[None]:
        before = getattr(self._calling, "router", None)
        self._calling.router = router
        try:
            yield
        finally:
            self._calling.router = before

    @not_compiled
    def _call(self, original: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        router = getattr(self._calling, "router", None)
        router_replay = kwargs.get("router_replay") if HAS_ROUTER_REPLAY else getattr(router, "router_replay", None)
        if isinstance(router_replay, SessionRouter) and is_needed(router_replay.found.router):
            return _routed(router_replay, *args, **{**kwargs, "router_replay": router_replay})
        routed: tuple[Tensor, Tensor] = original(*args, **kwargs)
        return routed


routing_function = RoutingFunction()


def _routed(
    session_router: SessionRouter,
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
    router_replay: object = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor]:
    """Return (routing_probs, routing_map), both [num_tokens, num_experts], of the experts that the session chooses.

    Raises:
        UnsupportedRouterError: an argument that Megatron-Core 0.14 to 0.16 do not know.
    """
    if unknown:
        raise UnsupportedRouterError(
            f"{session_router.found}: Megatron-Core routes with {sorted(unknown)}, which fused replay does not know. Use "
            "a version up to 0.16, or moe_router_fusion=False."
        )
    score = partial(
        selection_scores, score_function=score_function, use_pre_softmax=use_pre_softmax, expert_bias=expert_bias
    )
    select = partial(select_topk, topk=topk, num_groups=num_groups, group_topk=group_topk)
    return route(
        logits,
        session_router.select(LiveSelection(logits, score=score, select=select)),
        score_function=score_function,
        use_pre_softmax=use_pre_softmax,
        scaling_factor=scaling_factor,
        exact=not fused,
    )
