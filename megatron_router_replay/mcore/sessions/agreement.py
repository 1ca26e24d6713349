"""Ask the router: would it choose nearly the experts that it is told?

In each micro-batch one layer of a chunk also takes its live top-k; in the first that a process runs on it, all layers do.
Both choices stay on the device and are counted when the session ends. Agreement is their overlap beyond chance: 1 is the same
experts, 0 what a random token of the micro-batch would share. It is judged by unit:

    layer    one layer over the session's rows; with too few of them, together with the sessions before it
    block    32 to 191 rows of one sample in one layer on this rank (neighbouring rows of a packed row)
    sample   one sample (one block of a packed row) over the layers that were asked

Evidence counts different routes: a run of one token at a near-tie flips as one, and is no evidence of anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron_router_replay.mcore.heart.streams import current_stream, follow, to_device

ALL = -1
"""In place of a layer's position: all layers are asked."""

BLOCK, LEAST_ROWS = 96, 32
EVIDENCE, LAYER_EVIDENCE = 48.0, 64.0
"""Decisions beyond chance that a unit, and a layer, must have to be judged; few blocks of a collapsed router have them."""
LEAST_EVIDENCE = 16.0
"""A layer or a sample with fewer is not named in a report."""
PAIR_EVIDENCE = 8.0
"""What one pair of routes, live and replayed, can be of them at most, however often it comes."""
PAIR_SHARE = 1 / 8
"""What one pair that hardly agrees can be of a unit's rows at most."""
WARN = 0.5
FOLD_ROWS = 1 << 20
"""Rows that were asked and wait on the device; beyond it they are counted, and the host waits once."""
FOLD_CALLS = 8192

_CODE_BITS = 16


class _Rotation:
    """Which layer of a chunk is asked next, and layers that earlier sessions asked without enough evidence to judge them."""

    def __init__(self) -> None:
        self.microbatches = 0
        self.carried: dict[int, Pairs] = {}

    def next(self, num_layers: int) -> int:
        """Return the position of the layer that the next micro-batch asks, or ALL."""
        self.microbatches += 1
        return ALL if self.microbatches == 1 else (self.microbatches - 2) % num_layers


_rotations: WeakKeyDictionary[nn.Module, _Rotation] = WeakKeyDictionary()
"""Innermost module of a chunk -> its rotation, which goes on from session to session."""


# ---- from rows to units
@dataclass(slots=True, eq=False)
class Pairs:
    """Rows added up by what they have in common: a unit, and a pair of routes (the live one and the replayed one).

    Args:
        keys: [n] int64, the unit's number and 16 bits that tell pairs of routes apart; different ones, in order.
        sums: [n, 3] float64, rows, experts that both name, and experts that chance would have them name.
    """

    keys: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    sums: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 3)))

    def unit(self, number: int) -> Pairs:
        """Return those of one unit."""
        kept = self.keys >> _CODE_BITS == number
        return Pairs(self.keys[kept], self.sums[kept])

    @classmethod
    def of(cls, units: NDArray[np.int64], rows: NDArray[np.int16]) -> Pairs:
        """Return [4, n] rows, as `count_rows` makes them, by unit and pair of routes."""
        keys = units << _CODE_BITS | rows[2].view(np.uint16)
        sums = np.stack([np.ones(len(keys)), rows[0], rows[1].view(np.float16)], axis=1)
        return cls.merge([cls(keys, sums.astype(np.float64))])

    @classmethod
    def merge(cls, parts: Sequence[Pairs]) -> Pairs:
        """Return what is in all of them."""
        keys, inverse = np.unique(np.concatenate([part.keys for part in parts]), return_inverse=True)
        sums = np.concatenate([part.sums for part in parts]).T
        return cls(keys, np.stack([np.bincount(inverse, column, len(keys)) for column in sums], axis=1))

    def measure(self, topk: int) -> dict[int, Unit]:
        """Return agreement and evidence of each unit."""
        numbers, unit = np.unique(self.keys >> _CODE_BITS, return_inverse=True)
        rows, overlap, chance = self.sums.T
        beyond = rows * topk - chance
        total = np.bincount(unit, rows, len(numbers))
        # A pair that hardly agrees is one near-tie if it comes again and again, and many if they are different ones.
        weight = np.where(overlap - chance < beyond / 2, np.minimum(1, PAIR_SHARE * total[unit] / rows), 1.0)
        columns = (rows, weight * overlap, weight * chance, weight * rows * topk, np.minimum(beyond, PAIR_EVIDENCE))
        sums = zip(*(np.bincount(unit, column, len(numbers)).tolist() for column in columns))
        return {number: Unit(*each) for number, each in zip(numbers.tolist(), sums)}


