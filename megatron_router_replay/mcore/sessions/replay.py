"""Replay: every forward and recompute uses given experts, of a trace or as a trainer's micro-batch carries them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_router_replay.errors import LayoutError, ReplayStateError, TraceError
from megatron_router_replay.layout.rows import MOVED_APART, check_tokens, count_differing_tokens
from megatron_router_replay.mcore.balance import AuxLoss, Balance, ExpertBias, aux_loss_group
from megatron_router_replay.mcore.batches.attach import session_of
from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.batches.fed import lay_out
from megatron_router_replay.mcore.batches.prefetch import MicrobatchRoutes
from megatron_router_replay.mcore.batches.queue import Microbatch
from megatron_router_replay.mcore.batches.rows import (
    RankRoutes,
    RowInputs,
    balanced_padding_experts,
    check_padding,
    check_trained,
    count_rows,
    is_known,
    padding_ranks,
)
from megatron_router_replay.mcore.batches.upload import KeptLayer, LayerRoutes, take_rows
from megatron_router_replay.mcore.core.call import RoutingCall, TopKRequest
from megatron_router_replay.mcore.core.streams import to_device, to_host
from megatron_router_replay.mcore.model.find import Models
from megatron_router_replay.mcore.model.layers import check_hashed_routes, check_trace_layers
from megatron_router_replay.mcore.sessions import agreement
from megatron_router_replay.mcore.sessions.agreement import ALL, Agreement
from megatron_router_replay.mcore.sessions.group_check import Numbers, judge_replay
from megatron_router_replay.mcore.sessions.microbatches import MicrobatchSession, open_session
from megatron_router_replay.mcore.sessions.report import SessionReport
from megatron_router_replay.mcore.sessions.session import RouterState
from megatron_router_replay.trace import RoutingTrace

ChooseDecisions = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer_number, routes, own, scores) -> [num_tokens] bool, True: replay this call, False: the router's own."""

_LOG = logging.getLogger(__name__)

_PRIME = (1 << 31) - 1


