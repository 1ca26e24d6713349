"""Choose the experts of a call of `TopKRouter.routing`.

Megatron-Core requests the experts of an object by `get_replay_topk`: of a RoutingCall, which the hook on `TopKRouter.routing`
passes in place of `router.router_replay`.
"""

from __future__ import annotations

import threading
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
    """Choose the experts of a forward: for a session, or as a RouterReplay with an action."""

    def _routing_state(self, router: Any, shape: torch.Size) -> tuple[RouterCounts, Any]:
        """Return the counts of a router, and the micro-batch of its tokens [s, b]; None: the call is live."""

    def _experts(self, call: RoutingCall, request: TopKRequest) -> Tensor | None:
        """Return the experts that a call uses, [num_tokens, topk] integers; None: the router's own live top-k."""

    def _on_routed(self, call: RoutingCall) -> None:
        """Count a call that returned, and keep its experts if the source records."""

    @property
    def _announces_recomputes(self) -> bool:
        """Return whether a call in a backward without a tape is a recompute, whose experts the source has."""

    @property
    def _may_be_captured(self) -> bool:
        """Return whether a graph may have the calls of now, because they record into memory that stays."""


class RoutingSource(ExpertSource, Protocol):
    """Choose the experts for the routers of a session.

    The source of a `freeze_recompute` outlives its session object, and lasts as long as the model.
    """

    kind: str
    _takes_microbatches: bool
    had_inner: bool
    """A session began inside this one, whose source then chose for the routers."""

    def begin(self, session: Any) -> None:
        """Put this source's own hooks on the model; the session has registered the source for its routers."""

    def end(self) -> None:
        """Take off all that `begin` put on the model."""

    def _session(self) -> Any:
        """Return the session; None once it was garbage-collected. A freeze stays in force then, until its model is freed."""


class RouterCounts(Counts):
    """Counts of a router in a session; tapes keep them, so they outlive the session.

    Args:
        flips: take the live top-k in recomputes as well, and count the tokens for which it differs from the replayed experts.
        verify: compare every routing map that `TopKRouter.routing` returns with the experts that were used.
        topk_again: the dispatcher takes a top-k of the probabilities; count the tokens for which it may find other experts.
        dtype: of the indices that a tape keeps.

    Attributes:
        forwards, recomputes: calls of the router.
        recomputed: rows of its recomputes, if flips are counted.
    """

    __slots__ = (
        "counts_flips",
        "dtype",
        "forwards",
        "recomputed",
        "recomputes",
        "topk_again",
        "verify",
    )

    def __init__(
        self,
        *,
        flips: bool = False,
        verify: bool = False,
        topk_again: bool = False,
        dtype: torch.dtype = torch.int64,
    ) -> None:
        super().__init__()
        self.topk_again, self.dtype = topk_again, dtype
        self.counts_flips, self.verify = flips, verify
        # Outside of `add` and its lock, because every call counts: Python switches threads at calls and jumps, and there is
        # none within `counter.forwards += 1`.
        self.forwards = self.recomputes = self.recomputed = 0


