"""Compare replayed experts with the live router, and judge them when the session ends.

In each micro-batch, one layer of a chunk also takes its live scores; in the first one that a process runs on the chunk, all
layers do. The device writes down for each row which of its replayed experts the live router chooses or nearly chooses. The
host judges once, when the session ends: layers by their *agreement* (1: the same experts, 0: no more of them than by chance),
and rows by `blocks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.batches.queue import Microbatch
from megatron_router_replay.mcore.core.streams import current_stream, follow
from megatron_router_replay.mcore.sessions.blocks import EVIDENCE, ROW_EVIDENCE, ComparedRows, find_blocks
from megatron_router_replay.mcore.sessions.wrong_rows import RowNames
from megatron_router_replay.trace import RoutingTrace

ALL = -1
"""In place of a layer's position: all layers take their live scores."""

LEAST_DECISIONS = 128.0
"""Experts beyond chance below which the agreement of a layer is not judged."""
WARN = 0.5
"""Agreement of a layer below which a session warns."""
PART_EVIDENCE = 8.0
"""The most that the rows of a sample on one rank rise by noise; what is above it adds up over the ranks that share it."""
MOST_PARTS = 1024
"""Samples of which a rank publishes parts."""
NUM_APART = 20
"""Single rows up to which they are noise."""

_num_microbatches: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""By the innermost module of a chunk: the compared layer rotates with it."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveAgreement:
    """Agreement of the live router with the replayed routes.

    Args:
        layers: layer number -> its sums over this session.
        num_layers: layers that replay.
        block: the neighbouring rows that look most like those of other tokens.
        rows_apart: single rows without an expert near the live router's choice.
    """

    layers: Mapping[int, Sums]
    num_layers: int
    block: Finding = Finding()
    rows_apart: int = 0

    @property
    def all_layers(self) -> float | None:
        """Agreement over all layers that were compared; None: no row was."""
        sums = Sums(*map(sum, zip(Sums(), *self.layers.values())))
        return sums.agreement if sums.rows else None

    @property
    def judged(self) -> dict[int, float]:
        """Layer number -> agreement, of those with enough evidence."""
        return judged(self.layers)

    def to_dict(self) -> dict[str, float | None]:
        """Return the numbers to plot."""
        if self.all_layers is None:
            return {}
        return {
            "agreement": self.all_layers,
            "agreement_least_layer": min(self.judged.values(), default=None),
            "block_evidence": self.block.evidence,
            "rows_apart": self.rows_apart,
        }

    def low(self) -> list[tuple[str, str, str]]:
        """Return what looks wrong, as facts of a table."""
        number, value = min(self.judged.items(), key=lambda each: each[1], default=(0, 1.0))
        remark = f"layer {number}: routes of older weights, or of other rows?"
        facts = [("least layer", f"{value:.0%}", remark)] if value < WARN else []
        if self.block.evidence >= EVIDENCE:
            facts.append(("evidence of wrong rows", f"{self.block.evidence:.0f}", self.block.text))
        return facts

    def __str__(self) -> str:
        if self.all_layers is None:
            return "the live router was compared in no row"
        judged = f"{len(self.judged)} of {self.num_layers} layers judged"
        return f"the live router agrees with {self.all_layers:.1%} of the trace's routes beyond chance ({judged})"


class _Compared(NamedTuple):
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


