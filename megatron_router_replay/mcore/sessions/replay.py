"""Replay: every forward and recompute uses the experts of a trace."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.checks import with_checked_options
from megatron_router_replay.errors import LayoutError, TraceError
from megatron_router_replay.layout.rows import differing_tokens
from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.batches.forward_counts import ForwardCounts
from megatron_router_replay.mcore.batches.inputs import ForwardInputs
from megatron_router_replay.mcore.batches.lookup import RowLookup
from megatron_router_replay.mcore.batches.microbatch import Microbatch
from megatron_router_replay.mcore.batches.row_inputs import RowInputs, check_padding, check_range
from megatron_router_replay.mcore.batches.segments import CpPartition
from megatron_router_replay.mcore.batches.upload import KeptLayer, LayerRoutes, take_rows
from megatron_router_replay.mcore.core.call import RoutingCall, TopKRequest
from megatron_router_replay.mcore.core.streams import to_host
from megatron_router_replay.mcore.judge.agreement import ALL, Agreement
from megatron_router_replay.mcore.judge.group_check import GroupCheck
from megatron_router_replay.mcore.model.find import Models
from megatron_router_replay.mcore.model.layers import check_trace_layers
from megatron_router_replay.mcore.sessions.microbatches import Microbatches, make_chunks, names_again
from megatron_router_replay.mcore.sessions.routers import RouterState, SessionRouters
from megatron_router_replay.mcore.sessions.session import Session, open_session
from megatron_router_replay.trace import RoutingTrace

WrongRoutes = Literal["raise", "warn"]


class TraceRoutes(Microbatches):
    """The routes of a trace, and the micro-batches of a session that replay them.

    Args:
        routers: of the session.
        chunks, group_check: see `Microbatches`.
        trace: of the session.
        min_replayed, min_agreement, wrong_routes: see `replay`.
        ask_every_layer, padding_token_ids, cp_partition_mode: see `replay`.

    Raises:
        TraceError: the trace is of another model, or without some of its layers.
    """

    kind = "replay"

    def __init__(
        self,
        routers: SessionRouters,
        chunks: list[Chunk],
        group_check: GroupCheck,
        trace: RoutingTrace,
        *,
        min_replayed: float | None,
        min_agreement: float,
        wrong_routes: WrongRoutes,
        ask_every_layer: bool,
        padding_token_ids: Sequence[int] | None,
        cp_partition_mode: CpPartition | None,
    ) -> None:
        super().__init__(routers, chunks, group_check)
        self._trace = trace
        self._min_replayed = min_replayed
        self._options = [min_replayed, min_agreement, wrong_routes]
        # Sizes before layers: for a trace of another model, the error names the reason and not a missing layer.
        for state in routers.states.values():
            if state.chunk is not None:
                _check_model(trace, state)
        check_trace_layers(trace.layer_numbers, routers.walks)
        # On the host, also of a trace on a GPU; its routes are gathered where they are.
        has_route, tokens = to_host([trace.replay_mask, trace.token_ids])
        self._has_route = None if has_route.all() else torch.from_numpy(has_route)
        self._tokens = None if tokens is None else torch.from_numpy(tokens)
        self._routes_of = {
            chunk.index: trace.select_layers([each.layer_number for each in chunk.replayed_routers]).topk_indices
            for chunk in chunks
        }
        self._lookup: RowLookup | None = None
        if trace.token_ids is not None and trace.sequence_lengths is not None:
            self._lookup = RowLookup(trace, padding_token_ids=padding_token_ids, cp_partition_mode=cp_partition_mode)
        replayed = [found.router for chunk in chunks for found in chunk.replayed_routers]
        if replayed and (min_agreement or ask_every_layer):
            self.agreement = Agreement(
                topk=int(replayed[0].topk),
                num_experts=int(replayed[0].num_experts),
                num_layers=len(replayed),
                every_layer=ask_every_layer,
                rank=routers.rank,
                trace=trace,
                layout=set() if self._lookup is None else self._lookup.layout,
            )

    # ---- rows into the trace
    def locate_rows(self, chunk: Chunk, inputs: ForwardInputs) -> RowInputs | None:
        """Return the rows of a forward's tokens; None: the trace has no tokens to find them by."""
        if self._lookup is None:
            return None
        return self._lookup.locate(chunk.module, inputs, f"{chunk.where}, micro-batch {chunk.num_begun}")

    def check_rows(self, chunk: Chunk, inputs: RowInputs) -> None:
        """Check rows that were given by hand, and count those that are repeated."""
        self._trace.check_unchanged()  # a trainer may compute on it in place between two micro-batches
        check_padding(inputs)
        check_range(inputs, self._trace.num_tokens)
        # Not of rows that tokens found: the tokens of a batch may well contain a sample twice.
        num_repeated = _num_repeated(inputs)
        inputs.counts = ForwardCounts(rows_repeated=num_repeated)
        if num_repeated and not self._knows_tokens(inputs.rows):
            raise LayoutError(
                f"MRR202: {names_again(num_repeated)}, and the trace has no token ids to compare. If a batch has a "
                "sample twice, make the trace with token ids."
            )

    def make_microbatch(self, chunk: Chunk, inputs: RowInputs) -> Microbatch:
        """Return the micro-batch that replays these rows of the trace, as this rank's routers see them."""
        rows = inputs.rows
        # Of the whole batch, not of this rank's part: a fault in it raises on every rank.
        check_range(inputs, self._trace.num_tokens)
        any_unrouted = inputs.lowest < 0
        expected = self._expected_tokens(rows, inputs.token_ids, any_unrouted=any_unrouted)
        router_rows = chunk.router_view(rows)  # a part of a recording has these alone
        gathered, replay_mask = router_rows, None
        live_positions = None  # spares every router of the micro-batch its live top-k
        num_live = num_padding = 0
        if any_unrouted or self._has_route is not None:  # else every row has a route
            replay_mask, gathered = router_rows >= 0, router_rows.clamp(min=0)
            if self._has_route is not None:
                has_row, replay_mask = replay_mask, replay_mask & self._has_route[gathered]
                self._check_known(gathered, has_row & ~replay_mask)
            live = (~replay_mask).nonzero().squeeze(1)
            if not live.numel():
                replay_mask = None
            else:
                live_positions = live
                # The live router decides padding as well; it is counted apart.
                num_padding = 0 if inputs.padding is None else int(chunk.router_view(inputs.padding).sum())
                num_live = live.numel() - num_padding
        num_replayed = router_rows.numel() - num_live - num_padding
        counts = inputs.counts + ForwardCounts(
            microbatches=1, rows_replayed=num_replayed, rows_live=num_live, rows_padding=num_padding
        )
        if chunk.sequence_share[0]:  # sequence-parallel ranks get the same rows by hand: the first of them counts
            counts = counts._replace(rows_repeated=0)
        shape = rows.shape[0], rows.shape[1]
        return Microbatch(
            shape=chunk.router_shape(shape),
            batch_shape=shape,
            counts=counts,
            num_routers=len(chunk.replayed_routers),
            routes=LayerRoutes(take_rows(self._routes_of[chunk.index], gathered, chunk.device)),
            live_positions=live_positions,
            rows=router_rows,
            replay_mask=replay_mask,
            token_ids=expected,
            batch_rows=None if expected is None else rows,
            must_compare=inputs.counts.rows_repeated if inputs.token_ids is None else 0,
            checked_layer=None
            if self.agreement is None
            else self.agreement.next_layer(chunk, has_replayed_rows=num_replayed > 0),
        )

    # ---- checks of rows
    def _knows_tokens(self, rows: Tensor) -> bool:
        """Return whether the trace has the token of each of these rows, so that they can be compared."""
        return self._tokens is not None and bool((self._tokens[rows[rows >= 0]] >= 0).all())

    def _check_known(self, rows: Tensor, unrouted: Tensor) -> None:
        """Check that the trace has a token id for each row without a route; `merge_traces` leaves rows of no rank without."""
        if self._tokens is None or not unrouted.any():
            return
        unknown = unrouted & (self._tokens[rows] < 0)
        if unknown.any():
            raise LayoutError(
                f"MRR108: the batch has rows without any entry in the trace (row {int(rows[unknown][0])}, "
                f"{int(unknown.sum())} in all): no route and no token id. Another rank routed them: join the parts with "
                "recording.gather() or merge_traces before micro-batches are regrouped."
            )

    def _expected_tokens(self, rows: Tensor, tokens: Tensor | None, *, any_unrouted: bool) -> Tensor | None:
        """Return the tokens that the forward must get, [b, s], -1 where they are not known; None: none is."""
        known = self._tokens
        if known is None:
            if tokens is not None:
                raise LayoutError(
                    "MRR101: token_ids were given for comparison, but the trace has none: make it with token_ids=..., "
                    "or leave them out."
                )
            return None
        if not known.numel():
            return tokens
        expected = torch.where(rows >= 0, known[rows.clamp(min=0)], -1) if any_unrouted else known[rows]
        if tokens is None:
            return expected
        if not torch.equal(tokens, expected) and (text := differing_tokens(tokens, expected, rows)):
            raise LayoutError(f"MRR203: {text}")
        return tokens

    # ---- calls of routers
    def _experts(self, call: RoutingCall, request: TopKRequest) -> Tensor | None:
        """Return the micro-batch's routes, and the router's own experts in rows without a route."""
        microbatch: Microbatch | None = call.microbatch
        if microbatch is None:  # paused, or a multi-token-prediction layer
            return None
        assert microbatch.routes is not None, "a replayed micro-batch has routes"
        state = self._states[call.router]
        used = microbatch.routes.layer(state.position)
        if used.shape != (request.scores.shape[0], request.topk):
            return used  # the call refuses it
        if microbatch.checked_layer is not None and microbatch.checked_layer in (state.position, ALL):
            assert self.agreement is not None, "a layer is checked"
            assert state.chunk is not None, "it takes micro-batches"
            self.agreement.add(
                microbatch,
                state.chunk,
                state.found.layer_number,
                request=request,
                replayed=used,
                counts=microbatch.replay_mask,
            )
        if microbatch.live_positions is not None:
            return used.index_copy(0, microbatch.live_positions, request.live_topk_of(microbatch.live_positions))
        if call.is_written:
            call.kept = KeptLayer(microbatch.routes, state.position)
        return used

    # ---- the end
    def summary(self) -> dict[str, Any]:
        """Return the options that all ranks must share, and the agreement."""
        return {
            "options": self._options,
            "agreement": None if self.agreement is None else self.agreement.summary(),
        }


