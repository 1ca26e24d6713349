"""Compare the replayed experts with the live router's own, and so find routes of other tokens, layers or weights.

In each micro-batch one layer of a chunk also takes its live top-k; in the first one that a process runs on the chunk, all
layers do. The overlap of both choices is counted on the device at once, beyond chance: an agreement of 1 means the same
experts, and 0 as many shared ones as a random token of the micro-batch has. At the end of a session, the ranks add up:

    layer     one layer, over all rows of the session
    window    128 neighbouring positions of a sequence in one layer, on one rank
    sample    a sequence in one layer, over the ranks that share it, if no rank has a window of it with enough evidence

A low layer raises. Low windows and samples raise by the evidence of all of them. Evidence counts different routes, because a
token at a near-tie flips each time that it comes again: one pair of routes (live, replayed) is 8 decisions at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from megatron_router_replay.mcore.batches.chunk import Chunk
from megatron_router_replay.mcore.batches.queue import Microbatch
from megatron_router_replay.mcore.core.streams import current_stream, follow, to_device

ALL = -1
"""In place of a layer's position: all layers take their live top-k."""

WINDOW, LEAST_ROWS = 128, 32
WINDOW_EVIDENCE, LAYER_EVIDENCE, SESSION_EVIDENCE = 48.0, 64.0, 192.0
"""Decisions beyond chance below which a window and a layer do not count, and below which low windows do not raise: the last
for each thousand samples."""
PAIR_EVIDENCE, PAIR_SHARE = 8.0, 1 / 8
"""The most that one pair of routes adds to evidence, or misses in a window; and the most of a layer's rows that count for a
pair which hardly agrees. Rows that agree have no bound."""
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

    @property
    def counts(self) -> bool:
        """Whether a window or a sample of these sums has enough rows and evidence."""
        return self.rows >= LEAST_ROWS and self.evidence >= WINDOW_EVIDENCE

    def plus(self, other: Sequence[float]) -> Unit:
        return Unit(*map(sum, zip(self, other)))


class Windows(NamedTuple):
    """Windows of a micro-batch's rows.

    Args:
        keys: [n] int64, PAIRS times the window of each row.
        sequence: [num_windows] int64, the sequence of each window.
        num_sequences: more than the highest of them.
        weight, share: [n] and [1] float32, of rows that all count: 1, and 1 / n.
    """

    keys: Tensor
    sequence: Tensor
    num_sequences: int
    weight: Tensor
    share: Tensor


