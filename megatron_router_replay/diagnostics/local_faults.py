"""Faults that the rows around, or the other layers of the same row, explain: stuck rows, shifts, layers that changed places.

Every search counts in how many far decisions another row or layer of a holds exactly the set that b names, beside how
often that happens by chance, and takes out of `Evidence.far` what it explains.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_router_replay.diagnostics.compare import Array
from megatron_router_replay.diagnostics.evidence import MIN_RUN, Evidence
from megatron_router_replay.diagnostics.finding import Finding
from megatron_router_replay.diagnostics.samples import Samples
from megatron_router_replay.diagnostics.wording import (
    Place,
    finding_at,
    layer_words,
    place_of,
    runs_of_rows,
    shift_finding,
)

_STUCK_ROWS = 8


def stands_out(hits: Array, tries: Array, chance: Array) -> Array:
    """Return where an explanation holds far more often than by chance, bool.

    Args:
        hits, tries: integers. chance: the share of tries that hit without any reason.
    """
    rate = hits / np.maximum(1, tries)
    excess = rate - chance
    # Eight standard deviations: thousands of pieces, layers and shifts are tried. The 0.01 keeps one hit from standing out
    # where the chance was measured as zero.
    stands: Array = (
        (hits >= 8) & (excess >= 0.3) & (excess * np.sqrt(tries) >= 8 * np.sqrt(chance * (1 - chance) + 0.01))
    )
    return stands


def find_stuck(evidence: Evidence, samples: Samples) -> Iterator[Finding]:
    """Yield rows that repeat one route while the other trace's rows differ from each other."""
    # Rows that were read may lie far apart; only a row behind its own neighbour can repeat it.
    neighbours = (np.diff(evidence.rows, prepend=-2) == 1)[:, None]
    still_a, still_b = (
        (np.diff(sets, axis=0, prepend=sets[:1]) == 0) & neighbours
        for sets in (evidence.shifted(0)[:, evidence.index_in_a], evidence.sets_b)
    )
    for still, other, ids, names in (
        (still_b, still_a, evidence.ids_b, (evidence.name_b, evidence.name_a)),
        (still_a, still_b, evidence.ids_a, (evidence.name_a, evidence.name_b)),
    ):
        stuck = _long_runs(still & ~other, _unlikely_lengths(still, other), evidence.far)
        for layers in _groups_of_layers(evidence.by_piece(stuck) > 0):
            # Half of the layers: a router may name the same experts twice in a row by chance, in one layer and not in all.
            explained = stuck[:, layers].mean(axis=1) >= 0.5
            runs = runs_of_rows(evidence.rows, explained, ~explained, complete=evidence.complete)
            if not runs:
                continue
            place = place_of(runs, int(explained.sum()), samples, seen=not evidence.complete)
            at = int(np.flatnonzero(explained)[0])
            yield _stuck_finding(evidence, ids[at][layers], layers, place, names)
        # Here, not at the end: a row that is stuck in b must not be judged once more as one of a.
        evidence.far &= ~stuck


def _stuck_finding(
    evidence: Evidence, experts: Array, layers: list[int], place: Place, names: tuple[str, str]
) -> Finding:
    name, other = names
    numbers = tuple(evidence.layers[i] for i in layers)
    every = len(numbers) == len(evidence.layers) > 1
    filler = bool((experts == experts[0]).all())
    chosen = f"the same experts {experts[0].tolist()}" if filler else "one and the same row of experts"
    if every and place.words:
        alike = " (all layers alike)" if filler else ""
        text = f"{name} repeats {chosen} in every layer{alike}, {place.words}; in {other} the rows differ."
        return Finding(kind="rows_stuck", text=text, rows=place.rows, samples=place.samples)
    sends, does = ("sends", "it does") if len(numbers) == 1 else ("send", "they do")
    where = f" {place.words}" if place.words else ""
    text = (
        f"{layer_words(numbers)} of {name} {sends} every token to {chosen}{where}, in {other} {does} not: the data was "
        "lost or zeroed."
    )
    return Finding(kind="layer_constant", layer_numbers=numbers, rows=place.rows, samples=place.samples, text=text)


def _unlikely_lengths(still: Array, other: Array) -> Array:
    """Return how many rows in a row must repeat before it is no chance, [num_layers]: one in a million runs is that long.

    Args:
        still, other: [n, num_layers], where each trace repeats its last row.
    """
    usual = np.maximum(still.mean(axis=0), other.mean(axis=0))
    # Popular experts repeat more often than the mean says; a layer that is stuck as a whole must not hide itself.
    share = np.clip(1.5 * usual + 0.02, 0.0, 0.6)
    lengths: Array = np.maximum(_STUCK_ROWS, np.ceil(np.log(1e-6 / max(1, len(still))) / np.log(share)))
    return lengths