@with_checked_options
def replay(
    model_chunks: Models,
    trace: RoutingTrace | str | os.PathLike[str],
    *,
    padding_token_ids: Sequence[int] | None = None,
    cp_partition_mode: CpPartition | None = None,
    verify: bool = False,
    min_replayed: float | None = None,
    min_agreement: float = 0.25,
    wrong_routes: WrongRoutes = "raise",
    ask_every_layer: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Session:
    """Make the model use given experts, in every forward and recompute.

    Only the selection of experts is replaced: scores and gradients come from the live logits. The rows of a forward are found
    by its `input_ids`, on every pipeline stage: nothing is attached to a batch. A model that gets embeddings takes rows from
    `session.microbatch(rows, model)`, called right before each forward of each chunk. Tokens of no sample raise; a forward
    over other tokens, such as an evaluation, runs inside `session.paused()`. Where input_ids are on a GPU, the host waits
    for it once a forward.

    Args:
        model_chunks: the model or all of its chunks on this rank.
        trace: routes for at least every MoE layer of these chunks, or the path of a file that `save_trace` wrote. The live
            router decides rows without a route, and multi-token-prediction layers, whose recomputes use their forward's
            experts.
        padding_token_ids: the tokens of padding, `[tokenizer.pad_token_id]`. Needed where batches are padded, unless the
            forward gets `padding_mask` or unpadded `cu_seqlens_q`; without any of them, a forward that shows padding raises.
        cp_partition_mode: "zigzag" or "contiguous", how context-parallel ranks share the sequences of a forward; a packed
            row is one contiguous stream. None: packed_seq_params.cp_partition_mode, else zigzag.
        verify: compare every routing map that leaves a router with the decided experts; a difference raises.
        min_replayed: the least share of tokens (without padding) that must have been replayed, over all ranks of the
            group together; a smaller share raises on every rank when the session ends. None: at least one token must be
            replayed. 0: a session also ends in order if nothing ran, or if all tokens are padding; it still raises if no
            token had a route. 1: every row has a route, or the session raises.
        min_agreement: how far the live router must agree with the replayed routes in each layer: 1 means the same experts, 0
            no more of them than by chance. One layer of each micro-batch is compared, without a host sync. When the session
            ends, layers that agree less raise, and blocks of rows with experts that are far from the live choice. 0.5 is
            strict. 0 turns these checks off, for routes that belong to a different model on purpose.
        wrong_routes: "raise", or "warn" for a run that must not stop. Both leave the rows in `session.report.wrong_rows`.
        ask_every_layer: take the live top-k of all layers in every micro-batch.
        group: the ranks that are checked together when the session ends; all of them must have such a session. None: every
            rank of the job. No rank waits for one that raised inside its block.

    Raises:
        UnsupportedRouterError: a router cannot be replayed exactly; names the config field.
        TraceError: the trace is of another model, or no trace; a share or an option has an unknown value.
        LayoutError: the model has no experts, or not all chunks of a virtual pipeline are given.
        ReplayStateError: the model is under another session, or RouterReplay objects of its own have an action.
    """

    shares = {"min_replayed": min_replayed, "min_agreement": min_agreement}

    def make(group_check: GroupCheck) -> Session:
        _check_shares(shares)
        if wrong_routes not in get_args(WrongRoutes):
            raise TraceError(f"MRR101: wrong_routes={wrong_routes!r} must be 'raise' or 'warn'.")
        loaded = _loaded(trace, model_chunks)
        routers = SessionRouters(model_chunks, verify=verify)
        chunks = make_chunks(routers, f"routes{_why_not_found(loaded)}")
        routes = TraceRoutes(
            routers,
            chunks,
            group_check,
            loaded,
            min_replayed=min_replayed,
            min_agreement=min_agreement,
            wrong_routes=wrong_routes,
            ask_every_layer=ask_every_layer,
            padding_token_ids=padding_token_ids,
            cp_partition_mode=cp_partition_mode,
        )
        return Session(routes.kind, routers, routes)

    return open_session(make, group)


def _loaded(trace: Any, model_chunks: Any) -> RoutingTrace:
    """Return the trace, read where a path was given.

    Raises:
        TraceError: it is neither.
    """
    if isinstance(trace, str | os.PathLike):
        from megatron_router_replay.store import load_trace

        trace = load_trace(trace)
    if isinstance(trace, list | tuple) and trace and all(isinstance(each, RoutingTrace) for each in trace):
        raise TraceError(
            f"MRR101: cannot replay {len(trace)} traces: pass concat_traces(traces), one trace of all samples."
        )
    if not isinstance(trace, RoutingTrace):
        are_swapped = isinstance(model_chunks, RoutingTrace)
        swapped = " The arguments are swapped: replay(model_chunks, trace)." if are_swapped else ""
        raise TraceError(
            f"MRR101: cannot replay a {type(trace).__name__}: pass a RoutingTrace or its path; mrr.engines "
            f"decodes an engine's reply.{swapped}"
        )
    return trace


def _why_not_found(trace: RoutingTrace) -> str:
    """Return the words that say why no forward can find its rows in the trace; "": it can."""
    if trace.token_ids is None:
        return (
            ": the trace has no token ids, so no row can be found by input_ids. In the request, vLLM and SGLang's OpenAI "
            'endpoints take "return_token_ids": true, SGLang\'s /generate "return_logprob": true and "logprob_start_len": 0; '
            "decode takes the ids that the engine ran as token_ids=..., or a prompt's as prompt_token_ids=..."
        )
    if trace.sequence_lengths is None:
        return ": the trace has token ids and no samples: trace.with_samples(lengths) cuts it into them"
    return ""


def _num_repeated(inputs: RowInputs) -> int:
    """Return how many rows a micro-batch names again: a sample is in it twice, or a token would get another one's routes."""
    if not inputs.rows.numel():
        return 0
    rows = inputs.rows.numpy().ravel()
    if inputs.lowest < 0:
        rows = rows[rows >= 0]
    is_named = np.zeros(inputs.highest + 1 - max(inputs.lowest, 0), dtype=np.bool_)
    is_named[rows - max(inputs.lowest, 0)] = True
    return rows.size - int(np.count_nonzero(is_named))


def _check_shares(shares: Mapping[str, Any]) -> None:
    for name, value in shares.items():
        if value is not None and not (isinstance(value, int | float) and 0 <= value <= 1):
            raise TraceError(f"MRR101: {name}={value!r} must be a share, 0 to 1.")


def _check_model(trace: RoutingTrace, state: RouterState) -> None:
    for name in ("num_experts", "topk"):
        of_model, of_trace = int(getattr(state.found.router, name)), getattr(trace, name)
        if of_model != of_trace:
            raise TraceError(
                f"MRR405: {state.found} has {name}={of_model}, the trace {of_trace}: it is of another model."
            )