class ReplaySession(MicrobatchSession):
    """Forwards and recomputes use the given experts; see `replay`."""

    kind = "replay"

    def __init__(
        self,
        model_chunks: Models,
        trace: RoutingTrace | None,
        *,
        mtp: bool,
        min_agreement: float,
        ask_every_layer: bool,
        min_replayed: float | None,
        choose: ChooseDecisions | None,
        **options: Any,
    ) -> None:
        super().__init__(model_chunks, mtp=mtp, **options)
        self._trace = trace
        self._choose = choose
        self._min_replayed = min_replayed
        self._unproved = False  # fed routes came without a stamp
        self._padding_known = True  # padding was said wherever routes were fed
        self._digest = 0  # of which micro-batches' padding is known
        self._trace_of: dict[int, RoutingTrace] = {}
        if trace is not None:
            self._take_trace(trace, mtp=mtp)
        self._warned = False  # that something on a GPU is read by the host
        self._min_agreement = min_agreement
        self._agreement: Agreement | None = None
        routers = [found.router for chunk in self._chunks for found in chunk.replayed_routers]
        if routers and (min_agreement or ask_every_layer):
            self._agreement = Agreement(
                topk=int(routers[0].topk),
                num_experts=int(routers[0].num_experts),
                num_layers=len(routers),
                least=min_agreement,
                every_layer=ask_every_layer,
                rank=self._rank,
                source=agreement.SOURCES[trace is None],
            )

    @property
    def report(self) -> SessionReport:
        """The report of every session, and how the live router agrees."""
        report = super().report
        decisions = report.decisions.copy()
        if self._choose is not None:
            decisions["asked"], decisions["left_live"] = self._choices()
        return replace(
            report,
            rows_left_out=self._rows["left_out"],
            rows_repeated=self._rows["repeated"],
            decisions=decisions,
            layout_proved=None if self._trace is not None or not self._enabled else not self._unproved,
            agreement=None if self._agreement is None else self._agreement.report(),
        )

    def _choices(self) -> list[int]:
        """Return how many decisions `choose=` was asked about, and how many it left to the live router."""
        return [sum(each.counter[name] for each in self._routers.values()) for name in ("asked", "left_live")]

    # ---- what a router uses
    def _experts(self, call: RoutingCall, request: TopKRequest) -> Tensor | None:
        """Return a micro-batch's routes, or the router's own experts. See `Registrant`."""
        microbatch: Microbatch | None = call.microbatch
        if microbatch is None:
            return None
        assert microbatch.routes is not None, "a replayed micro-batch has routes"
        position = self._routers[call.router].position
        used = microbatch.routes.layer(position)
        if used.shape != (request.scores.shape[0], request.topk):
            return used  # refused behind this
        live_mask, replayed = microbatch.live_mask, microbatch.replayed
        is_asked = microbatch.checked_layer is not None and microbatch.checked_layer in (position, ALL)
        if is_asked or live_mask is not None or self._choose is not None:
            own = request.live_topk()[1]
            if self._choose is not None:
                replayed = self._chosen(call, microbatch, used, own, request.scores)
                live_mask = ~replayed
            if is_asked:
                self._ask(call, microbatch, own, used, replayed)
            if live_mask is not None:
                return torch.where(live_mask.unsqueeze(1), own, used)
        if microbatch.live_positions is not None:
            return used.index_copy(0, microbatch.live_positions, request.live_topk_of(microbatch.live_positions))
        if call.is_written:
            call.kept = KeptLayer(microbatch.routes, position)
        return used

    def _ask(self, call: RoutingCall, microbatch: Microbatch, own: Tensor, used: Tensor, counts: Tensor | None) -> None:
        """Count how a router's own experts agree with the replayed ones, in the rows that count."""
        assert self._agreement is not None, "a layer is checked"
        router_state = self._routers[call.router]
        assert router_state.chunk is not None, "it takes micro-batches"
        self._agreement.add(microbatch, router_state.chunk, router_state.found.layer_number, own, used, counts)

    def _chosen(self, call: RoutingCall, microbatch: Microbatch, used: Tensor, own: Tensor, scores: Tensor) -> Tensor:
        """Ask `choose=` which decisions are replayed, [num_tokens] bool, and count those that are not."""
        assert self._choose is not None, "asked by it"
        layer_number = self._routers[call.router].found.layer_number
        # Copies: what is done with them in place must change neither routes nor probabilities.
        chosen = self._choose(layer_number, used.clone(), own.clone(), scores.detach().clone())
        if not isinstance(chosen, Tensor) or chosen.shape != used.shape[:1] or chosen.dtype is not torch.bool:
            raise ReplayStateError(
                f"MRR101: replay(choose=...) must return [num_tokens] bool, got {type(chosen).__name__}."
            )
        assert microbatch.replayed is not None, "made where there is a choice"
        chosen = chosen & microbatch.replayed
        left = microbatch.replayed & ~chosen
        call.counter.add(asked=microbatch.replayed.sum(), left_live=left.sum())
        return chosen

    # ---- rows into the trace
    def _take_trace(self, trace: RoutingTrace, *, mtp: bool) -> None:
        # What the trace is of, before which layers it has: a trace of another model names the reason, not a missing layer.
        for router_state in self._routers.values():
            if router_state.position >= 0:
                _check_model(trace, router_state)
        check_trace_layers(
            trace.layer_numbers,
            self._modules,
            walks=self._walks,
            mtp=mtp,
            hashed={found.layer_number for found in self._hashed},
        )
        self._any_live = not bool(trace.replay_mask.all())
        for chunk in self._chunks:
            self._trace_of[chunk.index] = trace.select_layers([found.layer_number for found in chunk.replayed_routers])

    def _queue(self, chunk: Chunk, inputs: RowInputs, routes: MicrobatchRoutes | None) -> None:
        if self._trace is None:
            raise LayoutError(
                "MRR411: this session has no trace to take rows from: mrr.replay(model, trace), or feed routes=."
            )
        self._trace.check_unchanged()  # a trainer may compute on it in place between two micro-batches
        trace = self._trace_of[chunk.index]
        if routes is not None and routes.source is not self._trace:
            raise LayoutError("MRR423: these routes were prefetched from another trace than this session's.")
        inputs = self._at_the_trace(inputs, trace.device)
        rows, padding = inputs.rows, inputs.padding
        # Of the whole batch, not of this rank's part: what is wrong with it raises on every rank.
        unrouted = self._may_be_unrouted(rows, trace.num_tokens)
        check_padding(rows >= 0, padding, self._check)
        self._count_repeated(rows, trace.num_tokens)
        view = chunk.router_view(rows)  # what this rank routes; a part of a recording has these rows alone
        live_mask = left_out = None
        if unrouted or self._any_live:  # else every row has a route
            routed, left_out = _at_rows(trace.replay_mask, view), _at_rows(trace.left_out, view)
            self._check_known(trace, view, routed | left_out)
            if inputs.trained is not None:
                without = chunk.router_view(inputs.trained) & ~(routed | left_out)
                check_trained(without, self._check, order="as routers see them")
            live_mask = ~routed
        expected = self._expected_tokens(trace, rows, inputs.token_ids, any_unrouted=unrouted)
        self._check_hashed(rows, expected)
        if routes is None:
            topk_indices = take_rows(trace.topk_indices, view.clamp(min=0), chunk.device)
        else:
            topk_indices = chunk.router_view(routes.layers(trace.layer_numbers))
        shape = rows.shape[0], rows.shape[1]
        left_out = None if trace.left_out is None else left_out
        laid_out = RankRoutes(
            topk_indices=topk_indices,
            live_mask=live_mask,
            left_out=left_out,
            padding=padding,
            batch_shape=shape,
            token_ids=expected,
            rows=None if expected is None else rows,
        )
        chunk.queue.queue(self._microbatch(chunk, laid_out))

    def _at_the_trace(self, inputs: RowInputs, device: torch.device) -> RowInputs:
        """Return them on the trace's device; the routers' rows of it alone go to theirs."""
        tensors = {each.name: getattr(inputs, each.name) for each in fields(inputs)}
        tensors = {name: values for name, values in tensors.items() if values is not None}
        if device.type != "cpu":
            return replace(inputs, **{name: to_device(values, device) for name, values in tensors.items()})
        if not self._warned and any(values.device.type != "cpu" for values in tensors.values()):
            self._warned = True
            _LOG.warning(
                "the trace is on the CPU and routing_rows, or what is queued beside them, on a GPU: the host waits for the "
                "GPU once in every micro-batch. Queue what the data loader gave, before it is moved; or replay "
                "trace.to('cuda')."
            )
        return replace(inputs, **to_host(tensors))

    def _microbatch(self, chunk: Chunk, routes: RankRoutes) -> Microbatch:
        """Return the micro-batch that replays these routes."""
        topk_indices, live_mask, padding = (
            to_device(routes.topk_indices, chunk.device),
            routes.live_mask,
            routes.padding,
        )
        num_tokens, split, token_ids = topk_indices.shape[0], routes.split, routes.token_ids
        if padding is not None:
            ordinals = chunk.router_view(padding_ranks(padding), split=split)
            padding = chunk.router_view(padding, split=split)
            live_mask = None if live_mask is None else live_mask & ~padding
            masks = to_device(padding, chunk.device), to_device(ordinals, chunk.device)
            topk_indices = balanced_padding_experts(
                topk_indices, *masks, int(chunk.replayed_routers[0].router.num_experts)
            )
        counts = count_rows(num_tokens, live_mask, padding)
        if routes.left_out is not None:
            counts["left_out"] = routes.left_out.sum()
        is_token = None if padding is None else to_device(~padding, chunk.device)
        replayed = is_token
        if live_mask is not None:
            replayed = to_device(~live_mask if padding is None else ~(live_mask | padding), chunk.device)
        if replayed is None and self._choose is not None:
            replayed = torch.ones(num_tokens, dtype=torch.bool, device=chunk.device)
        live_positions = device_mask = None  # None spares every router of the micro-batch its live top-k
        if live_mask is not None and live_mask.device.type == "cpu":
            live_positions = to_device(live_mask.nonzero().squeeze(1), chunk.device) if bool(live_mask.any()) else None
        elif live_mask is not None and self._min_replayed != 1:
            # Asking a GPU which rows are live would wait for it. With min_replayed=1 none is, or the session raises: they
            # are counted above, and judged when it is left.
            device_mask = to_device(live_mask, chunk.device)
        return Microbatch(
            shape=chunk.router_shape(routes.batch_shape, split=split),
            batch_shape=routes.batch_shape,
            counts=counts,
            num_routers=len(chunk.replayed_routers),
            routes=LayerRoutes(topk_indices),
            live_positions=live_positions,
            live_mask=device_mask,
            replayed=replayed,
            token_ids=None if token_ids is None else to_device(token_ids, chunk.device),
            batch_rows=None if routes.rows is None else to_device(routes.rows, chunk.device),
            is_token=is_token,
            checked_layer=None if self._agreement is None else self._agreement.next_layer(chunk),
        )

    def _queue_routes(self, chunk: Chunk, **layout: Any) -> None:
        if self._trace is not None:
            raise LayoutError(
                "MRR411: this session replays a trace: pass routing_rows= to the attached model, or call "
                "session.microbatch(rows, model). Routes themselves are for mrr.replay(model) without a trace."
            )
        laid_out = lay_out(chunk, self._check, self._hashed, **layout)
        self._unproved |= not layout.get("stamped")
        self._padding_known &= any(layout.get(name) is not None for name in ("padding", "filler"))
        chunk.queue.queue(self._microbatch(chunk, laid_out))

    def _on_done(self, chunk: Chunk, microbatch: Microbatch) -> None:
        super()._on_done(chunk, microbatch)
        self._digest = (self._digest * 1_000_003 + 1 + (microbatch.is_token is not None)) % _PRIME

    # ---- checks of one micro-batch
    def _count_repeated(self, rows: Tensor, num_rows: int) -> None:
        """Count the rows that a micro-batch names twice: one token is trained on the routes of another."""
        if rows.device.type == "cpu":
            named = rows.numpy().ravel()
            positions = np.arange(named.size)
            # Where a row is named last; row -1 has the last place. In numpy, whose indexing takes a third of torch's time.
            last = np.empty(num_rows + 1, dtype=positions.dtype)
            last[named] = positions
            self._rows.add(repeated=int(np.count_nonzero((last[named] != positions) & (named >= 0))))

    def _check_known(self, trace: RoutingTrace, rows: Tensor, routed: Tensor) -> None:
        """Check that no row is one which this trace knows nothing of, as merge_traces says: no route, and no token id."""
        if trace.token_ids is None or not trace.num_tokens or not self._any_live:
            return
        unknown = (rows >= 0) & ~routed & (trace.token_ids[rows.clamp(min=0)] < 0)
        first = f" (row {int(rows[unknown][0])}, {int(unknown.sum())} in all)" if is_known(unknown) else ""
        self._check(
            unknown.any(),
            f"MRR108: routing_rows name rows that the trace knows nothing of{first}: no route and no token id. Another "
            "rank routed them: join the parts with recording.gather() or merge_traces before micro-batches are regrouped.",
        )

    def _expected_tokens(
        self, trace: RoutingTrace, rows: Tensor, tokens: Tensor | None, *, any_unrouted: bool
    ) -> Tensor | None:
        """Return the tokens that the forward must get, [b, s], -1 where they are not known."""
        known = trace.token_ids
        if known is None:
            if tokens is not None:
                raise LayoutError(
                    "MRR101: token_ids were given for comparison, but the trace has none: make it with token_ids=..., "
                    "or leave them out."
                )
            return None
        if not trace.num_tokens:
            return tokens
        if tokens is None:
            if not any_unrouted:
                return known[rows].to(torch.int64)
            return torch.where(rows >= 0, known[rows.clamp(min=0)].to(torch.int64), -1)
        if rows.device.type == "cpu":
            check_tokens(rows, tokens, token_ids=known)
        else:
            count, tell = count_differing_tokens(tokens, torch.where(rows >= 0, known[rows.clamp(min=0)], -1), rows)
            self._check(count, f"MRR203: token_ids differ from the trace's: {MOVED_APART}", lambda: f"MRR203: {tell()}")
        return tokens

    def _check_hashed(self, rows: Tensor, tokens: Tensor | None) -> None:
        """Compare a trace's routes for hash layers with the layers' own tables."""
        if self._trace is None or tokens is None:
            return
        for found in self._hashed:
            if found.layer_number in self._trace.layer_numbers:
                routes = self._trace.layer(found.layer_number)[rows.clamp(min=0)]
                routed = _at_rows(self._trace.replay_mask, rows)
                check_hashed_routes(found, routes, torch.where(routed, tokens, -1), self._check)

    # ---- the end
    def _numbers(self) -> Numbers:
        routers = [each.found.router for each in self._routers.values()]
        group = None if self._balance.aux_loss == "off" else aux_loss_group(routers)
        shared = min(dist.get_process_group_ranks(group)) if group is not None and dist.is_initialized() else -1
        asked, left_live = self._choices()
        numbers = super()._numbers()
        return numbers._replace(
            rows_left_out=self._rows["left_out"],
            asked=asked,
            left_live=left_live,
            options=[self._balance.expert_bias, self._balance.aux_loss, self._min_replayed, self._min_agreement],
            loss_group=shared,
            padding_digest=self._digest,
            padding_known=self._padding_known,
            agreement=None if self._agreement is None else self._agreement.numbers(),
        )

    def _judge(self, everyone: Mapping[int, Numbers]) -> tuple[list[str], list[str]]:
        asked = [numbers.agreement for numbers in everyone.values() if numbers.agreement]
        problems = judge_replay(everyone, self._min_replayed) + agreement.problems(asked, self._min_agreement)
        warning = agreement.warning(asked)
        return problems, [warning] if warning else []


