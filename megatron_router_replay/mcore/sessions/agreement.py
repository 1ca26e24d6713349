"""Compare the replayed experts with the live router's own, and so find routes of other tokens, layers or weights.

In each micro-batch one layer of a chunk also takes its live top-k; in the first one that a process runs on the chunk, all
layers do. The overlap of both choices is counted on the device at once, beyond chance: an agreement of 1 means the same
experts, and 0 as many shared ones as a random token of the micro-batch has. At the end of a session, the ranks add up:

    layer     one layer, over all windows of the session
    window    128 neighbouring positions of a sequence in one layer, on one rank
    sample    a sequence in one layer, over the ranks that share it, if no rank has a window of it with enough evidence

A low layer raises. Low windows and samples raise by the evidence of all of them. Evidence counts different routes, because a
token at a near-tie flips each time that it comes again: one pair of routes (live, replayed) is 8 decisions at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.batches.microbatch import Microbatch
from megatron_router_replay.mcore.core.streams import current_stream, follow, to_device

ALL = -1
"""In place of a layer's position: all layers take their live top-k."""

WINDOW, LEAST_ROWS = 128, 32
WINDOW_EVIDENCE, LAYER_EVIDENCE, SESSION_EVIDENCE = 48.0, 64.0, 192.0
"""Decisions beyond chance below which a window and a layer do not count, and below which low windows do not raise: the last
for each thousand samples."""
PAIR_EVIDENCE = 8.0
"""The most that one pair of routes adds to evidence, or misses in a window. Rows that agree have no bound."""
WARN, PAIRS, MOST_PARTS = 0.5, 256, 1024
"""Agreement below which a session warns; buckets of pairs of routes; parts of samples that a rank publishes."""

