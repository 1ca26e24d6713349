"""Replay: every forward and recompute uses a trace's experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron_router_replay.diagnostics.live import LiveComparison, LiveReport
from megatron_router_replay.errors import LayoutError, ReplayStateError, TraceError
from megatron_router_replay.layout import check_rows
from megatron_router_replay.mcore.chunk import Chunk, Microbatch, choose_replayed
from megatron_router_replay.mcore.report import SessionReport
from megatron_router_replay.mcore.session import Models, Session
from megatron_router_replay.mcore.targets import build_targets, padding_ranks
from megatron_router_replay.routes import MicrobatchRoutes
from megatron_router_replay.trace import RoutingTrace

if TYPE_CHECKING:  # a room, which the core does not load
    from megatron_router_replay.transport.timing import LegTimes


class ReplaySession(Session):
    """Forwards and recomputes use the trace's experts; see `replay`."""

    kind = "replay"
    choose = staticmethod(choose_replayed)
    needs_queue = True

    def __init__(
        self,
        model_chunks: Models,
        trace: RoutingTrace,
        *,
        mtp: bool,
        verify: bool,
        compare_live: bool | int,
        leg_times: LegTimes | None = None,
    ) -> None:
        self._trace = trace
        self._leg_times = leg_times
        self._prefetched: RoutingTrace | None = None  # of the micro-batch that is being queued
        self._compare_every = int(compare_live)
        self._comparison: LiveComparison | None = None
        super().__init__(model_chunks, mtp=mtp, verify=verify)

    def microbatch(
        self, rows: Tensor | MicrobatchRoutes, model: nn.Module | None = None, *, token_ids: Tensor | None = None
    ) -> None:
        """Queue the routes of the next forward of a model chunk; call it once before each forward of each chunk.

        Args:
            rows: `routing_rows` as for every session, or what `transport.prefetch` made of them and this session's trace.
            model, token_ids: as for every session.

        Raises:
            LayoutError: as for every session; or the rows were prefetched from another trace.
            TraceError: they were prefetched without a layer of this chunk.
            ReplayStateError: the session is closed.
        """
        if not isinstance(rows, MicrobatchRoutes):
            super().microbatch(rows, model, token_ids=token_ids)
            return
        if rows.source is not self._trace:
            raise LayoutError("these routes were prefetched from another trace than this session's.")
        # Without a row, as when all is padding, any trace will do, but not an empty one.
        self._prefetched = rows.trace if rows.trace.num_tokens else None
        try:
            super().microbatch(rows.routing_rows, model, token_ids=token_ids)
        finally:
            self._prefetched = None

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
        return replace(
            super().report,
            live=None if self._comparison is None else self._comparison.report(),
            leg_times=None if self._leg_times is None else self._leg_times.report(),
        )

    def _setup(self) -> None:
        self._any_live = not bool(self._trace.replay_mask.all())
        self._trace_of: dict[int, RoutingTrace] = {}
        for chunk in self._chunks:
            _check_model(self._trace, chunk)
            self._trace_of[chunk.index] = self._trace.select_layers(
                [router.found.layer_number for router in chunk.in_trace]
            )
        if self._compare_every:
            self._compare()

    def _compare(self) -> None:
        routers = [router for router in self._routers() if router.in_trace]
        self._comparison = LiveComparison(
            sorted(router.found.layer_number for router in routers),
            num_experts=self._trace.num_experts,
            topk=self._trace.topk,
            device=routers[0].found.router.weight.device if routers else "cpu",
            every_n=self._compare_every,
        )
        for router in routers:
            router.live_comparison = self._comparison

    def _microbatch_done(self, chunk: Chunk, microbatch: Microbatch) -> None:
        super()._microbatch_done(chunk, microbatch)
        if self._comparison is not None and self._comparison.wants(microbatch.number):
            self._comparison.end_microbatch(chunk.index)

    def _queue(self, chunk: Chunk, rows: Tensor, token_ids: Tensor | None) -> None:
        trace = self._trace_of[chunk.index]
        if self._prefetched is not None:
            trace = self._prefetched.select_layers(trace.layer_numbers)
        rows = rows.to(trace.device)
        padded = self._may_be_padded(rows, trace.num_tokens)
        if token_ids is not None:
            self._check_tokens(rows, token_ids.to(trace.device), trace.token_ids)
        targets = build_targets(
            trace,
            self._router_view(chunk, rows),
            self._router_view(chunk, padding_ranks(rows)) if padded else None,
            device=chunk.routers[0].found.router.weight.device,
            any_live=self._any_live,
            with_replayed=self._comparison is not None,
        )
        self._count(targets.counts)
        chunk.queue(targets)

    def _check_tokens(self, rows: Tensor, token_ids: Tensor, expected: Tensor | None) -> None:
        if expected is None:
            raise LayoutError(
                "token_ids were given for comparison, but the trace has none: make it with token_ids=..., or leave them out."
            )
        if rows.device.type == "cpu":
            check_rows(rows, token_ids, token_ids=expected)
        else:
            known = expected[rows.clamp(min=0)]
            differ = (known != token_ids) & (known >= 0) & (rows >= 0)  # -1: the trace does not know that token
            self._check(differ.any(), "token_ids differ from the trace's: tokens and routing_rows moved apart.")

    def _problems(self, report: SessionReport) -> list[str]:
        problems = super()._problems(report)
        if report.rows_live and not report.rows_replayed:
            problems.append(
                f"rank {self._rank}: none of {report.rows_live} tokens was replayed; the trace has no route for any of "
                "them. Were the routes lost on the way, or is this another rank's part of a recording (merge_traces)?"
            )
        return problems