class Agreement:
    """Compare layers of a session's micro-batches with the live router.

    Args:
        topk, num_experts: of the model.
        num_layers: layers that replay on this rank.
        every_layer: compare all layers in every micro-batch.
        rank: this process, for messages.
        trace: of the session, to name samples; None: rows have no names.
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
    ) -> None:
        self.topk, self.num_experts, self.num_layers = topk, num_experts, num_layers
        self.every_layer, self.rank, self.trace = every_layer, rank, trace
        self.width = min(2 * topk, max(topk + 1, num_experts // 2))
        self._stream: Any = None
        self._row_sharing = (0, 1, 0)
        self._compared: list[_Compared] = []
        self._num_on_host = 0
        self._numbers: dict[str, Any] | None = None

    def next_layer(self, chunk: Chunk) -> int | None:
        """Return the position of the layer that a chunk's next micro-batch compares, or ALL; None: none is compared."""
        if self.topk == self.num_experts:  # every token has all experts
            return None
        self._to_host()
        number = _num_microbatches[chunk.module] = _num_microbatches.get(chunk.module, -1) + 1
        return ALL if self.every_layer or not number else (number - 1) % len(chunk.replayed_routers)

    def add(
        self,
        microbatch: Microbatch,
        chunk: Chunk,
        layer: int,
        *,
        scores: Tensor,
        live: Tensor,
        replayed: Tensor,
        counts: Tensor | None,
    ) -> None:
        """Compare a layer of a micro-batch, without device synchronization.

        Args:
            scores: [n, num_experts], of which the live router takes its top-k.
            live, replayed: [n, topk] int64.
            counts: [n] bool, True: the row is replayed; None: all are.
        """
        self._row_sharing = chunk.row_sharing
        scores = scores.detach()
        is_live = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, live, True)
        values, ranked = scores.topk(self.width, dim=1)
        # With groups of experts, a live expert may have a low rank among all.
        levels = torch.stack([is_live, (scores >= values[:, -1:]) | is_live])
        packed = torch.empty(len(live), self.topk + 2, dtype=torch.int16, device=live.device)
        level = levels.gather(2, replayed.expand(2, -1, -1)).sum(0, dtype=torch.int16)
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
            stream.wait_stream(self._stream)  # so that the last stream has all
            self._stream = stream
        self._compared.append(_Compared(key, layer, microbatch.shape, microbatch.rows, packed, loads))
        self._numbers = None

    def _to_host(self) -> None:
        """Copy what earlier micro-batches compared to the host, without a wait."""
        waiting = self._compared[self._num_on_host :]
        if waiting and self._stream is not None:
            on_device = [each.packed for each in waiting]
            on_device += [each.rows for each in waiting if each.rows is not None and each.rows.is_cuda]
            follow(self._stream, *on_device)
            self._stream = current_stream(on_device[0].device)
            # Layers of a micro-batch share its rows.
            copies = {id(each): each.to("cpu", non_blocking=True) for each in on_device}
            for number, each in enumerate(waiting, self._num_on_host):
                rows = None if each.rows is None else copies.get(id(each.rows), each.rows)
                self._compared[number] = each._replace(packed=copies[id(each.packed)], rows=rows)
        self._num_on_host = len(self._compared)

    # ---- the end
    def numbers(self) -> dict[str, Any]:
        """Return what this rank publishes at the end of the session; waits for the device once."""
        if self._numbers is None:
            replica, sharing, owner = self._row_sharing
            judgement = _Judgement(self)
            self._numbers = {
                "replica": replica,
                "layers": judgement.sums,
                "findings": sorted(judgement.findings, reverse=True)[:4],
                "parts": judgement.parts(owner) if sharing > 1 else [],
                "rows_apart": judgement.rows_apart,
            }
        return self._numbers

    def on_host(self) -> list[tuple[_Compared, Any, Any]]:
        """Return each comparison with its packed rows and loads, as arrays."""
        if not self._compared:
            return []
        self._to_host()
        loads = [each.loads for each in self._compared]
        follow(self._stream, *loads)
        # The wait for these is one for the copies before them, too.
        all_loads = torch.stack(loads).cpu().numpy()
        return [(each, each.packed.numpy(), load) for each, load in zip(self._compared, all_loads)]

    def report(self) -> LiveAgreement:
        """Return the comparison so far; waits for the device."""
        numbers = self.numbers()
        block = max(numbers["findings"], default=Finding())
        return LiveAgreement(
            layers=numbers["layers"],
            num_layers=self.num_layers,
            block=Finding(*block),
            rows_apart=numbers["rows_apart"],
        )


@dataclass(slots=True)
class _Layer:
    """A layer, or several together, with where its rows are.

    Args:
        layers: their numbers.
        ratios, kinds: [n], see `blocks`.
        places: of the rows.
    """

    layers: list[int]
    ratios: Any
    kinds: Any
    places: RowNames


