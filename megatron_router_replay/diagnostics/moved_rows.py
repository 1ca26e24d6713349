"""Rows of b whose origin in a is known -> findings: what was exchanged, shuffled, or read as [s, b] where it was [b, s].

The most special comes first: whole samples, then runs of rows with one offset, then stretches in some other order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megatron_router_replay.diagnostics.compare import Array
from megatron_router_replay.diagnostics.evidence import MIN_RUN, Evidence
from megatron_router_replay.diagnostics.finding import Finding
from megatron_router_replay.diagnostics.samples import Samples
from megatron_router_replay.diagnostics.wording import (
    layer_words,
    place_of,
    place_of_stretch,
    sample_words,
    shift_finding,
)


class _Run(NamedTuple):
    """Rows first..last of b that hold rows first + offset..last + offset of a."""

    first: int
    last: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Rows of b and the rows of a they hold the routes of, n rows that were found; index: of each in the evidence."""

    rows: Array
    sources: Array
    index: Array


def classify_origin(
    evidence: Evidence, origin: Origin, samples: Samples, numbers: tuple[int, ...]
) -> Iterator[Finding]:
    """Say what the origins look like: runs that moved as a whole first, then what is left in one order or another."""
    moved = origin.rows != origin.sources
    runs, in_runs = _runs(origin)
    displaced = [run for run in runs if run.offset]
    if displaced:
        yield from _run_findings(evidence, displaced, samples, numbers)
    for region in _regions(origin, moved & ~in_runs):
        yield _scrambled(evidence, origin.rows[region], origin.sources[region], samples, numbers)


def _runs(origin: Origin) -> tuple[list[_Run], Array]:
    """Return runs of rows that come from one place, and which rows of the origin lie in them, [n] bool."""
    offset = origin.sources - origin.rows
    in_runs = np.zeros(len(offset), dtype=bool)
    runs: list[_Run] = []
    begin = 0
    while begin < len(offset):
        # A row that was found elsewhere by chance does not end a run.
        end, misses = begin, 0
        for at in range(begin, len(offset)):
            if offset[at] == offset[begin] and origin.rows[at] - origin.rows[end] <= MIN_RUN:
                end, misses = at, 0
            else:
                misses += 1
                if misses > 3:
                    break
        inside = offset[begin : end + 1] == offset[begin]
        if inside.sum() >= MIN_RUN and inside.mean() >= 0.5:
            runs.append(_Run(int(origin.rows[begin]), int(origin.rows[end]), int(offset[begin])))
            in_runs[begin : end + 1] = True
            begin = end + 1
        else:
            begin += 1
    return runs, in_runs


def _run_findings(
    evidence: Evidence, runs: list[_Run], samples: Samples, numbers: tuple[int, ...]
) -> Iterator[Finding]:
    lengths: Counter[int] = Counter()
    for first, last, offset in runs:
        lengths[offset] += last - first + 1
    # Most rows at one offset: all were shifted, by more than the search for shifts looks.
    ((commonest, length),) = lengths.most_common(1)
    if length > 0.6 * samples.num_rows:
        shifted = [(run.first, run.last) for run in runs if run.offset == commonest]
        place = place_of(shifted, length, samples, seen=not evidence.complete)
        yield shift_finding(evidence.name_a, evidence.name_b, numbers, -commonest, place)
        runs = [run for run in runs if run.offset != commonest]
    whole, parts = _whole_samples(runs, samples)
    if whole:
        yield _samples_finding(evidence, whole, samples, numbers)
    if parts:
        yield _parts_finding(evidence, parts, samples, numbers)


def _whole_samples(runs: list[_Run], samples: Samples) -> tuple[dict[int, int], list[_Run]]:
    """Split runs into samples that hold another sample from its beginning, {sample of b: sample of a}, and the rest."""
    whole: dict[int, int] = {}
    parts: list[_Run] = []
    for run in _cut_at_samples(runs, samples):
        exchange = _exchanged_sample(run, samples)
        if exchange is not None:
            whole[exchange[0]] = exchange[1]
            continue
        # What was cut at a sample's end for nothing is joined again.
        if parts and parts[-1].last + 1 == run.first and parts[-1].offset == run.offset:
            run = run._replace(first=parts.pop().first)
        parts.append(run)
    return whole, parts


def _exchanged_sample(run: _Run, samples: Samples) -> tuple[int, int] | None:
    """Return the sample of b that a run lies in and the sample of a that it holds from its beginning, or None."""
    if not samples.known:
        return None
    _, places = samples.places(torch.tensor([run.first, run.first + run.offset]))
    sample, source = places.tolist()
    if sample == source or max(sample, source) >= samples.count:
        return None
    (begin, end), (source_begin, source_end) = samples.bounds(sample), samples.bounds(source)
    if source_begin - begin != run.offset:
        return None
    # Samples of other lengths share their shorter length at most; the first rows may be hidden by noise.
    enough = run.last - run.first + 1 >= 0.6 * min(end - begin, source_end - source_begin)
    return (sample, source) if enough and run.first - begin <= 4 else None


def _cut_at_samples(runs: list[_Run], samples: Samples) -> Iterator[_Run]:
    """Yield runs that lie in one sample each: samples behind each other may have moved by the same number of rows."""
    for first, last, offset in runs:
        begin = first
        inside = samples.ends[(samples.ends > first) & (samples.ends <= last)].tolist()
        for end in [*inside, last + 1]:
            yield _Run(begin, end - 1, offset)
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


def _parts_finding(evidence: Evidence, parts: list[_Run], samples: Samples, numbers: tuple[int, ...]) -> Finding:
    name_b, name_a = evidence.name_b, evidence.name_a
    exchanged = len(parts) == 2 and parts[0].offset == -parts[1].offset
    shown = [f"rows {first}..{last} hold rows {first + offset}..{last + offset}" for first, last, offset in parts[:4]]
    more = f", and {len(parts) - 4} more runs" if len(parts) > 4 else ""
    num_rows = sum(run.last - run.first + 1 for run in parts)
    place = place_of([(run.first, run.last) for run in parts], num_rows, samples, seen=False)
    of_samples = f" ({sample_words(place.samples)})" if 0 < len(place.samples) <= 6 else ""
    layers = f" in {layer_words(numbers)}" if numbers else ""
    verb = "two chunks are exchanged" if exchanged else "rows lie in another place"
    return Finding(
        kind="rows_moved",
        layer_numbers=numbers,
        rows=place.rows or (parts[0].first, parts[-1].last),
        samples=place.samples,
        text=f"{verb}{layers}: in {name_b}, {', '.join(shown)} of {name_a}{more}{of_samples}.",
    )


def _regions(origin: Origin, left: Array) -> Iterator[slice]:
    """Yield stretches of the origin in which most rows come from elsewhere without one offset."""
    flags = np.flatnonzero(left)
    breaks = np.flatnonzero((np.diff(flags) > 8) | (np.diff(origin.rows[flags]) > 64))
    for group in np.split(flags, breaks + 1):
        if len(group) >= 2 * MIN_RUN:
            yield slice(int(group[0]), int(group[-1]) + 1)


def _scrambled(evidence: Evidence, rows: Array, sources: Array, samples: Samples, numbers: tuple[int, ...]) -> Finding:
    name_b, name_a = evidence.name_b, evidence.name_a
    layers = f"{layer_words(numbers)} of " if numbers else ""
    first, last = int(rows[0]), int(rows[-1])
    place = place_of_stretch(rows, samples, seen=not evidence.complete)
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
