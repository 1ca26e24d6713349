"""State of one call of `TopKRouter.routing`: its request, its experts and their source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from megatron.core.transformer.moe.moe_utils import group_limited_topk
from torch import Tensor

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.core import tape
from megatron_router_replay.mcore.core.counts import Counts
from megatron_router_replay.mcore.core.tape import Entry
from megatron_router_replay.mcore.model.upstream import REPLAY_METHOD, TOPK_ORDER_FOLLOWS_GRAD


class RoutingSource(Protocol):
    """Chooses the experts of a router: a session, or its part that a freeze registers with the hook."""

    kind: str
    _takes_microbatches: bool

    def _session(self) -> Any:
        """Return the session; None: it was a freeze and is dropped; the freeze lasts as long as its model."""

    def _routing_call(self, router: Any, shape: torch.Size, is_written: bool) -> RoutingCall | None:
        """Return the state of this call, of tokens [s, b]; None: run Megatron-Core's own top-k, without bookkeeping.

        Args:
            is_written: a tape is being written.
        """

    def _experts(self, call: RoutingCall, request: TopKRequest) -> Tensor | None:
        """Return the experts that a call uses, [num_tokens, topk] integers; None: the router's own live top-k."""

    def _on_routed(self, call: RoutingCall) -> None:
        """Record that the call is over."""


class RouterCounts(Counts):
    """Counts of one router in one session; tapes keep them, so they outlive the session.

    Args:
        flips: also take the live top-k in recomputes, and count the decisions that it would have flipped.
        verify: compare every routing map that a token dispatcher gets with the experts that were used.
        verify_routing: compare the map that leaves `TopKRouter.routing`, where a layer has no dispatcher or this version of
            Megatron-Core was never read.
        topk_again: the dispatcher takes a top-k of the probabilities; count the decisions that it may read differently.
        balance_off: leave expert bias and auxiliary losses out of its calls.
    """

    __slots__ = ("balance_off", "counts_flips", "topk_again", "verify", "verify_entering", "verify_routing")

    def __init__(
        self,
        *,
        flips: bool = False,
        verify: bool = False,
        verify_routing: bool = False,
        topk_again: bool = False,
        balance_off: bool = False,
    ) -> None:
        super().__init__()
        self.topk_again, self.balance_off = topk_again, balance_off
        self.counts_flips, self.verify, self.verify_routing = flips, verify, verify_routing
        self.verify_entering = verify and not verify_routing


class TopKRequest(NamedTuple):
    """Megatron-Core's request for the experts of one call of a router; it lives for one call.

    Args:
        scores: [num_tokens, num_experts], what the router ranks: logits or probabilities, with the expert bias where there
            is one.
        topk: experts for each token.
        num_groups, group_topk: group-limited routing; `compute_topk` takes them.
        compute_topk: the router's own top-k.
    """

    scores: Tensor
    topk: int
    num_groups: int | None
    group_topk: int | None
    compute_topk: Any

    def live_topk(self) -> tuple[Tensor, Tensor]:
        """Return (scores, ids) of the router's own top-k, [num_tokens, topk]; without a gradient."""
        # This runs in the gradient mode of the forward: since Megatron-Core 0.18 the order of the columns depends on it.
        scores, groups = self.scores.detach(), {"num_groups": self.num_groups, "group_topk": self.group_topk}
        values, indices = self.compute_topk(scores, self.topk, **groups)
        return values, indices

    def live_topk_of(self, rows: Tensor) -> Tensor:
        """Return the experts that the router chooses for rows at these positions ([n] int64), [n, topk] int64."""
        scores = self.scores.detach().index_select(0, rows)
        if self.group_topk:  # the router's own top-k in groups expects all rows
            chosen = group_limited_topk(scores, self.topk, *scores.shape, self.num_groups, self.group_topk)
        else:
            chosen = self.compute_topk(scores, self.topk)
        indices: Tensor = chosen[1]
        return indices

    def ids(self, used: Tensor, router: Any) -> Tensor:
        """Return the experts that answer it as Megatron-Core takes them, [num_tokens, topk] int64.

        Args:
            used: any integer dtype.
            router: for messages.

        Raises:
            ReplayStateError: they have another shape than the tokens.
        """
        num_tokens = self.scores.shape[0]
        if used.shape != (num_tokens, self.topk):
            raise ReplayStateError(
                f"MRR201: {tape.layer_of(router)} routes {num_tokens} tokens to {self.topk} experts each, its routes are "
                f"{list(used.shape)}: give one row a token, in the order the router sees them (s-major, this rank's)."
            )
        return used.to(device=self.scores.device, dtype=torch.int64)


