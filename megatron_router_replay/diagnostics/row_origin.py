"""Where rows of b come from in a, anywhere: samples and chunks that were exchanged, rows shuffled, [b, s] read as [s, b].

Rows that nothing near explains are looked up by fingerprints: the sets of a few layers together as one number. One pass
over some layers of a finds, for each row, the row of a that holds most of its sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_router_replay.diagnostics.counting import Samples
from megatron_router_replay.diagnostics.evidence import Evidence, expert_numbers, set_numbers
from megatron_router_replay.diagnostics.finding import Finding
from megatron_router_replay.diagnostics.source import TraceSource, block_rows
from megatron_router_replay.diagnostics.wording import layer_words, place_of, sample_words, shift_finding

Array = npt.NDArray[Any]

_TARGETS = 4096
_LAYERS = 12
_MAX_PAIRS = 1 << 20
_MIN_RUN = 6
_LOST = 0.15
"""Share of far decisions, measured by that of unrelated routes, from which a piece's rows are looked up."""

_PRIME = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class _Origin:
    """Rows of b and the rows of a they hold the routes of, n rows that were found; index: of each in the evidence."""

    rows: Array
    sources: Array
    index: Array


def find_origins(evidence: Evidence, a: TraceSource, samples: Samples, *, chance: Array) -> list[Finding]:
    """Return the findings of rows that hold other rows' routes.

    Args:
        chance: [num_layers] how often two rows that have nothing to do with each other name the same set.
    """
    findings: list[Finding] = []
    lost = evidence.unexplained() >= _LOST
    # Layers that were lost in the same pieces have one cause, and together they tell a row from others better than alone.
    for layers, pieces in _groups(lost):
        origin = _look_up(evidence, a, layers, pieces, chance)
        if origin is None:
            continue
        numbers = tuple(evidence.layers[i] for i in layers) if len(layers) < 0.9 * len(evidence.layers) else ()
        findings += list(_classify(evidence, origin, samples, numbers))
        moved = origin.index[origin.rows != origin.sources]
        # Rows between those that were found are of the same fault, though noise hid where they come from.
        hidden = np.isin(evidence.piece, np.unique(evidence.piece[moved]))
        evidence.far[hidden] = False
    return findings


def _groups(lost: Array) -> list[tuple[list[int], Array]]:
    """Group pieces that lost the same layers: [(layer indices, [pieces] bool), ...]."""
    groups: list[tuple[Array, Array]] = []
    for piece in np.flatnonzero(lost.sum(axis=1) >= 2):
        for layers, pieces in groups:
            if (layers & lost[piece]).sum() >= 0.6 * (layers | lost[piece]).sum():
                pieces[piece] = True
                break
        else:
            pieces = np.zeros(len(lost), dtype=bool)
            pieces[piece] = True
            groups.append((lost[piece], pieces))
    return [(np.flatnonzero(lost[pieces].mean(axis=0) >= 0.6).tolist(), pieces) for _, pieces in groups[:8]]


