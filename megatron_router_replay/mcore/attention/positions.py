"""The positions that sparse attention attends to in the forwards of a session: recorded, or taken from a trace.

Both go through rows. A query's row says which token of the trace it is; where its sample begins among the keys, Megatron-Core
says itself. So positions count from the beginning of their sample, and packing, context parallelism and micro-batches in
another order move nothing.

    record    the indexer's positions - where the sample begins -> PositionTrace, one part for each micro-batch
    replay    PositionTrace, at the rows of the queries + where the sample begins -> what the attention gets
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import ReplayStateError, TraceError, UnsupportedRouterError
from megatron_router_replay.indexer.merge import merge_positions, place_positions
from megatron_router_replay.indexer.positions import PositionTrace
from megatron_router_replay.mcore.attention.indexers import FoundIndexer
from megatron_router_replay.mcore.attention.sparse import Question, tells_bounds
from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.heart import tape
from megatron_router_replay.mcore.heart.decision import Counter
from megatron_router_replay.mcore.heart.streams import to_device
from megatron_router_replay.mcore.model.upstream import megatron_version
from megatron_router_replay.trace import RoutingTrace


class SessionPositions(ABC):
    """What the sparse attentions of a session ask; it lives as long as its session.

    Args:
        session: which takes micro-batches.
        chunks: its chunks that take micro-batches.
    """

    queued = True

    def __init__(self, session: Any, chunks: Sequence[Chunk]) -> None:
        self.kind, self.made_at = session.kind, session.made_at
        self.session: Any = weakref.ref(session)
        self.indexer_counter = Counter()
        self._chunks = {chunk.index: chunk for chunk in chunks}
        self._chunk_of: dict[Any, Chunk] = {}

    def take_part(self, found: Sequence[FoundIndexer]) -> None:
        """Learn which chunk each attention is in.

        Raises:
            UnsupportedRouterError: a chunk takes no micro-batches, so its attentions cannot know their rows; or this
                Megatron-Core does not say where samples begin.
        """
        if found and not tells_bounds():
            raise UnsupportedRouterError(
                f"MRR401: Megatron-Core {megatron_version()} does not tell its indexers where samples begin among the keys: "
                "record and replay of positions need 0.19 or later."
            )
        for each in found:
            if each.is_mtp:
                continue  # live, and frozen in recomputes
            if each.chunk not in self._chunks:
                raise UnsupportedRouterError(
                    f"MRR401: {each}: its chunk has no MoE layer that takes micro-batches, so which tokens the attention "
                    "gets is not known. Split the pipeline so that each stage has one, or leave positions out."
                )
            self._chunk_of[each.attention] = self._chunks[each.chunk]

    def layer_numbers(self, chunk_index: int | None = None) -> list[int]:
        """Return the layers that have an indexer of their own."""
        return sorted(
            attention.layer_number
            for attention, chunk in self._chunk_of.items()
            if attention.indexer is not None and chunk_index in (None, chunk.index)
        )

    @property
    def topk(self) -> int:
        """The model's index_topk."""
        return int(next(iter(self._chunk_of)).config.dsa_indexer_topk)

    def source(self, attention: Any) -> SessionPositions | None:
        """Return itself; None: the attention of an MTP layer is live."""
        return self if attention in self._chunk_of else None

    @abstractmethod
    def choose(self, attention: Any, question: Question, needs_scores: bool) -> tuple[Tensor | None, Tensor]:
        """See `sparse.Source`."""

    def _microbatch(self, attention: Any, question: Question) -> tuple[Chunk, int, Tensor, Tensor, Tensor]:
        """Return (chunk, number of the micro-batch, rows [b, sq], own positions [sq], begins of samples [sq]) of a call."""
        chunk, who = self._chunk_of[attention], tape.layer_of(attention)
        microbatch = chunk.queue.running(who)
        assert microbatch.batch_rows is not None, "sessions with positions keep them"
        if attention.layer_number in microbatch.attended:
            raise ReplayStateError(
                f"MRR407: {chunk.queue.where}, micro-batch {microbatch.number}: one forward of the model called {who} twice. "
                "A micro-batch has one set of positions for a token in a layer."
            )
        microbatch.attended.add(attention.layer_number)
        starts, ends = question.bounds(who)
        rows = chunk.query_rows(microbatch.batch_rows, question.shape, who)
        return chunk, microbatch.number, rows, ends - 1 - starts, starts