@dataclass(slots=True, eq=False)
class RoutingCall:
    """The experts of one call of a router; Megatron-Core must request them exactly once.

    Args:
        router: the TopKRouter.
        counter: of the source and this router.
        dtype: of the indices that a tape keeps.
        source: chooses the experts, and records the end of the call; None: the call is a recompute.
        recompute_of: the entry that this call repeats; None: it is a forward.
        microbatch: the one that the router forwards; None: the router only runs live, or the session takes none.

    Attributes:
        is_written: a tape is being written.
        used: [num_tokens, topk] int64, the experts, once Megatron-Core has requested them.
        kept: `used` as a tape keeps it; None: it is made in `dtype` when a tape needs it.
        in_order: the columns of `used` are sorted as those of a live top-k with gradients; it matters since 0.18.
    """

    router: Any
    counter: RouterCounts
    dtype: torch.dtype
    source: RoutingSource | None = None
    recompute_of: Entry | None = None
    microbatch: Any = None
    is_written: bool = False
    used: Tensor | None = field(default=None, init=False)
    kept: Any = field(default=None, init=False)
    in_order: bool = field(default=False, init=False)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (scores of the chosen experts [num_tokens, topk], their ids, int64); gradients flow to the scores.

        Raises:
            ReplayStateError: a second request, or the routes have another shape than the tokens.
        """
        if self.used is not None:
            raise ReplayStateError(
                f"MRR414: {tape.layer_of(self.router)} asked for its experts twice in one call; which tokens the "
                "second request is about cannot be told."
            )
        request = TopKRequest(scores, topk, num_groups, group_topk, default_compute_topk)
        # A forward chooses and a recompute recalls. A selective checkpoint pairs their operations, so it must not see these.
        values: Tensor | None = None
        with tape.hidden_from_selective_checkpoint():
            if self.recompute_of is not None:
                used = self.recompute_of.topk_indices.to(torch.int64)
                if self.counter.counts_flips:
                    flipped = request.live_topk()[1].sort(dim=1).values != used.sort(dim=1).values
                    self.counter.add(flips=flipped.any(dim=1).sum())
            else:
                assert self.source is not None, "somebody decides for a forward"
                used = self.source._experts(self, request)
                if used is None:
                    values, used = request.live_topk()
            self.used = request.ids(used, self.router)
            if TOPK_ORDER_FOLLOWS_GRAD and torch.is_grad_enabled():
                # A sum of two is the same in both orders.
                if topk > 2 and values is None and self._order_matters(request):
                    order = scores.detach().gather(1, self.used).argsort(dim=1, descending=True, stable=True)
                    self.used, self.kept = self.used.gather(1, order), None
                self.in_order = True
            indices = self.used
        if values is not None and not torch.is_grad_enabled():
            return values, indices  # without a gradient, a gather would give the same values
        return scores.gather(1, indices), indices

    def _order_matters(self, request: TopKRequest) -> bool:
        """Return whether sums over the columns would differ from those of a live top-k, which is sorted here.

        Without a sum over the chosen experts, no order matters. A top-k in groups is always sorted, and so is a recording of
        it. What ran in a forward with gradients is sorted by the same scores already.
        """
        config = self.router.config
        has_no_sum = config.moe_router_score_function == "softmax" and config.moe_router_pre_softmax
        was_sorted = request.group_topk or (self.recompute_of is not None and self.recompute_of.in_order)
        return not has_no_sum and not was_sorted

    def entry(self) -> Entry:
        """Return this call as a tape keeps it for its recompute."""
        assert self.used is not None, "the call is over"
        if self.recompute_of is not None:
            return self.recompute_of
        if self.kept is None:
            with tape.hidden_from_selective_checkpoint():
                self.kept = self.used.to(self.dtype)
        return Entry(self.router, self.kept, self.counter, self.in_order)

    def check_probabilities(self, probs: Tensor) -> None:
        """Count the rows that gave a chosen expert the probability 0; the host waits for nothing."""
        assert self.used is not None, "the call is over"
        with tape.hidden_from_selective_checkpoint(), torch.no_grad():
            self.counter.add(zero=(probs.gather(1, self.used) == 0).any(dim=1).sum())


setattr(RoutingCall, REPLAY_METHOD, RoutingCall.get_replay_topk)


def count_wrong(counter: RouterCounts, used: Tensor, routing_map: Tensor) -> None:
    """Count the rows of a routing map that do not name the experts used; the host waits for nothing."""
    with tape.hidden_from_selective_checkpoint(), torch.no_grad():
        expected = torch.zeros_like(routing_map).scatter_(1, used, True)
        counter.add(wrong=(expected != routing_map).any(dim=1).sum(), verified=used.shape[0])