def _long_runs(still: Array, lengths: Array, far: Array) -> Array:
    """Keep flags that stand in long runs down a column where the traces are far apart, and flag the row before each run."""
    kept = np.zeros_like(still)
    for layer in range(still.shape[1]):
        flags = np.flatnonzero(still[:, layer])
        # Rows of a that happen to repeat interrupt the run of flags: a gap of one or two rows ends none.
        for run in np.split(flags, np.flatnonzero(np.diff(flags) > 3) + 1):
            begin, end = (int(run[0]), int(run[-1]) + 1) if len(run) else (0, 0)
            if end - begin >= lengths[layer] and far[begin:end, layer].mean() >= 0.4:
                kept[max(0, begin - 1) : end, layer] = True
    return kept


def find_shifts(evidence: Evidence, samples: Samples) -> tuple[list[Finding], Array]:
    """Return the findings of shifted rows, and the shift that most layers of each row have, [n].

    Two rounds, for a piece may hold the end of one shift and the beginning of another.
    """
    found: list[Finding] = []
    unmoved = evidence.same_sets()
    common = np.zeros(len(evidence.rows), dtype=np.int64)
    # The second round sees only what the first left, so that two shifts in one piece do not hide each other.
    for _ in range(2):
        shift, common_by_piece = _shift_by_cell(evidence)
        row_shift = shift[evidence.piece]
        explained = np.zeros_like(evidence.far)
        for value in np.unique(shift[shift != 0]).tolist():
            equal = evidence.same_sets(value)
            explained |= (row_shift == value) & equal
            found += _shift_findings(evidence, samples, value, shift == value, equal, unmoved)
        common = np.where(common == 0, common_by_piece[evidence.piece], common)
        evidence.far &= ~explained
        if not explained.any():
            break
    return found, common


def _shift_by_cell(evidence: Evidence) -> tuple[Array, Array]:
    """Return the shift of each piece in each layer, 0 where none stands out, and that of all layers of a piece together."""
    shifts = [value for value in range(-evidence.max_shift, evidence.max_shift + 1) if value]
    far = evidence.by_piece(evidence.far)
    # [shifts, pieces, num_layers]
    hits = np.stack([evidence.by_piece(evidence.far & evidence.same_sets(value)) for value in shifts])
    best, stands = _best(hits, far)
    together, together_stands = _best(hits.sum(axis=2), far.sum(axis=1))
    of_shift = np.array(shifts)
    together_hits = hits[together, np.arange(len(together))]
    # A layer too quiet to show a shift by itself goes with the shift that its piece shows as a whole.
    joins = together_stands[:, None] & (together_hits >= 0.3 * far) & (far > 0)
    cell = np.where(joins, of_shift[together][:, None], np.where(stands, of_shift[best], 0))
    return cell, np.where(together_stands, of_shift[together], 0)


def _best(hits: Array, tries: Array) -> tuple[Array, Array]:
    """Return the index of the candidate with most hits, and whether it stands out; candidates on axis 0."""
    best = hits.argmax(axis=0)
    # At most one candidate is right, so the median over all of them is what chance brings.
    chance = np.median(hits, axis=0) / np.maximum(1, tries)
    return best, stands_out(hits.max(axis=0), tries, chance)


def _shift_findings(
    evidence: Evidence, samples: Samples, shift: int, cells: Array, equal: Array, unmoved: Array
) -> Iterator[Finding]:
    """Yield what one shift explains.

    Args:
        cells: [pieces, num_layers] bool, where the shift stands out.
        equal, unmoved: [n, num_layers] bool, where the traces agree under the shift, and without one.
    """
    for layers in _groups_of_layers(cells):
        # A quarter of the layers is enough where more of them hold than speak against it: noise hides the others.
        holds = (equal & evidence.far)[:, layers].mean(axis=1)
        agrees = (unmoved & ~equal)[:, layers].mean(axis=1)
        explained = (holds >= 0.25) & (holds > agrees)
        contradicted = (agrees >= 0.5) & ~explained
        runs = runs_of_rows(evidence.rows, explained, contradicted, complete=evidence.complete)
        runs = [run for run in runs if _is_shifted(evidence.rows, run, equal[:, layers], unmoved[:, layers])]
        if not runs:
            continue
        place = place_of(runs, int(explained.sum()), samples, seen=not evidence.complete)
        numbers = tuple(evidence.layers[i] for i in layers) if len(layers) < len(evidence.layers) else ()
        yield shift_finding(evidence.name_a, evidence.name_b, numbers, shift, place)