def number_windows(shape: tuple[int, int], share: tuple[int, int], cu_seqlens: Tensor | None, device: Any) -> Windows:
    """Return the windows of the rows that a router gets, without device synchronization.

    Args:
        shape: (positions, sequences) of the rows, which are s-major.
        share: (number of this rank's part, number of parts) of the positions, split by sequence parallelism.
        cu_seqlens: [num_seqs + 1] integers, where packed sequences start, over all context-parallel ranks; None: not packed.
    """
    length, num_sequences = shape
    n = length * num_sequences
    if cu_seqlens is None:  # on the host, because each operation on a device is a launch
        rows, windows = torch.arange(n), torch.arange(-(-length // WINDOW) * num_sequences)
        window, sequence = (
            rows // num_sequences // WINDOW * num_sequences + rows % num_sequences,
            windows % num_sequences,
        )
    else:
        rows = torch.arange(n, device=device)
        ends = to_device(cu_seqlens, device)[1:].long()
        # Each context-parallel rank has the same share of each sequence.
        cp_size = (ends[-1] / max(1, share[1] * n)).round().long().clamp(min=1)
        ends = ends // cp_size - share[0] * n
        starts = nn.functional.pad(ends.clamp(min=0), (1, 0))  # the last one is of rows after all sequences
        num_sequences = len(starts)
        # Windows are numbered in the order of rows. A sequence has at most one more of them than it fills: hence the sum.
        first = starts // WINDOW + torch.arange(num_sequences, device=device)
        of_row = torch.bucketize(rows, ends, right=True)
        window = first[of_row] + (rows - starts[of_row]) // WINDOW
        sequence = torch.bucketize(torch.arange(n // WINDOW + num_sequences, device=device), first, right=True) - 1
    keys, sequence = to_device(window * PAIRS, device), to_device(sequence, device)
    ones, part = torch.ones(n, device=device), torch.full((1,), 1 / max(1, n), device=device)
    return Windows(keys, sequence, num_sequences, ones, part)


def count_rows(live: Tensor, replayed: Tensor, weight: Tensor, share: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the counts of each row, and the bucket of its pair of routes, without device synchronization.

    Args:
        live, replayed: [n, topk] int64.
        weight: [n] float32, 1: the row counts; 0: it does not.
        share: [n * topk] float32, the part of each live expert's row in the rows that count.
        codes: [2, num_experts] int64, random.

    Returns:
        [n, 4] float32: weight, shared experts beyond chance, missed experts, and the sum of these two; and [n] int64.
    """
    topk = live.shape[1]
    load = torch.zeros(codes.shape[1], device=live.device).scatter_add_(0, live.reshape(-1), share)
    chance = load[replayed].sum(1)
    overlap = (live.unsqueeze(2) == replayed.unsqueeze(1)).sum((1, 2))
    pairs = (codes[0][live] + codes[1][replayed]).sum(1) % PAIRS
    return torch.stack([weight, overlap - chance, topk - overlap, topk - chance], 1), pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveAgreement:
    """Agreement of the live router with the replayed routes.

    Args:
        layers: layer number -> its sums over this session.
        num_layers: layers that replay.
        least_sample: agreement of the window that agrees least; None: none has enough rows and evidence.
        samples, samples_not_judged: sequences of micro-batches, and those without such a window on this rank.
    """

    layers: Mapping[int, Unit]
    num_layers: int
    least_sample: float | None
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

    def __str__(self) -> str:
        if self.all_layers is None:
            return "the live router was compared in no row"
        least = {"layer": min(self.judged.values(), default=None), "sample": self.least_sample}
        found = [f"least {name} {value:.0%}" for name, value in least.items() if value is not None]
        found.append(f"{len(self.judged)} of {self.num_layers} layers judged")
        found.append(f"{self.samples - self.samples_not_judged} of {self.samples} samples")
        return f"the live router agrees with {self.all_layers:.1%} of the trace's routes ({', '.join(found)})"


class _Call(NamedTuple):
    """Counts of a layer in a micro-batch, on the device."""

    microbatch: tuple[int, int]  # chunk and number
    layer: int
    sequence: Tensor
    units: Tensor  # [num_windows, 4]
    whole: Tensor  # [num_sequences], evidence
    stream: Any


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
        self._constants: tuple[Tensor, ...] = ()  # codes of experts, and the bounds of a pair's counts in a window
        self._layers: tuple[Tensor, ...] = ()  # [PAIRS, 4] sums
        self._slots: dict[int, int] = {}  # layer number -> which of these
        self._windows: dict[int, tuple[Any, Windows]] = {}  # chunk -> of which micro-batch, and its windows
        self._stream: Any = None  # which used these last
        self._calls: list[_Call] = []
        self._read_last: Any = None  # what `_read` returned, until the next call

    def next_layer(self, chunk: Chunk) -> int:
        """Return the position of the layer that a chunk's next micro-batch compares, or ALL."""
        number = _num_microbatches[chunk.module] = _num_microbatches.get(chunk.module, -1) + 1
        return ALL if self.every_layer or not number else (number - 1) % len(chunk.replayed_routers)

    def add(
        self, microbatch: Microbatch, chunk: Chunk, layer: int, live: Tensor, replayed: Tensor, counts: Tensor | None
    ) -> None:
        """Count a layer of a micro-batch, without device synchronization.

        Args:
            live: [n, topk] int64.
            replayed: [n, topk] int64.
            counts: [n] bool, True: the row is replayed; None: all are.
        """
        self._begin(chunk, live.device)
        windows, (codes, low, high) = self._windows_of(microbatch, chunk, live.device), self._constants
        if counts is None:
            rows, pairs = count_rows(live, replayed, windows.weight, windows.share.expand(live.numel()), codes)
        else:
            share = (counts / counts.sum().clamp(min=1)).unsqueeze(1).expand_as(live).reshape(-1)
            rows, pairs = count_rows(live, replayed, windows.weight, share, codes)
            rows = rows * counts.unsqueeze(1)
        self._layers[self._slots.setdefault(layer, len(self._slots))].index_add_(0, pairs, rows)
        sums = rows.new_zeros(len(windows.sequence) * PAIRS, 4)
        sums = sums.index_add_(0, windows.keys + pairs, rows).view(-1, PAIRS, 4)
        units = sums.clamp(low, high).sum(1)
        # A loop of tokens is low in every window: of a whole sequence, on all ranks that share it, a pair counts once.
        whole = rows.new_zeros(windows.num_sequences, PAIRS).index_add_(0, windows.sequence, sums[:, :, 3])
        whole = whole.clamp(max=self._pair_evidence).sum(1)
        key = chunk.index, microbatch.number
        self._calls.append(_Call(key, layer, windows.sequence, units, whole, self._stream))
        self._read_last = None

    def _begin(self, chunk: Chunk, device: torch.device) -> None:
        """Let the current stream use the tensors of the last call; make them for the first call."""
        if not self._constants:
            self._replica, self._sharing, self._owner = chunk.row_sharing
            codes = torch.randint(1 << 16, (2, self.num_experts), generator=torch.Generator().manual_seed(0))
            low = torch.tensor([0, -PAIR_EVIDENCE, 0, 0])
            high = torch.tensor([torch.inf, torch.inf, PAIR_EVIDENCE, PAIR_EVIDENCE])
            self._constants = tuple(to_device(values, device) for values in (codes, low, high))
            # Normal tensors also where the first forward runs in inference mode: later ones may not, and add to them.
            with torch.inference_mode(False):
                self._layers = torch.zeros(self.num_layers, PAIRS, 4, device=device).unbind()
            self._stream = current_stream(device)
        for tensors in (self._constants, self._layers, *(windows for _, windows in self._windows.values())):
            follow(self._stream, *(each for each in tensors if isinstance(each, Tensor)))
        self._stream = current_stream(device)

    def _windows_of(self, microbatch: Microbatch, chunk: Chunk, device: torch.device) -> Windows:
        """Return the windows of a micro-batch. Those of a chunk's last one are kept, for its other layers or the next."""
        lengths = microbatch.cu_seqlens
        key = microbatch.shape, None if lengths is None else microbatch.number
        kept, windows = self._windows.get(chunk.index, (None, None))
        if windows is None or kept != key:
            windows = number_windows(microbatch.shape, chunk.sequence_share, lengths, device)
            self._windows[chunk.index] = key, windows
        return windows

    @property
    def _pair_evidence(self) -> float:
        """The most that a pair adds to evidence on one of the ranks that share a sequence; one row may be topk decisions."""
        return max(self.topk, PAIR_EVIDENCE / self._sharing)

    # ---- the end
    def _read(self) -> tuple[dict[str, Any], dict[tuple[int, ...], bool]]:
        """Return this rank's numbers, and whether each sample has a window that counts; waits for the device once."""
        if self._read_last is None:
            numbers: dict[str, Any] = {"replica": self._replica, "layers": {}, "low": [0, 0, 0]}
            numbers |= {"least": (np.inf, ""), "parts": []}
            samples: dict[tuple[int, ...], bool] = {}
            for call in self._calls:
                follow(call.stream, call.units, call.whole, call.sequence)
            follow(self._stream, *self._layers)
            tensors = [each.flatten() for each in self._layers]
            tensors += [each.flatten() for call in self._calls for each in (call.units, call.whole, call.sequence)]
            counts = torch.cat(tensors).cpu().double().numpy() if tensors else np.empty(0)
            pieces = iter(np.split(counts, np.cumsum([len(each) for each in tensors])[:-1]))
            sums_of_layers = [next(pieces) for _ in self._layers]
            for layer, slot in self._slots.items():
                numbers["layers"][layer] = self._layer_unit(sums_of_layers[slot].reshape(PAIRS, 4))
            for call in self._calls:
                units, whole, sequence = next(pieces), next(pieces), next(pieces)
                self._count(numbers, samples, call, units.reshape(-1, 4), whole, sequence.astype(np.int64))
            self._read_last = numbers, samples
        result: tuple[dict[str, Any], dict[tuple[int, ...], bool]] = self._read_last
        return result

    def _layer_unit(self, sums: Any) -> Unit:
        """Return the unit of a layer's [PAIRS, 4] sums."""
        rows, shared, _, beyond = sums.T
        # A pair that hardly agrees is one near-tie if it comes again and again, and many if they are different ones.
        most = np.minimum(1, PAIR_SHARE * rows.sum() / np.maximum(rows, 1))
        weight = np.where(2 * shared < beyond, most, 1)
        columns = rows, weight * shared, weight * beyond, np.minimum(beyond, self._pair_evidence)
        return Unit(*(float(column.sum()) for column in columns))

    def _count(self, numbers: Any, samples: Any, call: _Call, units: Any, whole: Any, sequence: Any) -> None:
        """Add up the windows of a call."""
        rows, shared, missed, evidence = units.T
        judged = (rows >= LEAST_ROWS) & (evidence >= WINDOW_EVIDENCE)
        agreement = np.where(judged, np.maximum(shared / np.maximum(shared + missed, 1e-9), -1), np.inf)
        low = agreement < self.least
        sums = [
            np.bincount(sequence, values, len(whole))
            for values in (rows, shared, shared + missed, judged, low * evidence)
        ]
        low_evidence = np.minimum(sums[4], whole)
        found = (sums[3] > 0).sum(), (low_evidence > 0).sum(), low_evidence.sum()
        numbers["low"] = [one + float(other) for one, other in zip(numbers["low"], found)]
        name = "chunk {}, micro-batch {}, layer {}".format(*call.microbatch, call.layer)
        if len(agreement):
            least = f"rank {self.rank}, {name}, sequence {sequence[agreement.argmin()]}"
            numbers["least"] = min(numbers["least"], (float(agreement.min()), least))
        for number in np.flatnonzero(sums[0]).tolist():
            key, is_judged = (*call.microbatch, number), bool(sums[3][number])
            samples[key] = samples.get(key, False) or is_judged
            if self._sharing > 1 and not is_judged and len(numbers["parts"]) < MOST_PARTS:
                where = f"rank {self._owner} and those that share its sequences, {name}, sequence {number}"
                of_sample = [round(float(values[number]), 3) for values in (*sums[:3], whole)]
                numbers["parts"].append((where, of_sample))

    def report(self) -> LiveAgreement:
        """Return the counts so far; waits for the device."""
        numbers, samples = self._read()
        return LiveAgreement(
            layers=numbers["layers"],
            num_layers=self.num_layers,
            least_sample=None if numbers["least"][0] == np.inf else numbers["least"][0],
            samples=len(samples),
            samples_not_judged=sum(not judged for judged in samples.values()),
        )

    def numbers(self) -> dict[str, Any]:
        """Return the counts that this rank publishes at the end of the session."""
        return self._read()[0]


# ---- the ranks of a session together
class _Group(NamedTuple):
    """Sums of all ranks.

    Args:
        layers: layer number -> agreement, where there is enough evidence.
        judged, low, evidence: samples in a layer with a window that counts, with a low one, and the evidence of these.
        least: agreement and name of the window or sample that agrees least.
    """

    layers: dict[int, float]
    judged: float
    low: float
    evidence: float
    least: tuple[float, str]


def _groups(everyone: Sequence[Mapping[str, Any]], least: float) -> Iterator[_Group]:
    """Yield the sums of each set of ranks that have every row once: of tensor-parallel ranks with the same rows one."""
    for replica in sorted({numbers["replica"] for numbers in everyone}):
        ranks = [numbers for numbers in everyone if numbers["replica"] == replica]
        layers = _add_up((int(layer), unit) for numbers in ranks for layer, unit in numbers["layers"].items())
        # A part that is too small on each rank may have enough evidence with those of the other ranks.
        parts = _add_up(part for numbers in ranks for part in numbers["parts"]).items()
        samples = [(unit.agreement, name, unit.evidence) for name, unit in parts if unit.counts]
        low = [evidence for agreement, _, evidence in samples if agreement < least]
        judged, num_low, evidence = map(
            sum, zip((len(samples), len(low), sum(low)), *(numbers["low"] for numbers in ranks))
        )
        yield _Group(
            {layer: unit.agreement for layer, unit in sorted(layers.items()) if unit.evidence >= LAYER_EVIDENCE},
            judged,
            num_low,
            evidence,
            min([*(tuple(numbers["least"]) for numbers in ranks), *(sample[:2] for sample in samples)]),
        )


def _add_up(units: Any) -> dict[Any, Unit]:
    """Return the sums of (key, unit) by key."""
    sums: dict[Any, Unit] = {}
    for key, unit in units:
        sums[key] = sums.get(key, Unit()).plus(unit)
    return sums


def problems(everyone: Sequence[Mapping[str, Any]], least: float) -> list[str]:
    """Return why the routes of a group of ranks are wrong, from the `Agreement.numbers` of each; the same on all."""
    for group in _groups(everyone, least) if least else ():
        found, num_low = "", sum(value < least for value in group.layers.values())
        if num_low:
            found = (
                f"{num_low} of {len(group.layers)} layers ({_list(group.layers)}). Either the routes are of other weights: "
                "compare their version with the trainer's. Or they are of other rows or layers: have the engine return token "
                "ids, and compare the trace's layer_numbers with the model's."
            )
        elif group.evidence >= SESSION_EVIDENCE * max(1, group.judged / 1000):
            found = (
                f"{group.low:.0f} of {group.judged:.0f} samples in a layer, least in {group.least[1]} "
                f"({group.least[0]:.0%}): routes of other tokens."
            )
        if found:
            return [f"the live router agrees with the replayed routes by less than min_agreement={least} in {found}"]
    return []


def warning(everyone: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning about routes that agree little, and are not wrong enough to raise."""
    for group in _groups(everyone, WARN):
        low = {layer: value for layer, value in group.layers.items() if value < WARN}
        found = [f"layers {_list(low)}"] if low else []
        found += [f"{group.least[1]}: {group.least[0]:.0%}"] if group.least[0] < WARN else []
        if found:
            return (
                f"the live router agrees little with the replayed routes ({'; '.join(found)}): routes of older weights do, "
                "and so do routes of other tokens"
            )
    return None


def _list(values: Mapping[int, float]) -> str:
    return ", ".join(f"{layer}: {value:.0%}" for layer, value in values.items())
