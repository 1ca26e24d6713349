"""Find wrong rows on this rank: from its compared layers to anomalies, each with its evidence and a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron_router_replay.mcore.judge.blocks import (
    EVIDENCE,
    NUM_APART,
    ROW_EVIDENCE,
    Block,
    ComparedRows,
    clearest_blocks,
    highest_rises,
    sums_of_kinds,
)
from megatron_router_replay.mcore.judge.causes import cause_of, moved_by
from megatron_router_replay.mcore.judge.places import ComparedPlaces
from megatron_router_replay.mcore.judge.sums import Sums
from megatron_router_replay.trace import RoutingTrace

SHARED_NOISE = 15.0
"""The most that the rows of a sample on one rank rise by noise; evidence above it adds up over the ranks that share it."""
MOST_SHARED_BLOCKS = 1024
"""Samples of which a rank publishes parts."""
MOST_RANGES = 4096
"""Ranges of wrong rows that a rank publishes."""


class Anomaly(NamedTuple):
    """Evidence of wrong rows, and a text that names the rows and their fault."""

    evidence: float = 0.0
    text: str = ""


class ComparedLayer(NamedTuple):
    """A layer of a micro-batch, which the host reads when the session ends.

    Args:
        microbatch: (chunk, number of the micro-batch).
        shape: (positions, sequences) of the rows, which are s-major.
        rows: [n] int64, rows of the trace; None: unknown.
        packed: [n, topk + 2] integers: 3 * expert + 2 if the live router chooses the expert, + 1 if it is inside, + 0 else;
            then the two experts that the live router ranks first, -1 in a row that is not replayed.
        loads: [2, num_experts] int32, in how many rows an expert is live, and inside.
    """

    microbatch: tuple[int, int]
    layer: int
    shape: tuple[int, int]
    rows: Tensor | None
    packed: Tensor
    loads: Tensor


class SharedBlock(NamedTuple):
    """The clearest block of a sequence on one of the ranks that share it.

    Args:
        name: of the sequence and layer, the same on these ranks.
        by_kind: kind of row -> its sum.
        rows: of the trace, as [first, stop].
    """

    name: str
    evidence: float
    by_kind: dict[str, float]
    text: str
    rows: list[list[int]]


class RankAgreement(NamedTuple):
    """The sums of a rank over the layers that it compared in a session, and its anomalies.

    Args:
        replica: of its tensor-parallel ranks with the same rows, which number it has.
        layers: layer number -> its sums.
        anomalies: the clearest ones.
        shared_blocks: blocks of sequences that it shares with other ranks.
        rows_apart: see `RankEvidence`.
        trace: a name of its trace.
        wrong_rows: of that trace, as [first, stop].
        layout: see `agreement.LiveAgreement`.
    """

    replica: int = 0
    layers: Mapping[int, Sums] = {}
    anomalies: Sequence[Anomaly] = ()
    shared_blocks: Sequence[SharedBlock] = ()
    rows_apart: int = 0
    trace: str = ""
    wrong_rows: Sequence[Sequence[int]] = ()
    layout: Sequence[str] = ()

    def published(self) -> RankAgreement:
        """Return the part of it that other ranks read: of 1,024 ranks, one reads all.

        An anomaly that does not raise is for the rank's own report, and of those that raise, the clearest is kept. Six digits
        of a sum are more than a threshold means.
        """
        raising = [each for each in self.anomalies if each.evidence >= EVIDENCE]
        layers = {number: Sums(*(float(f"{value:.6g}") for value in sums)) for number, sums in self.layers.items()}
        return self._replace(anomalies=[max(raising)] if raising else [], layers=layers)

    @classmethod
    def of_json(cls, values: Sequence[Any]) -> RankAgreement:
        """Return what became JSON values."""
        read = cls(*values)
        return read._replace(
            layers={int(number): Sums(*sums) for number, sums in read.layers.items()},
            anomalies=[Anomaly(*each) for each in read.anomalies],
            shared_blocks=[SharedBlock(*each) for each in read.shared_blocks],
        )


@dataclass(slots=True)
class _Layer:
    """The rows of a layer, or the sums over several layers, and their places.

    Args:
        layers: their numbers.
        ratios, kinds: [n], see `blocks`.
        places: of the rows.
    """

    layers: list[int]
    ratios: Any
    kinds: Any
    places: ComparedPlaces

    def rises(self) -> Iterator[float]:
        """Yield for each sequence the most that a block of it may have as its evidence."""
        end = 0
        for _, (length, num_sequences) in self.places.parts:
            begin, end = end, end + length * num_sequences
            yield from highest_rises(self.ratios[begin:end].reshape(num_sequences, length)).tolist()

    def __str__(self) -> str:
        return f"layer {self.layers[0]}" if len(self.layers) == 1 else f"layers {', '.join(map(str, self.layers))}"


class RankEvidence:
    """The anomalies of a rank in the rows that it compared.

    Args:
        compared: each layer of a micro-batch, with its packed rows and loads as arrays.
        topk, num_experts: of the model.
        rank: this process, for messages.
        trace: of the session, to name samples; None: unknown.

    Attributes:
        sums: by layer.
        anomalies: faults that the evidence suggests.
        rows_apart: single rows without an expert inside, over all layers.
        wrong_rows: rows of the trace that raise, as [first, stop].
    """

    def __init__(
        self,
        compared: Sequence[tuple[ComparedLayer, Any, Any]],
        *,
        topk: int,
        num_experts: int,
        rank: int,
        trace: RoutingTrace | None,
    ) -> None:
        self._rank, self._trace = rank, trace
        self._topk, self._num_experts = topk, num_experts
        self.sums: dict[int, Sums] = {}
        self.anomalies: list[Anomaly] = []
        self.rows_apart = 0
        self._wrong: list[Any] = []  # rows of the trace
        by_layer: dict[int, list[Any]] = {}
        by_microbatch: dict[tuple[int, int], list[Any]] = {}
        for part in compared:
            by_layer.setdefault(part[0].layer, []).append(part)
            by_microbatch.setdefault(part[0].microbatch, []).append(part)
        self._rows: dict[int, ComparedRows] = {}
        self._of_number = {number: self._layer(number, parts) for number, parts in sorted(by_layer.items())}
        self._add_single_rows()
        for number in self._rows:
            self._add_experts(number)
        self._layers = [*self._of_number.values(), *self._sums_over_layers(by_layer, by_microbatch)]
        for layer in self._layers:
            self._add_blocks(layer)

    @property
    def wrong_rows(self) -> list[list[int]]:
        rows: Any = np.unique(np.concatenate([np.zeros(0, np.int64), *self._wrong]))
        return _ranges(rows)[:MOST_RANGES]

    # ---- rows
    def _layer(self, number: int, parts: Sequence[Any]) -> _Layer:
        """Put the rows of a layer in the order of their sequences."""
        ordered, chances = [], []
        for compared, packed, loads in parts:
            length, num_sequences = compared.shape
            num, width = packed.shape  # named, because a micro-batch may have no rows
            columns = packed.reshape(length, num_sequences, width).transpose(2, 1, 0).reshape(width, num)
            ordered.append(columns)
            chances.append((loads / max(1, int((columns[self._topk] >= 0).sum()))).astype(np.float32))
        columns, (live_chance, chance) = np.concatenate(ordered, axis=1), np.stack(chances, axis=1)
        first, second = columns[self._topk :].astype(np.int32)
        places = self._places([part[0] for part in parts])
        rows = ComparedRows(
            codes=columns[: self._topk],
            kinds=np.where(first >= 0, first * self._num_experts + second, -1),
            ends=np.cumsum([each.shape[1] for each in ordered]),
            live_chance=live_chance,
            chance=chance,
            versions=places.versions(),
        )
        self.sums[number], self._rows[number] = Sums.of(rows), rows
        return _Layer([number], rows.ratios(), rows.kinds, places)

    def _places(self, parts: Sequence[ComparedLayer]) -> ComparedPlaces:
        named = [(each.microbatch, each.shape, each.rows) for each in parts]
        return ComparedPlaces.of(named, rank=self._rank, trace=self._trace)

    def _sums_over_layers(self, by_layer: Mapping[int, Any], by_microbatch: Mapping[Any, Any]) -> list[_Layer]:
        """Return sums over layers: one for the micro-batches that compared the same several layers."""
        values: dict[Any, tuple[Any, Any]] = {}
        for number, parts in by_layer.items():
            layer = self._of_number[number]
            ends = np.cumsum([len(packed) for _, packed, _ in parts])[:-1]
            for part, ratios, kinds in zip(parts, np.split(layer.ratios, ends), np.split(layer.kinds, ends)):
                values[part[0].microbatch, number] = ratios, kinds
        by_layers: dict[tuple[int, ...], list[Any]] = {}
        for name, parts in by_microbatch.items():
            numbers = tuple(sorted(part[0].layer for part in parts))
            if len(set(numbers)) > 1:
                by_layers.setdefault(numbers, []).append((name, parts[0][0]))
        together = []
        for numbers, microbatches in by_layers.items():
            summed = [sum(values[name, number][0] for number in numbers) for name, _ in microbatches]
            of_first = [values[name, numbers[0]][1] for name, _ in microbatches]
            of_rows = np.clip(np.concatenate(summed), -ROW_EVIDENCE, ROW_EVIDENCE)
            places = self._places([compared for _, compared in microbatches])
            together.append(_Layer(list(numbers), of_rows, np.concatenate(of_first), places))
        return together

    # ---- faults
    def _add_single_rows(self) -> None:
        apart, noise = {}, {}
        for number, rows in self._rows.items():
            single, noise[number] = rows.apart()
            apart[number] = int(single.sum())
        self.rows_apart = sum(apart.values())
        for numbers in (*([number] for number in self._rows), list(self._rows)):
            num_apart, most = (sum(each[number] for number in numbers) for each in (apart, noise))
            if num_apart < NUM_APART:
                continue
            where = f"layer {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} layers"
            text = (
                f"rank {self._rank}, {where}: {num_apart} single rows have no expert near the live router's choice, where "
                f"near-ties give {most:.0f} at most: were rows overwritten before they were copied?"
            )
            anomaly = Anomaly(EVIDENCE * num_apart / most, text)
            self.anomalies.append(anomaly)
            if anomaly.evidence >= EVIDENCE:
                for number in numbers:
                    self._add_wrong(self._of_number[number], np.flatnonzero(self._rows[number].all_outside()))

    def _add_experts(self, number: int) -> None:
        wrong, evidence = self._rows[number].wrong_experts()
        if len(wrong):
            listed = ", ".join(map(str, wrong[:16].tolist())) + (", ..." if len(wrong) > 16 else "")
            text = (
                f"rank {self._rank}, layer {number}: experts {listed} are hardly ever near the live router's choice where "
                "they are replayed: physical ids of redundant experts in place of logical ones?"
            )
            self.anomalies.append(Anomaly(evidence, text))

    def _add_blocks(self, layer: _Layer) -> None:
        blocks = clearest_blocks(layer.ratios, layer.kinds)
        raising = [block for block in blocks if block.evidence >= EVIDENCE]
        for block in raising:
            self._add_wrong(layer, np.arange(block.first, block.stop))
        if blocks:
            more = f" ({len(raising)} such blocks)" if len(raising) > 1 else ""
            self.anomalies.append(Anomaly(blocks[0].evidence, self._describe(layer, blocks[0]) + more))

    def _add_wrong(self, layer: _Layer, at: Any) -> None:
        if layer.places.rows is not None:
            rows = layer.places.rows[at]
            self._wrong.append(rows[rows >= 0].astype(np.int64))

    def _describe(self, layer: _Layer, block: Block) -> str:
        text = f"rank {self._rank}, {layer.places.name(block)}, {layer}: routes of other tokens"
        return text if block.evidence < EVIDENCE else "; ".join([text, *filter(None, self._causes(layer, block))])

    def _causes(self, layer: _Layer, block: Block) -> Iterable[str]:
        rows = layer.places.trace_rows(block)
        cause = cause_of(self._trace, rows) if self._trace is not None and len(rows) else ""
        yield cause or self._moved(layer, block)
        if len(layer.layers) == 1 and len(rows) and self._others_are_right(layer, rows):
            yield "the other layers of these tokens are right: those of a draft model, or of a different layer?"

    def _moved(self, layer: _Layer, block: Block) -> str:
        """Return by how many tokens the routes of a block moved, in the first of its layers; "" if they did not."""
        number = layer.layers[0]
        rows, places = self._rows[number], self._of_number[number].places
        name, begin, _ = next(each for each in layer.places.sequences() if block.first < each[2])
        # Of a layer that was compared alone in more micro-batches, the sequence has a different place.
        _, begin_of_layer, end = next(each for each in places.sequences() if each[0] == name)
        first, stop = (at - begin + begin_of_layer for at in (block.first, block.stop))
        experts_ranked_first = np.where(rows.counts, rows.kinds // self._num_experts, -1)
        block = Block(block.evidence, first, stop)
        return moved_by((rows.codes // 3).T, experts_ranked_first, block, begin_of_layer, end)

    def _others_are_right(self, layer: _Layer, rows: Any) -> bool:
        """Return if other layers were compared in these rows of the trace, and all are right."""
        others = [each for each in self._of_number.values() if each is not layer and each.places.rows is not None]
        sums = [float(each.ratios[np.isin(each.places.rows, rows)].sum()) for each in others]
        return any(sums) and max(sums) <= 0

    def shared_blocks(self, owner: int) -> list[SharedBlock]:
        """Return the blocks that may be too small for this rank alone, the clearest of each sequence."""
        found = []
        for layer in self._layers:
            for (name, first, stop), rise in zip(layer.places.sequences(), layer.rises()):
                if rise <= SHARED_NOISE:
                    continue
                evidence, begin, end = clearest_blocks(layer.ratios[first:stop], layer.kinds[first:stop])[0]
                if evidence > SHARED_NOISE:
                    block = Block(evidence, first + begin, first + end)
                    rows = slice(block.first, block.stop)
                    by_kind = sums_of_kinds(layer.ratios[rows], layer.kinds[rows])
                    ranges = _ranges(np.unique(layer.places.trace_rows(block)))[:MOST_RANGES]
                    name = f"{owner} {name} {layer.layers}"
                    found.append(SharedBlock(name, evidence, by_kind, self._describe(layer, block), ranges))
        return sorted(found, key=lambda each: -each.evidence)[:MOST_SHARED_BLOCKS]


def _ranges(rows: Any) -> list[list[int]]:
    """Return sorted rows as [first, stop] of neighbours."""
    if not len(rows):
        return []
    cuts = np.flatnonzero(np.diff(rows) > 1) + 1
    return [[int(part[0]), int(part[-1]) + 1] for part in np.split(rows, cuts)]
