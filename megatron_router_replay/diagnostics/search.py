"""What a pass over two traces counted -> the faults that explain it.

Nothing is called a fault because it is large: a finding says that under another row, layer or name of the experts the two
traces agree where they are far apart, or that they have nothing to do with each other in one place and agree around it.
Searches run from the special to the general, and each takes what it explains out of what the next ones see.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_router_replay.diagnostics.compare import Array, count_shared
from megatron_router_replay.diagnostics.counting import Counter
from megatron_router_replay.diagnostics.evidence import Evidence, expert_numbers, gather_evidence, set_numbers
from megatron_router_replay.diagnostics.expert_faults import find_renaming, renaming_findings
from megatron_router_replay.diagnostics.finding import Finding
from megatron_router_replay.diagnostics.local_faults import find_moved_layers, find_shifts, find_stuck
from megatron_router_replay.diagnostics.row_origin import find_origins
from megatron_router_replay.diagnostics.samples import Samples
from megatron_router_replay.diagnostics.wording import Place, finding_at, layer_words, place_of_stretch
from megatron_router_replay.runs import neighbour_runs

MAX_SHIFT = 64
_EVERYWHERE = Place(words="", rows=None, samples=())
_LOST = 0.7
"""Share of far decisions, measured by that of unrelated routes, from which routes have nothing to do with each other."""


def search_faults(counts: Counter, *, max_shift: int = MAX_SHIFT) -> list[Finding]:
    """Return the faults that a pass over two traces points to, most special first.

    Args:
        counts: of a whole pass.
        max_shift: rows that the search for shifts within one layer looks in either direction.
    """
    findings: list[Finding] = []
    if counts.rows_other_token:
        findings.append(_other_tokens(counts))
    if counts.layers and counts.rows_compared:
        findings += _order_changed(counts)
        if counts.rows_different:
            findings += _search_routes(counts, max_shift)
    return findings


def _search_routes(counts: Counter, max_shift: int) -> Iterator[Finding]:
    sampled_a, sampled_b = counts.sampled_rows()
    far_if_unrelated, chance = _unrelated(sampled_a, sampled_b, counts.a.num_experts)
    names = {"name_a": counts.a.name, "name_b": counts.b.name}
    num_layers = len(counts.layers)
    renamings = [
        (number, renaming)
        for i, number in enumerate(counts.layers)
        if (renaming := find_renaming(sampled_a[:, i], sampled_b[:, i], counts.a.num_experts)) is not None
    ]
    # First, because under other names nothing else can be recognised.
    yield from renaming_findings(renamings, num_layers, _EVERYWHERE, **names)
    evidence = gather_evidence(counts, far_if_unrelated=far_if_unrelated, max_shift=max_shift)
    if evidence is None:
        return
    samples = counts.samples
    explained = [counts.layers.index(number) for number, _ in renamings]
    evidence.far[:, explained] = False
    # Before shifts: a row that repeats looks like itself shifted by any number of rows.
    yield from find_stuck(evidence, samples)
    shifted, common_shift = find_shifts(evidence, samples)
    yield from shifted
    # Behind shifts, and seen through them: layers of shifted rows are those of the row they came from.
    yield from find_moved_layers(evidence, samples, common_shift)
    yield from _renamed_in_part(evidence, samples, counts.a.num_experts)
    # A look-up over all of a is dear, so it comes when what is near explains nothing.
    yield from find_origins(evidence, counts.a, samples, chance=chance)
    yield from _unexplained(counts, evidence, samples, explained)


def _other_tokens(counts: Counter) -> Finding:
    return Finding(
        kind="other_tokens",
        text=f"{counts.rows_other_token:,} of {counts.rows_compared:,} rows hold another token in {counts.b.name} than "
        f"in {counts.a.name}: the rows are numbered differently, or the batches differ.",
    )


def _order_changed(counts: Counter) -> Iterator[Finding]:
    """Yield the layers whose experts are sorted in another way; noise reorders the near-ties within a set too."""
    same_sets = counts.rows_compared - counts.different_by_layer
    flips = (1 - same_sets.double() / counts.rows_compared).tolist()
    share = (counts.other_order.double() / same_sets.clamp(min=1)).tolist()
    topk = counts.a.topk
    layers = {
        number: share[i]
        for i, number in enumerate(counts.layers)
        if flips[i] < 0.7 and (share[i] > 0.9 or share[i] > max(0.3, 4 * topk * flips[i]))
    }
    if layers:
        every = len(layers) == len(counts.layers)
        where = "every layer" if every else layer_words(list(layers))
        yield Finding(
            kind="order_changed",
            layer_numbers=() if every else tuple(layers),
            text=f"in {where} {counts.b.name} names the same experts in another order than {counts.a.name} in "
            f"{sum(layers.values()) / len(layers):.0%} of the decisions; the sets are the same.",
        )


def _unrelated(a: Array, b: Array, num_experts: int) -> tuple[Array, Array]:
    """Return, for rows that have nothing to do with each other, the share of far and of equal decisions, [layers] each."""
    num_layers, topk = b.shape[1:]
    if len(a) < 2:
        return np.ones(num_layers), np.ones(num_layers)
    # A fixed seed: the same two traces have the same findings every time.
    order = np.random.default_rng(7).permutation(len(a))
    other = b[np.where(order == np.arange(len(a)), (order + 1) % len(a), order)]
    overlap = count_shared(a.reshape(-1, topk), other.reshape(-1, topk)).reshape(len(a), num_layers)
    numbers = expert_numbers(num_experts)
    equal = (set_numbers(a, numbers) == set_numbers(other, numbers)).mean(axis=0)
    return np.maximum(0.05, (2 * overlap < topk).mean(axis=0)), equal


def _renamed_in_part(evidence: Evidence, samples: Samples, num_experts: int) -> Iterator[Finding]:
    """Yield renamings that hold in some rows only, in runs of pieces whose layers are lost."""
    lost = evidence.unexplained() >= 0.5
    for pieces, rows in _stretches(evidence, np.asarray(lost.any(axis=1))):
        renamings = []
        for i in np.flatnonzero(lost[pieces].mean(axis=0) >= 0.5).tolist():
            renaming = find_renaming(evidence.ids_a[rows, i], evidence.ids_b[rows, i], num_experts)
            if renaming is not None:
                renamings.append((evidence.layers[i], renaming))
                evidence.far[rows, i] = False
        if renamings:
            place = place_of_stretch(evidence.rows[rows], samples, seen=not evidence.complete)
            names = {"name_a": evidence.name_a, "name_b": evidence.name_b}
            yield from renaming_findings(renamings, len(evidence.layers), place, **names)


def _stretches(evidence: Evidence, flags: Array) -> Iterator[tuple[slice, slice]]:
    """Yield every run of pieces that have a flag, [pieces] bool: which pieces, and which rows of the evidence."""
    bounds = [*evidence.starts.tolist(), len(evidence.rows)]
    for _, first, length in neighbour_runs(np.flatnonzero(flags)).tolist():
        yield slice(first, first + length), slice(bounds[first], bounds[first + length])


def _unexplained(counts: Counter, evidence: Evidence, samples: Samples, renamed: list[int]) -> Iterator[Finding]:
    """Yield layers and rows that have nothing to do with each other while what lies around them agrees."""
    # What is usual in a layer is judged over all pieces, also those that were not suspect and not read again.
    share = np.zeros((len(counts.piece_starts), len(counts.layers)))
    pieces = np.searchsorted(counts.piece_starts.numpy(), evidence.rows[evidence.starts], side="right") - 1
    share[pieces] = evidence.unexplained()
    known = np.zeros(len(share), dtype=bool)
    known[pieces] = True
    quiet = counts.far_by_piece.numpy() / np.maximum(1, counts.rows_by_piece.numpy())[:, None]
    share = np.where(known[:, None], share, quiet / evidence.far_if_unrelated if evidence.complete else np.nan)
    share = share[~np.isnan(share).any(axis=1) & (counts.rows_by_piece.numpy() > 0)]
    if not len(share):
        return
    typical = np.median(share, axis=0)
    outliers = [i for i in range(len(typical)) if i not in renamed and _stands_above(typical, i)]
    for i in outliers:
        yield _outlier(counts, evidence, i)
    others = [i for i in range(len(typical)) if i not in outliers]
    if others and (typical[others] >= 0.9).all() and not renamed:
        yield Finding(
            kind="unrelated",
            text=f"in every layer {counts.b.name} and {counts.a.name} have no more experts in common than rows that have "
            "nothing to do with each other: other tokens, another step or other weights.",
        )
        return
    if others:
        yield from _lost_rows(evidence, samples, others, typical[others])


def _stands_above(typical: Array, layer: int) -> bool:
    """Whether a layer is lost and its neighbours are not: a drift grows from layer to layer, a wrong layer stands alone."""
    if typical[layer] < _LOST or len(typical) < 3:
        return False
    kept = typical <= 0.5 * typical[layer]
    neighbours = [i for i in (layer - 1, layer + 1) if 0 <= i < len(typical)]
    return bool(kept.mean() >= 0.5 and any(kept[i] for i in neighbours))


def _outlier(counts: Counter, evidence: Evidence, i: int) -> Finding:
    number = counts.layers[i]
    different = counts.different_by_layer.double() / counts.rows_compared
    return Finding(
        kind="layer_outlier",
        layer_numbers=(number,),
        text=f"layer {number} of {evidence.name_b} differs in {float(different[i]):.1%} of its rows, the layer in the middle "
        f"in {float(different.median()):.1%}: its routes are of another layer, step or model.",
    )


def _lost_rows(evidence: Evidence, samples: Samples, others: list[int], typical: Array) -> Iterator[Finding]:
    """Yield runs of pieces that are lost in some layers in which the traces agree elsewhere."""
    quiet = [i for i, share in zip(others, typical) if share <= 0.35]
    if not quiet:
        return
    lost = evidence.unexplained() >= _LOST
    enough = evidence.rows_by_piece() >= 16
    for pieces, rows in _stretches(evidence, lost[:, quiet].any(axis=1) & enough):
        layers = [i for i in quiet if lost[pieces, i].mean() >= 0.6]
        # One layer's piece of some tens of rows may be lost by the noise of a bad layer.
        if not layers or (len(layers) < 2 and rows.stop - rows.start < 48):
            continue
        numbers = tuple(evidence.layers[i] for i in layers)
        every = len(layers) >= 0.9 * len(evidence.layers)
        place = place_of_stretch(evidence.rows[rows], samples, seen=not evidence.complete)
        subject = "the routes" if every else f"the routes of {layer_words(numbers)}"
        text = f"{subject} of {evidence.name_b} have nothing to do with those of {evidence.name_a}"
        yield finding_at(place, "rows_unrelated", text, layer_numbers=() if every else numbers)