@dataclass(slots=True)
class _Judgement:
    """All that a rank finds in what it compared.

    Args:
        agreement: has compared.

    Attributes:
        sums: by layer.
        findings: what may be wrong.
        rows_apart: single rows without an expert inside, over all layers.
    """

    agreement: Agreement
    sums: dict[int, Sums] = field(default_factory=dict, init=False)
    findings: list[Finding] = field(default_factory=list, init=False)
    rows_apart: int = field(default=0, init=False)
    _layers: list[_Layer] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        by_layer: dict[int, list[Any]] = {}
        together: dict[tuple[int, int], list[Any]] = {}  # micro-batch -> its layers
        for part in self.agreement.on_host():
            by_layer.setdefault(part[0].layer, []).append(part)
            together.setdefault(part[0].microbatch, []).append(part)
        most = 0.0
        ratios: dict[tuple[tuple[int, int], int], Any] = {}
        for number, parts in sorted(by_layer.items()):
            rows, names = self._rows(parts), self._names([part[0] for part in parts])
            layer = _Layer([number], rows.ratios(), rows.kinds, names)
            self.sums[number] = Sums.of(rows)
            self._layers.append(layer)
            apart, noise = rows.apart()
            self.rows_apart, most = self.rows_apart + int(apart.sum()), most + noise
            self._add_apart(int(apart.sum()), noise, f"layer {number}")
            self._add_experts(number, rows)
            ends = np.cumsum([len(packed) for _, packed, _ in parts])
            for part, values, kinds in zip(parts, np.split(layer.ratios, ends[:-1]), np.split(rows.kinds, ends[:-1])):
                ratios[part[0].microbatch, number] = values, kinds
        self._add_apart(self.rows_apart, most, f"{len(by_layer)} layers")
        self._add_together(together, ratios)
        for layer in self._layers:
            for block in find_blocks(layer.ratios, layer.kinds)[:4]:
                self.findings.append(Finding(block.evidence, layer.places.describe(block, layer.layers)))

    def _rows(self, parts: Sequence[Any]) -> ComparedRows:
        topk, experts = self.agreement.topk, self.agreement.num_experts
        packed, chances, versions = [], [], []
        trace = self.agreement.trace
        for compared, rows, loads in parts:
            order = _sequence_order(compared.shape)
            packed.append(rows[order])
            num = max(1, int((rows[:, topk] >= 0).sum()))
            chances.append((loads / num).astype(np.float32)[:, packed[-1][:, :topk] // 3])
            if trace is not None and trace.weight_version is not None and compared.rows is not None:
                row = compared.rows.numpy().ravel()[order]
                versions.append(np.where(row >= 0, trace.weight_version.cpu().numpy()[row], -1))
        rows, (live_chance, chance) = np.concatenate(packed), np.concatenate(chances, axis=1)
        first = rows[:, topk:].astype(np.int64)
        return ComparedRows(
            experts=rows[:, :topk] // 3,
            is_live=rows[:, :topk] % 3 == 2,
            is_inside=rows[:, :topk] % 3 > 0,
            live_chance=live_chance,
            chance=chance,
            kinds=np.where(first[:, 0] >= 0, first[:, 0] * experts + first[:, 1], -1),
            versions=np.concatenate(versions) if len(versions) == len(parts) else None,
            num_experts=experts,
        )

    def _names(self, parts: Sequence[_Compared]) -> RowNames:
        return RowNames.of(
            [(each.microbatch, each.shape, each.rows) for each in parts],
            rank=self.agreement.rank,
            trace=self.agreement.trace,
        )

    def _add_together(self, together: Mapping[tuple[int, int], list[Any]], ratios: Mapping[Any, Any]) -> None:
        """Judge the layers of micro-batches together that compared several."""
        by_layers: dict[tuple[int, ...], list[Any]] = {}
        for parts in together.values():
            by_layers.setdefault(tuple(sorted(part[0].layer for part in parts)), []).append(parts)
        for numbers, microbatches in by_layers.items():
            if len(numbers) < 2:
                continue
            summed, kinds = [], []
            for parts in microbatches:
                of_layers = [ratios[part[0].microbatch, part[0].layer] for part in parts]
                summed.append(sum(values for values, _ in of_layers))
                kinds.append(of_layers[0][1])
            values = np.clip(np.concatenate(summed), -ROW_EVIDENCE, ROW_EVIDENCE)
            names = self._names([parts[0][0] for parts in microbatches])
            self._layers.append(_Layer(list(numbers), values, np.concatenate(kinds), names))

    def _add_apart(self, apart: int, noise: float, where: str) -> None:
        if apart >= NUM_APART:
            text = (
                f"rank {self.agreement.rank}, {where}: {apart} single rows have no expert near the live router's choice, "
                f"where near-ties give {noise:.0f} at most: were rows overwritten before they were copied?"
            )
            self.findings.append(Finding(EVIDENCE * apart / noise, text))

    def _add_experts(self, number: int, rows: ComparedRows) -> None:
        wrong, evidence = rows.wrong_experts()
        if len(wrong):
            listed = ", ".join(map(str, wrong[:16].tolist())) + (", ..." if len(wrong) > 16 else "")
            text = (
                f"rank {self.agreement.rank}, layer {number}: experts {listed} are hardly ever near the live router's "
                "choice where they are replayed: physical ids of redundant experts in place of logical ones?"
            )
            self.findings.append(Finding(evidence, text))

    def parts(self, owner: int) -> list[tuple[str, float, str]]:
        """Return (sample and layer, evidence, text) of blocks too small for this rank alone."""
        found: list[tuple[str, float, str]] = []
        for layer in self._layers:
            for key, first, stop in layer.places.sequences():
                block = find_blocks(layer.ratios[first:stop], layer.kinds[first:stop])[:1]
                if block and PART_EVIDENCE < block[0].evidence:
                    evidence, begin, end = block[0]
                    text = layer.places.describe(type(block[0])(evidence, begin + first, end + first), layer.layers)
                    found.append((f"{owner} {key} {layer.layers}", evidence, text))
        return sorted(found, key=lambda each: -each[1])[:MOST_PARTS]


def _sequence_order(shape: tuple[int, int]) -> Any:
    """Return the s-major rows of a micro-batch in the order of its sequences."""
    return np.arange(shape[0] * shape[1]).reshape(shape).T.ravel()


# ---- the ranks of a session together
def judge(everyone: Sequence[Mapping[str, Any]], least: float) -> tuple[list[str], list[str]]:
    """Return why the routes of a group of ranks are wrong, and else a warning if they agree little; the same on all.

    Args:
        everyone: `Agreement.numbers` of each rank.
        least: `min_agreement` of `replay`; 0: nothing is wrong.
    """
    if not least:
        return [], []
    warnings: list[str] = []
    # Tensor-parallel ranks with the same rows are replicas: each is compared on its own.
    for replica in sorted({numbers["replica"] for numbers in everyone}):
        ranks = [numbers for numbers in everyone if numbers["replica"] == replica]
        sums = add_up((int(layer), unit) for numbers in ranks for layer, unit in numbers["layers"].items())
        layers = judged(dict(sorted(sums.items())))
        if num_low := sum(value < least for value in layers.values()):
            return [
                f"the live router agrees with the replayed routes by less than min_agreement={least} in {num_low} of "
                f"{len(layers)} layers ({_list(layers)}). Either the routes are of older or other weights: compare their "
                "version with the trainer's. Or they are of other rows or layers: have the engine return token ids, and "
                "compare the trace's layer_numbers with the model's."
            ], []
        evidence, text = max((tuple(each) for numbers in ranks for each in numbers["findings"]), default=(0.0, ""))
        if evidence < EVIDENCE:
            evidence, text = max([(evidence, text), *_parts_together(ranks)])
        if evidence >= EVIDENCE:
            return [f"{text} (log-likelihood ratio {evidence:.0f}, {EVIDENCE:.0f} raises)"], []
        if little := {layer: value for layer, value in layers.items() if value < WARN}:
            warnings.append(f"the live router agrees little with the replayed routes: layers {_list(little)}")
    return [], warnings[:1]


def _parts_together(ranks: Sequence[Mapping[str, Any]]) -> Iterable[tuple[float, str]]:
    """Yield the evidence of samples over the ranks that share them, with the text of the clearest part."""
    by_sample: dict[str, list[tuple[float, str]]] = {}
    for key, evidence, text in (part for numbers in ranks for part in numbers["parts"]):
        by_sample.setdefault(key, []).append((evidence, text))
    for parts in by_sample.values():
        yield PART_EVIDENCE + sum(evidence - PART_EVIDENCE for evidence, _ in parts), max(parts)[1]


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
