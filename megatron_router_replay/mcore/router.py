"""One router under a session: what it chooses in a forward, and what its recomputes use again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Size, Tensor, nn

from megatron_router_replay.errors import ReplayStateError, UnsupportedRouterError
from megatron_router_replay.ids import index_dtype
from megatron_router_replay.mass import ScoreKind
from megatron_router_replay.mcore import balance
from megatron_router_replay.mcore.compat import TOPK_ORDER_FOLLOWS_GRAD
from megatron_router_replay.mcore.find import FoundRouter
from megatron_router_replay.mcore.ledger import Ledger, Microbatch
from megatron_router_replay.mcore.margins import Margins
from megatron_router_replay.mcore.routing_function import is_needed, routing_function
from megatron_router_replay.mcore.selection import LiveTopk, in_order_of_scores
from megatron_router_replay.mcore.support import INFERENCE_ROUTERS, inference_refusals
from megatron_router_replay.recompute import Selection, check_known, recall, remember
from megatron_router_replay.topk import ComputeTopk, check_fits, check_not_captured, gather_topk
from megatron_router_replay.torch_private import (
    Surroundings,
    in_compiled_autograd,
    not_compiled,
    outside_selective_checkpoints,
    surroundings,
)

if TYPE_CHECKING:
    from megatron_router_replay.diagnostics.live import LiveComparison
    from megatron_router_replay.mcore.session import Session

Choose = Callable[["SessionRouter", Microbatch, LiveTopk], Tensor]
"""(router, microbatch, live) -> the experts to use, [num_tokens, topk] in the router's compact dtype."""


_NOT_ASKED = Size((-1,))
"""Stands for the shape of an input where no forward of the router runs."""


def choose_replayed(router: SessionRouter, microbatch: Microbatch, live: LiveTopk) -> Tensor:
    """Choose what the micro-batch's routes say; live rows as the router would."""
    targets = microbatch.targets
    assert targets is not None, "a replayed micro-batch is queued with targets"
    used = targets.layers[router.position]
    check_fits(used, live.scores, router.topk)
    if router.live_comparison is not None and router.live_comparison.wants(microbatch.number):
        router.live_comparison.add(
            router.found.layer_number,
            live.scores.detach(),
            live=live.indices(),
            replayed=used,
            mask=targets.replayed,
            kind=router.score_kind,
            key=router.chunk_index,
        )
    if router.margins is not None:
        assert targets.replayed is not None, "asked for where margins are"
        used = router.margins.select(
            router.found.layer_number,
            used,
            scores=live.scores,
            kind=router.score_kind,
            live=live.indices(),
            replayed=targets.replayed,
        )
    if targets.live is None:
        return used
    if targets.live.dtype is torch.bool:
        return torch.where(targets.live.unsqueeze(1), live.indices().to(used.dtype), used)
    return used.index_copy(0, targets.live, live.indices_of(targets.live).to(used.dtype))


