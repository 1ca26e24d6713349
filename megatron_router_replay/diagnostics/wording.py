"""Where something was seen -> the words and fields of a finding: layers, rows, samples, positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_router_replay.diagnostics.compare import Array
from megatron_router_replay.diagnostics.finding import Finding
from megatron_router_replay.diagnostics.samples import Samples

_BREAK = 3
"""Rows in which the explanation fails although the traces agree, from which a run of rows ends."""

_MAX_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class Place:
    """Rows in words.

    Args:
        words: such as "in sample 3, positions 40..99 (rows 160..219)"; empty: everywhere.
        rows, samples: as in `Finding`.
    """

    words: str
    rows: tuple[int, int] | None
    samples: tuple[int, ...]


def runs_of_rows(rows: Array, explained: Array, contradicted: Array, *, complete: bool) -> list[tuple[int, int]]:
    """Return the runs of rows that an explanation holds in, [(first, last), ...].

    Args:
        rows: [n] row numbers, increasing. explained, contradicted: [n] bool; rows that are neither end nothing.
        complete: whether rows that are not here hold no fault; otherwise they end no run.
    """
    hits = np.flatnonzero(explained)
    if not len(hits):
        return []
    against = np.concatenate([[0], np.cumsum(contradicted)])
    gap = against[hits[1:]] - against[hits[:-1] + 1] >= _BREAK
    if complete:
        gap |= rows[hits[1:]] - rows[hits[:-1]] > hits[1:] - hits[:-1]
    ends = np.flatnonzero(gap)
    firsts, lasts = hits[np.append(0, ends + 1)], hits[np.append(ends, len(hits) - 1)]
    return [(int(rows[first]), int(rows[last])) for first, last in zip(firsts, lasts)]


def place_of(runs: Sequence[tuple[int, int]], num_explained: int, samples: Samples, *, seen: bool) -> Place:
    """Say where runs of rows lie.

    Args:
        runs: (first, last), in order. num_explained: rows in them that the explanation holds for.
        seen: rows were looked at here and there only, so the runs are where the fault was seen.
    """
    first, last = runs[0][0], runs[-1][1]
    covered = sum(stop - start + 1 for start, stop in runs)
    verb = "seen in " if seen else "in "
    total = samples.num_rows
    # A list of twenty runs tells a reader less than the count and both ends.
    scattered = num_explained < 0.6 * covered or len(runs) > _MAX_NAMED
    # Noise hides a few rows at either end of a fault that lies everywhere.
    if not scattered and covered >= 0.97 * total:
        return Place(words="", rows=None, samples=())
    if scattered and last - first + 1 >= 0.9 * total:
        share = num_explained / total
        words = "" if seen or share > 0.7 else f"in {share:.0%} of the rows, first row {first}, last row {last}"
        words = words or (f"seen in rows {first}..{last}" if seen else "")
        return Place(words=words, rows=None if not words else (first, last), samples=())
    inside = _samples_of(first, last, samples)
    if scattered:
        words = f"{verb}{num_explained:,} of the rows {first}..{last}"
    elif len(runs) == 1:
        words = verb + _run_words(first, last, samples)
    else:
        words = verb + "rows " + ", ".join(f"{start}..{stop}" for start, stop in runs)
        inside = tuple(sorted({sample for run in runs for sample in _samples_of(*run, samples)}))
    if (scattered or len(runs) > 1) and 0 < len(inside) <= _MAX_NAMED:
        words += f" ({sample_words(inside)})"
    return Place(words=words, rows=(first, last), samples=inside)


def place_of_stretch(rows: Array, samples: Samples, *, seen: bool) -> Place:
    """Say where a stretch of row numbers lies, all of which an explanation holds for."""
    first, last = int(rows[0]), int(rows[-1])
    return place_of([(first, last)], last - first + 1, samples, seen=seen)


def _run_words(first: int, last: int, samples: Samples) -> str:
    inside = _samples_of(first, last, samples)
    if not inside:
        return f"rows {first}..{last}"
    begin, end = samples.bounds(inside[0])[0], samples.bounds(inside[-1])[1]
    # The first or last row of a sample may agree by chance.
    if first - begin <= 1 and end - last <= 2:
        return f"{sample_words(inside)} (rows {first}..{last})"
    if len(inside) == 1:
        return f"sample {inside[0]}, positions {first - begin}..{last - begin} (rows {first}..{last})"
    return f"rows {first}..{last} ({sample_words(inside)})"


def _samples_of(first: int, last: int, samples: Samples) -> tuple[int, ...]:
    if not samples.known:
        return ()
    _, sample = samples.places(torch.tensor([first, last]))
    # Rows behind the last sample are of none; they are called those of the last one.
    low, high = sample.clamp(max=samples.count - 1).tolist()
    return tuple(range(low, high + 1)) if high - low < 10_000 else ()


def sample_words(samples: Sequence[int]) -> str:
    """Return "sample 3", "samples 3..7" or "samples 3, 5"."""
    return _numbers("sample", samples)


def layer_words(numbers: Sequence[int]) -> str:
    """Return "layer 3", "layers 3..7" or "layers 3, 5"."""
    return _numbers("layer", numbers)


def _numbers(noun: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{noun}s {numbers[0]}..{numbers[-1]}"
    return f"{noun}s {', '.join(map(str, numbers))}"


def finding_at(
    place: Place, kind: str, text: str, *, layer_numbers: tuple[int, ...] = (), shift: int | None = None
) -> Finding:
    """Return a finding of these rows; its text is the given one with the place behind it and a full stop."""
    text += (f", {place.words}" if place.words else "") + "."
    return Finding(
        kind=kind, text=text, layer_numbers=layer_numbers, rows=place.rows, samples=place.samples, shift=shift
    )


def shift_finding(name_a: str, name_b: str, layer_numbers: tuple[int, ...], shift: int, place: Place) -> Finding:
    """Return the finding that row r of a is row r + shift of b, in these layers (all if empty) and rows."""
    subject = f"{name_b} looks"
    if layer_numbers:
        subject = f"{layer_words(layer_numbers)} of {name_b} look{'s' if len(layer_numbers) == 1 else ''}"
    rows = "one row" if abs(shift) == 1 else f"{abs(shift)} rows"
    sentence = (
        f"{subject} like {name_a} shifted {'down' if shift > 0 else 'up'} by {rows}: row r of {name_a} is row r "
        f"{'+' if shift > 0 else '-'} {abs(shift)} of {name_b}"
    )
    return finding_at(place, "rows_shifted", sentence, layer_numbers=layer_numbers, shift=shift)