class TopKRequest(NamedTuple):
    """Keep the arguments of `get_replay_topk` for one call.

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
        # `detach`, not `no_grad`: since Megatron-Core 0.18 the gradient mode decides the order of a top-k's columns.
        scores, groups = self.scores.detach(), {"num_groups": self.num_groups, "group_topk": self.group_topk}
        values, indices = self.compute_topk(scores, self.topk, **groups)
        return values, indices

    def live_topk_of(self, rows: Tensor) -> Tensor:
        """Return the live experts of some rows, [n, topk] int64; rows: [n] int64."""
        scores = self.scores.detach().index_select(0, rows)
        if self.group_topk:  # with groups, compute_topk needs all num_tokens rows, not some
            chosen = group_limited_topk(scores, self.topk, *scores.shape, self.num_groups, self.group_topk)
        else:
            chosen = self.compute_topk(scores, self.topk)
        indices: Tensor = chosen[1]
        return indices


@dataclass(slots=True, eq=False)
class RoutingCall:
    """The experts of a router's call, which Megatron-Core must request exactly once.

    Args:
        router: the TopKRouter, or a RouterReplay that is called without one.
        counter: counts of this router in the session.
        source: chooses the experts of a forward; None: the call is a recompute.
        recompute_of: the entry that this call repeats; None: it is a forward.
        microbatch: the chunk's current micro-batch; None: the session takes none, or leaves this router live (MTP).
        is_written: a tape is being written.
        in_order: the columns of `used` need no sort: a live top-k ordered them, or who set a RouterReplay's target.

    Attributes:
        used: [num_tokens, topk] int64, the experts, once Megatron-Core has requested them.
        kept: `used` as a tape keeps it; None: no tape is being written, or Megatron-Core has requested nothing yet.
    """

    router: Any
    counter: RouterCounts
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
        """Return the scores and ids of the chosen experts, [num_tokens, topk] each.

        If gradients are enabled, the returned scores carry them back to `scores`. Ids are int64.

        Raises:
            ReplayStateError: a second request, or the shape of the routes is not [num_tokens, topk].
        """
        if self.used is not None:
            raise ReplayStateError(
                f"MRR414: {tape.layer_of(self.router)} requested its experts twice in one call: "
                "replay cannot know which tokens each request is for."
            )
        request = TopKRequest(scores, topk, num_groups, group_topk, default_compute_topk)
        # A selective checkpoint pairs the operations of a recompute with those of its forward. Here they differ (a top-k,
        # a read of a tape), so both are hidden.
        if tape.pairs_operations():
            with tape.hidden_from_selective_checkpoint():
                values, indices = self._choose(request)
        else:
            values, indices = self._choose(request)
        return scores.gather(1, indices) if values is None else values, indices

    def _choose(self, request: TopKRequest) -> tuple[Tensor | None, Tensor]:
        """Decide on the experts, and return (scores, ids); scores are None where a gradient goes through them.

        Without gradients they are made here: a live forward then returns its top-k's scores, and only its recompute gathers.
        """
        scores, topk = request.scores, request.topk
        values: Tensor | None = None
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
        # Megatron-Core checks no shape. It would broadcast a single row to all tokens; with more rows, but fewer than the
        # tokens, the last tokens would get no experts.
        num_tokens = scores.shape[0]
        if used.shape != (num_tokens, topk):
            raise ReplayStateError(
                f"MRR201: {tape.layer_of(self.router)} routes {num_tokens} tokens to {topk} experts each, its routes "
                f"have shape {list(used.shape)}: give one row per token, in its order (s-major, this rank's tokens)."
            )
        if used.dtype is not torch.int64 or used.device != scores.device:
            used = used.to(device=scores.device, dtype=torch.int64)
        self.used = used
        has_gradients = torch.is_grad_enabled()
        if TOPK_ORDER_FOLLOWS_GRAD and has_gradients:
            # Sums over the columns depend on their order. A live top-k sorts them by score if gradients are enabled;
            # then routes are sorted, too. Two columns need no order: a + b == b + a exactly.
            if topk > 2 and values is None and self._must_sort(request):
                order = scores.detach().gather(1, self.used).argsort(dim=1, descending=True, stable=True)
                self.used, self.kept = self.used.gather(1, order), None
            self.in_order = True
        if self.is_written and self.kept is None:
            self.kept = self.used.to(self.counter.dtype)  # here, where it is hidden from a selective checkpoint
        if has_gradients:
            return None, self.used
        return scores.gather(1, self.used) if values is None else values, self.used

    def _must_sort(self, request: TopKRequest) -> bool:
        """Return whether the columns must be sorted by score, as a live top-k with gradients does."""
        if self.in_order or request.group_topk:  # a group-limited top-k is sorted in every mode, and so are recordings
            return False
        # With softmax before the top-k, nothing is summed over the chosen experts, so their order does not matter.
        config = self.router.config
        return not (config.moe_router_score_function == "softmax" and config.moe_router_pre_softmax)

    def entry(self) -> Entry:
        """Return this call as a tape keeps it for its recompute."""
        if self.recompute_of is not None:
            return self.recompute_of
        assert self.kept is not None, "Megatron-Core has requested the experts, and a tape is being written"
        return Entry(self.router, self.kept, self.counter, self.in_order)

    def check_probabilities(self, probs: Tensor) -> None:
        """Count the rows in which a chosen expert has probability 0; no device synchronization."""
        assert self.used is not None, "Megatron-Core has requested the experts"
        with tape.hidden_from_selective_checkpoint(), torch.no_grad():
            self.counter.add(zero=(probs.gather(1, self.used) == 0).any(dim=1).sum())


# Versions of Megatron-Core have different names for this method: add that of the installed one.
setattr(RoutingCall, REPLAY_METHOD, RoutingCall.get_replay_topk)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.call: RoutingCall | None = None


current = _Thread()
"""`current.call` is the RoutingCall of the router that runs in this thread; None: no hooked router runs."""


def count_wrong(counter: RouterCounts, used: Tensor, routing_map: Tensor) -> None:
    """Count the rows of a routing map that differ from `used`; no device synchronization."""
    with tape.hidden_from_selective_checkpoint(), torch.no_grad():
        expected = torch.zeros_like(routing_map).scatter_(1, used, True)
        counter.add(wrong=(expected != routing_map).any(dim=1).sum(), verified=used.shape[0])