class StaysWithItsModel:
    """What a session puts on a model: a copy of the model holds the same object, which tells it from the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> str:
        raise ReplayStateError(
            "a model under a session cannot be pickled: leave the session first, or save the model's state_dict()."
        )


class SessionRouter(StaysWithItsModel):
    """What a session puts in place of `router.router_replay`; Megatron-Core calls `get_replay_topk` for its top-k.

    Args:
        found: the router.
        position: its place in the chunk's micro-batches.
        chunk_index: which chunk of the session it is in.
        choose: how it chooses in a forward; None: live.
        ledger: whose micro-batches it routes; None: it needs none, and is only frozen in recomputes.
        beside: for one without, the ledger of the routers whose micro-batches it routes live (multi-token prediction).
    """

    def __init__(
        self,
        found: FoundRouter,
        *,
        position: int,
        chunk_index: int,
        choose: Choose | None,
        ledger: Ledger | None,
        beside: Ledger | None = None,
    ) -> None:
        self.found = found
        self.position = position
        self.chunk_index = chunk_index
        self.topk = int(found.router.topk)
        self.num_experts = int(found.router.num_experts)
        self.dtype = index_dtype(self.num_experts)
        config = found.router.config
        is_logits = config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax
        self.score_kind: ScoreKind = "logits" if is_logits else "probabilities"
        self.counts_flips = False
        self.live_comparison: LiveComparison | None = None
        self.margins: Margins | None = None
        self.watched = False
        # thread -> what its forward or recompute uses, for a Verifier that watches; threads may run backwards at once
        self.last_used: dict[int, Tensor] = {}
        self.forwards = self.recomputes = self.decisions_recomputed = 0
        self.balance = balance.AS_MEGATRON
        self.decisions_counted: int | Tensor = 0  # tokens that went into the expert-bias counters
        self.flips: Tensor | None = None  # recomputed decisions whose live top-k would have been another set
        self.closed = False
        self.session: Session | None = None  # while it is open
        self._choose = choose
        self._ledger = ledger
        self._beside = beside
        self._routing = type(found.router).routing
        # A frozen run may generate between its steps: there nothing is queued, and nothing is recomputed.
        self._must_train = ledger is not None and isinstance(found.router, INFERENCE_ROUTERS)
        self._replaced: Any = None
        self._replaces_function = False
        self._handles: list[Any] = []
        # thread -> shape of the input that is being routed and was not asked about yet; None: of a copy of the router
        self._inputs: dict[int, Size | None] = {}
        self._alive: dict[weakref.ref[Selection], None] = {}  # selections whose recompute can still come, oldest first
        self._counting = threading.Lock()  # several threads may run backwards at once

    def attach(self, session: Session) -> None:
        """Take the place of the router's own replay object, which may be None, for a session.

        Raises:
            ReplayStateError: that object is being driven, or is of an unknown kind.
        """
        router = self.found.router
        self._replaced = getattr(router, "router_replay", None)
        self._check_not_driven()
        self.session = session
        router.router_replay = self
        # A fused router asks nobody: the function that it calls must be told to.
        self._replaces_function = is_needed(router)
        if self._replaces_function:
            routing_function.attach()
        self._handles = [
            router.register_forward_pre_hook(self._before, with_kwargs=True),
            router.register_forward_hook(self._after, always_call=True),
        ]

    def detach(self) -> None:
        """End the session's hold; recomputes of forwards that ran under it still find their selections.

        While the graph of such a forward lives, this object stays in place, passes forwards on to what was there before,
        and goes when the last one is freed. Else a backward after the session would route live.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.closed = True
        # The graph may keep this object for long; the session, with its trace, shall not live as long. `_choose` stays: it
        # tells how forwards gathered, as their recomputes must.
        self._ledger = self._beside = self.live_comparison = self.margins = None
        self.session = None
        self._restore_if_done()

    @property
    def attached(self) -> bool:
        """Whether the router asks this object, directly or through a session inside this one."""
        return any(held is self for held in replay_objects(self.found.router))

    @property
    def replay_backward_list(self) -> list[Tensor]:
        """What recomputes that can still come will use, oldest first, [num_tokens, topk] each."""
        return [selection.topk_indices for selection in self._pending()]

    @property
    def chooses(self) -> bool:
        """Whether this call is for the session: not once it is closed, except in recomputes of its forwards."""
        return not self.closed or surroundings().in_backward

    @property
    def replaced(self) -> Any:
        """What the router has when neither this session nor an ended one is in place."""
        return next(held for held in _from(self._replaced) if not (_is_closed(held) and not held._pending()))

    @not_compiled
    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: ComputeTopk | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `RouterReplay.get_replay_topk`.

        Raises:
            ReplayStateError: no routes were queued for this forward, a recompute's forward is not known, or a graph other
                than torch.compile's is captured.
        """
        assert default_compute_topk is not None, "Megatron-Core passes its own top-k"
        live = LiveTopk(scores, topk, num_groups, group_topk, default_compute_topk)
        balance.forget()  # of a forward of this thread that raised between its top-k and its balancing
        # Taken out, so that a second question in the same forward finds none: one answer is for all of its tokens.
        shape = self._inputs.pop(threading.get_ident(), _NOT_ASKED)
        if shape is None:
            return self._pass_on(live)
        place = surroundings()
        # A closed session has no ledger any more and its hooks are gone: it answers recomputes and nothing else.
        if self.closed:
            selection = recall(place, self.found.router) if place.in_backward else None
            if selection is not None:
                # A freeze around this session has seen the router's call begin; it is not asked, and shall not miss it.
                for outer in _from(self._replaced):
                    if isinstance(outer, SessionRouter):
                        outer._inputs.pop(threading.get_ident(), None)
                return self._recompute(selection, live)
            if place.in_backward and place.recompute is None and self._pending():
                raise ReplayStateError(
                    f"{self.found}: recomputed by no checkpoint that is known, after a session of which recomputes are still "
                    "to come: whether the forward ran under it cannot be told. Run the backward before leaving the session."
                )
            return self._pass_on(live)
        # Both first: where Python does not run with each forward, nothing below tells a forward from a recompute.
        check_not_captured(scores, self.found)
        if in_compiled_autograd():
            raise ReplayStateError(
                f"{self.found}: cannot tell recomputes from forwards under compiled autograd: turn it off "
                "(torch._dynamo.config.compiled_autograd = False) while a session runs."
            )
        if shape is _NOT_ASKED:
            raise ReplayStateError(
                f"{self.found}: asked for experts outside its own forward, or twice in one; the session cannot tell for "
                "which tokens. Call the router as a module."
            )
        if place.in_backward:
            selection = recall(place, self.found.router)
            if selection is None:
                raise ReplayStateError(
                    f"{self.found}: recomputed, but this session saw no forward of it: the forward ran before the session, "
                    "or in a kind of checkpoint that is not known (known: torch.utils.checkpoint, and autograd functions "
                    "with forward(ctx, ...) and backward(ctx, ...) as Megatron-Core's and Transformer Engine's)."
                )
            return self._recompute(selection, live)
        # Now, not in the recompute: that would find nothing, or another's selection, and could not tell.
        check_known(place)
        with outside_selective_checkpoints():
            return self._forward(place, shape, live)

    def _forward(self, place: Surroundings, shape: Size, live: LiveTopk) -> tuple[Tensor, Tensor]:
        microbatch = None
        if self._ledger is not None:
            microbatch = self._ledger.microbatch_of(self.position)
            self._check_shape(microbatch, shape)
        beside = None if self._beside is None else self._beside.current
        if self._choose is not None and microbatch is not None:
            used = self._choose(self, microbatch, live)
            values, indices = self._gather(live.scores, used, like_topk=False)
        else:
            # A recompute gathers what this selects, so a masked top-k is a gather here too: non-reentrant checkpoints
            # compare what the two keep for the backward.
            values, indices = (
                gather_topk(live.scores, live.indices(), like_topk=True) if live.group_topk else live.with_values()
            )
            if not (place.inside or self._ledger is not None or self.watched):
                self.forwards += 1
                balance.begin(self._routed(indices, beside), live)
                return values, indices  # nothing will ask for them again
            used = indices.to(self.dtype)
        self.forwards += 1
        routing = self._routed(used, microbatch or beside)
        balance.begin(routing, live)
        if place.inside:
            # Held by its checkpoints alone, so it is freed with the graph that can ask for it.
            selection = Selection(used, self, routing)
            self._alive[weakref.ref(selection, self._freed)] = None
            remember(place, self.found.router, selection)
        if self.watched:
            self.last_used[threading.get_ident()] = used
        if microbatch is not None and self._ledger is not None:
            if self._choose is None:
                microbatch.used[self.position] = used
            # Last: behind the chunk's last router this hands the micro-batch on, and a forward that raised before has not
            # routed it.
            self._ledger.routed(microbatch, self.position)
        return values, indices

    def _routed(self, used: Tensor, microbatch: Microbatch | None) -> balance.Routing:
        """Return what the balancing of this forward shall see of the experts it used."""
        is_token = None if microbatch is None else microbatch.is_token
        if is_token is not None and is_token.numel() != used.shape[0]:
            raise ReplayStateError(
                f"{self.found}: routes {used.shape[0]} tokens beside a micro-batch that has {is_token.numel()} on this rank, "
                "so which of them are padding cannot be told. Leave padding= out, or take it in with mtp=True."
            )
        packed = microbatch is not None and microbatch.packed
        return balance.Routing(
            self.found.router, self.balance, used, is_token=is_token, packed=packed, counted=self._counted
        )

    def _counted(self, num_tokens: int | Tensor) -> None:
        with self._counting:
            self.decisions_counted = self.decisions_counted + num_tokens

    def _recompute(self, selection: Selection, live: LiveTopk) -> tuple[Tensor, Tensor]:
        used = selection.topk_indices
        check_fits(used, live.scores, self.topk)
        # The session that chose may be another one than this: a freeze answers for a replay that ran inside it.
        maker = selection.maker
        with outside_selective_checkpoints():
            num_flipped: Tensor | None = None
            if maker.counts_flips:
                flipped = live.indices().sort(dim=1).values != used.to(torch.int64).sort(dim=1).values
                num_flipped = flipped.any(dim=1).sum()
            with maker._counting:
                maker.recomputes += 1
                maker.decisions_recomputed += used.shape[0]
                if num_flipped is not None:
                    maker.flips = num_flipped if maker.flips is None else maker.flips + num_flipped
            if self.watched:
                self.last_used[threading.get_ident()] = used
            balance.begin(selection.routing, live)
            # As its forward gathered: a session that chooses nothing ran the router's own top-k there.
            return self._gather(live.scores, used, like_topk=maker._choose is None)

    def _gather(self, scores: Tensor, used: Tensor, *, like_topk: bool) -> tuple[Tensor, Tensor]:
        """Return the live scores of the chosen experts and their indices, in the order of columns that Megatron's have."""
        if TOPK_ORDER_FOLLOWS_GRAD and torch.is_grad_enabled():
            used = in_order_of_scores(used.to(torch.int64), scores)
        return gather_topk(scores, used, like_topk=like_topk)

    def _pass_on(self, live: LiveTopk) -> tuple[Tensor, Tensor]:
        self._restore_if_done()
        replaced = self.replaced
        if replaced is None:
            return live.with_values()
        routed: tuple[Tensor, Tensor] = replaced.get_replay_topk(
            live.scores, live.topk, live.num_groups, live.group_topk, live.compute
        )
        return routed

    @not_compiled
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is not self.found.router:  # a copy that was made during the session, with its hooks: it routes live
            self._inputs[threading.get_ident()] = None
            return
        router: Any = self.found.router
        if router.router_replay is not self:
            # A session that was left may still be in place, for its recomputes: it passes forwards on to this one.
            answers = next(held for held in replay_objects(router) if not _is_closed(held))
            if answers is not self and self.attached:
                return  # a record or replay inside this freeze answers
            if answers is not self:
                raise ReplayStateError(
                    f"{self.found}: router.router_replay was replaced during the session by {type(answers).__name__}, which "
                    "would decide in its stead. Leave the session first."
                )
        # With every forward: drivers set their action, and trainers change routers, between two of them.
        self._check_not_driven()
        if router.topk != self.topk or type(router).routing is not self._routing:
            raise ReplayStateError(
                f"{self.found}: topk or the router's class changed during the session (topk {self.topk} -> {router.topk}, "
                f"class {type(router).__name__}). Leave the session first."
            )
        if self._must_train and (reasons := list(inference_refusals(router))):
            raise UnsupportedRouterError(f"{self.found}: {reasons[0]}.")
        self._inputs[threading.get_ident()] = (args[0] if args else kwargs["input"]).shape[:-1]

    @not_compiled
    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        balance.forget()  # of a forward that raised; every other one is over
        # torch passes None for the output of a forward that raised.
        if self._inputs.pop(threading.get_ident(), None) is not None and output is not None:
            raise ReplayStateError(
                f"{self.found} chose experts without asking the session: was moe_router_fusion or its balancing changed "
                "since the session began?"
            )

    def _check_shape(self, microbatch: Microbatch, shape: Size) -> None:
        expected = microbatch.shape
        # Megatron's [s, b, h]; a router that gets [n, h] has lost which token is whose unless there is one sequence.
        if tuple(shape) != expected and not (len(shape) == 1 and expected[1] == 1 and shape[0] == expected[0]):
            raise ReplayStateError(
                f"{self._ledger.where if self._ledger else ''}, micro-batch {microbatch.number}, {self.found}: the router "
                f"routes {shape.numel()} tokens, [s, b] = {list(shape)} on this rank, routing_rows are for "
                f"{list(expected)}: they must have the shape of this micro-batch's input_ids, [b, s]."
            )

    def _check_not_driven(self) -> None:
        *_, replaced = _from(self._replaced)
        if replaced is None:
            return
        action = getattr(replaced, "router_replay_action", "unknown")
        if action is not None:
            raise ReplayStateError(
                f"{self.found}: its own {type(replaced).__name__} is being driven (action {getattr(action, 'name', action)}) "
                "and one router follows one driver. Clear its action (RouterReplay.clear_global_router_replay_action()), or "
                "use no session."
            )

    def _freed(self, reference: weakref.ref[Selection]) -> None:
        # Runs wherever the graph is freed, also on an autograd thread: one operation on a dict, and a plain assignment.
        self._alive.pop(reference, None)
        self._restore_if_done()

    def _pending(self) -> list[Selection]:
        selections = [reference() for reference in list(self._alive)]
        return [selection for selection in selections if selection is not None and selection.pending]

    def _restore_if_done(self) -> None:
        """Put back what was there before, once the session is closed and no recompute can come."""
        if not self.closed or self._pending():
            return
        if getattr(self.found.router, "router_replay", None) is self:
            self.found.router.router_replay = self.replaced
        if not isinstance(getattr(self.found.router, "router_replay", None), SessionRouter):
            balance.take_off(self.found.router)
        if self._replaces_function:
            self._replaces_function = False
            routing_function.detach()


def replay_objects(router: Any) -> Iterator[Any]:
    """Yield a router's replay object, what that replaced, and so on: the innermost session's first, its own or None last."""
    yield from _from(getattr(router, "router_replay", None))


def _from(held: Any) -> Iterator[Any]:
    while isinstance(held, SessionRouter):
        yield held
        held = held._replaced
    yield held


def _is_closed(held: Any) -> bool:
    return isinstance(held, SessionRouter) and held.closed
