"""Ask the router: would it choose nearly the experts that it is told?

In each micro-batch one layer of a chunk also takes its live top-k; in the first that a process runs on it, all layers do.
Both choices stay on the device and are counted when the session ends. Agreement is their overlap beyond chance: 1 is the same
experts, 0 what a random token of the micro-batch would share. It is judged by unit:

    layer    one layer over the session's rows; with too few of them, together with the sessions before it
    part     32 to 191 neighbouring rows of one sample in one layer on this rank
    sample   all rows of one sample in the layers that were asked, and those of its parts that are low

Evidence counts different routes: a run of one token at a near-tie flips as one, and so does a loop of few tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron_router_replay.mcore.heart.streams import current_stream, follow, to_device

ALL = -1
"""In place of a layer's position: all layers are asked."""

PART, LEAST_ROWS = 96, 32
EVIDENCE, LAYER_EVIDENCE, SAMPLE_EVIDENCE = 48.0, 64.0, 96.0
"""Decisions beyond chance that a part, a layer, and all that is low of a sample must have to be judged."""
PAIR_EVIDENCE = 8.0
"""What one pair of routes, live and replayed, can be of them at most, however often it comes."""
PAIR_SHARE = 1 / 8
"""What one pair that hardly agrees can be of a unit's rows at most."""
WARN = 0.5
FOLD_ROWS, LEAST_TENSOR = 1 << 20, 128
"""Rows that wait on the device; beyond it they are counted, and the host waits once. A small tensor takes as much as 128."""

PAIRS = 256
"""Numbers that tell pairs of routes apart; different pairs may share one, and then count as one."""

Sums = NDArray[np.float64]
"""[..., PAIRS, 3]: rows, experts that both name, and experts that chance would have them name, by pair of routes."""


class _Rotation:
    """Which layer of a chunk is asked next, and layers that earlier sessions asked without enough evidence to judge them."""

    def __init__(self) -> None:
        self.microbatches = 0
        self.carried: dict[int, Sums] = {}

    def next(self, num_layers: int) -> int:
        """Return the position of the layer that the next micro-batch asks, or ALL."""
        self.microbatches += 1
        return ALL if self.microbatches == 1 else (self.microbatches - 2) % num_layers


_rotations: WeakKeyDictionary[nn.Module, _Rotation] = WeakKeyDictionary()
"""Innermost module of a chunk -> its rotation, which goes on from session to session."""


# ---- from rows to units
@dataclass(frozen=True, slots=True)
class Unit:
    """What is known of a unit: rows, and sums over its decisions; those of several ranks add up."""

    rows: Any = 0.0
    overlap: Any = 0.0
    chance: Any = 0.0
    decisions: Any = 0.0
    evidence: Any = 0.0

    @property
    def agreement(self) -> Any:
        """1: the live router names the same experts; 0: no more of them than by chance."""
        return (self.overlap - self.chance) / np.maximum(self.decisions - self.chance, 1e-9)

    def __add__(self, other: Unit) -> Unit:
        return Unit(*(getattr(self, name) + getattr(other, name) for name in Unit.__slots__))


def measure(sums: Sums, topk: int) -> Unit:
    """Return what sums come to: [PAIRS, 3] one unit; [num_units, PAIRS, 3] a unit of arrays."""
    rows, overlap, chance = np.moveaxis(sums, -1, 0)
    beyond = rows * topk - chance
    # A pair that hardly agrees is one near-tie if it comes again and again, and many if they are different ones.
    most = PAIR_SHARE * rows.sum(-1, keepdims=True) / np.maximum(rows, 1)
    weight = np.where(overlap - chance < beyond / 2, np.minimum(1, most), 1.0)
    columns = (rows, weight * overlap, weight * chance, weight * rows * topk, np.minimum(beyond, PAIR_EVIDENCE))
    return Unit(*(column.sum(-1) for column in columns))


def count_rows(ids: Tensor, counts: Tensor | None, table: Tensor) -> Tensor:
    """Return what rows agree in, [4, n] int16, without a wait; the second are float16, viewed as 16 bits.

    Args:
        ids: [n, 2 * topk], the live experts and the replayed ones.
        counts: [n] bool, True: the row counts; None: all do.
        table: [2 * num_experts] int64, random.

    Returns:
        Experts that both name; what a random row that counts would share with the replayed ones (float16); the number of the
        pair of routes; whether the row counts.
    """
    num_experts, both = table.numel() // 2, ids.long()
    live, used = both.tensor_split(2, dim=1)
    weight = torch.ones(len(ids), device=ids.device) if counts is None else counts.float()
    load = torch.zeros(num_experts, device=ids.device)
    load.scatter_add_(0, live.reshape(-1), weight.unsqueeze(1).expand_as(live).reshape(-1))
    overlap = (live.unsqueeze(2) == used.unsqueeze(1)).sum((1, 2), dtype=torch.int16)
    chance = (load[used].sum(1) / weight.sum().clamp(min=1)).half().view(torch.int16)
    pairs = ((table[live] + table[num_experts:][used]).sum(1) % PAIRS).to(torch.int16)
    return torch.stack([overlap, chance, pairs, weight.to(torch.int16)])