SOURCES = ("the trace's routes", "the routes that were fed")
"""What the live router is compared with."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is known of a unit: rows, and sums over its decisions; those of several ranks add up."""

    rows: float = 0.0
    overlap: float = 0.0
    chance: float = 0.0
    decisions: float = 0.0
    evidence: float = 0.0

    @property
    def agreement(self) -> float:
        """1: the live router names the same experts; 0: no more of them than by chance."""
        return (self.overlap - self.chance) / max(self.decisions - self.chance, 1e-9)

    def __add__(self, other: Unit) -> Unit:
        return Unit(*(getattr(self, name) + getattr(other, name) for name in Unit.__slots__))


def count_rows(ids: Tensor, counts: Tensor | None, table: Tensor) -> Tensor:
    """Return what rows agree in, [4, n] int16, without a wait; the middle two are counted as 16 bits of another kind.

    Args:
        ids: [n, 2 * topk], the live experts and the replayed ones.
        counts: [n] bool, True: the row counts; None: all do.
        table: [2 * num_experts] int64, random.

    Returns:
        Experts that both name; what a random row that counts would share with the replayed ones (float16); 16 bits that
        tell pairs of routes apart; whether the row counts.
    """
    num_experts, both = table.numel() // 2, ids.long()
    live, used = both.tensor_split(2, dim=1)
    weight = torch.ones(len(ids), device=ids.device) if counts is None else counts.float()
    load = torch.zeros(num_experts, device=ids.device)
    load.scatter_add_(0, live.reshape(-1), weight.unsqueeze(1).expand_as(live).reshape(-1))
    overlap = (live.unsqueeze(2) == used.unsqueeze(1)).sum((1, 2), dtype=torch.int16)
    chance = (load[used].sum(1) / weight.sum().clamp(min=1)).half().view(torch.int16)
    codes = (table[live] + table[num_experts:][used]).sum(1).to(torch.int16)
    return torch.stack([overlap, chance, codes, weight.to(torch.int16)])


