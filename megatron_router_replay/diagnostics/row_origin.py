"""Where rows of b come from in a, anywhere; `moved_rows` says what their origins look like.

Rows that nothing near explains are looked up by fingerprints: the sets of a few layers together as one number. One pass
over some layers of a finds, for each row, the row of a that holds most of its sets.
"""

from __future__ import annotations

from math import comb

import numpy as np

from megatron_router_replay.diagnostics.compare import Array
from megatron_router_replay.diagnostics.evidence import MIN_RUN, Evidence, expert_numbers, set_numbers
from megatron_router_replay.diagnostics.finding import Finding
from megatron_router_replay.diagnostics.moved_rows import Origin, classify_origin
from megatron_router_replay.diagnostics.samples import Samples
from megatron_router_replay.diagnostics.source import TraceSource, block_rows

_TARGETS = 4096  # rows of b that are looked up, of each group of layers
_LAYERS = 12  # layers that are compared, spread over those that were lost
_MAX_PAIRS = 1 << 20  # pairs of rows that one fingerprint of one block may ask to be compared
_LOST = 0.15
"""Share of far decisions, measured by that of unrelated routes, from which a piece's rows are looked up."""

_PRIME = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying loses nothing modulo 2**64


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
        findings += list(classify_origin(evidence, origin, samples, numbers))
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
    # Each group costs a pass over a; noise makes many small ones, and no real fault made more than a few.
    return [(np.flatnonzero(lost[pieces].mean(axis=0) >= 0.6).tolist(), pieces) for _, pieces in groups[:8]]


def _look_up(evidence: Evidence, a: TraceSource, layers: list[int], pieces: Array, chance: Array) -> Origin | None:
    at = np.flatnonzero(pieces[evidence.piece])
    if len(at) < MIN_RUN or len(layers) < 2:
        return None
    if len(at) > _TARGETS:  # whole stretches, so that runs of rows can be seen
        stretches = np.array_split(at, len(at) // 64)
        chosen = np.linspace(0, len(stretches) - 1, _TARGETS // 64).astype(int)
        at = np.concatenate([stretches[i] for i in chosen])
    used = [layers[i] for i in np.unique(np.linspace(0, len(layers) - 1, min(_LAYERS, len(layers))).astype(int))]
    targets = evidence.sets_b[at][:, used]
    width = _fingerprint_width(a.num_tokens, chance[used])
    # In a layer that sends most tokens to the same experts all rows look alike, and any origin would be chance.
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
    if displaced.sum() < MIN_RUN or found[displaced].mean() < 0.5:
        return None
    return Origin(rows=evidence.rows[at[found]], sources=source[found], index=at[found])


def _fingerprint_width(num_rows: int, chance: Array) -> int | None:
    """Return how many layers tell one row of a from all others; None if these do not."""
    left = float(num_rows)
    # Worst layers first: every run of `width` layers must do, whichever layers it holds.
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
        sets = set_numbers(block.topk_indices.numpy(), numbers)
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
    # Multiplied in between, so that two layers that exchanged their sets have another fingerprint.
    for offset in range(width):
        total = total * _PRIME + np.roll(sets, -offset, axis=1)
    return total
