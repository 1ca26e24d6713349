"""Compare replayed experts with the live router.

In each micro-batch with replayed rows, one layer of a chunk also computes which experts its own router would choose; in the
first one that a process runs on the chunk, all layers do. The device packs for each row which of its replayed experts the
live router chooses or nearly chooses. When the session ends, `verdict` computes the *agreement* of each layer (1: the same
experts, 0: no more than by chance), and searches for wrong rows (`blocks`).
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.batches.microbatch import Microbatch
from megatron_router_replay.mcore.core.call import TopKRequest
from megatron_router_replay.mcore.core.streams import current_stream, wait_stream
from megatron_router_replay.mcore.judge.blocks import EVIDENCE
from megatron_router_replay.mcore.judge.rank_evidence import Anomaly, ComparedLayer, RankAgreement, RankEvidence
from megatron_router_replay.mcore.judge.sums import Sums, agreement_by_layer
from megatron_router_replay.mcore.judge.verdict import WARN
from megatron_router_replay.trace import RoutingTrace

ALL = -1
"""In place of a layer's position: all layers are compared."""

_num_microbatches: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Innermost module of a chunk -> number of micro-batches that it ran; the number chooses the layer to compare."""

_all_compared: WeakSet[nn.Module] = WeakSet()
"""Innermost modules of chunks of which a micro-batch compared all layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveAgreement:
    """Agreement of the live router with the replayed routes.

    Args:
        layers: layer number -> its sums over this session.
        num_layers: layers that replay.
        block: the neighbouring rows with the strongest evidence of a fault.
        rows_apart: single rows without an expert near the live router's choice.
        layout: facts of the forwards' layout that make attention see different tokens than in the engine.
    """

    layers: Mapping[int, Sums]
    num_layers: int
    block: Anomaly = Anomaly()
    rows_apart: int = 0
    layout: Collection[str] = ()

    @property
    def all_layers(self) -> float | None:
        """Agreement over all layers that were compared; None: no row was."""
        sums = Sums(*map(sum, zip(Sums(), *self.layers.values())))
        return sums.agreement if sums.rows else None

    @property
    def by_layer(self) -> dict[int, float]:
        """Layer number -> agreement, of those with enough evidence."""
        return agreement_by_layer(self.layers)

    def to_dict(self) -> dict[str, float | None]:
        """Return the numbers to plot."""
        if self.all_layers is None:
            return {}
        return {
            "agreement": self.all_layers,
            "agreement_least_layer": min(self.by_layer.values(), default=None),
            "block_evidence": self.block.evidence,
            "rows_apart": self.rows_apart,
        }

    def low(self) -> list[tuple[str, str, str]]:
        """Return the facts that look wrong: (name, value, remark) of each."""
        number, value = min(self.by_layer.items(), key=lambda each: each[1], default=(0, 1.0))
        remark = f"layer {number}: {'; '.join(sorted(self.layout)) or 'routes of older weights, or of other rows?'}"
        facts = [("least layer", f"{value:.0%}", remark)] if value < WARN else []
        if self.block.evidence >= EVIDENCE:
            facts.append(("evidence of wrong rows", f"{self.block.evidence:.0f}", self.block.text))
        return facts

    def __str__(self) -> str:
        if self.all_layers is None:
            return "the live router was compared in no row"
        if not self.by_layer:
            return f"too few routes were compared in any of {self.num_layers} layers"
        layers = f"{len(self.by_layer)} of {self.num_layers} layers have enough evidence"
        return f"the live router agrees with {self.all_layers:.1%} of the trace's routes beyond chance ({layers})"


