"""The router chooses, and every recompute repeats what its forward chose."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from megatron_router_replay.mcore.core.balance import Balance
from megatron_router_replay.mcore.core.call import RouterCounts, RoutingCall, TopKRequest
from megatron_router_replay.mcore.model.find import Models
from megatron_router_replay.mcore.model.support import check_no_indexers
from megatron_router_replay.mcore.sessions.routers import SessionRouters
from megatron_router_replay.mcore.sessions.session import Session


class FrozenRouters:
    """The source of a freeze, whose routers choose by themselves.

    It refers to no model, so a freeze whose session is dropped lasts as long as its model.

    Args:
        counters: counter and dtype of each router, by its id: the hooks call this only for registered routers, which live.
    """

    kind = "freeze_recompute"
    _takes_microbatches = False

    def __init__(self, counters: dict[int, tuple[RouterCounts, torch.dtype]]) -> None:
        self._counters = counters

    def begin(self, session: Session) -> None:
        """Remember the session, for `close_sessions`."""
        self._opened_by = weakref.ref(session)

    def end(self) -> None:
        """Leave the model as it is: nothing was put on it."""

    def _session(self) -> Any:
        return self._opened_by()

    def _routing_call(self, router: Any, shape: torch.Size, is_written: bool) -> RoutingCall | None:
        counter, dtype = self._counters[id(router)]
        if not (is_written or counter.verify or counter.balance_off):
            counter.add(forwards=1)
            return None  # no recompute follows
        return RoutingCall(router, counter, dtype, source=self, is_written=is_written)

    def _experts(self, call: RoutingCall, request: TopKRequest) -> None:
        """Let the router choose."""

    def _on_routed(self, call: RoutingCall) -> None:
        """Keep nothing: the tape has it."""


def freeze_recompute(
    model_chunks: Models,
    *,
    ask_every_layer: bool = False,
    verify: bool = False,
    indexers: bool = True,
    balance: Balance = "megatron",
) -> Session:
    """Let recomputes use their forward's experts.

    Call it once before a training loop. It starts at once, needs no call per step and works with any schedule. Each
    checkpoint keeps `topk` bytes per token and layer (two above 256 experts) as long as its graph lives. Forwards outside
    of checkpoints, such as evaluations, keep nothing. `record` and `replay` may run inside it. A backward that runs after
    the session still uses its forward's experts (see `tape`).

    Args:
        model_chunks: the model or its chunks on this rank; multi-token-prediction routers are frozen too.
        ask_every_layer: also take the live top-k in every recompute and report how many decisions it would have flipped.
        verify: compare every routing map that a token dispatcher gets with the chosen experts.
        indexers: True: refuse a model with sparse attention (DSA), whose recomputes may attend to different positions than
            their forward. False: freeze its experts alone.
        balance: "megatron": Megatron-Core balances as it does without a session. "off": no forward counts in the expert
            bias, nor has an auxiliary loss, for passes whose routes shall not balance the experts; `record` and `replay`
            inside it decide for themselves.

    Raises:
        UnsupportedRouterError: the choice of a router cannot be frozen, which names the config field; or layers have sparse
            attention, which names the layers.
        LayoutError: the model has no experts, or not all chunks of a virtual pipeline are given.
        ReplayStateError: the model is under another session, or its routers are driven by their own RouterReplay.
    """
    routers = SessionRouters(model_chunks, verify=verify, flips=ask_every_layer, balance=balance)
    if indexers:
        check_no_indexers(routers.walks)
    counters = {id(router): (state.counter, state.dtype) for router, state in routers.states.items()}
    return Session(FrozenRouters.kind, routers, FrozenRouters(counters))._start()
