"""One model chunk under a session: its micro-batches from forward to backward, and its routers' selections.

A micro-batch is known by its number, the count of the chunk's forwards. In the forward each router finds its
micro-batch by its own count, so that schedules which build a plan first and run it later still match. In a recompute
the autograd graph itself says which micro-batch it is: the chunk's output carries a hook that fires before anything
else of that micro-batch's backward. So no order of backwards has to be assumed, several micro-batches may share one
backward, and what a micro-batch keeps lives exactly as long as its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.ids import index_dtype
from megatron_router_replay.mcore.find import FoundRouter
from megatron_router_replay.mcore.selection import LiveSelection, select_topk
from megatron_router_replay.mcore.targets import Targets
from megatron_router_replay.router_replay import (
    ComputeTopk,
    check_fits,
    check_not_captured,
    gather_topk,
    in_backward,
    not_compiled,
)

if TYPE_CHECKING:
    from megatron_router_replay.diagnostics.live import LiveComparison


class Microbatch:
    """One micro-batch in one chunk: what its routers shall use, what they used, and how far it has come."""

    def __init__(self, number: int, num_routers: int, targets: Targets | None = None, rows: Tensor | None = None):
        self.number = number
        self.targets = targets
        self.rows = rows
        self.trains: bool | None = None  # None: the chunk's forward has not begun
        self.used: list[Tensor | None] = [None] * num_routers  # [num_tokens, topk], compact dtype
        self.missing = num_routers  # how many of them are still None
        self.checkpointed = [False] * num_routers
        self.recomputes = [0] * num_routers


Choose = Callable[["SessionRouter", Microbatch, LiveSelection], Tensor]
"""(router, microbatch, live) -> the experts to use, [num_tokens, topk] in the router's compact dtype."""


def choose_live(router: SessionRouter, microbatch: Microbatch, live: LiveSelection) -> Tensor:
    """Choose as the router would."""
    return live.topk().to(router.dtype)


def choose_replayed(router: SessionRouter, microbatch: Microbatch, live: LiveSelection) -> Tensor:
    """Choose what the micro-batch's routes say; live rows as the router would."""
    targets = microbatch.targets
    assert targets is not None, "a replayed micro-batch is queued with targets"
    used = targets.layers[router.position]
    check_fits(used, live.inputs, router.topk)
    if router.live_comparison is not None and router.live_comparison.wants(microbatch.number):
        router.live_comparison.add(
            router.found.layer_number,
            live.scores(),
            live=live.topk(),
            replayed=used,
            mask=targets.replayed,
            kind=router.score_kind,
            key=router.chunk.index,
        )
    if targets.live is None:
        return used
    if targets.live.dtype is torch.bool:
        return torch.where(targets.live.unsqueeze(1), live.topk().to(used.dtype), used)
    return used.index_copy(0, targets.live, live.topk(targets.live).to(used.dtype))


