"""Make routers with moe_router_fusion=True ask for their top-k while a session holds one of them.

Such a router calls one kernel of Transformer Engine that selects experts and makes probabilities of them, and asks nobody.
So the name that `TopKRouter.routing` calls is replaced: a router that a session holds runs Megatron-Core's own unfused code,
which asks; every other call goes on as it came.

The kernel of its auxiliary loss divides by a whole number of tokens, which the host knows: without padding. With padding
Megatron-Core gives it a tensor of floats, so there, too, a router that a session holds runs the unfused code.

Source: Transformer Engine 0385266, pytorch/router.py, fused_moe_aux_loss: total_num_tokens is an int or an int64 tensor.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_router_replay.mcore import balance
from megatron_router_replay.torch_private import not_compiled

_NAME = "topk_routing_with_score_function"
_LOSS = "switch_load_balancing_loss_func"


def is_needed(router: TopKRouter) -> bool:
    """Return whether this TopKRouter selects experts without asking its `router_replay`."""
    return bool(router.config.moe_router_fusion)


class RoutingFunction:
    """Takes the place of Megatron-Core's routing function from `attach` to `detach`; all routers share one."""

    def __init__(self) -> None:
        self._users = 0
        # One thread may come twice: the last recompute of a closed session is freed, and detaches, wherever garbage is
        # collected, in `attach` too.
        self._lock = threading.RLock()

    def attach(self) -> None:
        """Count one more user; the first puts this in place."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                # With their originals: one that is left behind in another's wrapper must not call on to that wrapper.
                self._originals = {name: getattr(router_module, name) for name in (_NAME, _LOSS)}
                self._ours = {
                    _NAME: partial(self._call, self._originals[_NAME]),
                    _LOSS: partial(self._loss, self._originals[_LOSS]),
                }
                for name, ours in self._ours.items():
                    setattr(router_module, name, ours)

    def detach(self) -> None:
        """Count one user less; the last puts the original back."""
        with self._lock:
            self._users -= 1
            # What someone else put there meanwhile stays, and finds ours passing calls on.
            for name, ours in self._ours.items():
                if not self._users and getattr(router_module, name) is ours:
                    setattr(router_module, name, self._originals[name])

    @not_compiled
    def _call(self, original: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # Asked of the object, not by its class: a RouterReplay, or a router without any, has no `chooses`.
        if getattr(kwargs.get("router_replay"), "chooses", False):
            kwargs["fused"] = False
        routed: tuple[Tensor, Tensor] = original(*args, **kwargs)
        return routed

    @not_compiled
    def _loss(self, original: Any, *args: Any, **kwargs: Any) -> Tensor:
        if balance.is_under_way() and isinstance(kwargs.get("total_num_tokens"), Tensor):
            kwargs["fused"] = False
        loss: Tensor = original(*args, **kwargs)
        return loss


routing_function = RoutingFunction()
