"""Ask the router: would it choose nearly the experts that it is told?

In each micro-batch one layer of a chunk also takes its live top-k; in the first that a process runs on it, all layers do.
Both choices stay on the device and are counted when the session ends. Agreement is their overlap beyond chance: 1 is the same
experts, 0 what a random token of the micro-batch would share. It is judged by unit:

    layer    one layer over the session's rows; with too few of them, together with the sessions before it
    part     32 to 191 neighbouring rows of one sample in one layer on this rank
    sample   all rows of one sample in the layers that were asked

A layer that is low raises by itself. Samples and parts that are low raise together, by the evidence of all of them.
Evidence counts different routes: a run of one token at a near-tie flips as one, and so does a loop of few tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.batches.queue import Microbatch
from megatron_router_replay.mcore.core.streams import current_stream, follow, to_device

ALL = -1
"""In place of a layer's position: all layers are asked."""

PART, LEAST_ROWS = 96, 32
EVIDENCE, LAYER_EVIDENCE, SAMPLE_EVIDENCE = 48.0, 64.0, 192.0
"""Decisions beyond chance that a part, a layer, and all that is low of a thousand samples must have to be judged."""
PAIR_EVIDENCE = 8.0
"""What one pair of routes, live and replayed, can be of them at most, however often it comes."""
PAIR_SHARE = 1 / 8
"""What one pair that hardly agrees can be of a unit's rows at most."""
WARN = 0.5
FOLD_ROWS, LEAST_TENSOR = 1 << 20, 128
"""Rows that wait on the device; beyond it they are counted, and the host waits once. A small tensor takes as much as 128."""

PAIRS = 256
"""Numbers that tell pairs of routes apart; different pairs may share one, and then count as one."""

Array = NDArray[np.float64]
Sums = Array
"""[..., PAIRS, 3]: rows, experts that both name, and experts that chance would have them name, by pair of routes."""


@dataclass(slots=True)
class _Kept:
    """What a chunk keeps from session to session: a count, and layers with too little evidence to judge them so far."""

    microbatches: int = 0
    layers: dict[int, Sums] = field(default_factory=dict)


_kept: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()
"""By the innermost module of a chunk."""


# ---- from rows to units
class Unit(NamedTuple):
    """What is known of a unit; those of several ranks add up, number by number.

    Args:
        rows: those that count.
        shared: experts that the live router and the replayed routes both name, less those by chance.
        most: what that would be if they named the same.
        evidence: decisions beyond chance, of different routes.
    """

    rows: float = 0.0
    shared: float = 0.0
    most: float = 0.0
    evidence: float = 0.0

    @property
    def agreement(self) -> float:
        """1: the live router names the same experts; 0: no more of them than by chance."""
        return float(agreement_of(np.array(self)))


def agreement_of(units: Array) -> Array:
    """Return the agreement of [..., 4], the numbers of units."""
    agreement: Array = units[..., 1] / np.maximum(units[..., 2], 1e-9)
    return agreement


def total(units: Iterable[Unit]) -> Unit:
    """Return several units as one."""
    return Unit(*np.sum([Unit(), *units], axis=0).tolist())


def measure(sums: Sums, topk: int) -> Array:
    """Return the numbers of units, [..., 4] in the order of `Unit`, that [..., PAIRS, 3] sums come to."""
    rows, overlap, chance = np.moveaxis(sums, -1, 0)
    shared, beyond = overlap - chance, rows * topk - chance
    # A pair that hardly agrees is one near-tie if it comes again and again, and many if they are different ones.
    most = PAIR_SHARE * rows.sum(-1, keepdims=True) / np.maximum(rows, 1)
    weight = np.where(shared < beyond / 2, np.minimum(1, most), 1.0)
    units: Array = np.stack([rows, weight * shared, weight * beyond, np.minimum(beyond, PAIR_EVIDENCE)])
    return np.moveaxis(units.sum(-1), 0, -1)


def count_rows(ids: Tensor, counts: Tensor | None, table: Tensor) -> Tensor:
    """Return what rows agree in, [4, n] float32, without a wait.

    Args:
        ids: [n, 2 * topk], the live experts and the replayed ones.
        counts: [n] bool, True: the row counts; None: all do.
        table: [2 * num_experts] int64, random.

    Returns:
        Experts that both name; what a random row that counts would share with the replayed ones; the number of the pair of
        routes; whether the row counts.
    """
    num_experts, both = table.numel() // 2, ids.long()
    live, used = both.tensor_split(2, dim=1)
    weight = torch.ones(len(ids), device=ids.device) if counts is None else counts.float()
    load = torch.zeros(num_experts, device=ids.device)
    load.scatter_add_(0, live.reshape(-1), weight.unsqueeze(1).expand_as(live).reshape(-1))
    overlap = (live.unsqueeze(2) == used.unsqueeze(1)).sum((1, 2))
    chance = load[used].sum(1) / weight.sum().clamp(min=1)
    pairs = (table[live] + table[num_experts:][used]).sum(1) % PAIRS
    return torch.stack([overlap.float(), chance, pairs.float(), weight])


