"""Judge the comparison of replayed experts with the live router: this rank's rows, then all ranks of a session together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron_router_replay.mcore.sessions.blocks import (
    EVIDENCE,
    NUM_APART,
    ROW_EVIDENCE,
    Block,
    ComparedRows,
    evidence_of,
    find_blocks,
    sums_of_kinds,
)
from megatron_router_replay.mcore.sessions.wrong_rows import ComparedPlaces, cause_of, moved_by
from megatron_router_replay.trace import RoutingTrace

LEAST_DECISIONS = 128.0
"""Experts beyond chance below which the agreement of a layer is not judged."""
WARN = 0.5
"""Agreement of a layer below which a session warns."""
PART_EVIDENCE = 15.0
"""The most that the rows of a sample on one rank rise by noise; what is above it adds up over the ranks that share it."""
MOST_PARTS = 1024
"""Samples of which a rank publishes parts."""
MOST_RANGES = 4096
"""Ranges of wrong rows that a rank publishes."""


class Sums(NamedTuple):
    """Sums of a layer: rows, shared experts beyond chance, the most that these could be; these two with kinds bounded."""

    rows: float = 0.0
    shared: float = 0.0
    most: float = 0.0
    shared_of_kinds: float = 0.0
    most_of_kinds: float = 0.0

    @property
    def agreement(self) -> float:
        return max(-1.0, self.shared / max(self.most, 1e-9))

    @property
    def judged(self) -> float | None:
        """Agreement of rows or of kinds of rows, whichever is more; None: there are too few to judge."""
        if self.most_of_kinds < LEAST_DECISIONS:
            return None
        return max(self.agreement, self.shared_of_kinds / self.most_of_kinds)

    @classmethod
    def of(cls, rows: ComparedRows) -> Sums:
        topk = rows.experts.shape[1]
        missed = topk - rows.is_live.sum(1)
        most = (1 - rows.live_chance).sum(1)
        counts, weights = rows.counts, rows.weights()
        columns = (counts, (most - missed) * counts, most * counts, (most - missed) * weights, most * weights)
        return cls(*(float(each.sum()) for each in columns))

    def plus(self, other: Iterable[float]) -> Sums:
        return Sums(*map(sum, zip(self, other)))


class Finding(NamedTuple):
    """Rows that look like those of other tokens: the evidence, and where they are and what is wrong."""

    evidence: float = 0.0
    text: str = ""


class ComparedLayer(NamedTuple):
    """A layer of a micro-batch, which the host reads when the session ends.

    Args:
        microbatch: (chunk, number of the micro-batch).
        shape: (positions, sequences) of the rows, which are s-major.
        rows: [n] int64, rows of the trace; None: not known.
        packed: [n, topk + 2] int16: 3 * expert + 2 if the live router chooses the expert, + 1 if it is inside, + 0 else; then
            the two experts that the live router ranks first, -1 in a row that is not replayed.
        loads: [2, num_experts] int32, in how many rows an expert is live, and inside.
    """

    microbatch: tuple[int, int]
    layer: int
    shape: tuple[int, int]
    rows: Tensor | None
    packed: Tensor
    loads: Tensor


class Part(NamedTuple):
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


@dataclass(slots=True)
class _Layer:
    """A layer, or several together, with where its rows are.

    Args:
        layers: their numbers.
        ratios, kinds: [n], see `blocks`.
        places: of the rows.
        compared: the rows of a single layer; None: there are several.
    """

    layers: list[int]
    ratios: Any
    kinds: Any
    places: ComparedPlaces
    compared: ComparedRows | None = None

    def __str__(self) -> str:
        return f"layer {self.layers[0]}" if len(self.layers) == 1 else f"layers {', '.join(map(str, self.layers))}"


class RankJudgement:
    """All that a rank finds in what it compared.

    Args:
        compared: each layer of a micro-batch, with its packed rows and loads as arrays.
        topk, num_experts: of the model.
        rank: this process, for messages.
        trace: of the session, to name samples; None: not known.

    Attributes:
        sums: by layer.
        findings: what may be wrong.
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
        self.findings: list[Finding] = []
        self.rows_apart = 0
        self._wrong: list[Any] = []  # rows of the trace
        by_layer: dict[int, list[Any]] = {}
        by_microbatch: dict[tuple[int, int], list[Any]] = {}
        for part in compared:
            by_layer.setdefault(part[0].layer, []).append(part)
            by_microbatch.setdefault(part[0].microbatch, []).append(part)
        self._layers = [self._layer(number, parts) for number, parts in sorted(by_layer.items())]
        self._judge_single_rows()
        for layer in self._layers:
            self._judge_experts(layer)
        self._layers += self._together(by_layer, by_microbatch)
        for layer in self._layers:
            self._judge_blocks(layer)

    @property
    def wrong_rows(self) -> list[list[int]]:
        rows: Any = np.unique(np.concatenate([np.zeros(0, np.int64), *self._wrong]))
        return _ranges(rows)[:MOST_RANGES]

    # ---- rows
    def _layer(self, number: int, parts: Sequence[Any]) -> _Layer:
        """Put the rows of a layer in the order of their sequences."""
        ordered, chances, versions = [], [], []
        trace = self._trace
        for compared, packed, loads in parts:
            order = _sequence_order(compared.shape)
            ordered.append(packed[order])
            num = max(1, int((packed[:, self._topk] >= 0).sum()))
            chances.append((loads / num).astype(np.float32)[:, ordered[-1][:, : self._topk] // 3])
            if trace is not None and trace.weight_version is not None and compared.rows is not None:
                row = compared.rows.numpy().ravel()[order]
                versions.append(np.where(row >= 0, trace.weight_version.cpu().numpy()[row], -1))
        rows, (live_chance, chance) = np.concatenate(ordered), np.concatenate(chances, axis=1)
        first = rows[:, self._topk :].astype(np.int64)
        compared_rows = ComparedRows(
            experts=rows[:, : self._topk] // 3,
            is_live=rows[:, : self._topk] % 3 == 2,
            is_inside=rows[:, : self._topk] % 3 > 0,
            live_chance=live_chance,
            chance=chance,
            kinds=np.where(first[:, 0] >= 0, first[:, 0] * self._num_experts + first[:, 1], -1),
            versions=np.concatenate(versions) if len(versions) == len(parts) else None,
            num_experts=self._num_experts,
        )
        self.sums[number] = Sums.of(compared_rows)
        places = self._places([part[0] for part in parts])
        return _Layer([number], compared_rows.ratios(), compared_rows.kinds, places, compared_rows)

    def _places(self, parts: Sequence[ComparedLayer]) -> ComparedPlaces:
        named = [(each.microbatch, each.shape, each.rows) for each in parts]
        return ComparedPlaces.of(named, rank=self._rank, trace=self._trace)

    def _together(self, by_layer: Mapping[int, Any], by_microbatch: Mapping[Any, Any]) -> list[_Layer]:
        """Return the layers of micro-batches together that compared several: a row is the sum of its layers."""
        values: dict[Any, tuple[Any, Any]] = {}
        for layer, (number, parts) in zip(self._layers, sorted(by_layer.items())):
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
    def _judge_single_rows(self) -> None:
        apart: list[int] = []
        noise: list[float] = []
        for layer in self._layers:
            assert layer.compared is not None, "a single layer"
            rows, most = layer.compared.apart()
            apart.append(int(rows.sum()))
            noise.append(most)
        self.rows_apart = sum(apart)
        wholes = [(each, most, [layer]) for each, most, layer in zip(apart, noise, self._layers)]
        for number, most, layers in (*wholes, (sum(apart), sum(noise), self._layers)):
            if number < NUM_APART:
                continue
            where = str(layers[0]) if len(layers) == 1 else f"{len(layers)} layers"
            text = (
                f"rank {self._rank}, {where}: {number} single rows have no expert near the live router's choice, where "
                f"near-ties give {most:.0f} at most: were rows overwritten before they were copied?"
            )
            finding = Finding(EVIDENCE * number / most, text)
            self.findings.append(finding)
            if finding.evidence >= EVIDENCE:
                for layer in layers:
                    assert layer.compared is not None, "a single layer"
                    self._add_wrong(layer, np.flatnonzero(layer.compared.counts & ~layer.compared.is_inside.any(1)))

    def _judge_experts(self, layer: _Layer) -> None:
        assert layer.compared is not None, "a single layer"
        wrong, evidence = layer.compared.wrong_experts()
        if len(wrong):
            listed = ", ".join(map(str, wrong[:16].tolist())) + (", ..." if len(wrong) > 16 else "")
            text = (
                f"rank {self._rank}, {layer}: experts {listed} are hardly ever near the live router's choice where they "
                "are replayed: physical ids of redundant experts in place of logical ones?"
            )
            self.findings.append(Finding(evidence, text))

    def _judge_blocks(self, layer: _Layer) -> None:
        blocks = find_blocks(layer.ratios, layer.kinds)
        raising = [block for block in blocks if block.evidence >= EVIDENCE]
        for block in raising:
            self._add_wrong(layer, np.arange(block.first, block.stop))
        if blocks:
            more = f" ({len(raising)} such blocks)" if len(raising) > 1 else ""
            self.findings.append(Finding(blocks[0].evidence, self._describe(layer, blocks[0]) + more))

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
        yield cause
        one = (
            layer
            if layer.compared is not None
            else next(each for each in self._layers if each.layers[0] in layer.layers)
        )
        if (
            not cause
            and one.compared is not None
            and (layer is one or len(one.places.parts) == len(layer.places.parts))
        ):
            for _, begin, end in one.places.sequences():
                if begin <= block.first < end:
                    first = np.where(one.kinds >= 0, one.kinds // self._num_experts, -1)
                    yield moved_by(one.compared.experts, first, block, begin, end)
        if layer is one and len(rows) and self._is_alone(layer, rows):
            yield "the other layers of these tokens are right: those of a draft model, or of a different layer?"

    def _is_alone(self, layer: _Layer, rows: Any) -> bool:
        """Return whether other layers compared these rows of the trace, and all found them right."""
        sums = []
        for other in self._layers:
            if other is not layer and other.compared is not None and other.places.rows is not None:
                sums.append(float(other.ratios[np.isin(other.places.rows, rows)].sum()))
        return any(sums) and max(sums) <= 0

    def parts(self, owner: int) -> list[Part]:
        """Return the blocks that may be too small for this rank alone, the clearest of each sequence."""
        found = []
        for layer in self._layers:
            for name, first, stop in layer.places.sequences():
                for evidence, begin, end in find_blocks(layer.ratios[first:stop], layer.kinds[first:stop])[:1]:
                    if evidence > PART_EVIDENCE:
                        block = Block(evidence, begin + first, end + first)
                        by_kind = sums_of_kinds(
                            layer.ratios[block.first : block.stop], layer.kinds[block.first : block.stop]
                        )
                        ranges = _ranges(np.unique(layer.places.trace_rows(block)))[:MOST_RANGES]
                        text = self._describe(layer, block)
                        found.append(Part(f"{owner} {name} {layer.layers}", evidence, by_kind, text, ranges))
        return sorted(found, key=lambda each: -each.evidence)[:MOST_PARTS]


def _ranges(rows: Any) -> list[list[int]]:
    """Return sorted rows as [first, stop] of neighbours."""
    if not len(rows):
        return []
    cuts = np.flatnonzero(np.diff(rows) > 1) + 1
    return [[int(part[0]), int(part[-1]) + 1] for part in np.split(rows, cuts)]


def _sequence_order(shape: tuple[int, int]) -> Any:
    """Return the s-major rows of a micro-batch in the order of its sequences."""
    return np.arange(shape[0] * shape[1]).reshape(shape).T.ravel()


# ---- the ranks of a session together
class Verdict(NamedTuple):
    """What the ranks of a session found together.

    Args:
        problems: why the routes are wrong.
        warnings: that they agree little.
        wrong_rows: name of a trace -> its wrong rows, as [first, stop].
    """

    problems: list[str]
    warnings: list[str]
    wrong_rows: dict[str, list[list[int]]]


def judge(everyone: Sequence[Mapping[str, Any]], least: float) -> Verdict:
    """Return what is wrong with the routes of a group of ranks, the same on all of them.

    Args:
        everyone: `Agreement.numbers` of each rank.
        least: `min_agreement` of `replay`; 0: nothing is wrong.
    """
    verdict = Verdict([], [], {})
    if not least:
        return verdict
    # Tensor-parallel ranks with the same rows are replicas: each is compared on its own.
    for replica in sorted({numbers["replica"] for numbers in everyone}):
        ranks = [numbers for numbers in everyone if numbers["replica"] == replica]
        sums = add_up((int(layer), unit) for numbers in ranks for layer, unit in numbers["layers"].items())
        layers = judged(dict(sorted(sums.items())))
        for numbers in ranks:
            if numbers["wrong_rows"]:
                verdict.wrong_rows.setdefault(numbers["trace"], []).extend(numbers["wrong_rows"])
        findings = [Finding(*each) for numbers in ranks for each in numbers["findings"]]
        findings += _add_parts(ranks, verdict)
        raising = [each for each in findings if each.evidence >= EVIDENCE]
        if num_low := sum(value < least for value in layers.values()):
            verdict.problems.append(
                f"the live router agrees with the replayed routes by less than min_agreement={least} in {num_low} of "
                f"{len(layers)} layers ({_list(layers)}). Either the routes are of older or other weights: compare their "
                "version with the trainer's. Or they are of other rows or layers: have the engine return token ids, and "
                "compare the trace's layer_numbers with the model's."
                + (f" The clearest rows: {max(raising).text}." if raising else "")
            )
        elif raising:
            evidence, text = max(raising)
            verdict.problems.append(
                f"{text}. The log-likelihood ratio is {evidence:.0f}, {EVIDENCE:.0f} raises; report.wrong_rows has the rows "
                "for trace.without_routes."
            )
        elif little := {layer: value for layer, value in layers.items() if value < WARN}:
            verdict.warnings.append(f"the live router agrees little with the replayed routes: layers {_list(little)}")
    return Verdict(verdict.problems[:1], verdict.warnings[:1], verdict.wrong_rows)


def _add_parts(ranks: Sequence[Mapping[str, Any]], verdict: Verdict) -> list[Finding]:
    """Return the findings of sequences over the ranks that share them, and add their rows if they raise."""
    by_name: dict[str, list[tuple[str, Part]]] = {}
    for numbers in ranks:
        for values in numbers["parts"]:
            part = Part(*values)
            by_name.setdefault(part.name, []).append((numbers["trace"], part))
    findings = []
    for parts in by_name.values():
        by_kind: dict[str, float] = {}
        for kind, value in (item for _, part in parts for item in part.by_kind.items()):
            by_kind[kind] = by_kind.get(kind, 0.0) + value
        # Each rank chose its clearest block: noise rises so far by itself.
        chosen = PART_EVIDENCE * (len(parts) - 1)
        finding = Finding(
            evidence_of(by_kind.values()) - chosen, max((part.evidence, part.text) for _, part in parts)[1]
        )
        findings.append(finding)
        if finding.evidence >= EVIDENCE:
            for trace, part in parts:
                verdict.wrong_rows.setdefault(trace, []).extend(part.rows)
    return findings


def judged(layers: Mapping[int, Sums]) -> dict[int, float]:
    """Return the agreement of layers with enough evidence."""
    return {number: value for number, sums in layers.items() if (value := sums.judged) is not None}


def add_up(units: Iterable[tuple[Any, Iterable[float]]]) -> dict[Any, Sums]:
    """Return the sums of (key, sums) by key."""
    sums: dict[Any, Sums] = {}
    for key, unit in units:
        sums[key] = sums.get(key, Sums()).plus(unit)
    return sums


def _list(values: Mapping[int, float]) -> str:
    return ", ".join(f"{layer}: {value:.0%}" for layer, value in values.items())
