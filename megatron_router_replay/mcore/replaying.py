"""Replay: every forward and recompute uses a trace's experts."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.errors import LayoutError, ReplayStateError, TraceError
from megatron_router_replay.layout import check_rows
from megatron_router_replay.mcore.agreement import Agreement
from megatron_router_replay.mcore.balance import AuxLoss, Balance, ExpertBias, has_expert_bias
from megatron_router_replay.mcore.chunk import Chunk
from megatron_router_replay.mcore.layers import check_trace_layers
from megatron_router_replay.mcore.ledger import Microbatch
from megatron_router_replay.mcore.margins import NUM_COUNTS, Margins
from megatron_router_replay.mcore.report import SessionReport
from megatron_router_replay.mcore.router import choose_replayed
from megatron_router_replay.mcore.session import MicrobatchInputs, Models, Session
from megatron_router_replay.mcore.targets import build_targets, check_padding, choices_of, padding_ranks
from megatron_router_replay.routes import MicrobatchRoutes
from megatron_router_replay.trace import RoutingTrace

if TYPE_CHECKING:
    from megatron_router_replay.diagnostics.live import LiveComparison, LiveReport
    from megatron_router_replay.transport.timing import LegTimes


class ReplaySession(Session):
    """Forwards and recomputes use the trace's experts; see `replay`."""

    kind = "replay"
    choose = staticmethod(choose_replayed)
    queued = True

    def __init__(
        self,
        model_chunks: Models,
        trace: RoutingTrace,
        *,
        mtp: bool,
        verify: bool,
        compare_live: bool | int,
        min_replayed: float | None,
        margins: Margins | None,
        leg_times: LegTimes | None,
        balance: Balance,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(model_chunks, mtp=mtp, verify=verify, group=group)
        self._balance = balance
        routers = [router.found.router for router in self._routers()]
        balance.check_model(routers)
        for router in self._routers():
            router.balance = balance
        self._agreement = Agreement(balance, routers)
        self._trace = trace
        self._leg_times = leg_times
        self._min_replayed = min_replayed
        self._any_live = not bool(trace.replay_mask.all())
        self._left_live: Tensor | None = None  # as Targets.left_live, added up
        self._says_trained = False
        self._trace_of: dict[int, RoutingTrace] = {}
        # What the trace is of, before which layers it has: a trace of another model names the reason, not a missing layer.
        for chunk in self._chunks:
            _check_model(trace, chunk)
        found = [router.found for chunk in self._chunks for router in chunk.routers]
        check_trace_layers(trace.layer_numbers, model_chunks, routers=found, mtp=mtp)
        for chunk in self._chunks:
            self._trace_of[chunk.index] = trace.select_layers([router.found.layer_number for router in chunk.in_trace])
        self._comparison = self._compare(int(compare_live)) if compare_live else None
        self._margins = margins
        for chunk in self._chunks:
            for router in chunk.in_trace:
                router.margins = margins

    def live_report(self, *groups: dist.ProcessGroup | None) -> LiveReport:
        """Return how the live router and the replayed routes agree, added up over groups of ranks with the same layers.

        Args:
            groups: as for `diagnostics.live.LiveComparison.report`; every rank of a group calls it. None given: this
                rank alone.

        Raises:
            ReplayStateError: the session does not compare: replay(..., compare_live=True).
        """
        if self._comparison is None:
            raise ReplayStateError(
                "this session does not compare with the live router: replay(..., compare_live=True)."
            )
        return self._comparison.report(*groups)

    @property
    def report(self) -> SessionReport:
        """As of every session; where asked for, also this rank's comparison with the live router, and the leg times."""
        not_kept, stale, trained_live = [0, 0, 0] if self._left_live is None else self._left_live.tolist()
        routers = [router.found.router for router in self._routers()]
        return replace(
            super().report,
            rows_not_kept=not_kept,
            rows_stale=stale,
            rows_trained_live=trained_live if self._says_trained else None,
            **self._weighed(),
            expert_bias=self._balance.expert_bias if any(map(has_expert_bias, routers)) else None,
            aux_loss=self._balance.aux_loss if any(router.is_aux_loss_enabled() for router in routers) else None,
            live=None if self._comparison is None else self._comparison.report(),
            leg_times=None if self._leg_times is None else self._leg_times.report(),
        )

    def _compare(self, every_n: int) -> LiveComparison:
        from megatron_router_replay.diagnostics.live import LiveComparison  # a room, loaded by those who ask for it

        routers = [router for chunk in self._chunks for router in chunk.in_trace]
        comparison = LiveComparison(
            sorted(router.found.layer_number for router in routers),
            num_experts=self._trace.num_experts,
            topk=self._trace.topk,
            device=routers[0].found.router.weight.device if routers else "cpu",
            every_n=every_n,
        )
        for router in routers:
            router.live_comparison = comparison
        return comparison

    def _microbatch_done(self, chunk: Chunk, microbatch: Microbatch) -> None:
        super()._microbatch_done(chunk, microbatch)
        self._agreement.add(microbatch.is_token is not None)
        left_live = None if microbatch.targets is None else microbatch.targets.left_live
        if left_live is not None:
            self._left_live = left_live if self._left_live is None else self._left_live + left_live
        if self._comparison is not None and self._comparison.wants(microbatch.number):
            self._comparison.end_microbatch(chunk.index)

    def _queue(self, inputs: MicrobatchInputs, routes: MicrobatchRoutes | None) -> None:
        chunk, rows = inputs.chunk, inputs.rows
        assert chunk.ledger is not None, "the chunk has routers in the trace"
        self._trace.check_unchanged()  # a trainer may compute on it in place between two micro-batches
        trace = self._trace_of[chunk.index]
        if routes is not None:
            if routes.source is not self._trace:
                raise LayoutError("these routes were prefetched from another trace than this session's.")
            # Without a row, as when all is padding, any trace will do, but not an empty one.
            trace = routes.trace.select_layers(trace.layer_numbers) if routes.trace.num_tokens else trace
        # They meet where the trace is; the routers' rows of it alone go to the routers' device.
        rows = rows.to(trace.device)
        beside = [None if values is None else values.to(trace.device) for values in (inputs.padding, inputs.trained)]
        padding, trained = beside
        # Of the whole batch, not of this rank's part: what is wrong with it raises on every rank.
        unrouted = self._may_be_unrouted(rows, trace.num_tokens)
        check_padding(rows, padding, self._check)
        view = chunk.router_view(rows)  # what this rank routes; a part of a recording has these rows alone
        self._check_known(trace, view)
        at_padding = None if padding is None else chunk.router_view(padding)
        trained = None if trained is None else chunk.router_view(trained)
        if trained is not None:
            self._says_trained = True
            self._check_trained(trace, view, trained)
        tokens = None if inputs.token_ids is None else inputs.token_ids.to(trace.device)
        targets = build_targets(
            trace,
            view,
            padding=at_padding,
            padding_rank=None if padding is None else chunk.router_view(padding_ranks(padding)),
            device=chunk.routers[0].found.router.weight.device,
            any_live=self._any_live or unrouted,
            with_replayed=self._comparison is not None or self._margins is not None,
            trained=trained,
        )
        chunk.ledger.queue(
            Microbatch(
                chunk.ledger.num_queued,
                len(chunk.in_trace),
                shape=chunk.router_shape(rows),
                rows=rows,
                token_ids=self._expected_tokens(trace, rows, tokens, any_unrouted=unrouted),
                targets=targets,
                is_token=chunk.is_token(at_padding),
                counts=targets.counts,
            )
        )

    def _check_known(self, trace: RoutingTrace, rows: Tensor) -> None:
        """Check that no row is one which this trace knows nothing of, as merge_traces says: no route, and no token id."""
        if trace.token_ids is None or not self._any_live or not trace.num_tokens:
            return
        at = rows.clamp(min=0)
        unknown = (rows >= 0) & ~trace.replay_mask[at] & (trace.token_ids[at] < 0) & (choices_of(trace, rows) == 0)
        first = f" (row {int(rows[unknown][0])}, {int(unknown.sum())} in all)" if _is_known(unknown) else ""
        self._check(
            unknown.any(),
            f"routing_rows name rows that the trace knows nothing of{first}: no route and no token id. Another rank routed "
            "them: join the parts with recording.gather() or merge_traces before micro-batches are regrouped.",
        )

    def _check_trained(self, trace: RoutingTrace, rows: Tensor, trained: Tensor) -> None:
        routed = torch.zeros_like(trained)
        if trace.num_tokens:
            # What was left live by choice has a route that nobody lost: it is counted apart.
            routed = (rows >= 0) & trace.replay_mask[rows.clamp(min=0)] | (choices_of(trace, rows) > 0)
        without = trained & ~routed
        which = ""
        if _is_known(without):
            first = int(without.nonzero()[0])
            which = f" ({int(without.sum())} of them, the first is token {first} as routers see them)"
        self._check(
            without.any(),
            f"a trained position has no route{which}: its row is -1, or the trace has no route for it. Leave `trained` out "
            "to let the live router decide such positions.",
        )

    def _expected_tokens(
        self, trace: RoutingTrace, rows: Tensor, tokens: Tensor | None, *, any_unrouted: bool
    ) -> Tensor | None:
        """Return the tokens that the forward must get, [b, s], -1 where they are not known."""
        known = trace.token_ids
        if known is None:
            if tokens is not None:
                raise LayoutError(
                    "token_ids were given for comparison, but the trace has none: make it with token_ids=..., or leave them "
                    "out."
                )
            return None
        if not trace.num_tokens:
            return tokens
        if tokens is None:
            if not any_unrouted:
                return known[rows].to(torch.int64)
            return torch.where(rows >= 0, known[rows.clamp(min=0)].to(torch.int64), -1)
        if rows.device.type == "cpu":
            check_rows(rows, tokens, token_ids=known)
        else:
            of_trace = known[rows.clamp(min=0)]
            differ = (of_trace != tokens) & (of_trace >= 0) & (rows >= 0)
            self._check(differ.any(), "token_ids differ from the trace's: tokens and routing_rows moved apart.")
        return tokens

    def _weighed(self) -> dict[str, Any]:
        """Return what the report says of margins."""
        if self._margins is None:
            return {}
        of_layer = self._margins.counts_of_layer()
        weighed, below, above = (sum(counts) for counts in zip([0] * NUM_COUNTS, *of_layer.values()))
        return {
            "decisions_weighed": weighed,
            "decisions_below_margin": below,
            "decisions_above_margin": above,
            "left_live_of_layer": {layer: below + above for layer, (_, below, above) in of_layer.items()},
        }

    def _chosen(self) -> list[int]:
        """Return rows not kept and stale, decisions weighed and left live by their margin, and the two bounds."""
        not_kept, stale, _ = [0, 0, 0] if self._left_live is None else self._left_live.tolist()
        of_margins = self._weighed()
        weighed, below, above = (
            of_margins.get(f"decisions_{n}", 0) for n in ("weighed", "below_margin", "above_margin")
        )
        bounds = (None, None) if self._margins is None else (self._margins.lowest, self._margins.highest)
        return [not_kept, stale, weighed, below + above, *map(_bits, bounds)]

    def _numbers(self) -> list[int]:
        """Return those of every session (4), of the balance (3), and of what was left live by choice (6), for `_judge`."""
        return [*super()._numbers(), *self._agreement.numbers(), *self._chosen()]

    def _judge(self, everyone: dict[int, list[int]]) -> list[str]:
        disagree = self._agreement.problems({rank: numbers[4:7] for rank, numbers in everyone.items()})
        if disagree:
            return disagree
        of_choice = {rank: numbers[7:] for rank, numbers in everyone.items()}
        bounds = {rank: of_rank[4:] for rank, of_rank in of_choice.items()}
        others = [rank for rank, of_rank in bounds.items() if of_rank != next(iter(bounds.values()))]
        if others:
            return [
                f"ranks {others} replay with another min_margin or max_margin than rank {next(iter(bounds))}: give all ranks "
                "the same."
            ]
        # Judged over the group: one rank may rightly have nothing but padding, and if one raised alone, its peers would hang.
        replayed, live, *_ = (sum(counts) for counts in zip(*everyone.values()))
        not_kept, stale, weighed, left, *_ = (sum(counts) for counts in zip(*of_choice.values()))
        ranks = "this rank" if len(everyone) == 1 else f"{len(everyone)} ranks"
        reasons = (
            (not_kept, "not kept"),
            (stale, "older than max_age"),
            (left, f"of {weighed} decisions by their margin"),
        )
        choices = ", ".join(f"{n} {why}" for n, why in reasons if n)
        # Rows whose every decision went to the live router were not replayed either, though they came with a route.
        by_margin = left / weighed if weighed else 0.0
        share = replayed * (1 - by_margin) / (replayed + live) if replayed + live else None
        # Apart from the share asked for: a session that replays nothing is a mistake, unless somebody said min_replayed=0.
        if share == 0 and choices and self._min_replayed != 0:
            return [
                f"none of {replayed + live} tokens was replayed on {ranks}: {choices}; others have no route. Is a mask "
                "inverted, does trainer_version count something else than the engine's weight versions, are the margins "
                "right? If it is meant so, replay(..., min_replayed=0) says it."
            ]
        if share == 0 and not choices:
            return [
                f"none of {live} tokens was replayed on {ranks}; the trace has no route for any of them, or all rows are -1. "
                "Were the routes lost on the way, or is this another rank's part of a recording (recording.gather)?"
            ]
        if self._min_replayed is not None and share is not None and share < self._min_replayed:
            by_choice = f" (live by choice: {choices})" if choices else ""
            return [
                f"{share:.4%} of {replayed + live} tokens were replayed on {ranks}, less than "
                f"min_replayed={self._min_replayed}{by_choice}."
            ]
        return []


def _bits(bound: float | None) -> int:
    """Return a margin as an integer that equals another's only if they are the same; -1 for none."""
    return -1 if bound is None else int.from_bytes(struct.pack(">d", bound), "big")


def _is_known(values: Tensor) -> bool:
    """Return whether the host can read these values without waiting, and there are some."""
    return values.device.type == "cpu" and bool(values.any())


def replay(
    model_chunks: Models,
    trace: RoutingTrace | str | os.PathLike[str],
    *,
    mtp: bool = False,
    verify: bool = False,
    compare_live: bool | int = False,
    min_replayed: float | None = None,
    min_margin: float | None = None,
    max_margin: float | None = None,
    leg_times: LegTimes | None = None,
    expert_bias: ExpertBias = "replayed",
    aux_loss: AuxLoss = "live",
    group: dist.ProcessGroup | None = None,
) -> ReplaySession:
    """Make the model use the experts of a trace, in every forward and recompute.

    Scores and gradients stay those of the live logits; only the selection is replaced. Call `session.microbatch(rows,
    model)` before each forward of each chunk, or `attach` the model once.

    Args:
        model_chunks: the model or its chunks on this rank.
        trace: routes for at least every MoE layer of these chunks, or the path of a file that `save_trace` wrote. Rows
            without a route are decided by the live router. Moved to the GPU (`trace.to("cuda")`) it takes rows that are
            there without a host sync.
        mtp: also replay multi-token-prediction layers, as layer_number num_layers + 1, ...; else their forwards stay
            live and their recomputes use what the forward chose.
        verify: compare every routing map that leaves a router with the trace; the report counts, a difference raises.
        compare_live: take the live top-k beside the replayed routes, in every micro-batch (True) or every n-th: agreement,
            probability mass and expert load by layer, and layers whose capture looks wrong. No host sync.
        min_replayed: the least share of tokens (padding left out) that must have been replayed, over all ranks of the
            group together; less raises on every rank when the session is left. Tokens that were left live by choice
            (`trace.keep`, `trace.limit_age`) are not replayed. None: at least one token. 0: none is also right where all
            were left live by choice.
        min_margin, max_margin: replay a decision (a row in a layer) only where the live router disagrees by at least, and by
            at most this; else the live router takes it, and the recompute uses what it took. The measure is compare_live's
            (mass_live - mass_replayed of one row): the probability that the live router gives to its own experts beyond that
            of the replayed ones, 0 to 1. Where both name the same experts there is nothing to decide. Takes a live top-k in
            every forward. Another forward of the same tokens may decide otherwise. The same on every rank of the group.
        leg_times: `receiver.times` of the transport that brought the trace: the report then says what each leg of its
            way here took since `leg_times.reset()`, on both sides, and which one training waited for.
        expert_bias: whose experts the counters behind Megatron-Core's expert bias get: "replayed", those that the forward
            used; "live", those that the router would have chosen, which costs a top-k; "off", none, so that the bias stays.
        aux_loss: whose experts auxiliary losses take for the load: "live", their own top-k of the scores, as always;
            "replayed", those that the forward used; "off": no auxiliary loss. Padding counts in neither.
        group: the ranks that judge the shares together when the session is left, in one all_gather of 14 numbers; all of
            them must have such a session. None: every rank of the job.

    Raises:
        UnsupportedRouterError: a router cannot be replayed exactly, or has nothing of what expert_bias="live" or
            aux_loss="replayed" asks for; names the config field.
        TraceError: the trace is of another model, or no trace; a share, a margin or an option has an unknown value.
        LayoutError: the model has no experts.
        ReplayStateError: the model is under another session, or its routers are driven by their own RouterReplay.
    """
    if isinstance(trace, str | os.PathLike):
        from megatron_router_replay.store import load_trace

        trace = load_trace(trace)
    if not isinstance(trace, RoutingTrace):
        swapped = (
            " The arguments are swapped: replay(model_chunks, trace)." if isinstance(model_chunks, RoutingTrace) else ""
        )
        raise TraceError(f"cannot replay a {type(trace).__name__}: pass a RoutingTrace or the path of one.{swapped}")
    if min_replayed is not None and not (isinstance(min_replayed, int | float) and 0 <= min_replayed <= 1):
        raise TraceError(f"min_replayed={min_replayed!r} must be a share, 0 to 1.")
    if not isinstance(compare_live, int):
        raise TraceError(f"compare_live={compare_live!r} must be a bool, or an int n for every n-th micro-batch.")
    return ReplaySession(
        model_chunks,
        trace,
        mtp=mtp,
        verify=verify,
        compare_live=compare_live,
        min_replayed=min_replayed,
        margins=Margins.of(min_margin, max_margin),
        leg_times=leg_times,
        balance=Balance(expert_bias=expert_bias, aux_loss=aux_loss),
        group=group,
    ).start()


def _check_model(trace: RoutingTrace, chunk: Chunk) -> None:
    for router in chunk.in_trace:
        for name, of_model, of_trace in (
            ("num_experts", router.num_experts, trace.num_experts),
            ("topk", router.topk, trace.topk),
        ):
            if of_model != of_trace:
                raise TraceError(f"{router.found} has {name}={of_model}, the trace {of_trace}: it is of another model.")