def sum_parts(rows: NDArray[np.float32], num_samples: int) -> tuple[Sums, NDArray[np.int64]]:
    """Return the sums of each part, and the first part of each sample.

    Args:
        rows: [5, n], those of `count_rows`, and the sample of each. One of 192 rows and more has parts of 96 and more.
        num_samples: in the micro-batch; one without a row has an empty part.
    """
    rows = rows[:, rows[3] != 0]
    rows = rows[:, rows[4].argsort(kind="stable")]
    samples = rows[4].astype(np.int64)
    totals = np.bincount(samples, minlength=num_samples)
    parts = np.maximum(1, totals // PART)
    place = np.arange(len(samples)) - (totals.cumsum() - totals)[samples]
    first = parts.cumsum() - parts
    part = first[samples] + place * parts[samples] // totals[samples]
    keys, shape = part * PAIRS + rows[2].astype(np.int64), (int(parts.sum()), PAIRS)
    sums = [np.bincount(keys, column, shape[0] * PAIRS).reshape(shape) for column in (rows[3], rows[0], rows[1])]
    return np.stack(sums, axis=-1), first


# ---- a session
SOURCES = ("the trace's routes", "the routes that were fed")
"""What the live router is compared with."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Asked:
    """One layer of one micro-batch, in the order of its router (s-major)."""

    layer: int
    sequences: int
    cu_seqlens: Tensor | None  # of a packed row
    first: int  # position in it that this rank begins with
    length: int  # of it, over the ranks that share it
    ids: Tensor
    counts: Tensor | None
    stream: Any  # under which they were made

    def counted(self, table: Tensor) -> Tensor:
        """Return [5, n]: see `count_rows`, and the number of each row's sample in the micro-batch."""
        kept = (self.ids, self.counts, self.cu_seqlens)
        follow(self.stream, *(tensor for tensor in kept if tensor is not None))
        samples = torch.arange(len(self.ids), device=self.ids.device)
        if self.cu_seqlens is None:
            samples = samples % self.sequences
        else:
            ends = to_device(self.cu_seqlens, samples.device)[1:]
            # Each context-parallel rank has the same share of each sample.
            ends = ends // (ends[-1] / self.length).round().clamp(min=1)
            samples = torch.bucketize(samples + self.first, ends.long(), right=True)
        return torch.cat([count_rows(self.ids, self.counts, table), samples.float().unsqueeze(0)])


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
        unit = total(self.layers.values())
        return unit.agreement if unit.rows else None

    @property
    def judged(self) -> dict[int, float]:
        """Layer number -> agreement, of those with enough evidence."""
        return {number: unit.agreement for number, unit in self.layers.items() if unit.evidence >= LAYER_EVIDENCE}

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
        self._asked: dict[tuple[int, int], list[_Asked]] = {}  # by chunk and micro-batch
        self._rows = 0  # that wait on the device
        self._kept: dict[int, dict[int, Sums]] = {}  # layer -> those that its chunk keeps
        self._layers: dict[int, Sums] = {}
        self._low = np.zeros(3)  # samples with anything below `least`; of how many; the evidence of all that is low
        self._least = np.inf, ""  # agreement of the least sample or part of one, and its name

    def next_layer(self, chunk: Chunk) -> int:
        """Return the position of the layer that a chunk's next micro-batch asks, or ALL."""
        kept = _kept.setdefault(chunk.module, _Kept())
        kept.microbatches += 1
        if self.every_layer or kept.microbatches == 1:
            return ALL
        return (kept.microbatches - 2) % len(chunk.replayed_routers)

    def add(
        self, microbatch: Microbatch, chunk: Chunk, layer: int, live: Tensor, replayed: Tensor, counts: Tensor | None
    ) -> None:
        """Keep what one layer would choose and what it is told. No wait, but for each million rows.

        Args:
            live: [n, topk] int64.
            replayed: [n, topk] in the dtype of the trace.
            counts: [n] bool, True: the row is replayed; None: all are.
        """
        key = chunk.index, microbatch.number
        if self._rows > FOLD_ROWS and key not in self._asked:
            self.fold()
        self._kept[layer] = _kept[chunk.module].layers
        self._rows += max(LEAST_TENSOR, len(live))
        share, shares = chunk.sequence_share
        lengths = microbatch.cu_seqlens
        self._asked.setdefault(key, []).append(
            _Asked(
                layer=layer,
                sequences=microbatch.shape[1],
                # Our own: a trainer may write the next micro-batch's into its again.
                cu_seqlens=None if lengths is None else lengths.clone(),
                first=share * len(live),
                length=shares * len(live),
                ids=torch.cat([live.to(replayed.dtype), replayed], dim=1),
                counts=counts,
                stream=current_stream(live.device),
            )
        )

    def fold(self) -> None:
        """Add up what waits on the device; one wait."""
        asked, self._asked, self._rows = self._asked, {}, 0
        calls = [each for calls in asked.values() for each in calls]
        if not calls:
            return
        numbers = torch.randint(PAIRS, (2 * self.num_experts,), generator=torch.Generator().manual_seed(0))
        table = to_device(numbers, calls[0].ids.device)
        rows: NDArray[np.float32] = torch.cat([each.counted(table) for each in calls], dim=1).cpu().numpy()
        pieces = iter(np.split(rows, np.cumsum([len(each.ids) for each in calls])[:-1], axis=1))
        for (chunk, number), of_one in asked.items():
            layers = [(each.layer, next(pieces)) for each in of_one]
            self._count(f"rank {self.rank}, chunk {chunk}, micro-batch {number}", layers)

    def _count(self, name: str, layers: list[tuple[int, NDArray[np.float32]]]) -> None:
        """Add up and judge what one micro-batch was asked: layers, and [5, n] rows of each."""
        num_samples = 1 + max((int(rows[4].max()) for _, rows in layers if rows.size), default=0)
        whole, low = np.zeros((2, num_samples, PAIRS, 3))
        least = np.full(num_samples, np.inf)
        for layer, rows in layers:
            sums, first = sum_parts(rows, num_samples)
            self._layers[layer] = self._layers.get(layer, 0.0) + sums.sum(0)
            whole += np.add.reduceat(sums, first)
            agreement = self._judged(sums)
            least = np.minimum(least, np.minimum.reduceat(agreement, first))
            low += np.add.reduceat(np.where((agreement < self.least)[:, None, None], sums, 0), first)
        agreement = self._judged(whole)
        least = np.minimum(least, agreement)
        low = np.where((agreement < self.least)[:, None, None], whole, low)
        self._low += (least < self.least).sum(), np.isfinite(least).sum(), measure(low, self.topk)[:, 3].sum()
        self._least = min(self._least, (float(least.min()), f"{name}, sequence {least.argmin()}"))

    def _judged(self, sums: Sums) -> Array:
        """Return the agreement of parts or samples, infinite where there is too little evidence to judge it."""
        units = measure(sums, self.topk)
        return np.where((units[:, 0] >= LEAST_ROWS) & (units[:, 3] >= EVIDENCE), agreement_of(units), np.inf)

    # ---- the end
    def report(self) -> LiveAgreement:
        """Return what was counted so far; waits for the device."""
        self.fold()
        return LiveAgreement(
            layers={layer: Unit(*measure(sums, self.topk).tolist()) for layer, sums in self._layers.items()},
            num_layers=self.num_layers,
            least_sample=None if self._least[0] == np.inf else self._least[0],
            source=self.source,
        )

    def numbers(self) -> dict[str, Any]:
        """Return what this rank tells the others: layers with enough evidence, and what is low. Ask once, at the end."""
        self.fold()
        return {
            "layers": dict(self._settled()),
            "low": self._low.tolist(),
            "least": list(self._least),
        }

    def _settled(self) -> Iterator[tuple[int, Unit]]:
        """Yield the layers with enough evidence, of this session or with those before it; the others wait for the next."""
        for layer, sums in self._layers.items():
            kept = self._kept[layer]
            for tried in (sums, sums + kept.pop(layer, 0.0)):
                unit = Unit(*measure(tried, self.topk).tolist())
                if unit.evidence >= LAYER_EVIDENCE:
                    yield layer, unit
                    break
            else:
                kept[layer] = tried


def problems(everyone: Sequence[Mapping[str, Any]], least: float) -> list[str]:
    """Return what is wrong with the routes of a group of ranks, from the `Agreement.numbers` of each; the same on all."""
    if not everyone or not least:
        return []
    layers = _layers(everyone)
    low = {number: value for number, value in layers.items() if value < least}
    num_low, num_samples, evidence = np.sum([numbers["low"] for numbers in everyone], axis=0)
    if low and len(low) == len(layers):
        found = (
            f"every layer that was judged ({_list(low)}): they are of other or much older weights, or of other tokens. "
            "Are the trainer's weights those of the engine (weight_versions=, trace.without_routes)?"
        )
    elif low:
        found = f"{len(low)} of {len(layers)} layers: {_list(low)}; layers changed places, or lost their routes."
    elif evidence >= SAMPLE_EVIDENCE * max(1, num_samples / 1000):
        found = (
            f"{num_low:.0f} of {num_samples:.0f} samples, or in parts of them, least of all in {_least(everyone)[1]}: routes "
            "of another sample, or of other places in it."
        )
    else:
        return []
    return [
        f"the live router agrees with the replayed routes by less than min_agreement={least} in {found} If they are meant to "
        "differ (routes of another model), min_agreement=0 says it."
    ]


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
    units: dict[int, list[Unit]] = {}
    for numbers in everyone:
        for number, unit in numbers["layers"].items():  # numbers are strings where they came through JSON
            units.setdefault(int(number), []).append(unit)
    return {number: total(units[number]).agreement for number in sorted(units)}


def _list(values: Mapping[int, float]) -> str:
    named = [f"{number} ({value:.0%})" for number, value in sorted(values.items(), key=lambda each: each[1])[:4]]
    return ", ".join(named) + (", ..." if len(values) > 4 else "")