_num_microbatches: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""By the innermost module of a chunk: the compared layer rotates with it. No count of routes outlives its session."""


class Unit(NamedTuple):
    """Sums of a layer or a sample: rows, shared experts beyond chance, the most that these could be, evidence."""

    rows: float = 0.0
    shared: float = 0.0
    most: float = 0.0
    evidence: float = 0.0

    @property
    def agreement(self) -> float:
        return max(-1.0, self.shared / max(self.most, 1e-9))

    def plus(self, other: Iterable[float]) -> Unit:
        return Unit(*map(sum, zip(self, other)))


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveAgreement:
    """Agreement of the live router with the replayed routes.

    Args:
        layers: layer number -> its sums over this session.
        num_layers: layers that replay.
        least_sample: agreement of the window that agrees least; None: none has enough rows and evidence.
        least_place: rank, micro-batch, layer and sequence of that window.
        samples, samples_not_judged: sequences of micro-batches, and those without such a window on this rank.
    """

    layers: Mapping[int, Unit]
    num_layers: int
    least_sample: float | None
    least_place: str = ""
    samples: int = 0
    samples_not_judged: int = 0

    @property
    def all_layers(self) -> float | None:
        """Agreement over all layers that were compared; None: no row was."""
        unit = Unit(*map(sum, zip(Unit(), *self.layers.values())))
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
            "agreement_samples_not_judged": self.samples_not_judged if self.samples else None,
        }

    def low(self) -> list[tuple[str, str, str]]:
        """Return the layer and the sample that agree so little that a session warns, as facts of a table."""
        number, value = min(self.judged.items(), key=lambda each: each[1], default=(0, 1.0))
        facts = [("least layer", f"{value:.0%}", f"layer {number}: routes of older weights, or of other rows?")]
        facts = facts if value < WARN else []
        if self.least_sample is not None and self.least_sample < WARN:
            facts.append(("least sample", f"{self.least_sample:.0%}", f"{self.least_place}: routes of other tokens?"))
        return facts

    def __str__(self) -> str:
        if self.all_layers is None:
            return "the live router was compared in no row"
        least = {"layer": min(self.judged.values(), default=0), "sample": self.least_sample or 0}
        parts = [f"least {name} {value:.0%}" for name, value in least.items() if value >= WARN]
        parts.append(f"{len(self.judged)} of {self.num_layers} layers judged")
        parts.append(f"{self.samples - self.samples_not_judged} of {self.samples} samples")
        return f"the live router agrees with {self.all_layers:.1%} of the trace's routes ({', '.join(parts)})"


def number_windows(
    shape: tuple[int, int], share: tuple[int, int], cu_seqlens: Tensor | None, device: torch.device
) -> tuple[int, Tensor, Tensor, Tensor]:
    """Return the sequences and windows of the rows that a router gets, without device synchronization.

    Args:
        shape: (positions, sequences) of the rows, which are s-major.
        share: (number of this rank's part, number of parts) of the positions, split by sequence parallelism.
        cu_seqlens: [num_seqs + 1] integers, where packed sequences start, over all context-parallel ranks; None: not packed.

    Returns:
        How many sequences; the sequence of each window, [num_windows]; the sequence and the window of each row, [n].
    """
    length, num_sequences = shape
    n = length * num_sequences
    # On the host, because each operation on a device is a launch; bounds of no sequence are those of a row of padding.
    if cu_seqlens is None or len(cu_seqlens) < 2:
        rows, windows = torch.arange(n), torch.arange(-(-length // WINDOW) * num_sequences)
        sequence = rows % num_sequences
        return (
            num_sequences,
            windows % num_sequences,
            sequence,
            rows // num_sequences // WINDOW * num_sequences + sequence,
        )
    rows, ends = torch.arange(n, device=device), to_device(cu_seqlens, device)[1:].long()
    # Each context-parallel rank has the same share of each sequence.
    cp_size = (ends[-1] / max(1, share[1] * n)).round().long().clamp(min=1)
    ends = ends // cp_size - share[0] * n
    starts = nn.functional.pad(ends.clamp(min=0), (1, 0))  # the last one is of rows after all sequences
    num_sequences = len(starts)
    # Windows are numbered in the order of rows. A sequence has at most one more of them than it fills: hence the sum.
    first = starts // WINDOW + torch.arange(num_sequences, device=device)
    windows = torch.arange(n // WINDOW + num_sequences, device=device)
    sequence = torch.bucketize(rows, ends, right=True)
    window = first[sequence] + (rows - starts[sequence]) // WINDOW
    return num_sequences, torch.bucketize(windows, first, right=True) - 1, sequence, window


class _Units(NamedTuple):
    """The sequences of a micro-batch on this rank, and then their windows.

    Args:
        num_sequences: how many units are sequences.
        sequence: [num_windows] int64, of each window.
        keys: [3, n] int64, PAIRS times the number of each row's layer (0), sequence and window.
        low, high: [num_units, 1, 4] float32, bounds of the counts of one pair of routes.
        zeros: [num_units * PAIRS, 4] float32.
        share: [1] float32, 1 / n.
    """

    num_sequences: int
    sequence: Tensor
    keys: Tensor
    low: Tensor
    high: Tensor
    zeros: Tensor
    share: Tensor


class _Call(NamedTuple):
    """Sums of a layer in a micro-batch: [num_units, 4], see `Agreement.add`."""

    name: str
    sample: tuple[int, int]
    layer: int
    units: _Units
    sums: Tensor


class Agreement:
    """Counts of a session, in which layers take their live top-k.

    Args:
        topk, num_experts: of the model.
        num_layers: layers that replay on this rank.
        least: below it a unit is low; 0: none is.
        every_layer: compare all layers in every micro-batch.
        rank: this process, for messages.
    """

    def __init__(
        self, *, topk: int, num_experts: int, num_layers: int, least: float, every_layer: bool, rank: int
    ) -> None:
        self.topk, self.num_experts, self.num_layers = topk, num_experts, num_layers
        self.least, self.every_layer, self.rank = least, every_layer, rank
        self._replica, self._sharing, self._owner = 0, 1, rank  # see `Chunk.row_sharing`
        self._constants: tuple[Tensor, ...] = ()
        self._layers: tuple[Tensor, ...] = ()  # [PAIRS] decisions beyond chance
        self._slots: dict[int, int] = {}  # layer number -> which of these
        self._units: tuple[Any, _Units] | None = None  # of which micro-batch, and its units
        self._stream: Any = None  # which used these last
        self._calls: list[_Call] = []
        self._numbers: dict[str, Any] | None = None  # see `numbers`; None: there are more calls

    def next_layer(self, chunk: Chunk) -> int:
        """Return the position of the layer that a chunk's next micro-batch compares, or ALL."""
        number = _num_microbatches[chunk.module] = _num_microbatches.get(chunk.module, -1) + 1
        return ALL if self.every_layer or not number else (number - 1) % len(chunk.replayed_routers)

    def add(
        self, microbatch: Microbatch, chunk: Chunk, layer: int, live: Tensor, replayed: Tensor, counts: Tensor | None
    ) -> None:
        """Count a layer of a micro-batch, without device synchronization.

        Args:
            live, replayed: [n, topk] int64.
            counts: [n] bool, True: the row is replayed; None: all are.
        """
        self._begin(chunk, live.device)
        units, (codes, columns, no_load) = self._units_of(microbatch, chunk, live.device), self._constants
        if counts is None:
            share = units.share.expand(live.numel())
        else:
            share = (counts / counts.sum().clamp(min=1)).unsqueeze(1).expand_as(live).flatten()
        # By chance, a row shares an expert with as many rows as chose it live.
        chance = no_load.scatter_add(0, live.flatten(), share)[replayed].sum(1, keepdim=True)
        overlap = (live.unsqueeze(2) == replayed.unsqueeze(1)).sum((1, 2), dtype=torch.float32).unsqueeze(1)
        # [n, 4]: 1, shared experts beyond chance, missed experts, and the sum of these two.
        rows = columns[0].addcmul(overlap, columns[1]).addcmul(chance, columns[2])
        rows = rows if counts is None else rows * counts.unsqueeze(1)
        # A sum of bytes is the same whatever the order of experts, and wraps at PAIRS.
        pairs = (codes[0][live] + codes[1][replayed]).sum(1, dtype=torch.uint8)
        of_layer, of_sequence, of_window = units.keys + pairs
        self._layers[self._slots.setdefault(layer, len(self._slots))].index_add_(0, of_layer, rows[:, 3])
        # A loop of tokens is low in every window: of a whole sequence, on all ranks that share it, a pair counts once.
        sums = units.zeros.index_add(0, of_sequence, rows).index_add_(0, of_window, rows)
        sums = sums.view(-1, PAIRS, 4).clamp(units.low, units.high).sum(1)
        name = f"chunk {chunk.index}, micro-batch {microbatch.number}, layer {layer}, sequence "
        self._calls.append(_Call(name, (chunk.index, microbatch.number), layer, units, sums))
        self._numbers = None

    def _begin(self, chunk: Chunk, device: torch.device) -> None:
        """Let the current stream use the tensors of the last call; make them for the first call."""
        if not self._constants:
            self._replica, self._sharing, self._owner = chunk.row_sharing
            codes = torch.randint(PAIRS, (2, self.num_experts), generator=torch.Generator().manual_seed(0)).byte()
            # A constant, and the factors of overlap and chance.
            columns = torch.tensor([[1.0, 0, self.topk, self.topk], [0, 1, -1, 0], [0, -1, 0, -1]])
            self._constants = (to_device(codes, device), to_device(columns, device))
            self._constants += (torch.zeros(self.num_experts, device=device),)
            # Normal tensors also where the first forward runs in inference mode: later ones may not, and add to them.
            with torch.inference_mode(False):
                self._layers = torch.zeros(self.num_layers, PAIRS, device=device).unbind()
            self._stream = current_stream(device)
        units = () if self._units is None else self._units[1][1:]
        follow(self._stream, *self._constants, *self._layers, *units)
        self._stream = current_stream(device)

    def _units_of(self, microbatch: Microbatch, chunk: Chunk, device: torch.device) -> _Units:
        """Return the units of a micro-batch; they are kept for its other layers, or for the next one of its shape."""
        starts = microbatch.cu_seqlens
        key = microbatch.shape, None if starts is None else (chunk.index, microbatch.number)
        if self._units is None or self._units[0] != key:
            num, sequence, of_row, window = number_windows(microbatch.shape, chunk.sequence_share, starts, device)
            keys = PAIRS * torch.stack([torch.zeros_like(of_row), of_row, num + window])
            # On ranks that share a sequence, a pair misses as much of 128 positions as in a window of a single rank.
            lengths = torch.zeros(num, device=of_row.device).index_add_(0, of_row, torch.ones_like(of_row).float())
            missed = (PAIR_EVIDENCE / WINDOW * lengths).clamp(min=self._pair_evidence)
            missed = nn.functional.pad(missed, (0, len(sequence)), value=PAIR_EVIDENCE)
            evidence = torch.full_like(missed, PAIR_EVIDENCE)
            evidence[:num] = self._pair_evidence
            zero, most = torch.zeros_like(missed), torch.full_like(missed, torch.inf)
            low, high = (
                torch.stack(each, 1).unsqueeze(1)
                for each in ([zero, -missed, zero, zero], [most, most, missed, evidence])
            )
            share = torch.full((1,), 1 / max(1, len(of_row)))
            sequence, keys, low, high, share = (to_device(each, device) for each in (sequence, keys, low, high, share))
            zeros = torch.zeros(len(missed) * PAIRS, 4, device=device)
            self._units = key, _Units(num, sequence, keys, low, high, zeros, share)
        return self._units[1]

    @property
    def _pair_evidence(self) -> float:
        """The most that a pair adds to evidence on one of the ranks that share a sequence; one row may be topk decisions."""
        return max(self.topk, PAIR_EVIDENCE / self._sharing)

    # ---- the end
    def numbers(self) -> dict[str, Any]:
        """Return the counts that this rank publishes at the end of the session; waits for the device once."""
        if self._numbers is None:
            numbers: dict[str, Any] = {"replica": self._replica, "layers": {}, "low": [0, 0, 0]}
            numbers |= {"least": (np.inf, ""), "parts": []}
            is_judged: dict[tuple[int, int, int], bool] = {}  # sample -> it has a window that counts
            tensors = [*self._layers, *(each for call in self._calls for each in (call.sums, call.units.sequence))]
            if tensors:
                follow(self._stream, *tensors)
                values = torch.cat([each.flatten() for each in tensors]).cpu().double().numpy()
                pieces = np.split(values, np.cumsum([each.numel() for each in tensors])[:-1])
                for layer, slot in self._slots.items():
                    evidence = float(np.minimum(pieces[slot], self._pair_evidence).sum())
                    numbers["layers"][layer] = Unit(evidence=evidence)
                of_calls = iter(pieces[len(self._layers) :])
                for call, sums, sequence in zip(self._calls, of_calls, of_calls):
                    self._count(numbers, is_judged, call, sums.reshape(-1, 4), sequence.astype(np.int64))
            self._numbers = numbers | {"samples": (len(is_judged), list(is_judged.values()).count(False))}
        return self._numbers

    def _count(self, numbers: Any, is_judged: Any, call: _Call, sums: Any, sequence: Any) -> None:
        """Add up the windows of a call."""
        num = call.units.num_sequences
        whole, (rows, shared, missed, evidence) = sums[:num], sums[num:].T
        of_layer = Unit(float(rows.sum()), float(shared.sum()), float((shared + missed).sum()))
        numbers["layers"][call.layer] = numbers["layers"][call.layer].plus(of_layer)
        counts = (rows >= LEAST_ROWS) & (evidence >= WINDOW_EVIDENCE)
        agreement = np.where(counts, np.maximum(shared / np.maximum(shared + missed, 1e-9), -1), np.inf)
        judged = np.bincount(sequence, counts, num) > 0
        low = np.minimum(np.bincount(sequence, (agreement < self.least) * evidence, num), whole[:, 3])
        added = judged.sum(), (low > 0).sum(), low.sum()
        numbers["low"] = [total + float(more) for total, more in zip(numbers["low"], added)]
        if len(agreement):
            place = f"rank {self.rank}, {call.name}{sequence[agreement.argmin()]}"
            numbers["least"] = min(numbers["least"], (float(agreement.min()), place))
        for number in np.flatnonzero(whole[:, 0]).tolist():
            key = (*call.sample, number)
            is_judged[key] = is_judged.get(key, False) or bool(judged[number])
            if self._sharing > 1 and not judged[number] and len(numbers["parts"]) < MOST_PARTS:
                place = f"rank {self._owner} and those that share its sequences, {call.name}{number}"
                rows, shared, missed, evidence = whole[number].round(3).tolist()
                numbers["parts"].append((place, Unit(rows, shared, shared + missed, evidence)))

    def report(self) -> LiveAgreement:
        """Return the counts so far as a report has them; waits for the device."""
        numbers = self.numbers()
        least, place = numbers["least"]
        samples, not_judged = numbers["samples"]
        return LiveAgreement(
            layers=numbers["layers"],
            num_layers=self.num_layers,
            least_sample=None if least == np.inf else least,
            least_place=place,
            samples=samples,
            samples_not_judged=not_judged,
        )


# ---- the ranks of a session together
class _Group(NamedTuple):
    """Sums of ranks that have every row once.

    Args:
        layers: layer number -> agreement, where there is enough evidence.
        judged, low, evidence: samples in a layer with a window that counts, with a low window, and the evidence of these.
        least: agreement and name of the window or sample that agrees least.
    """

    layers: dict[int, float]
    judged: float
    low: float
    evidence: float
    least: tuple[float, str]


def judge(everyone: Sequence[Mapping[str, Any]], least: float) -> tuple[list[str], list[str]]:
    """Return why the routes of a group of ranks are wrong, and else a warning if they agree little; the same on all.

    Args:
        everyone: `Agreement.numbers` of each rank.
        least: `min_agreement` of `replay`; 0: nothing is wrong.
    """
    warnings = []
    # Tensor-parallel ranks with the same rows are replicas: each is compared on its own.
    for replica in sorted({numbers["replica"] for numbers in everyone}) if least else ():
        group = _add_up_ranks([numbers for numbers in everyone if numbers["replica"] == replica], least)
        lowest, place = group.least
        found, little = "", {layer: value for layer, value in group.layers.items() if value < WARN}
        if num_low := sum(value < least for value in group.layers.values()):
            found = (
                f"{num_low} of {len(group.layers)} layers ({_list(group.layers)}). Either the routes are of older or other "
                "weights: compare their version with the trainer's. Or they are of other rows or layers: have the engine "
                "return token ids, and compare the trace's layer_numbers with the model's."
            )
        elif group.evidence >= SESSION_EVIDENCE * max(1, group.judged / 1000):
            found = (
                f"{group.low:.0f} of {group.judged:.0f} samples in a layer, least in {place} ({lowest:.0%}): routes of "
                "other tokens."
            )
        if found:
            problem = f"the live router agrees with the replayed routes by less than min_agreement={least} in {found}"
            return [problem], []
        if little or lowest < WARN:
            found = "; ".join([f"layers {_list(little)}"] * bool(little) + [f"{place}: {lowest:.0%}"] * (lowest < WARN))
            warnings.append(
                f"the live router agrees little with the replayed routes ({found}): routes of older weights do, and so do "
                "routes of other tokens"
            )
    return [], warnings[:1]


def _add_up_ranks(ranks: Sequence[Mapping[str, Any]], least: float) -> _Group:
    units = add_up((int(layer), unit) for numbers in ranks for layer, unit in numbers["layers"].items())
    # A part that is too small on each rank may have enough evidence with those of the other ranks.
    parts = add_up(part for numbers in ranks for part in numbers["parts"]).items()
    samples = [(unit, at) for at, unit in parts if unit.rows >= LEAST_ROWS and unit.evidence >= WINDOW_EVIDENCE]
    low = [unit.evidence for unit, _ in samples if unit.agreement < least]
    judged, num_low, evidence = map(sum, zip((len(samples), len(low), sum(low)), *(each["low"] for each in ranks)))
    return _Group(
        {layer: unit.agreement for layer, unit in sorted(units.items()) if unit.evidence >= LAYER_EVIDENCE},
        judged,
        num_low,
        evidence,
        min([*(tuple(each["least"]) for each in ranks), *((unit.agreement, at) for unit, at in samples)]),
    )


def add_up(units: Iterable[tuple[Any, Iterable[float]]]) -> dict[Any, Unit]:
    """Return the sums of (key, unit) by key."""
    sums: dict[Any, Unit] = {}
    for key, unit in units:
        sums[key] = sums.get(key, Unit()).plus(unit)
    return sums


def _list(values: Mapping[int, float]) -> str:
    return ", ".join(f"{layer}: {value:.0%}" for layer, value in values.items())