def _look_up(evidence: Evidence, a: TraceSource, layers: list[int], pieces: Array, chance: Array) -> _Origin | None:
    at = np.flatnonzero(pieces[evidence.piece])
    if len(at) < _MIN_RUN or len(layers) < 2:
        return None
    if len(at) > _TARGETS:  # whole stretches, so that runs of rows can be seen
        stretches = np.array_split(at, len(at) // 64)
        chosen = np.linspace(0, len(stretches) - 1, _TARGETS // 64).astype(int)
        at = np.concatenate([stretches[i] for i in chosen])
    used = [layers[i] for i in np.unique(np.linspace(0, len(layers) - 1, min(_LAYERS, len(layers))).astype(int))]
    targets = evidence.sets_b[at][:, used]
    width = _fingerprint_width(a.num_tokens, chance[used])
    if width is None:
        return None
    # Fewer layers than were lost are looked at: what decides is how many agree, and a dozen tell millions of rows apart.
    score, source = _best_rows(a, [evidence.layers[i] for i in used], targets, width)
    found = score >= _enough_layers(a.num_tokens, len(used), float(chance[used].mean()))
    # A row that noise changed is nowhere else: only what is clearly better than the row's own place counts as moved.
    in_place = (evidence.shifted(0)[at][:, evidence.index_in_a[used]] == targets).sum(axis=1)
    source = np.where(found & (score >= in_place + max(2, 0.3 * len(used))), source, evidence.rows[at])
    found |= in_place >= 0.4 * len(used)
    displaced = evidence.far[at][:, used].mean(axis=1) >= 0.5
    if displaced.sum() < _MIN_RUN or found[displaced].mean() < 0.5:
        return None
    return _Origin(rows=evidence.rows[at[found]], sources=source[found], index=at[found])


def _fingerprint_width(num_rows: int, chance: Array) -> int | None:
    """Return how many layers tell one row of a from all others; None if these do not."""
    left = float(num_rows)
    for width, share in enumerate(np.sort(chance)[::-1], start=1):
        left *= max(float(share), 1e-6)
        if width >= 2 and left <= 0.5:
            return width
    return len(chance) if left <= 4 else None


def _enough_layers(num_rows: int, num_layers: int, chance: float) -> int:
    """Return in how many layers a row must agree so that not one of 100 rows of b does so with some row of a by chance."""
    least = max(2, -(-2 * num_layers // 5))
    for enough in range(least, num_layers + 1):
        if num_rows * comb(num_layers, enough) * chance**enough <= 0.01:
            return enough
    return num_layers + 1


def _best_rows(a: TraceSource, layers: list[int], targets: Array, width: int) -> tuple[Array, Array]:
    """Return the layers in which the best row of a holds each target's sets, and that row, [targets] each."""
    numbers = expert_numbers(a.num_experts)
    score, source = np.zeros(len(targets), dtype=np.int64), np.full(len(targets), -1, dtype=np.int64)
    prints = _fingerprints(targets, width)
    order = np.argsort(prints, axis=0, kind="stable")
    ordered = np.take_along_axis(prints, order, axis=0)
    step = block_rows(a)
    for start in range(0, a.num_tokens, step):
        block = a.read(start, start + step, layers)
        dtype = torch.uint8 if a.num_experts <= 256 else torch.int16
        sets = set_numbers(block.topk_indices.to(dtype).numpy(), numbers)
        # Filler of rows without a route would look like the origin of rows that hold filler too.
        sets[~block.replay_mask.numpy()] = 0
        # Targets are few and sorted, rows of a are many: each block is looked up and forgotten.
        candidates = _fingerprints(sets, width)
        for column in range(prints.shape[1]):
            low = np.searchsorted(ordered[:, column], candidates[:, column], side="left")
            high = np.searchsorted(ordered[:, column], candidates[:, column], side="right")
            counts = high - low
            row = np.flatnonzero(counts)
            if counts.sum() > _MAX_PAIRS:  # a fingerprint that half of all rows have says nothing
                row = row[counts[row] <= 4][: _MAX_PAIRS // 4]
            counts = counts[row]
            inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            target = order[np.repeat(low[row], counts) + inside, column]
            pair_row = np.repeat(row, counts)
            equal = (sets[pair_row] == targets[target]).sum(axis=1)
            # The best pair of each target comes last, the first row of a first among equals.
            ranked = np.lexsort((-pair_row, equal, target))
            target, equal, pair_row = target[ranked], equal[ranked], pair_row[ranked]
            last = np.flatnonzero(np.append(target[1:] != target[:-1], True)) if len(target) else ranked
            better = last[equal[last] > score[target[last]]]
            score[target[better]], source[target[better]] = equal[better], pair_row[better] + start
    return score, source


def _fingerprints(sets: Array, width: int) -> Array:
    """Return numbers of `width` neighbouring layers each, around in a circle, [n, layers] -> [n, layers] uint64."""
    total = np.zeros_like(sets)
    for offset in range(width):
        total = total * _PRIME + np.roll(sets, -offset, axis=1)
    return total


def _classify(evidence: Evidence, origin: _Origin, samples: Samples, numbers: tuple[int, ...]) -> Iterator[Finding]:
    """Say what the origins look like: runs that moved as a whole first, then what is left in one order or another."""
    moved = origin.rows != origin.sources
    runs, in_runs = _runs(origin, complete=evidence.complete)
    big = [run for run in runs if run[2]]
    if big:
        yield from _run_findings(evidence, big, samples, numbers)
    left = moved & ~in_runs
    for begin, end in _regions(origin, left):
        rows, sources = origin.rows[begin:end], origin.sources[begin:end]
        yield _scrambled(evidence, rows, sources, samples, numbers)


def _runs(origin: _Origin, *, complete: bool) -> tuple[list[tuple[int, int, int]], Array]:
    """Return runs of rows that come from one place, (first row, last row, offset), and which rows lie in them."""
    offset = origin.sources - origin.rows
    in_runs = np.zeros(len(offset), dtype=bool)
    runs: list[tuple[int, int, int]] = []
    begin = 0
    while begin < len(offset):
        # A row that was found elsewhere by chance does not end a run.
        end, misses = begin, 0
        for at in range(begin, len(offset)):
            if offset[at] == offset[begin] and origin.rows[at] - origin.rows[end] <= _MIN_RUN:
                end, misses = at, 0
            else:
                misses += 1
                if misses > 3:
                    break
        inside = offset[begin : end + 1] == offset[begin]
        if inside.sum() >= _MIN_RUN and inside.mean() >= 0.5:
            run = (int(origin.rows[begin]), int(origin.rows[end]), int(offset[begin]))
            runs.append(run)
            in_runs[begin : end + 1] = True
            begin = end + 1
        else:
            begin += 1
    return runs, in_runs


def _run_findings(
    evidence: Evidence, runs: list[tuple[int, int, int]], samples: Samples, numbers: tuple[int, ...]
) -> Iterator[Finding]:
    lengths: dict[int, int] = {}
    for first, last, offset in runs:
        lengths[offset] = lengths.get(offset, 0) + last - first + 1
    shift = -max(lengths, key=lambda offset: lengths[offset])
    if lengths[-shift] > 0.6 * samples.num_rows:
        shifted = [run[:2] for run in runs if run[2] == -shift]
        place = place_of(shifted, lengths[-shift], samples, seen=not evidence.complete)
        yield shift_finding(evidence.name_a, evidence.name_b, numbers, shift, place)
        runs = [run for run in runs if run[2] != -shift]
    whole, parts = _whole_samples(runs, samples)
    if whole:
        yield _samples_finding(evidence, whole, samples, numbers)
    if parts:
        yield _parts_finding(evidence, parts, samples, numbers)


def _whole_samples(
    runs: list[tuple[int, int, int]], samples: Samples
) -> tuple[dict[int, int], list[tuple[int, int, int]]]:
    """Split runs into samples that hold another sample from its beginning, {sample of b: sample of a}, and the rest."""
    whole: dict[int, int] = {}
    parts: list[tuple[int, int, int]] = []
    for first, last, offset in _cut_at_samples(runs, samples):
        match = None
        if samples.known:
            _, (sample, source) = samples.places(torch.tensor([first, first + offset]))
            sample, source = int(sample), int(source)
            if sample < samples.count and source < samples.count:
                begin, end = samples.bounds(sample)
                source_begin, source_end = samples.bounds(source)
                aligned = begin - source_begin == -offset
                shorter = min(end - begin, source_end - source_begin)
                if aligned and sample != source and last - first + 1 >= 0.6 * shorter and first - begin <= 4:
                    match = (sample, source)
        if match is None:
            if parts and parts[-1][1] + 1 == first and parts[-1][2] == offset:
                first = parts.pop()[0]
            parts.append((first, last, offset))
        else:
            whole[match[0]] = match[1]
    return whole, parts


def _cut_at_samples(runs: list[tuple[int, int, int]], samples: Samples) -> Iterator[tuple[int, int, int]]:
    """Yield runs that lie in one sample each: samples behind each other may have moved by the same number of rows."""
    for first, last, offset in runs:
        begin = first
        inside = samples.ends[(samples.ends > first) & (samples.ends <= last)].tolist()
        for end in [*inside, last + 1]:
            yield begin, end - 1, offset
            begin = end


def _samples_finding(evidence: Evidence, whole: dict[int, int], samples: Samples, numbers: tuple[int, ...]) -> Finding:
    name_b, name_a = evidence.name_b, evidence.name_a
    exchanged = [(i, j) for i, j in sorted(whole.items()) if i < j and whole.get(j) == i]
    rest = [(i, j) for i, j in sorted(whole.items()) if whole.get(j) != i]
    sentences = [f"samples {i} and {j} of {name_b} are exchanged" for i, j in exchanged[:4]]
    sentences += [f"sample {i} of {name_b} holds the routes of sample {j} of {name_a}" for i, j in rest[:4]]
    more = len(exchanged) + len(rest) - len(sentences)
    if more > 0:
        sentences.append(f"{more} more samples are in another order")
    concerned = tuple(sorted(whole))
    rows = (samples.bounds(concerned[0])[0], samples.bounds(concerned[-1])[1] - 1)
    spans = ", ".join(f"{first}..{stop - 1}" for first, stop in (samples.bounds(i) for i in concerned[:6]))
    layers = f" in {layer_words(numbers)}" if numbers else ""
    text = "; ".join(sentences) + layers + f" (rows {spans}{', ...' if len(concerned) > 6 else ''})."
    return Finding(kind="samples_moved", layer_numbers=numbers, rows=rows, samples=concerned, text=text)


def _parts_finding(
    evidence: Evidence, parts: list[tuple[int, int, int]], samples: Samples, numbers: tuple[int, ...]
) -> Finding:
    name_b, name_a = evidence.name_b, evidence.name_a
    exchanged = len(parts) == 2 and parts[0][2] == -parts[1][2]
    shown = [f"rows {first}..{last} hold rows {first + offset}..{last + offset}" for first, last, offset in parts[:4]]
    more = f", and {len(parts) - 4} more runs" if len(parts) > 4 else ""
    place = place_of([run[:2] for run in parts], sum(run[1] - run[0] + 1 for run in parts), samples, seen=False)
    of_samples = f" ({sample_words(place.samples)})" if 0 < len(place.samples) <= 6 else ""
    layers = f" in {layer_words(numbers)}" if numbers else ""
    verb = "two chunks are exchanged" if exchanged else "rows lie in another place"
    return Finding(
        kind="rows_moved",
        layer_numbers=numbers,
        rows=place.rows or (parts[0][0], parts[-1][1]),
        samples=place.samples,
        text=f"{verb}{layers}: in {name_b}, {', '.join(shown)} of {name_a}{more}{of_samples}.",
    )


def _regions(origin: _Origin, left: Array) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of stretches in which most rows come from elsewhere without one offset."""
    flags = np.flatnonzero(left)
    if not len(flags):
        return
    breaks = np.flatnonzero((np.diff(flags) > 8) | (np.diff(origin.rows[flags]) > 64))
    for group in np.split(flags, breaks + 1):
        if len(group) >= 2 * _MIN_RUN:
            yield int(group[0]), int(group[-1]) + 1


def _scrambled(evidence: Evidence, rows: Array, sources: Array, samples: Samples, numbers: tuple[int, ...]) -> Finding:
    name_b, name_a = evidence.name_b, evidence.name_a
    layers = f"{layer_words(numbers)} of " if numbers else ""
    first, last = int(rows[0]), int(rows[-1])
    place = place_of([(first, last)], last - first + 1, samples, seen=not evidence.complete)
    where = place.words or "in all rows"

    def finding(kind: str, text: str) -> Finding:
        return Finding(kind=kind, layer_numbers=numbers, rows=(first, last), samples=place.samples, text=text)

    sizes = _transposed(rows, sources)
    if sizes is not None:
        text = (
            f"{layers}{name_b} was read in the other order of its axes, {sizes[0]} x {sizes[1]} as {sizes[1]} x {sizes[0]} "
            f"([b, s] as [s, b] or back), {where}."
        )
        return finding("rows_transposed", text)
    # Only steps between neighbours tell an order; across rows that were not found anything may lie.
    steps = np.diff(sources)[np.diff(rows) == 1]
    if len(steps) and (steps == -1).mean() > 0.6:
        return finding("rows_shuffled", f"{layers}{name_b} holds the rows of {name_a} in reverse, {where}.")
    near = np.mean((sources >= first - 4) & (sources <= last + 4))
    if near >= 0.8:
        return finding("rows_shuffled", f"{layers}{name_b} holds the rows of {name_a} shuffled, {where}.")
    low, high = int(np.quantile(sources, 0.02)), int(np.quantile(sources, 0.98))
    text = f"{layers}{name_b} holds other rows of {name_a} (between {low} and {high}), in no one order, {where}."
    return finding("rows_shuffled", text)


def _transposed(rows: Array, sources: Array) -> tuple[int, int] | None:
    """Return (n, m) if row i * n + j of b holds row j * m + i of a, rows counted from where both begin; else None."""
    steps = np.diff(sources)[np.diff(rows) == 1]
    if not len(steps):
        return None
    values, counts = np.unique(steps, return_counts=True)
    stride = int(values[counts.argmax()])
    if stride < 2 or counts.max() < 0.4 * len(steps):
        return None
    lowest = min(int(rows.min()), int(sources.min()))
    highest = max(int(rows.max()), int(sources.max()))
    best = (0.0, 0)
    # The first and the last row stay where they are, so they are not among those that moved.
    for base in range(max(0, lowest - 2), lowest + 1):
        for count in _counts(highest + 1 - base, stride):
            row = rows - base
            fits = float(np.mean(row % count * stride + row // count == sources - base))
            best = max(best, (fits, count))
    return (best[1], stride) if best[0] >= 0.6 else None


def _counts(size: int, stride: int) -> range:
    middle = round(size / stride)
    return range(max(2, middle - 2), middle + 3)