class Agreement:
    """Compare layers of a session's micro-batches with the live router.

    Args:
        topk, num_experts: of the model.
        num_layers: layers that replay on this rank.
        every_layer: compare all layers in every micro-batch.
        rank: this process, for messages.
        trace: of the session, to name samples; None: rows have no names.
        layout: see `LiveAgreement`; facts may be added until the session ends.
    """

    def __init__(
        self,
        *,
        topk: int,
        num_experts: int,
        num_layers: int,
        every_layer: bool,
        rank: int,
        trace: RoutingTrace | None = None,
        layout: Collection[str] = (),
    ) -> None:
        self.topk, self.num_experts, self.num_layers = topk, num_experts, num_layers
        self.every_layer, self.rank, self.trace, self.layout = every_layer, rank, trace, layout
        # A replayed expert is near if it is among the live router's best `width`: 2 * topk, but with few experts fewer.
        self.width = min(2 * topk, max(topk + 1, num_experts // 2))
        self._stream: Any = None
        self._row_sharing = (0, 1, 0)
        self._compared: list[ComparedLayer] = []
        self._num_on_host = 0
        self._summary: RankAgreement | None = None

    def next_layer(self, chunk: Chunk, *, has_replayed_rows: bool) -> int | None:
        """Return the position of the layer that a chunk's next micro-batch compares, or ALL; None: none is compared."""
        if self.topk == self.num_experts:  # every token has all experts
            return None
        self._to_host()  # copies the results of earlier micro-batches while the device runs this one
        # Counted also without replayed rows, because ranks that share sequences compare the same layer.
        number = _num_microbatches[chunk.module] = _num_microbatches.get(chunk.module, -1) + 1
        if not has_replayed_rows:  # a dummy of a data-parallel rank
            return None
        if self.every_layer or chunk.module not in _all_compared:
            _all_compared.add(chunk.module)
            return ALL
        return (number - 1) % len(chunk.replayed_routers)

    def add(
        self,
        microbatch: Microbatch,
        chunk: Chunk,
        layer: int,
        *,
        request: TopKRequest,
        replayed: Tensor,
        counts: Tensor | None,
    ) -> None:
        """Compare a layer of a micro-batch, without device synchronization.

        Args:
            request: of the live router.
            replayed: [n, topk] int64.
            counts: [n] bool, True: the row is replayed; None: all are.
        """
        if not self._compared:
            self._row_sharing = chunk.row_sharing  # the same for all chunks of a rank
        scores = request.scores.detach()
        values, ranked = scores.topk(self.width, dim=1)
        # Each row's levels of all experts, [2, n, num_experts]: live, and near. An expert with the same score as the last
        # live one could be live as well, and counts so.
        if request.group_topk:  # a live expert may rank low
            is_live = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, request.live_topk()[1], True)
            levels = torch.stack([is_live, (scores >= values[:, -1:]) | is_live])
        else:
            last_of_each = values[:, self.topk - 1 :: self.width - self.topk]
            levels = scores >= last_of_each.t().unsqueeze(2)
        # A row has topk + 2 numbers: 3 * id + level of each replayed expert (2: live, 1: near, 0: neither), and the two that
        # the live router ranks first, or -1 if the row is not replayed.
        dtype = torch.int16 if 3 * self.num_experts <= 1 << 15 else torch.int32
        packed = torch.empty(len(scores), self.topk + 2, dtype=dtype, device=scores.device)
        level = levels.gather(2, replayed.expand(2, -1, -1)).sum(0, dtype=dtype)
        torch.add(level, replayed, alpha=3, out=packed[:, : self.topk])
        first = ranked[:, :2]
        if counts is not None:
            first, levels = torch.where(counts.unsqueeze(1), first, -1), levels & counts.unsqueeze(1)
        packed[:, self.topk :] = first
        loads = levels.sum(1, dtype=torch.int32)
        key = chunk.index, microbatch.number
        if self._stream is None:
            self._stream = current_stream(scores.device)
        elif (stream := current_stream(scores.device)) != self._stream:
            stream.wait_stream(self._stream)  # so that waiting for the last stream is enough
            self._stream = stream
        self._compared.append(ComparedLayer(key, layer, microbatch.shape, microbatch.rows, packed, loads))
        self._summary = None

    def _to_host(self) -> None:
        """Copy the comparisons of earlier micro-batches to the host, without a wait."""
        waiting = self._compared[self._num_on_host :]
        if waiting and self._stream is not None:
            on_device = [each.packed for each in waiting]
            on_device += [each.rows for each in waiting if each.rows is not None and each.rows.is_cuda]
            wait_stream(self._stream, *on_device)
            self._stream = current_stream(on_device[0].device)
            # Layers of a micro-batch share its rows.
            copies = {id(each): each.to("cpu", non_blocking=True) for each in on_device}
            for number, each in enumerate(waiting, self._num_on_host):
                rows = None if each.rows is None else copies.get(id(each.rows), each.rows)
                self._compared[number] = each._replace(packed=copies[id(each.packed)], rows=rows)
        self._num_on_host = len(self._compared)

    # ---- the end
    def summary(self) -> RankAgreement:
        """Return what this rank publishes at the end of the session; waits for the device once."""
        if self._summary is None:
            replica, sharing, owner = self._row_sharing
            evidence = RankEvidence(
                self._on_host(),
                topk=self.topk,
                num_experts=self.num_experts,
                rank=self.rank,
                trace=self.trace,
            )
            self._summary = RankAgreement(
                replica=replica,
                layers=evidence.sums,
                anomalies=sorted(evidence.anomalies, reverse=True)[:4],
                # A block may lie on several ranks.
                shared_blocks=evidence.shared_blocks(owner) if sharing > 1 else [],
                rows_apart=evidence.rows_apart,
                trace=self._trace_name(),
                wrong_rows=evidence.wrong_rows,
                layout=sorted(self.layout),
            )
        return self._summary

    def _trace_name(self) -> str:
        """Return a name by the tokens of the trace, for pipeline stages that replay it may have different layers."""
        if self.trace is None:
            return ""
        tokens = self.trace.token_ids
        return f"{self.trace.num_tokens} {0 if tokens is None else zlib.crc32(tokens.cpu().numpy().tobytes())}"

    def wrong_rows(self, ranges: Mapping[str, Sequence[Sequence[int]]]) -> Tensor | None:
        """Return a mask over the rows of this rank's trace, [num_tokens] bool: True where a rank found a wrong row."""
        if self.trace is None:
            return None
        mask = torch.zeros(self.trace.num_tokens, dtype=torch.bool)
        for first, stop in ranges.get(self._trace_name(), ()):
            mask[first:stop] = True
        return mask

    def _on_host(self) -> list[tuple[ComparedLayer, Any, Any]]:
        """Return each comparison with its packed rows and loads, as arrays."""
        if not self._compared:
            return []
        self._to_host()
        loads = [each.loads for each in self._compared]
        wait_stream(self._stream, *loads)
        # .cpu() waits for the stream, and so for the copies before it.
        all_loads = torch.stack(loads).cpu().numpy()
        return [(each, each.packed.numpy(), load) for each, load in zip(self._compared, all_loads)]

    def report(self) -> LiveAgreement:
        """Return the comparison so far; waits for the device."""
        summary = self.summary()
        return LiveAgreement(
            layers=summary.layers,
            num_layers=self.num_layers,
            block=max(summary.anomalies, default=Anomaly()),
            rows_apart=summary.rows_apart,
            layout=summary.layout,
        )