class SessionRouter:
    """What a session puts in place of `router.router_replay`; Megatron-Core calls `get_replay_topk` for its top-k."""

    def __init__(self, chunk: Chunk, position: int, found: FoundRouter, choose: Choose, *, in_trace: bool) -> None:
        self.chunk = chunk
        self.in_trace = in_trace  # False: its selection stays live, and is frozen in recomputes only
        self.position = position
        self.found = found
        self.topk = int(found.router.topk)
        self.num_experts = int(found.router.num_experts)
        self.dtype = index_dtype(self.num_experts)
        self.forwards = self.trained = self.recomputed = self.recompute_calls = 0
        self.counts_flips = False
        self.flips: Tensor | None = None  # recomputed decisions whose live top-k would have been another set
        self.live_comparison: LiveComparison | None = None
        config = found.router.config
        is_logits = config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax
        self.score_kind: Literal["logits", "probabilities"] = "logits" if is_logits else "probabilities"
        self.watched = False
        self.last_used: Tensor | None = None  # of the forward or recompute that runs, for a Verifier that watches
        self._choose = choose if in_trace else choose_live
        self._replaced: object = None

    def attach(self) -> None:
        """Take the place of the router's own replay object, which may be None."""
        self._replaced = getattr(self.found.router, "router_replay", None)
        self.found.router.router_replay = self

    def detach(self) -> None:
        """Put back what was there, or what that had replaced if its own session has ended meanwhile."""
        replaced = self._replaced
        while isinstance(replaced, SessionRouter) and replaced.chunk.closed:
            replaced = replaced._replaced
        self.found.router.router_replay = replaced

    @property
    def attached(self) -> bool:
        return getattr(self.found.router, "router_replay", None) is self

    @property
    def replay_backward_list(self) -> list[Tensor]:
        """What recomputes of micro-batches still in flight will use, oldest first, [num_tokens, topk] each."""
        used = (microbatch.used[self.position] for microbatch in self.chunk.in_flight.values())
        return [indices for indices in used if indices is not None]

    @not_compiled
    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: ComputeTopk | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `RouterReplay.get_replay_topk`."""
        assert default_compute_topk is not None, "Megatron-Core passes its own top-k"
        if self._choose is choose_live and not group_topk and not in_backward():
            values, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            self.select(LiveSelection(scores, select=lambda some: indices))
            return values, indices

        def select(some: Tensor) -> Tensor:
            if group_topk and some is not scores:  # the default knows how many rows all scores have
                return select_topk(some, topk, num_groups, group_topk)
            return default_compute_topk(some, topk, num_groups=num_groups, group_topk=group_topk)[1]

        used = self.select(LiveSelection(scores, select=select))
        return gather_topk(scores, used, like_topk=self._choose is choose_live)

    def select(self, live: LiveSelection) -> Tensor:
        """Return the experts that this forward or recompute uses, [num_tokens, topk] in the compact dtype.

        Raises:
            ReplayStateError: no routes were queued for this forward, or the micro-batch of a recompute cannot be told; a
                graph other than torch.compile's is captured.
        """
        check_not_captured(live.inputs, self.found)
        used = self._recompute(live) if in_backward() else self._forward(live)
        self.last_used = used if self.watched else None
        return used

    def _forward(self, live: LiveSelection) -> Tensor:
        microbatch = self.chunk.microbatch_of_forward(self)
        grad_enabled = torch.is_grad_enabled()
        if microbatch.trains is None:  # a schedule that runs layers without the chunk's own forward
            microbatch.trains = grad_enabled
        used = self._choose(self, microbatch, live)
        self.forwards += 1
        microbatch.used[self.position] = used
        microbatch.checkpointed[self.position] = microbatch.trains and not grad_enabled
        self.chunk.router_done(microbatch)
        return used

    def _recompute(self, live: LiveSelection) -> Tensor:
        microbatch = self.chunk.microbatch_of_recompute(self)
        used = microbatch.used[self.position]
        if used is None:
            raise ReplayStateError(
                f"{self.chunk.where(microbatch, self)}: recomputed, but this session saw no forward of it."
            )
        check_fits(used, live.inputs, self.topk)
        microbatch.recomputes[self.position] += 1
        self.recompute_calls += 1
        if self.counts_flips:
            flipped = live.topk().sort(dim=1).values != used.to(torch.int64).sort(dim=1).values
            num_flipped = flipped.any(dim=1).sum()
            self.flips = num_flipped if self.flips is None else self.flips + num_flipped
        return used


class Chunk:
    """A model chunk's routers and its micro-batches in flight."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        routers: list[FoundRouter],
        choose: Choose,
        rank: int,
        queued: bool,
        mtp: bool = True,
    ) -> None:
        self.index = index
        self.module = module
        # By layer number, so that routers in the trace come first.
        self.routers = [
            SessionRouter(self, position, found, choose, in_trace=mtp or not found.is_mtp)
            for position, found in enumerate(routers)
        ]
        self.in_trace = [router for router in self.routers if router.in_trace]
        self.tp_rank, self.tp_size, self.sequence_parallel = 0, 1, False  # how its routers share tokens, read once
        if routers:
            router = routers[0].router
            self.tp_rank, self.tp_size = get_pg_rank(router.tp_group), get_pg_size(router.tp_group)
            self.sequence_parallel = bool(router.config.sequence_parallel)
        self.in_flight: dict[int, Microbatch] = {}
        self.closed = False
        self._rank = rank
        self._queued = 0
        self.needs_queue = queued
        self._entered = 0
        self._in_backward: Microbatch | None = None
        self._on_done: Callable[[Chunk, Microbatch], None] | None = None
        self._handles: list[Any] = []

    def attach(self, on_done: Callable[[Chunk, Microbatch], None]) -> None:
        """Put the session's routers in and watch the chunk's forwards; `on_done` gets each forwarded micro-batch."""
        self._on_done = on_done
        for router in self.routers:
            router.attach()
        if self.routers:
            self._handles = [
                self.module.register_forward_pre_hook(self._enter),
                self.module.register_forward_hook(self._leave),
            ]

    def detach(self) -> None:
        """Put back what was there and drop all state."""
        for handle in self._handles:
            handle.remove()
        for router in self.routers:
            if router.attached:
                router.detach()
        self.closed = True
        self._in_backward = None
        self.in_flight.clear()

    def queue(self, targets: Targets | None = None, *, rows: Tensor | None = None) -> None:
        """Add the micro-batch that the next forward not yet queued will find."""
        self.in_flight[self._queued] = Microbatch(self._queued, len(self.routers), targets, rows)
        self._queued += 1

    def microbatch_of_forward(self, router: SessionRouter) -> Microbatch:
        """Return the micro-batch of this router's next forward.

        Raises:
            ReplayStateError: none was queued for it.
        """
        return self._at(router.forwards, f"layer {router.found.layer_number}")

    def microbatch_of_recompute(self, router: SessionRouter) -> Microbatch:
        """Return the micro-batch whose backward is running.

        Raises:
            ReplayStateError: it cannot be told.
        """
        if self._in_backward is None:
            raise ReplayStateError(
                f"rank {self._rank}, chunk {self.index}, layer {router.found.layer_number}: a recompute runs, but no "
                f"micro-batch of this session ({len(self.in_flight)} are in flight) has begun its backward. The forward "
                "must run under this session, through the chunk's own forward, and not inside a checkpoint around it."
            )
        return self._in_backward

    def router_done(self, microbatch: Microbatch) -> None:
        """Count one router more that has forwarded the micro-batch; hand it on once all have."""
        microbatch.missing -= 1
        if not microbatch.missing:
            if self._on_done is not None:
                self._on_done(self, microbatch)
            microbatch.targets = None

    def where(self, microbatch: Microbatch, router: SessionRouter) -> str:
        """Return rank, chunk, micro-batch and layer, for messages."""
        return (
            f"rank {self._rank}, chunk {self.index}, micro-batch {microbatch.number}, "
            f"{'MTP ' if router.found.is_mtp else ''}layer {router.found.layer_number}"
        )

    def problems(self) -> Iterator[str]:
        """Yield what does not match at the end of a session; nothing if every forward and recompute is accounted for."""
        for microbatch in self.in_flight.values():
            missing = [router for router in self.routers if microbatch.used[router.position] is None]
            waiting = [router for router in self.routers if microbatch.checkpointed[router.position]]
            if missing:
                yield f"{self.where(microbatch, missing[0])}: routes were queued, but no forward used them"
            elif waiting:
                yield (
                    f"{self.where(microbatch, waiting[0])}: its backward has not run, and its recompute would route live "
                    "once the session is left"
                )
        for router in self.routers:
            if router.recomputed not in (0, router.trained):
                yield (
                    f"rank {self._rank}, chunk {self.index}, layer {router.found.layer_number}: recomputed in "
                    f"{router.recomputed} of {router.trained} backwards"
                )

    def _at(self, number: int, who: str) -> Microbatch:
        if number not in self.in_flight:
            if self.needs_queue:
                raise ReplayStateError(
                    f"rank {self._rank}, chunk {self.index}, micro-batch {number}, {who}: a forward without routes; "
                    f"{self._queued} micro-batches were queued. Call session.microbatch(routing_rows, model) before each "
                    "forward of each chunk."
                )
            self.in_flight[number] = Microbatch(number, len(self.routers))
        return self.in_flight[number]

    @not_compiled
    def _enter(self, module: nn.Module, args: Any) -> None:
        # Another session may have taken the routers for a while; a recompute of the whole chunk is not a forward.
        if not self.routers[0].attached or in_backward():
            return
        self._in_backward = None  # a backward that raised could not take it back
        if not self.needs_queue:
            # A forward that failed half-way and was caught, in a session of a whole run, must not shift the counts.
            self.in_flight.pop(self._entered, None)
            for router in self.routers:
                router.forwards = self._entered
        self._at(self._entered, f"layer {self.routers[0].found.layer_number}").trains = torch.is_grad_enabled()

    @not_compiled
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.routers[0].attached or in_backward():
            return
        number = self._entered
        self._entered += 1
        late = [router for router in self.routers if router.forwards != self._entered]
        if late:
            raise ReplayStateError(
                f"rank {self._rank}, chunk {self.index}, micro-batch {number}, layer {late[0].found.layer_number}: its "
                f"router selected experts {late[0].forwards} times in {self._entered} forwards of the chunk."
            )
        microbatch = self.in_flight.get(number)
        if microbatch is None:
            return
        tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if not tensors:  # forward only: no recompute can follow
            del self.in_flight[number]
            return
        hook = _BackwardHook(self, microbatch)
        for tensor in tensors:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def begin_backward(self, microbatch: Microbatch) -> None:
        """Note whose recomputes come next; called by autograd before the micro-batch's first gradient."""
        if self.closed:
            if any(microbatch.checkpointed):
                raise ReplayStateError(
                    f"rank {self._rank}, chunk {self.index}, micro-batch {microbatch.number}: backward after its session "
                    "was left; its recompute would route live. Run the backward inside the session."
                )
            return
        self._in_backward = microbatch
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(microbatch))

    def _end_backward(self, microbatch: Microbatch) -> None:
        self._in_backward = None
        if self.in_flight.pop(microbatch.number, None) is None:
            return  # counted already: several outputs, or a second backward through a retained graph
        for router in self.routers:
            router.trained += 1
            router.recomputed += microbatch.recomputes[router.position] > 0


class _BackwardHook:
    """A tensor hook that lives as long as the micro-batch's graph, and keeps what its recompute needs."""

    def __init__(self, chunk: Chunk, microbatch: Microbatch) -> None:
        self._chunk = chunk
        self._microbatch = microbatch

    def __del__(self) -> None:
        # A graph that is dropped without a backward takes its micro-batch along.
        self._chunk.in_flight.pop(self._microbatch.number, None)

    @not_compiled
    def __call__(self, grad: Tensor) -> None:
        if compiled_autograd.in_compiled_autograd_region:
            raise ReplayStateError(
                "cannot tell recomputes from forwards under compiled autograd: turn it off "
                "(torch._dynamo.config.compiled_autograd = False) while a session runs."
            )
        self._chunk.begin_backward(self._microbatch)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