def microbatch(model: nn.Module, routes: Tensor, **layout: Any) -> None:
    """Queue routes for the next forward of a chunk, in the session that holds it. Call it where the trainer lays out its
    batch.

    It is `session.microbatch(routes=...)` of the innermost `mrr.replay(model)` that holds the chunk. Say how the layout is
    proved: `stamped=True` with `token_ids`, where `mrr.stamp` sealed the rollout's routes, or `trust_layout=True`.

    Args:
        model: the chunk, wrapped or not.
        routes: [b, s, layers, topk] of this context-parallel rank's tokens, sample by sample, before sequence parallelism;
            [t, layers, topk] or [1, t, layers, topk] for one packed row; uint8, int16, int32 or int64. A row of -1 is live.
        layout: see `fed.lay_out`: token_ids, stamped, trust_layout, padding, trained, stale, filler, missing, layer_numbers,
            split; and ahead=True queues behind micro-batches that wait.

    Raises:
        ReplayStateError: no open session holds this model, or a micro-batch waits for its forward already.
        LayoutError: the routes do not fit the model, the tokens, or the layout that is said.
    """
    if not isinstance(model, nn.Module):
        raise LayoutError(
            f"MRR403: {type(model).__name__} is no model: the model comes first, microbatch(model, routes)."
        )
    session = session_of(model)
    if session is None:
        raise ReplayStateError(
            f"MRR403: no session holds this {type(model).__name__}: open `with mrr.replay(model):` around the schedule (with "
            "enabled=False where a pass shall not replay)."
        )
    session.microbatch(model=model, routes=routes, **layout)


