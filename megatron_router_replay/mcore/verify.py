"""Look at what really leaves the routers: the proof that a session's choice arrived."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_router_replay.errors import UnsupportedRouterError
from megatron_router_replay.mcore.router import SessionRouter
from megatron_router_replay.torch_private import not_compiled


class Verifier:
    """Compares every routing map, of forwards and recomputes, with the experts that the session chose; no host sync.

    Raises:
        UnsupportedRouterError: routers drop tokens behind the selection, so that maps rightly differ from it.
    """

    def __init__(self, routers: Sequence[SessionRouter]) -> None:
        for router in routers:
            factor = router.found.router.config.moe_expert_capacity_factor
            if factor is not None:
                raise UnsupportedRouterError(
                    f"cannot verify {router.found}: moe_expert_capacity_factor={factor} drops tokens behind the selection, "
                    "so routing maps rightly differ from it. Leave verify off."
                )
        self.num_verified = 0
        self._wrong: Tensor | None = None
        self._routers = routers
        self._handles: list[Any] = []
        self._counting = threading.Lock()  # several threads may run backwards at once

    def attach(self) -> None:
        """Begin to watch."""
        for router in self._routers:
            router.watched = True
        # always_call: also for a forward that raises, whose choice would wait for the next one, of a session inside this.
        self._handles = [
            router.found.router.register_forward_hook(self._watch(router), always_call=True) for router in self._routers
        ]

    def detach(self) -> None:
        """Stop to watch."""
        for handle in self._handles:
            handle.remove()

    def num_wrong(self) -> int:
        """Return how many (row, layer) decisions were not as chosen; waits for the device."""
        return 0 if self._wrong is None else int(self._wrong)

    def _watch(self, router: SessionRouter) -> Callable[[nn.Module, Any, tuple[Tensor, Tensor] | None], None]:
        @not_compiled
        def compare(module: nn.Module, args: Any, output: tuple[Tensor, Tensor] | None) -> None:
            # Taken out, so that a run which asks for nothing is not compared with the choice of the run before.
            used = router.last_used.pop(threading.get_ident(), None)
            if output is None or not router.attached or used is None:
                return
            routing_map = output[1]
            chosen = routing_map.gather(1, used.to(device=routing_map.device, dtype=torch.int64))
            # Every chosen expert is in the map, and as many are as were chosen: so nobody else is.
            wrong = (~chosen.all(dim=1) | (routing_map.sum(dim=1) != router.topk)).sum()
            with self._counting:
                self._wrong = wrong if self._wrong is None else self._wrong + wrong
                self.num_verified += used.shape[0]

        return compare
