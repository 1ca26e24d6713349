"""The base of all sessions: register for a model's routers at the start, release them at the end, then check.

start       register: from now on the hook takes experts from this session
close       release the routers, and check the counts of the session
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from megatron_router_replay.errors import ReplayStateError, UnsupportedRouterError, listed
from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.core import balance as balancing
from megatron_router_replay.mcore.core import dispatch, hooks
from megatron_router_replay.mcore.core.balance import Balance, check_balance, check_can_be_off
from megatron_router_replay.mcore.core.call import RouterCounts, RoutingSource
from megatron_router_replay.mcore.core.counts import Counts
from megatron_router_replay.mcore.model.find import (
    FoundRouter,
    Models,
    Walk,
    as_chunks,
    check_has_experts,
    check_whole_pipeline,
    find_routers,
    walk,
)
from megatron_router_replay.mcore.model.support import check_supported, is_hashed, takes_topk_again
from megatron_router_replay.mcore.model.upstream import check_version
from megatron_router_replay.mcore.sessions.report import Decisions, SessionReport, log_began, log_ended, log_failed
from megatron_router_replay.trace.ids import index_dtype


@dataclass(slots=True, eq=False)
class RouterState:
    """One router of a session.

    Args:
        found: the router.
        counter: what the session counts of it.
        chunk_index: which chunk of the session has it.
        dtype: of the indices that are kept.
        chunk: the one that it belongs to; None: it is only frozen.
        position: its place among the routers that take part; -1: it is live, and frozen in recomputes.
    """

    found: FoundRouter
    counter: RouterCounts
    chunk_index: int
    dtype: torch.dtype
    chunk: Chunk | None = None
    position: int = -1


class Session:
    """A session on a model's routers, until `close()` or the end of a `with` block.

    Made and started by `record`, `replay` and `freeze_recompute`. Leaving the block releases the routers in every case;
    without an exception it also verifies.

    Args:
        model_chunks: as given by the user.
        verify: see `replay`.
        flips: see `freeze_recompute`.
        balance: see `replay`.
    """

    kind: str
    _takes_microbatches = False

    def __init__(
        self, model_chunks: Models, *, verify: bool, flips: bool = False, balance: Balance = "megatron"
    ) -> None:
        self._modules = as_chunks(model_chunks)
        self._walks: list[Walk] = []  # while the session is opened
        found = self._find_routers()
        # Maps that leave the hook of a Megatron-Core that was never read are always verified.
        verify_routing = check_supported([router for routers in found for router in routers])
        self._verify, self._verify_routing = verify, verify_routing
        check_balance(balance)
        self._balance = balance
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._routers: dict[Any, RouterState] = {}
        for index, (module, routers) in enumerate(zip(self._modules, found)):
            self._add_chunk(index, module, [r for r in routers if not is_hashed(r.router)], flips=flips)
        if verify or verify_routing:
            self._check_verifiable()
        self._closed = False

    def _find_routers(self) -> list[list[FoundRouter]]:
        check_version()
        self._walks = list(map(walk, self._modules))
        found = [find_routers(module, walked) for module, walked in zip(self._modules, self._walks)]
        check_has_experts(self._modules, found)
        check_whole_pipeline(self._modules)
        return found

    def _start(self) -> Self:
        """Register for the routers; nothing is registered before.

        Raises:
            ReplayStateError: a router has another session, or its own RouterReplay has an action; or this one was closed.
        """
        self._check_open()
        self._walks = []
        hooks.install()
        hooks.check_installed()
        # All are checked before the first is registered, so a model that is partly under a session stays as it was.
        for router, router_state in self._routers.items():
            self._check_free(router, router_state.found)
            if self._balance == "off":
                hooks.install_balance()
                check_can_be_off(router)
        for router, router_state in self._routers.items():
            hooks.register(router, self._source(), router_state.found.dispatchers)
        log_began(self.kind, len(self._routers))
        return self

    def microbatch(self, *args: Any, **options: Any) -> None:
        """Raise ReplayStateError: such a session takes no micro-batches."""
        self._check_open()
        raise ReplayStateError(f"MRR407: a {self.kind} session takes no micro-batches: just run the model.")

    @property
    def report(self) -> SessionReport:
        """Return the counts of the session so far, on this rank. On a GPU, reading them waits for the device."""
        self._read()
        routers = list(self._routers.values())
        counting = [each for each in routers if each.counter.counts_flips]
        decisions = Decisions()
        if counting:
            decisions["recomputed"] = sum(each.counter["recomputed"] for each in counting)
        if self._verify or self._verify_routing:
            decisions["verified"] = sum(each.counter["verified"] for each in routers)
            decisions["wrong"] = sum(each.counter["wrong"] for each in routers)
        return SessionReport(
            kind=self.kind,
            routers=len(routers),
            microbatches=self._num_microbatches(),
            forwards=sum(each.counter["forwards"] for each in routers),
            recomputes=sum(each.counter["recomputes"] for each in routers),
            decisions=decisions,
            flips_of_layer={each.found.layer_number: each.counter["flips"] for each in counting},
        )

    def close(self, *, verify: bool = True) -> None:
        """Release the routers, then verify. The end of a `with` block without an exception does so. A second call does
        nothing.

        Where torch.distributed is initialised, `record` and `replay` sessions exchange a few numbers here, over `group`:
        every rank that has such a session must leave it. So all ranks of the group raise, or none. A rank that leaves its
        block by an exception publishes that, and no rank waits for it.

        Args:
            verify: False: only release the routers, as a block does that is left by an exception. The ranks of the group
                learn this.

        Raises:
            ReplayStateError: on this rank or another one, a router forwarded more or less often than micro-batches were
                queued, nothing ran, a hook was replaced, or a routing map had different experts; no token of the group was
                replayed, or fewer than `min_replayed`; or another rank failed.
            LayoutError: a check on the device failed.
        """
        if self._closed:
            return
        if not verify:
            self._abandon()
            return
        problems = self._faults()
        self._release()
        report = self.report
        # A layer of a user's own may call no dispatcher, so that nothing compared its maps.
        routed = [each for each in self._routers.values() if each.counter["forwards"] and each.counter.verify_entering]
        if unverified := sorted(each.found.layer_number for each in routed if not each.counter["maps"]):
            problems.append(
                f"rank {self._rank}: nothing was verified in layers {listed(unverified)}, whose token dispatchers got nothing"
            )
        if wrong := report.decisions.get("wrong"):
            problems.append(
                f"rank {self._rank}: {wrong} of {report.decisions['verified']} decisions left their router "
                "with other experts than were decided"
            )
        if zero := sum(each.counter["zero"] for each in self._routers.values()):
            problems.append(
                f"rank {self._rank}: {zero} decisions gave a chosen expert the probability 0. This model's dispatcher "
                "(DeepEP, NCCL EP) takes a top-k of the probabilities, and may have sent these tokens to different experts"
            )
        problems = self._settled(problems)
        if problems:
            raise ReplayStateError(f"MRR419: the {self.kind} session does not add up:\n  " + "\n  ".join(problems))
        log_ended(report)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon()
            log_failed(self.kind, error)

    def _abandon(self) -> None:
        """Release the routers without verifying."""
        if not self._closed:
            self._release()

    def _source(self) -> RoutingSource:
        """Return the source that the hook registers for the routers."""
        raise NotImplementedError

    # ---- the end
    def _tallies(self) -> list[Counts]:
        """Return all counts of the session, some of them on a device."""
        return [each.counter for each in self._routers.values()]

    def _read(self) -> None:
        """Bring counts of a GPU to the host, in one wait."""
        Counts.read(self._tallies())

    def _num_microbatches(self) -> int:
        raise NotImplementedError

    def _faults(self) -> list[str]:
        """Return the faults of hooks and model, while the routers are registered."""
        problems = []
        try:
            hooks.check_installed()
        except ReplayStateError as error:
            problems.append(str(error))
        if self._balance == "off" and (replaced := balancing.replaced()):
            problems.append(f"MRR415: {listed(replaced)} was replaced, so balance='off' did not reach every call")
        return problems + self._exchanged_routers()

    def _settled(self, problems: list[str]) -> list[str]:
        """Return this rank's problems, and those of its group."""
        return problems

    def _exchanged_routers(self) -> list[str]:
        """Return the routers that the session did not reach, because they were exchanged or changed during it."""
        problems = []
        for module in self._modules:
            for found in find_routers(module):
                if is_hashed(found.router):
                    continue
                if found.router not in self._routers:
                    problems.append(
                        f"{found}: the router was exchanged during the session, which did not reach the new one"
                    )
                elif not all(map(dispatch.is_checked, found.dispatchers)):
                    problems.append(
                        f"{found}: its token dispatcher, or the class of it, was exchanged during the session"
                    )
                elif not hasattr(type(found.router).routing, "is_hook"):
                    problems.append(
                        f"{found}: the router got the class {type(found.router).__name__}, which asks nobody"
                    )
        return problems

    def _release(self) -> None:
        if self._closed:
            return
        self._closed = True
        for router in self._routers:
            hooks.unregister(router, self._source())

    # ---- parts of the constructor
    def _add_chunk(self, index: int, module: nn.Module, routers: list[FoundRouter], *, flips: bool) -> None:
        for found in routers:
            if found.router in self._routers:  # a freeze may have one that two chunks share
                shared = self._routers[found.router].found.dispatchers
                found = replace(found, dispatchers=(*shared, *found.dispatchers))
            self._routers[found.router] = RouterState(
                found=found,
                counter=RouterCounts(
                    flips=flips,
                    verify=self._verify,
                    verify_routing=not found.dispatchers if self._verify else self._verify_routing,
                    topk_again=takes_topk_again(getattr(found.router, "config", None)),
                    balance_off=self._balance == "off",
                ),
                chunk_index=index,
                dtype=index_dtype(found.router.num_experts),
            )

    def _check_verifiable(self) -> None:
        for router_state in self._routers.values():
            factor = router_state.found.router.config.moe_expert_capacity_factor
            if factor is not None:
                raise UnsupportedRouterError(
                    f"MRR401: cannot verify {router_state.found}: moe_expert_capacity_factor={factor} drops tokens after "
                    "the selection, so routing maps rightly differ from it. Leave verify off, and use a tested "
                    "Megatron-Core: with a newer one, every map is verified."
                )

    def _check_free(self, router: Any, found: FoundRouter) -> None:
        for outer in hooks.sources_of(router):
            if outer._takes_microbatches or not self._takes_microbatches:
                raise ReplayStateError(
                    f"MRR404: {found} is under another session already, a {outer.kind}: leave that first, or end it with "
                    "close_sessions(model_chunks) if its variable is gone. Only freeze_recompute may surround record or "
                    "replay."
                )
        hooks.check_not_driven(router)

    def _check_open(self) -> None:
        if self._closed:
            raise ReplayStateError(f"MRR407: this {self.kind} session is closed: make a new one.")


def close_sessions(model_chunks: Models) -> int:
    """End every session on these chunks, without verification.

    Call it if a session was dropped without `close()` (a notebook cell run twice). Until then such a session decides for its
    routers, and keeps the model alive.

    Args:
        model_chunks: the model or its chunks on this rank.

    Returns:
        How many sessions were ended.
    """
    chunks = as_chunks(model_chunks)
    routers = [found.router for chunk in chunks for found in find_routers(chunk)]
    sources = {id(source): source for router in routers for source in hooks.sources_of(router)}
    for session in filter(None, [source._session() for source in sources.values()]):
        session.close(verify=False)
    for router in routers:
        for source in hooks.sources_of(router):
            hooks.unregister(router, source)
    return len(sources)