def replay(
    model_chunks: Models,
    trace: RoutingTrace | str | os.PathLike[str] | None = None,
    *,
    enabled: bool = True,
    mtp: bool = False,
    choose: ChooseDecisions | None = None,
    verify: bool = False,
    min_replayed: float | None = None,
    min_agreement: float = 0.25,
    ask_every_layer: bool = False,
    group: dist.ProcessGroup | None = None,
    expert_bias: ExpertBias = "replayed",
    aux_loss: AuxLoss = "live",
) -> ReplaySession:
    """Make the model use given experts, in every forward and recompute.

    Only the selection of experts is replaced: scores and gradients come from the live logits. With a trace, `attach` the
    model once and pass it routing_rows, or call `session.microbatch(rows, model)` before each forward of each chunk.
    Without a trace, feed routes with `mrr.microbatch(model, routes=...)`.

    Which:
        model_chunks: the model or all of its chunks on this rank.
        trace: routes for at least every MoE layer of these chunks, or the path of a file that `save_trace` wrote. The live
            router decides rows without a route. If the trace is on the GPU (`trace.to("cuda")`), it takes rows that are
            there without a host sync. None: routes are fed.
        enabled: False: hold nothing and drop what is queued, for a pass of a trainer that must not replay.
        mtp: also replay multi-token-prediction layers, as layer_number num_layers + 1, ... If False, their forwards stay
            live and their recomputes use the experts of the forward.
        choose: f(layer_number, routes, own, scores) -> [num_tokens] bool, True: replay; elsewhere the router's own experts
            are used. `routes` and `own` are [num_tokens, topk] int64, and scores [num_tokens, num_experts] is what the
            router ranks. Each forward calls it and takes a live top-k; recomputes use the experts of the forward.

    Checks:
        verify: compare every routing map that a token dispatcher gets with the decided experts; a difference raises.
        min_replayed: the least share of tokens (without padding) that must have been replayed, over all ranks of the
            group together; a smaller share raises on every rank when the session ends. Tokens that you left out by choice
            (`trace.keep`) do not count as replayed. None: at least one token must be replayed. 0: a session also ends in
            order if nothing ran, or if you left out all tokens or called them padding; it still raises if no token had a
            route. 1: every row has a route, or the session raises. With routes on a GPU this avoids a live top-k in every
            router, which is taken if the host cannot see whether all rows have one.
        min_agreement: how far the live router must agree with the replayed routes: 1 means the same experts, 0 no more of
            them than by chance. One layer of each micro-batch takes its live top-k, without a host sync, and the group
            judges layers and samples when the session ends. 0.5 is strict. 0 turns the check off, for routes that belong
            to a different model on purpose.
        ask_every_layer: take the live top-k of all layers in every micro-batch.
        group: the ranks that are judged together when the session ends; all of them must have such a session. None: every
            rank of the job. The others do not wait for a rank that raised inside its block.

    Balance:
        expert_bias: "replayed": Megatron-Core's expert bias counts the experts that the forward used, each token once and
            padding never; "off": it counts nothing, so it stays as it is.
        aux_loss: "live": auxiliary losses count the top-k of the live scores, without padding; "off": there is none.

    Raises:
        UnsupportedRouterError: a router cannot be replayed exactly; names the config field.
        TraceError: the trace is of another model, or no trace; a share or an option has an unknown value.
        LayoutError: the model has no experts, or not all chunks of a virtual pipeline are given.
        ReplayStateError: the model is under another session, or its routers are driven by their own RouterReplay.
    """

    def make() -> ReplaySession:
        _check_share("min_replayed", min_replayed)
        _check_share("min_agreement", min_agreement)
        return ReplaySession(
            model_chunks,
            _loaded(trace, model_chunks) if enabled else None,
            mtp=mtp,
            verify=verify,
            min_agreement=min_agreement,
            ask_every_layer=ask_every_layer,
            min_replayed=min_replayed,
            choose=choose,
            choice=Balance(expert_bias=expert_bias, aux_loss=aux_loss),
            group=group,
            enabled=enabled,
        )

    return open_session(make, group) if enabled else make()._start()


