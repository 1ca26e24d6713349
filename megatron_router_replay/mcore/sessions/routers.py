"""The routers of a session: found and checked, registered with the hooks, counted, released."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from megatron_router_replay.errors import ReplayStateError, TraceError, UnsupportedRouterError
from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.core import dispatch, hooks
from megatron_router_replay.mcore.core.call import RouterCounts, RoutingSource
from megatron_router_replay.mcore.judge.report import Decisions, SessionReport
from megatron_router_replay.mcore.model.find import (
    FoundRouter,
    Models,
    WalkedChunk,
    as_chunks,
    check_has_experts,
    check_whole_pipeline,
    find_routers,
    walk,
)
from megatron_router_replay.mcore.model.support import check_supported, is_hashed, takes_topk_again
from megatron_router_replay.mcore.model.upstream import check_version
from megatron_router_replay.trace.ids import index_dtype


@dataclass(slots=True, eq=False)
class RouterState:
    """A router of a session.

    Args:
        found: the router.
        router_class: of the router as the session found it.
        counter: counts of the session and this router.
        chunk_index: which chunk of the session has it.
        chunk: it routes the micro-batches of this one; None: it is live, and frozen in recomputes.
        position: its place among the routers of that chunk which route micro-batches.

    """

    found: FoundRouter
    router_class: type
    counter: RouterCounts
    chunk_index: int
    chunk: Chunk | None = None
    position: int = -1


class SessionRouters:
    """The routers of a session, from its opening to its report.

    Args:
        model_chunks: as given by the user.
        verify: see `replay`.
        flips: count the decisions that the live router would have flipped in a recompute.

    Attributes:
        modules: the chunks as the user gave them, with their wrappers.
        found: the routers of each chunk, without hash-routed ones, which are the model's own.
        states: the same, by router.
        walks: of the chunks, while the session opens; empty after `register`.

    Raises:
        UnsupportedRouterError, LayoutError: see `replay`.
    """

    def __init__(
        self,
        model_chunks: Models,
        *,
        verify: bool = False,
        flips: bool = False,
    ) -> None:
        if not isinstance(verify, bool):
            raise TraceError(
                f"MRR101: verify={verify!r} must be True or False: True compares every routing map of every layer."
            )
        self.modules = as_chunks(model_chunks)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        check_version()
        self.walks: list[WalkedChunk] = list(map(walk, self.modules))
        check_has_experts(self.walks)
        check_whole_pipeline(self.walks)
        # Maps of a Megatron-Core that was never read are always verified.
        verify = check_supported([each for walked in self.walks for each in walked.routers]) or verify
        self.found = [[each for each in walked.routers if not is_hashed(each.router)] for walked in self.walks]
        self.states: dict[Any, RouterState] = {}
        for index, routers in enumerate(self.found):
            for each in routers:
                if each.router in self.states:  # a freeze may have one that two chunks share
                    shared = self.states[each.router].found.dispatchers
                    each = replace(each, dispatchers=(*shared, *each.dispatchers))
                counter = RouterCounts(
                    flips=flips,
                    verify=verify,
                    topk_again=takes_topk_again(getattr(each.router, "config", None)),
                    dtype=index_dtype(each.router.num_experts),
                )
                self.states[each.router] = RouterState(each, type(each.router), counter, index)
        self._verifies = verify
        if verify:
            self._check_verifiable()

    def _check_verifiable(self) -> None:
        for state in self.states.values():
            factor = state.found.router.config.moe_expert_capacity_factor
            if factor is not None:
                raise UnsupportedRouterError(
                    f"MRR401: cannot verify {state.found}: moe_expert_capacity_factor={factor} drops tokens after "
                    "the selection, so routing maps rightly differ from it. Leave verify off, and use a tested "
                    "Megatron-Core and its own routing function: with others, every map is verified."
                )

    # ---- registration
    def register(self, source: RoutingSource) -> None:
        """Register the source of their experts.

        Raises:
            ReplayStateError: a router is under another session, or its own RouterReplay has an action.
        """
        self.walks = []
        hooks.install()
        hooks.check_installed()
        # All are checked before the first is registered, so a model that is partly under a session stays as it was.
        for router, state in self.states.items():
            for outer in hooks.sources_of(router):
                if outer._takes_microbatches or not source._takes_microbatches:
                    raise ReplayStateError(
                        f"MRR404: {state.found} is under another session already, a {outer.kind}. Leave its block "
                        "first; one that was opened without `with` ends with its close(), or with "
                        "close_sessions(model_chunks). Only freeze_recompute may surround record or replay."
                    )
            hooks.check_not_driven(router)
        for router, state in self.states.items():
            for outer in hooks.sources_of(router):
                outer.had_inner = True
            hooks.register(router, source, state.found.dispatchers)

    def unregister(self, source: RoutingSource) -> None:
        """Release the routers; those that were never registered stay as they are."""
        for router in self.states:
            hooks.unregister(router, source)

    # ---- the end
    def problems(self) -> list[str]:
        """Return the faults of hooks and model, while the routers are registered."""
        problems = []
        try:
            hooks.check_installed()
        except ReplayStateError as error:
            problems.append(str(error))
        for module in self.modules:
            problems += filter(None, map(self._why_not_reached, find_routers(module)))
        return problems

    def _why_not_reached(self, found: FoundRouter) -> str:
        """Return why the session does not reach a router that the model has by now; "": it does."""
        if is_hashed(found.router):
            return ""
        if found.router not in self.states:
            return f"{found}: the router was exchanged during the session, which did not reach the new one"
        if not all(map(dispatch.is_checked, found.dispatchers)):
            return f"{found}: its token dispatcher, or the class of it, was exchanged during the session"
        if type(found.router) is not self.states[found.router].router_class:
            return f"{found}: the router got the class {type(found.router).__name__} during the session"
        return ""

    def problems_in_counts(self, decisions: Decisions) -> list[str]:
        """Return the faults that the counts show, once they are read."""
        problems, states = [], self.states.values()
        if wrong := decisions.get("wrong"):
            problems.append(
                f"rank {self.rank}: {wrong} of {decisions['verified']} decisions left their router "
                "with other experts than were decided"
            )
        if zero := sum(each.counter["zero"] for each in states):
            problems.append(
                f"rank {self.rank}: {zero} decisions gave a chosen expert the probability 0. This model's dispatcher "
                "(DeepEP, NCCL EP) takes a top-k of the probabilities, and may have sent these tokens to different experts"
            )
        return problems

    def report(self, kind: str) -> SessionReport:
        """Return the counts that were read, of a session of this kind without micro-batches."""
        states = list(self.states.values())
        counting = [each for each in states if each.counter.counts_flips]
        decisions = Decisions()
        if counting:
            decisions["recomputed"] = sum(each.counter.recomputed for each in counting)
        if self._verifies:
            decisions["verified"] = sum(each.counter["verified"] for each in states)
            decisions["wrong"] = sum(each.counter["wrong"] for each in states)
        forwards: dict[int, int] = {}  # of each chunk
        for each in states:
            forwards[each.chunk_index] = max(forwards.get(each.chunk_index, 0), each.counter.forwards)
        return SessionReport(
            kind=kind,
            routers=len(states),
            microbatches=sum(forwards.values()),
            forwards=sum(each.counter.forwards for each in states),
            recomputes=sum(each.counter.recomputes for each in states),
            decisions=decisions,
            flips_of_layer={each.found.layer_number: each.counter["flips"] for each in counting},
        )