def sum_parts(rows: NDArray[np.int16], samples: NDArray[np.int64], num_samples: int) -> tuple[Sums, NDArray[np.int64]]:
    """Return the sums of each part, and the first part of each sample.

    Args:
        rows: [3, n], the first three of `count_rows`, of the rows that count.
        samples: [n], the sample of each row, in order. One of 192 rows and more has parts of 96 and more.
    """
    totals = np.bincount(samples, minlength=num_samples)
    parts = np.maximum(1, totals // PART)
    place = np.arange(len(samples)) - (totals.cumsum() - totals)[samples]
    first = parts.cumsum() - parts
    part = first[samples] + place * parts[samples] // totals[samples]
    keys, shape = part * PAIRS + rows[2], (int(parts.sum()), PAIRS)
    columns = (None, rows[0], rows[1].view(np.float16))
    sums = [np.bincount(keys, column, shape[0] * PAIRS).reshape(shape) for column in columns]
    return np.stack(sums, axis=-1).astype(np.float64), first


# ---- a session
SOURCES = ("the trace's routes", "the routes that were fed")
"""What the live router is compared with."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Asked:
    """One layer of one micro-batch, in the order of its router (s-major)."""

    layer: int
    chunk: int
    microbatch: int
    sequences: int
    cu_seqlens: Tensor | None  # of a packed row
    first: int  # position in it that this rank begins with
    length: int  # of it, over the ranks that share it
    ids: Tensor
    counts: Tensor | None
    stream: Any

    def samples(self) -> Tensor:
        """Return the number of each row's sample in the micro-batch, [n] int16."""
        rows = torch.arange(len(self.ids), device=self.ids.device)
        if self.cu_seqlens is None:
            return (rows % self.sequences).to(torch.int16)
        ends = to_device(self.cu_seqlens, rows.device)[1:]
        # Each context-parallel rank has the same share of each sample.
        ends = ends // (ends[-1] / self.length).round().clamp(min=1)
        return torch.bucketize(rows + self.first, ends.long(), right=True).to(torch.int16)


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveAgreement:
    """How the live router agrees with the replayed routes: 1 the same experts, 0 no more of them than by chance.

    Args:
        layers: layer number -> its sums over this session.
        num_layers: layers that replay.
        least_sample: of the sample, or 96 rows of one in one layer, that agrees least; None: none has enough evidence.
        source: what the routes are said to be from, of SOURCES.
    """

    layers: Mapping[int, Unit]
    num_layers: int
    least_sample: float | None
    source: str

    @property
    def all_layers(self) -> float | None:
        """Over all layers that were asked; None: no row was."""
        total = sum(self.layers.values(), Unit())
        return total.agreement if total.decisions else None

    @property
    def judged(self) -> dict[int, float]:
        """Layer number -> agreement, of those with enough evidence."""
        return {number: unit.agreement for number, unit in self.layers.items() if unit.evidence >= EVIDENCE}

    def to_dict(self) -> dict[str, float | None]:
        """Return the numbers to plot."""
        return {
            "agreement": self.all_layers,
            "agreement_least_layer": min(self.judged.values(), default=None),
            "agreement_least_sample": self.least_sample,
        }

    def __str__(self) -> str:
        if self.all_layers is None:
            return "the live router was asked about no row"
        judged = self.judged
        least = [f"least layer {min(judged.values()):.0%}"] if judged else []
        least += [] if self.least_sample is None else [f"least sample {self.least_sample:.0%}"]
        counted = f"{len(judged)} of {self.num_layers} layers judged"
        return f"the live router agrees with {self.all_layers:.1%} of {self.source} ({', '.join(least)}; {counted})"


class Agreement:
    """What one session asks its routers, and what comes of it.

    Args:
        topk, num_experts: of the model.
        num_layers: layers that replay on this rank.
        least: below it a unit is wrong; 0: nothing is.
        every_layer: ask all layers in every micro-batch.
        rank: this process, for messages.
        source: what the routes are from.
    """

    def __init__(
        self, *, topk: int, num_experts: int, num_layers: int, least: float, every_layer: bool, rank: int, source: str
    ) -> None:
        self.topk, self.num_experts, self.num_layers = topk, num_experts, num_layers
        self.least, self.every_layer, self.rank, self.source = least, every_layer, rank, source
        self._asked: list[_Asked] = []
        self._rows = 0  # that wait on the device
        self._carried: dict[int, dict[int, Sums]] = {}  # layer -> what its chunk carries from session to session
        self._layers: dict[int, Sums] = {}
        self._low = np.zeros(2, np.int64)  # samples that are below `least`, as a whole or in a part; of how many
        self._evidence = 0.0  # the most that there is of what is low of one sample
        self._least = np.inf, ""  # agreement of the least sample or part of one, and its name

    def next_layer(self, chunk: Any) -> int:
        """Return the position of the layer that a chunk's next micro-batch asks, or ALL."""
        position = _rotations.setdefault(chunk.module, _Rotation()).next(len(chunk.taking_part))
        return ALL if self.every_layer else position

    def add(
        self, microbatch: Any, chunk: Any, layer: int, live: Tensor, replayed: Tensor, counts: Tensor | None
    ) -> None:
        """Keep what one layer would choose and what it is told. No wait, but for each million rows.

        Args:
            live: [n, topk] int64.
            replayed: [n, topk] in the dtype of the trace.
            counts: [n] bool, True: the row is replayed; None: all are.
        """
        if self._rows > FOLD_ROWS:
            self.fold()
        self._carried[layer] = _rotations[chunk.module].carried
        self._rows += max(LEAST_TENSOR, len(live))
        share, shares = chunk.sequence_share
        self._asked.append(
            _Asked(
                layer=layer,
                chunk=chunk.index,
                microbatch=microbatch.number,
                sequences=microbatch.shape[1],
                cu_seqlens=microbatch.cu_seqlens,
                first=share * len(live),
                length=shares * len(live),
                ids=torch.cat([live.to(replayed.dtype), replayed], dim=1),
                counts=counts,
                stream=current_stream(live.device),
            )
        )

    def fold(self) -> None:
        """Add up what waits on the device; one wait."""
        asked, self._asked, self._rows = self._asked, [], 0
        if not asked:
            return
        rows, at = self._to_host(asked), 0
        for (chunk, number), calls in groupby(asked, lambda each: (each.chunk, each.microbatch)):
            layers = []
            for each in calls:
                layers.append((each.layer, rows[:, at : at + len(each.ids)]))
                at += len(each.ids)
            self._count(f"rank {self.rank}, chunk {chunk}, micro-batch {number}", layers)

    def _to_host(self, asked: list[_Asked]) -> NDArray[np.int16]:
        """Return [5, n] for the rows of all calls: see `count_rows`, and the sample of each."""
        generator = torch.Generator().manual_seed(0)
        table = to_device(torch.randint(PAIRS, (2 * self.num_experts,), generator=generator), asked[0].ids.device)
        counted = []
        for each in asked:
            kept = (each.ids, each.counts, each.cu_seqlens)
            follow(each.stream, *(tensor for tensor in kept if tensor is not None))
            counted.append(torch.cat([count_rows(each.ids, each.counts, table), each.samples().unsqueeze(0)]))
        rows: NDArray[np.int16] = torch.cat(counted, dim=1).cpu().numpy()
        return rows

    def _count(self, name: str, layers: list[tuple[int, NDArray[np.int16]]]) -> None:
        """Add up and judge what one micro-batch was asked: layers, and [5, n] rows of each."""
        num_samples = 1 + max((int(rows[4].max()) for _, rows in layers if rows.size), default=0)
        whole, low = np.zeros((2, num_samples, PAIRS, 3))
        least = np.full(num_samples, np.inf)
        for layer, rows in layers:
            rows = rows[:, rows[3] != 0]
            rows = rows[:, rows[4].argsort(kind="stable")]
            sums, first = sum_parts(rows[:3], rows[4].astype(np.int64), num_samples)
            self._layers[layer] = self._layers.get(layer, 0.0) + sums.sum(0)
            whole += np.add.reduceat(sums, first)
            agreement = self._judged(sums)
            least = np.minimum(least, np.minimum.reduceat(agreement, first))
            low += np.add.reduceat(np.where((agreement < self.least)[:, None, None], sums, 0), first)
        agreement = self._judged(whole)
        least = np.minimum(least, agreement)
        low = np.where((agreement < self.least)[:, None, None], whole, low)
        self._low += np.array([(least < self.least).sum(), np.isfinite(least).sum()])
        self._evidence = max(self._evidence, float(measure(low, self.topk).evidence.max()))
        self._least = min(self._least, (float(least.min()), f"{name}, sequence {least.argmin()}"))

    def _judged(self, sums: Sums) -> NDArray[np.float64]:
        """Return the agreement of parts or samples, infinite where there is too little evidence to judge it."""
        unit = measure(sums, self.topk)
        agreement: NDArray[np.float64] = np.where(
            (unit.rows >= LEAST_ROWS) & (unit.evidence >= EVIDENCE), unit.agreement, np.inf
        )
        return agreement

    # ---- the end
    def report(self) -> LiveAgreement:
        """Return what was counted so far; waits for the device."""
        self.fold()
        return LiveAgreement(
            layers={layer: measure(sums, self.topk) for layer, sums in self._layers.items()},
            num_layers=self.num_layers,
            least_sample=None if self._least[0] == np.inf else self._least[0],
            source=self.source,
        )

    def numbers(self) -> dict[str, Any]:
        """Return what this rank tells the others: layers with enough evidence, and what is low. Ask once, at the end."""
        self.fold()
        return {
            "layers": {layer: astuple(unit) for layer, unit in self._settled()},
            "low": [*self._low.tolist(), self._evidence],
            "least": list(self._least),
        }

    def _settled(self) -> Iterator[tuple[int, Unit]]:
        """Yield the layers with enough evidence, of this session or with those before it; the others wait for the next."""
        for layer, sums in self._layers.items():
            carried = self._carried[layer]
            earlier, unit = carried.pop(layer, None), measure(sums, self.topk)
            if unit.evidence < LAYER_EVIDENCE and earlier is not None:
                sums = sums + earlier
                unit = measure(sums, self.topk)
            if unit.evidence >= LAYER_EVIDENCE:
                yield layer, unit
            else:
                carried[layer] = sums


def problems(everyone: Sequence[Mapping[str, Any]], least: float) -> list[str]:
    """Return what is wrong with the routes of a group of ranks, from the `Agreement.numbers` of each; the same on all."""
    if not everyone or not least:
        return []
    layers = _layers(everyone)
    low = {number: value for number, value in layers.items() if value < least}
    hint = "If they are meant to differ (routes of another model), min_agreement=0 says it."
    if low and len(low) == len(layers):
        return [
            f"the live router agrees with the replayed routes by {max(low.values()):.0%} at most in every layer that was "
            f"judged ({_list(low)}), less than min_agreement={least}: they are from other or much older weights, or of other "
            f"tokens. Are the trainer's weights those of the engine (weight_versions=, trace.keep)? {hint}"
        ]
    if low:
        return [
            f"the live router agrees with the replayed routes by less than min_agreement={least} in {len(low)} of "
            f"{len(layers)} layers: {_list(low)}; layers changed places, or lost their routes. {hint}"
        ]
    num_low, num_samples, _ = np.sum([numbers["low"] for numbers in everyone], axis=0).astype(int).tolist()
    evidence = max(numbers["low"][2] for numbers in everyone)
    if evidence >= SAMPLE_EVIDENCE or (num_low >= 3 and num_low * 1000 > num_samples):
        return [
            f"the live router agrees with the replayed routes by less than min_agreement={least} in {num_low} of "
            f"{num_samples} samples, or in parts of them, least of all in {_least(everyone)[1]}: routes of another sample, "
            f"or of other places in it. {hint}"
        ]
    return []


def warning(everyone: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what a user should look at, of routes that are not wrong enough to raise."""
    low = {number: value for number, value in _layers(everyone).items() if value < WARN}
    value, where = _least(everyone)
    if not low and value >= WARN:
        return None
    found = [f"layers {_list(low)}"] if low else []
    found += [f"{where}: {value:.0%}"] if value < WARN else []
    return (
        f"the live router agrees little with the replayed routes ({'; '.join(found)}): older weights do that, and so do "
        "wrong routes"
    )


def _least(everyone: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
    """Return agreement and name of the sample, or part of one, that agrees least."""
    least: Sequence[Any] = min((numbers["least"] for numbers in everyone), default=(np.inf, ""))
    return least


def _layers(everyone: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    totals: dict[int, Unit] = {}
    for numbers in everyone:
        for number, sums in numbers["layers"].items():  # numbers are strings where they came through JSON
            totals[int(number)] = totals.get(int(number), Unit()) + Unit(*sums)
    return {number: float(totals[number].agreement) for number in sorted(totals)}


def _list(values: Mapping[int, float]) -> str:
    named = [f"{number} ({value:.0%})" for number, value in sorted(values.items(), key=lambda each: each[1])[:4]]
    return ", ".join(named) + (", ..." if len(values) > 4 else "")
