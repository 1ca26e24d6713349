"""The router chooses, and every recompute repeats the choice of its forward."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any

from megatron_router_replay.checks import as_integer, warn, with_checked_options
from megatron_router_replay.errors import UnsupportedRouterError, listed
from megatron_router_replay.mcore.core import hooks
from megatron_router_replay.mcore.core.call import RouterCounts, RoutingCall, TopKRequest
from megatron_router_replay.mcore.judge.report import SessionReport
from megatron_router_replay.mcore.model.find import Models
from megatron_router_replay.mcore.model.support import find_indexers
from megatron_router_replay.mcore.sessions.routers import SessionRouters
from megatron_router_replay.mcore.sessions.session import Session

_LOG = logging.getLogger(__name__)

_Sizes = tuple[Any, ...]
"""Layer number, topk, and shape of the weight, [num_experts, hidden size], of a router."""


@dataclass(slots=True, eq=False)
class _Successor:
    """Routers without a session, of the same layers and sizes as a frozen model's.

    Args:
        frozen: the source of the freeze, which lives as long as its model.
        sizes: of its routers.
        forwards: of such routers in training, since `log_every` logged a line.
    """

    frozen: weakref.ref[FrozenRouters]
    sizes: set[_Sizes]
    forwards: int = 0


_successors: list[_Successor] = []
"""Of all freezes that were not closed."""


class FrozenRouters:
    """The source of a freeze: its routers choose by themselves.

    It refers to no model, so a freeze lasts as long as its model, also after its session is dropped.

    Args:
        routers: of the session.
    """

    kind = "freeze_recompute"
    _takes_microbatches = _announces_recomputes = _may_be_captured = False
    had_inner = False  # since `log_every` logged a line

    def __init__(self, routers: SessionRouters) -> None:
        # By id: the hooks call it only for registered routers, which live.
        self._counters = {id(router): state.counter for router, state in routers.states.items()}
        self._successor = _Successor(weakref.ref(self), set(map(_sizes_of, routers.states)))

    def begin(self, session: Session) -> None:
        """Watch for routers that train in place of these."""
        self._opened_by = weakref.ref(session)
        # A model that no longer exists has its successor in this one: there is nothing to warn of.
        _successors[:] = [
            each for each in _successors if each.frozen() is not None or each.sizes.isdisjoint(self._successor.sizes)
        ]
        _successors.append(self._successor)
        hooks.on_unregistered = _count_successor

    def end(self) -> None:
        """End the watch."""
        _successors[:] = [each for each in _successors if each is not self._successor]
        if not _successors:
            hooks.on_unregistered = None

    # ---- calls of routers, see `RoutingSource`
    def _session(self) -> Any:
        return self._opened_by()

    def _routing_state(self, router: Any, shape: Any) -> tuple[RouterCounts, None]:
        return self._counters[id(router)], None

    def _experts(self, call: RoutingCall, request: TopKRequest) -> None:
        """Let the router choose."""

    def _on_routed(self, call: RoutingCall) -> None:
        """Keep nothing: the tape has it."""

    # ---- see `FreezeSession.log_every`
    def take_successors_forwards(self) -> int:
        """Return how many forwards of other such routers trained since the last call."""
        forwards, self._successor.forwards = self._successor.forwards, 0
        return forwards


def _sizes_of(router: Any) -> _Sizes:
    return getattr(router, "layer_number", None), int(router.topk), *router.weight.shape


def _count_successor(router: Any) -> None:
    """Count a forward of a router without a session that trains, for the freezes of such a model."""
    for successor in list(_successors):
        if _sizes_of(router) in successor.sizes:
            successor.forwards += 1
            # A frozen model that exists may train next, as an actor does after its critic; `log_every` sees both.
            if successor.frozen() is None:
                _successors.remove(successor)
                _warn_of_successor("the frozen model no longer exists, and")


def _warn_of_successor(seen: str) -> None:
    warn(
        "freeze",
        f"{seen} forwards of routers of its layers and sizes trained without a session, so their recomputes may flip. Was "
        "the model rebuilt? Call mrr.freeze_recompute after each build",
    )


class FreezeSession(Session):
    """A freeze: `log_every` is all that it adds to a session. See `freeze_recompute`."""

    _source: FrozenRouters
    _num_steps = 0  # calls of `log_every`
    _logged = SessionReport(kind=FrozenRouters.kind)  # by the last line

    def log_every(self, num_steps: int) -> None:
        """Log the counts since the last line, in every num_steps-th call. Call it once a training step.

        A line has the number of forwards and recomputes; with ask_every_layer=True also the decisions that recomputes would
        have flipped, by layer. It is logged as INFO. On a GPU such a call waits for the device; calls without a line do not.

        Forwards in a `record` or `replay` inside the freeze are counted there, and not here. The line warns if the frozen
        model ran no forward and had no such session since the last one, while routers of the same layer numbers and sizes
        trained without a session: a model that was rebuilt needs a freeze of its own. Routers train if they are in training
        mode, run with gradients, and have a weight that requires one, so a reference model that is only evaluated is none of
        them.

        Raises:
            ReplayStateError: the freeze is closed.
            TraceError: num_steps is no integer of 1 or more.
        """
        self._check_open()
        num_steps = as_integer("num_steps", num_steps, least=1)
        self._num_steps += 1
        if self._num_steps % num_steps == 0:
            self._log()

    def _log(self) -> None:
        last, report = self._logged, self.report
        self._logged = report
        forwards, recomputes = report.forwards - last.forwards, report.recomputes - last.recomputes
        line = f"{self.kind}, step {self._num_steps}: {forwards:,} forwards and {recomputes:,} recomputes since the last line"
        if "recomputed" in report.decisions:
            flips = {layer: count - last.flips_of_layer.get(layer, 0) for layer, count in report.flips_of_layer.items()}
            decisions = report.decisions["recomputed"] - last.decisions.get("recomputed", 0)
            layers = ", ".join(f"layer {layer}: {count:,}" for layer, count in sorted(flips.items()) if count)
            line += f", {sum(flips.values()):,} of {decisions:,} decisions would have flipped"
            line += f" ({layers})" if layers else ""
        _LOG.info("%s", line)
        elsewhere = self._source.take_successors_forwards()
        had_inner, self._source.had_inner = self._source.had_inner, False  # that session counted the model's forwards
        if elsewhere and not forwards and not had_inner:
            _warn_of_successor(f"the frozen model ran no forward since the last line, and {elsewhere:,}")


@with_checked_options
def freeze_recompute(
    model_chunks: Models,
    *,
    ask_every_layer: bool = False,
    indexers: bool = True,
) -> FreezeSession:
    """Let recomputes use their forward's experts.

    Call it once before a training loop. It starts at once, needs no call per step and works with any schedule. Each
    checkpoint keeps `topk` bytes per token and layer (two above 256 experts) as long as its graph lives. Forwards outside
    of checkpoints, such as evaluations, keep nothing. `record` and `replay` may run inside it. A backward that runs after
    the session still uses its forward's experts (see `tape`).

    `log_every(n)` of the returned session logs a line every n steps. A model that is rebuilt needs a new call, for the
    freeze lasts as long as the routers that it was given. If that model no longer exists and routers of the same layers and
    sizes train without a session, their first forward warns; `log_every` also warns while the old model exists.

    Args:
        model_chunks: the model or its chunks on this rank; multi-token-prediction routers are frozen too.
        ask_every_layer: also take the live top-k in every recompute and report how many decisions it would have flipped.
        indexers: True: refuse a model with sparse attention (DSA), because its recomputes may attend to different positions
            than their forward. False: freeze its experts alone.

    Raises:
        UnsupportedRouterError: the choice of a router cannot be frozen, which names the config field; or layers have sparse
            attention, which names the layers.
        LayoutError: the model has no experts, or not all chunks of a virtual pipeline are given.
        ReplayStateError: the model is under another session, or RouterReplay objects of its own have an action.
    """
    routers = SessionRouters(model_chunks, flips=ask_every_layer)
    if indexers and (layers := find_indexers(routers.walks)):
        raise UnsupportedRouterError(
            f"MRR401: cannot freeze the positions of sparse attention in {listed(layers)}: a recompute chooses positions "
            "again. freeze_recompute(..., indexers=False) freezes the experts alone."
        )
    return FreezeSession(FrozenRouters.kind, routers, FrozenRouters(routers))._start()
