"""A call of `TopKRouter.routing`: the request of Megatron-Core, its experts, and their source.

session        the hook passes a RoutingCall to Megatron-Core in place of `router.router_replay`
RouterReplay   Megatron-Core calls its `get_replay_topk`, which makes a RoutingCall and returns its answer
"""

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


class ExpertSource(Protocol):
    """Chooses the experts of a forward: a session, or a RouterReplay with an action."""

    def _experts(self, call: RoutingCall, request: TopKRequest) -> Tensor | None:
        """Return the experts that a call uses, [num_tokens, topk] integers; None: the router's own live top-k."""

    def _on_routed(self, call: RoutingCall) -> None:
        """Record that the call is over."""


class RoutingSource(ExpertSource, Protocol):
    """An ExpertSource that the hook registers for routers: a session, or the part of a freeze that lasts with the model."""

    kind: str
    _takes_microbatches: bool

    def _session(self) -> Any:
        """Return the session; None: it was a freeze and is dropped; the freeze lasts as long as its model."""

    def _routing_call(self, router: Any, shape: torch.Size, is_written: bool) -> RoutingCall | None:
        """Return the state of this call, of tokens [s, b]; None: run Megatron-Core's own top-k, without bookkeeping.

        Args:
            is_written: a tape is being written.
        """


class RouterCounts(Counts):
    """Counts of a router in a session; tapes keep them, so they outlive the session.

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
    """Arguments of `get_replay_topk`, by which Megatron-Core requests the experts of a call; they live for that call.

    Args:
        scores: [num_tokens, num_experts], logits or probabilities, with the expert bias where there is one.
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
        """Return experts as Megatron-Core takes them, [num_tokens, topk] int64.

        Args:
            used: any integer dtype.
            router: for messages.

        Raises:
            ReplayStateError: they have another shape than the tokens.
        """
        # Megatron-Core would broadcast one row, and leave tokens without experts where rows are too few.
        num_tokens = self.scores.shape[0]
        if used.shape != (num_tokens, self.topk):
            raise ReplayStateError(
                f"MRR201: {tape.layer_of(router)} routes {num_tokens} tokens to {self.topk} experts each, its routes are "
                f"{list(used.shape)}: give one row a token, in the order the router sees them (s-major, this rank's)."
            )
        return used.to(device=self.scores.device, dtype=torch.int64)


@dataclass(slots=True, eq=False)
class RoutingCall:
    """The experts of a router's call, which Megatron-Core must request exactly once.

    Args:
        router: the TopKRouter, or the RouterReplay with an action.
        counter: of the source and this router.
        dtype: of the indices that a tape keeps.
        source: chooses the experts of a forward; None: the call is a recompute.
        recompute_of: the entry that this call repeats; None: it is a forward.
        microbatch: the one that the router forwards; None: the router only runs live, or the session takes none.
        is_written: a tape is being written.
        in_order: leave the columns as they are: a live top-k with gradients would sum them in this order, or a driver set it.

    Attributes:
        used: [num_tokens, topk] int64, the experts, once Megatron-Core has requested them.
        kept: `used` as a tape keeps it; None: it is made in `dtype` when a tape needs it.
    """

    router: Any
    counter: RouterCounts
    dtype: torch.dtype
    source: ExpertSource | None = None
    recompute_of: Entry | None = None
    microbatch: Any = None
    is_written: bool = False
    in_order: bool = False
    used: Tensor | None = field(default=None, init=False)
    kept: Any = field(default=None, init=False)

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
                f"MRR414: {tape.layer_of(self.router)} requested its experts twice in one call, and either request may be "
                "about different tokens."
            )
        request = TopKRequest(scores, topk, num_groups, group_topk, default_compute_topk)
        values: Tensor | None = None
        # A forward chooses where its recompute reads a tape: a selective checkpoint would pair these unequal operations.
        with tape.hidden_from_selective_checkpoint():
            if self.recompute_of is not None:
                used = self.recompute_of.topk_indices.to(torch.int64)
                if self.counter.counts_flips:
                    flipped = request.live_topk()[1].sort(dim=1).values != used.sort(dim=1).values
                    self.counter.add(flips=flipped.any(dim=1).sum())
            else:
                assert self.source is not None, "a forward has a source"
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
            if not torch.is_grad_enabled():
                # A live forward has its values and gathers nothing, so this is hidden: its recompute may have to gather.
                return scores.gather(1, indices) if values is None else values, indices
        return scores.gather(1, indices), indices

    def _order_matters(self, request: TopKRequest) -> bool:
        """Return whether sums over the columns would differ from those of a live top-k, which is sorted here."""
        if self.in_order or request.group_topk:  # a live top-k in groups is always sorted, and so are its recordings
            return False
        # Softmax before the top-k leaves no sum over the chosen experts.
        config = self.router.config
        return not (config.moe_router_score_function == "softmax" and config.moe_router_pre_softmax)

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
        """Count the rows that gave a chosen expert the probability 0, without a device synchronization."""
        assert self.used is not None, "the call is over"
        with tape.hidden_from_selective_checkpoint(), torch.no_grad():
            self.counter.add(zero=(probs.gather(1, self.used) == 0).any(dim=1).sum())


setattr(RoutingCall, REPLAY_METHOD, RoutingCall.get_replay_topk)


def count_wrong(counter: RouterCounts, used: Tensor, routing_map: Tensor) -> None:
    """Count the rows of a routing map that differ from the experts used, without a device synchronization."""
    with tape.hidden_from_selective_checkpoint(), torch.no_grad():
        expected = torch.zeros_like(routing_map).scatter_(1, used, True)
        counter.add(wrong=(expected != routing_map).any(dim=1).sum(), verified=used.shape[0])