def _loaded(trace: Any, model_chunks: Any) -> RoutingTrace | None:
    """Return the trace, read where a path was given.

    Raises:
        TraceError: it is neither.
    """
    if isinstance(trace, str | os.PathLike):
        from megatron_router_replay.store import load_trace

        trace = load_trace(trace)
    if trace is not None and not isinstance(trace, RoutingTrace):
        are_swapped = isinstance(model_chunks, RoutingTrace)
        swapped = " The arguments are swapped: replay(model_chunks, trace)." if are_swapped else ""
        raise TraceError(
            f"MRR101: cannot replay a {type(trace).__name__}: pass a RoutingTrace or the path of one; mrr.engines "
            f"decodes an engine's reply.{swapped}"
        )
    return trace


def _check_share(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, int | float) and 0 <= value <= 1):
        raise TraceError(f"MRR101: {name}={value!r} must be a share, 0 to 1.")


def _at_rows(mask: Tensor | None, rows: Tensor) -> Tensor:
    """Return a trace's mask at rows of it, False where it is None or the row is -1."""
    if mask is None or not mask.numel():
        return torch.zeros_like(rows, dtype=torch.bool)
    return (rows >= 0) & mask[rows.clamp(min=0)]


def _check_model(trace: RoutingTrace, router_state: RouterState) -> None:
    for name in ("num_experts", "topk"):
        of_model, of_trace = int(getattr(router_state.found.router, name)), getattr(trace, name)
        if of_model != of_trace:
            raise TraceError(
                f"MRR405: {router_state.found} has {name}={of_model}, the trace {of_trace}: it is of another model."
            )