class RecordedPositions(SessionPositions):
    """Keeps what indexers chose."""

    def __init__(self, session: Any, chunks: Sequence[Chunk]) -> None:
        super().__init__(session, chunks)
        # (chunk, micro-batch) -> layer -> rows [n], own positions [n], positions in their samples [n, k] int32
        self._kept: dict[tuple[int, int], dict[int, tuple[Tensor, Tensor, Tensor]]] = {}
        self._done: set[tuple[int, int]] = set()

    def choose(self, attention: Any, question: Question, needs_scores: bool) -> tuple[Tensor | None, Tensor]:
        """Let the indexer choose, and keep it; see `sparse.Source`."""
        chunk, number, rows, queries, starts = self._microbatch(attention, question)
        scores, positions = question.score()
        in_sample = torch.where(positions >= 0, positions - starts.unsqueeze(1), -1).to(torch.int32)
        keep = self.session()._to_host
        kept = keep(rows.flatten()), keep(queries.expand(rows.shape).flatten()), keep(in_sample.flatten(0, 1))
        self._kept.setdefault((chunk.index, number), {})[attention.layer_number] = kept
        return scores, positions

    def done(self, chunk_index: int, number: int) -> None:
        """Take note that the routers of a micro-batch have routed it; one that failed before is not recorded."""
        self._done.add((chunk_index, number))

    def trace(self, num_tokens: int) -> PositionTrace | None:
        """Return what was recorded, of other rows nothing; None: no attention of this rank ran that has an indexer.

        Raises:
            TraceError: a layer's attention did not run in a micro-batch, or a row was recorded twice with other positions.
        """
        parts = []
        for index in self._chunks:
            layers = self.layer_numbers(index)
            for number in sorted(number for chunk, number in self._done if chunk == index and layers):
                kept = self._kept.get((index, number), {})
                if missing := sorted(set(layers) - set(kept)):
                    raise TraceError(
                        f"MRR422: in micro-batch {number} of chunk {index} the attention of layers {missing} did not run."
                    )
                rows, queries, _ = kept[layers[0]]
                positions = torch.stack([kept[layer][2] for layer in layers], dim=1)
                positions = torch.nn.functional.pad(positions, (0, self.topk - positions.shape[2]), value=-1)
                real = rows >= 0
                part = PositionTrace.from_positions(
                    positions[real], positions_in_sample=queries[real], layer_numbers=layers, topk=self.topk
                )
                parts.append(place_positions(part, rows[real], num_tokens))
        return merge_positions(parts) if parts else None


class ReplayedPositions(SessionPositions):
    """Gives attention what a trace holds.

    Args:
        trace: the session's positions.
        routes: the session's trace, whose rows these are.
    """

    def __init__(self, session: Any, chunks: Sequence[Chunk], trace: PositionTrace, routes: RoutingTrace) -> None:
        super().__init__(session, chunks)
        self._trace = trace
        if trace.num_tokens != routes.num_tokens:
            raise TraceError(
                f"MRR114: positions are of {trace.num_tokens} rows, routes of {routes.num_tokens}: both must be of one batch."
            )
        lost = routes.replay_mask.cpu() & (trace.positions_in_sample < 0)
        if bool(lost.any()):
            raise TraceError(
                f"MRR114: {int(lost.sum())} rows have routes and no positions, the first is row {int(lost.nonzero()[0])}. "
                "Leave them out of the routes, too: trace.keep(positions.positions_in_sample >= 0)."
            )

    def take_part(self, found: Sequence[FoundIndexer]) -> None:
        super().take_part(found)
        if not self._chunk_of:
            raise UnsupportedRouterError("MRR401: positions= was given, and no layer here has sparse attention (DSA).")
        if missing := sorted(set(self.layer_numbers()) - set(self._trace.layer_numbers)):
            raise TraceError(f"MRR114: positions lack layers {missing}; they have {list(self._trace.layer_numbers)}.")
        sharing = {attention.layer_number for attention in self._chunk_of if attention.indexer is None}
        if unused := sorted(sharing & set(self._trace.layer_numbers)):
            raise TraceError(
                f"MRR114: positions have layers {unused}, which share an earlier layer's choice in this model and would "
                "attend to that: give positions of the layers that have an indexer of their own."
            )
        if self._trace.topk != self.topk:
            raise TraceError(
                f"MRR114: positions hold {self._trace.topk} a token and layer, the model's dsa_indexer_topk is {self.topk}."
            )

    def choose(self, attention: Any, question: Question, needs_scores: bool) -> tuple[Tensor | None, Tensor]:
        """Take positions from the trace, of rows without any from the indexer; see `sparse.Source`."""
        chunk, number, rows, queries, starts = self._microbatch(attention, question)
        in_sample = torch.where(rows >= 0, self._trace.positions_in_sample[rows.clamp(min=0)], -1)
        known = in_sample >= 0
        expected = to_device(in_sample, queries.device)
        self.session()._check(
            ((expected != queries) & (expected >= 0)).any(),
            f"MRR203: micro-batch {number}: {tape.layer_of(attention)} has tokens at other places of their samples than "
            "where their positions were chosen: samples were cut at the front, padded on the left, or joined to one.",
        )
        width = min(self.topk, question.num_keys)
        told = torch.full((*rows.shape, width), -1, dtype=torch.int64)
        told[known] = self._trace.rows(rows[known], [attention.layer_number])[:, 0, :width].to(torch.int64)
        told = to_device(told, queries.device)
        told = torch.where(told >= 0, told + starts.unsqueeze(1), -1)
        num_known = int(known.sum())
        self.indexer_counter.add(replayed=num_known, live=known.numel() - num_known)
        if needs_scores:
            scores, live = question.score()
            return scores, torch.where(to_device(known, queries.device).unsqueeze(2), told, live)
        if num_known < known.numel():
            at = to_device((~known).any(dim=0).nonzero().squeeze(1), queries.device)
            is_live = to_device(~known, queries.device).index_select(1, at).unsqueeze(2)
            _, live = question.score(at)
            told = told.index_copy(1, at, torch.where(is_live, live, told.index_select(1, at)))
        return None, told