def blocks_of(counted: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sequence and block of each position that counts, both in the order of positions of one sequence after another.

    Args:
        counted: [b, s] bool. A sequence of 192 such positions and more has blocks of 96 and more.
    """
    sequence = counted.nonzero()[0]
    totals = counted.sum(1)
    place = np.arange(len(sequence)) - (totals.cumsum() - totals)[sequence]
    return sequence, place * np.maximum(1, totals // BLOCK)[sequence] // np.maximum(1, totals[sequence])


# ---- a session
@dataclass(slots=True, eq=False, kw_only=True)
class _Asked:
    """One layer of one micro-batch, in the order of its router (s-major)."""

    layer: int
    chunk: int
    microbatch: int
    shape: tuple[int, int]  # positions, sequences
    packed: bool
    ids: Tensor
    counts: Tensor | None
    stream: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveAgreement:
    """How the live router agrees with the replayed routes: 1 the same experts, 0 no more of them than by chance.

    Args:
        layers: layer number -> its sums over this session.
        num_layers: layers that replay.
        least_sample: of the sample that agrees least, None: none has enough evidence.
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
        return {number: unit.agreement for number, unit in self.layers.items() if unit.evidence >= LEAST_EVIDENCE}

    def to_dict(self) -> dict[str, float | None]:
        """Return the numbers to plot."""
        least = min(self.judged.values(), default=None)
        return {
            "agreement": self.all_layers,
            "agreement_least_layer": least,
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
        self._rotations: dict[int, _Rotation] = {}  # by chunk
        self._chunk_of: dict[int, int] = {}  # by layer
        self._layers = Pairs()
        self._units = 0  # blocks and samples that were judged
        self._low: dict[str, int] = {}  # sample -> how many of its units are below `least`
        self._least_unit = 1.0, ""
        self._least_sample: float | None = None

    def next_layer(self, chunk: Any) -> int:
        """Return the position of the layer that a chunk's next micro-batch asks, or ALL."""
        rotation = self._rotations[chunk.index] = _rotations.setdefault(chunk.module, _Rotation())
        position = rotation.next(len(chunk.taking_part))
        return ALL if self.every_layer else position

    def add(
        self, microbatch: Any, chunk: int, layer: int, live: Tensor, replayed: Tensor, counts: Tensor | None
    ) -> None:
        """Keep what one layer would choose and what it is told. No wait, but for each million rows.

        Args:
            live: [n, topk] int64.
            replayed: [n, topk] in the dtype of the trace.
            counts: [n] bool, True: the row is replayed; None: all are.
        """
        if self._rows > FOLD_ROWS or len(self._asked) > FOLD_CALLS:
            self.fold()
        self._chunk_of[layer] = chunk
        self._rows += len(live)
        self._asked.append(
            _Asked(
                layer=layer,
                chunk=chunk,
                microbatch=microbatch.number,
                shape=microbatch.shape,
                packed=microbatch.packed,
                ids=torch.cat([live.to(replayed.dtype), replayed], dim=1),
                counts=counts,
                stream=current_stream(live.device),
            )
        )

    def fold(self) -> None:
        """Add up what waits on the device; one wait."""
        if not self._asked:
            return
        asked, self._asked, self._rows = self._asked, [], 0
        rows = self._to_host(asked)
        microbatches = list(dict.fromkeys((each.chunk, each.microbatch) for each in asked))
        parts, blocks, samples, layers, at = [], [], [], [], 0
        for index, each in enumerate(asked):
            positions, sequences = each.shape
            part = rows[:, at : at + len(each.ids)].reshape(4, positions, sequences).transpose(0, 2, 1)
            at += len(each.ids)
            parts.append(part[:, part[3] != 0])
            sequence, block = blocks_of(part[3] != 0)
            # A number for each unit: its block (20 bits) or, where that is no sample of its own, 0, sequence (10), and call.
            blocks.append(index << 30 | sequence << 20 | block)
            place = microbatches.index((each.chunk, each.microbatch))
            samples.append(place << 30 | sequence << 20 | (block if each.packed else 0))
            layers.append(np.full(len(block), each.layer))
        flat, block, sample = np.concatenate(parts, axis=1), np.concatenate(blocks), np.concatenate(samples)
        self._layers = Pairs.merge([self._layers, Pairs.of(np.concatenate(layers), flat)])
        names = [f"rank {self.rank}, chunk {chunk}, micro-batch {number}" for chunk, number in microbatches]
        sample_of, with_blocks = dict(zip(block.tolist(), sample.tolist())), set()
        for number, unit in Pairs.of(block, flat).measure(self.topk).items():
            if unit.rows >= LEAST_ROWS and unit.evidence >= EVIDENCE:
                with_blocks.add(sample_of[number])
                self._judge(
                    unit, names, sample_of[number], f"layer {asked[number >> 30].layer}, part {number & 0xFFFFF}"
                )
        for number, unit in Pairs.of(sample, flat).measure(self.topk).items():
            if unit.rows >= LEAST_ROWS and unit.evidence >= LEAST_EVIDENCE:
                self._least_sample = min(unit.agreement, 1.0 if self._least_sample is None else self._least_sample)
                if unit.evidence >= EVIDENCE and number not in with_blocks:
                    self._judge(unit, names, number, "the layers that were asked")

    def _to_host(self, asked: list[_Asked]) -> NDArray[np.int16]:
        """Return [4, n] for the rows of all calls; see `count_rows`."""
        generator = torch.Generator().manual_seed(0)
        table = torch.randint(1 << _CODE_BITS, (2 * self.num_experts,), generator=generator)
        table = to_device(table, asked[0].ids.device)
        counted = []
        for each in asked:
            follow(each.stream, *(tensor for tensor in (each.ids, each.counts) if tensor is not None))
            counted.append(count_rows(each.ids, each.counts, table))
        rows: NDArray[np.int16] = torch.cat(counted, dim=1).cpu().numpy()
        return rows

    def _judge(self, unit: Unit, names: list[str], sample: int, place: str) -> None:
        self._units += 1
        name = f"{names[sample >> 30]}, sequence {sample >> 20 & 0x3FF}"
        if unit.agreement < self._least_unit[0]:
            self._least_unit = unit.agreement, f"{name}, {place}"
        if unit.agreement < self.least:
            name += f", part {sample & 0xFFFFF}" if sample & 0xFFFFF else ""
            self._low[name] = self._low.get(name, 0) + 1

    # ---- the end
    def report(self) -> LiveAgreement:
        """Return what was counted so far; waits for the device."""
        self.fold()
        return LiveAgreement(
            layers=self._layers.measure(self.topk),
            num_layers=self.num_layers,
            least_sample=self._least_sample,
            source=self.source,
        )

    def numbers(self) -> dict[str, Any]:
        """Return what this rank tells the others: layers with enough evidence, and what is low. Ask once, at the end."""
        self.fold()
        worst = max(self._low, key=self._low.__getitem__, default="")
        return {
            "layers": {number: astuple(unit) for number, unit in self._settled()},
            "units": self._units,
            "low": sum(self._low.values()),
            "worst": [worst, self._low.get(worst, 0)],
            "least": list(self._least_unit),
        }

    def _settled(self) -> Iterator[tuple[int, Unit]]:
        """Yield the layers with enough evidence, of this session or with those before it; the others wait for the next."""
        for layer, unit in self._layers.measure(self.topk).items():
            pairs, carried = self._layers.unit(layer), self._rotations[self._chunk_of[layer]].carried
            earlier = carried.pop(layer, None)
            if unit.evidence < LAYER_EVIDENCE and earlier is not None:
                pairs = Pairs.merge([pairs, earlier])
                unit = pairs.measure(self.topk)[layer]
            if unit.evidence >= LAYER_EVIDENCE:
                yield layer, unit
            else:
                carried[layer] = pairs


def problems(everyone: Sequence[Mapping[str, Any]], least: float) -> list[str]:
    """Return what is wrong with the routes of a group of ranks, from the `Agreement.numbers` of each; the same on all."""
    everyone = [numbers for numbers in everyone if numbers]
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
    num_low, units = (sum(numbers[name] for numbers in everyone) for name in ("low", "units"))
    worst, in_worst = max((numbers["worst"] for numbers in everyone), key=lambda each: each[1])
    if in_worst >= 2 or (num_low >= 3 and num_low * 1000 > units):
        return [
            f"the live router agrees with the replayed routes by less than min_agreement={least} in {num_low} of {units} "
            f"parts of samples, {in_worst} of them in {worst}: routes of another sample, or of other places in it. {hint}"
        ]
    return []


def warning(everyone: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what a user should look at, of routes that are not wrong enough to raise."""
    everyone = [numbers for numbers in everyone if numbers]
    low = {number: value for number, value in _layers(everyone).items() if value < WARN}
    least: list[Any] = min((numbers["least"] for numbers in everyone), default=[1.0, ""])
    value, where = least
    if not low and value >= WARN:
        return None
    found = [f"layers {_list(low)}"] if low else []
    found += [f"{where}: {value:.0%}"] if value < WARN else []
    return (
        f"the live router agrees little with the replayed routes ({'; '.join(found)}): older weights do that, and so do "
        "wrong routes"
    )


def _layers(everyone: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    totals: dict[int, Unit] = {}
    for numbers in everyone:
        for number, sums in numbers["layers"].items():  # numbers are strings where they came through JSON
            totals[int(number)] = totals.get(int(number), Unit()) + Unit(*sums)
    return {number: totals[number].agreement for number in sorted(totals)}


def _list(values: Mapping[int, float]) -> str:
    named = [f"{number} ({value:.0%})" for number, value in sorted(values.items(), key=lambda each: each[1])[:4]]
    return ", ".join(named) + (", ..." if len(values) > 4 else "")