def replay(
    model_chunks: Models,
    trace: RoutingTrace,
    *,
    mtp: bool = False,
    verify: bool = False,
    compare_live: bool | int = False,
    leg_times: LegTimes | None = None,
) -> ReplaySession:
    """Make the model use the experts of a trace, in every forward and recompute.

    Scores and gradients stay those of the live logits; only the selection is replaced. Call `session.microbatch(rows,
    model)` before each forward of each chunk.

    Args:
        model_chunks: the model or its chunks on this rank.
        trace: routes for at least every MoE layer of these chunks. Rows without a route, and nothing else, are decided
            by the live router. Moved to the GPU (`trace.to("cuda")`) it takes rows that are there without a host sync.
        mtp: also replay multi-token-prediction layers, as layer_number num_layers + 1, ...; else their forwards stay
            live and their recomputes use what the forward chose.
        compare_live: take the live top-k beside the replayed routes, in every micro-batch (True) or every n-th: agreement,
            probability mass and expert load by layer, and layers whose capture looks wrong. No host sync.
        verify: compare every routing map that leaves a router with the trace; the report counts, a difference raises.
        leg_times: `receiver.times` of the transport that brought the trace: the report then says what each leg of its
            way here took since `leg_times.reset()`, on both sides, and which one training waited for.

    Raises:
        UnsupportedRouterError: a router cannot be replayed exactly; names the config field.
        TraceError: the trace is of another model.
        ReplayStateError: the model is under another session.
    """
    return ReplaySession(model_chunks, trace, mtp=mtp, verify=verify, compare_live=compare_live, leg_times=leg_times)


def _check_model(trace: RoutingTrace, chunk: Chunk) -> None:
    for router in chunk.in_trace:
        for name, of_model, of_trace in (
            ("num_experts", router.num_experts, trace.num_experts),
            ("topk", router.topk, trace.topk),
        ):
            if of_model != of_trace:
                raise TraceError(f"{router.found} has {name}={of_model}, the trace {of_trace}: it is of another model.")
        if router.found.layer_number not in trace.layer_numbers:
            raise TraceError(
                f"{router.found} has no routes: the trace has layers {list(trace.layer_numbers)}. Layer numbers are "
                "Megatron's, from 1, and count dense layers too."
            )
    modules = list(chunk.module.modules())
    in_mtp = {
        id(inner) for layer in modules if isinstance(layer, MultiTokenPredictionLayer) for inner in layer.modules()
    }
    with_router = {router.found.layer_number for router in chunk.in_trace}
    for layer in modules:
        if isinstance(layer, TransformerLayer) and id(layer) not in in_mtp:
            number = layer.layer_number
            if number in trace.layer_numbers and number not in with_router:
                raise TraceError(
                    f"the trace has routes for layer {number}, but that layer of the model is dense: it is of another "
                    "model, or its layers are shifted."
                )