def _is_shifted(rows: Array, run: tuple[int, int], equal: Array, unmoved: Array) -> bool:
    """Whether most decisions of a run are those of the shifted rows; rows near each other look alike here and there."""
    begin, end = np.searchsorted(rows, [run[0], run[1] + 1])
    share, share_unmoved = equal[begin:end].mean(), unmoved[begin:end].mean()
    return bool(end - begin >= MIN_RUN and share >= 0.4 and share >= share_unmoved + 0.2)


def _groups_of_layers(cells: Array) -> list[list[int]]:
    """Group layers whose fault lies in the same pieces, [pieces, num_layers] bool -> lists of layer indices."""
    groups: list[list[int]] = []
    for layer in np.flatnonzero(cells.any(axis=0)).tolist():
        for group in groups:
            one, other = cells[:, group[0]], cells[:, layer]
            if (one & other).sum() >= 0.6 * (one | other).sum():
                group.append(layer)
                break
        else:
            groups.append([layer])
    return groups


def find_moved_layers(evidence: Evidence, samples: Samples, shift: Array) -> list[Finding]:
    """Return layers of b that look like other layers of a.

    Args:
        shift: [n], what most layers of each row are shifted by.
    """
    sets_a = evidence.shifted(shift)
    far = evidence.by_piece(evidence.far)
    hits = np.stack(
        [evidence.by_piece(evidence.far & (sets_a[:, [j]] == evidence.sets_b)) for j in range(len(evidence.layers_a))]
    )
    # A layer that looks like itself has not moved.
    hits[evidence.index_in_a, :, np.arange(len(evidence.layers))] = 0
    best, stands = _best(hits, far)
    # A fault in a third of all rows leaves few decisions in each piece: all pieces count together too.
    best_of_all, stands_of_all = _best(hits.sum(axis=1), far.sum(axis=0))
    found: list[tuple[int, int, list[tuple[int, int]], int]] = []
    for layer in range(len(evidence.layers)):
        whole = stands_of_all[layer]
        candidates = {int(best_of_all[layer])} if whole else set(best[stands[:, layer], layer].tolist())
        for source in sorted(candidates):
            equal = sets_a[:, source] == evidence.sets_b[:, layer]
            holds = equal & evidence.far[:, layer]
            if not whole:
                holds &= (stands[:, layer] & (best[:, layer] == source))[evidence.piece]
            agree = sets_a[:, evidence.index_in_a[layer]] == evidence.sets_b[:, layer]
            runs = runs_of_rows(evidence.rows, holds, agree & ~equal, complete=evidence.complete)
            # Near rows count as well: their experts changed places though half of them are the same.
            found.append((layer, source, runs, int((equal & ~agree).sum() if whole else holds.sum())))
            evidence.far[:, layer] &= ~holds
    return _layer_findings(evidence, samples, found)


def _layer_findings(
    evidence: Evidence, samples: Samples, found: list[tuple[int, int, list[tuple[int, int]], int]]
) -> list[Finding]:
    """Join swaps, and neighbours with one offset in the same rows."""
    groups: list[tuple[Place, dict[int, int]]] = []
    for layer, source, runs, count in found:
        place = place_of(runs, count, samples, seen=not evidence.complete)
        group = next((pairs for other, pairs in groups if _near(place, other, samples)), None)
        if group is None:
            groups.append((place, group := {}))
        group[evidence.layers[layer]] = evidence.layers_a[source]
    findings = []
    a, b = evidence.name_a, evidence.name_b
    for place, pairs in groups:
        for number, other in sorted(pairs.items()):
            if number < other and pairs.get(other) == number:
                text = f"layers {number} and {other} of {b} are swapped: each looks like the other in {a}"
                findings.append(finding_at(place, "layers_moved", text, layer_numbers=(number, other)))
                del pairs[number], pairs[other]
        for numbers in _same_offset(pairs):
            others = [pairs[number] for number in numbers]
            verb = "looks" if len(numbers) == 1 else "look"
            text = f"{layer_words(numbers)} of {b} {verb} like {layer_words(others)} of {a}"
            findings.append(finding_at(place, "layers_moved", text, layer_numbers=tuple(numbers)))
    return findings


def _near(one: Place, other: Place, samples: Samples) -> bool:
    """Places whose ends differ by the few rows that chance decides are the same place."""
    if one.rows is None or other.rows is None:
        return one.rows == other.rows
    size = max(8, samples.num_rows // 50)
    return all(abs(end - other_end) <= size for end, other_end in zip(one.rows, other.rows))


def _same_offset(pairs: dict[int, int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for number in sorted(pairs):
        if groups and pairs[number] - number == pairs[groups[-1][-1]] - groups[-1][-1]:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups
