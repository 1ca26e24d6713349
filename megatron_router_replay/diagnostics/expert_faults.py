"""Expert ids that were renamed: two exchanged, an offset between them, or any permutation.

For each expert of a, the expert of b that stands in its place is the one named most often where a names it. A renaming is a
finding if it was learned from half of the rows and holds in the other half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_router_replay.diagnostics.compare import Array
from megatron_router_replay.diagnostics.finding import Finding
from megatron_router_replay.diagnostics.wording import Place, finding_at, layer_words

_MIN_NAMED = 6
"""Times that an expert must be named in each half before anything is said of it."""

_EXPLAINED = 0.5
"""Share of a layer's decisions whose experts must be renamed or kept; the rest may be noise."""

_SAME = 0.9
"""Share of experts that must be renamed alike: a rare expert may be mistaken by chance."""


def find_renaming(a: Array, b: Array, num_experts: int) -> Array | None:
    """Return which expert of b stands for each expert of a in one layer, [num_experts]; None if no renaming is sure.

    Args:
        a, b: [n, topk] expert ids of the same rows.
    """
    if len(a) < 4 * _MIN_NAMED:
        return None
    # Every second row, because neighbours look alike: two halves of a run would confirm each other's chance.
    (counts, named), (counts_again, named_again) = (_together(a[half::2], b[half::2], num_experts) for half in (0, 1))
    # What stands most often in rows of an expert is its new name, if it has one.
    experts = np.arange(num_experts)
    best = counts.argmax(axis=1)
    known = (named >= _MIN_NAMED) & (named_again >= _MIN_NAMED)
    kept = counts_again[experts, experts] / np.maximum(1, named_again)
    gained = counts_again[experts, best] / np.maximum(1, named_again)
    # An expert that nearly every row of b names stands beside all experts of a; that is no renaming.
    popular = np.bincount(b.reshape(-1), minlength=num_experts)[best] / len(b)
    lift = (gained - popular) / np.maximum(1e-9, 1 - popular)
    renamed = known & (best != experts) & (gained >= 0.6) & (gained - kept >= 0.4) & (lift >= 0.5)
    if not renamed.any():
        return None
    renaming: Array = np.where(renamed, best, experts)
    # Two that got one name, and names whose owner kept his, cannot be: a few are chance, more of them are no renaming.
    names, counts_of_names = np.unique(renaming[renamed], return_counts=True)
    twice = renamed & np.isin(renaming, names[counts_of_names > 1])
    owner_stayed = np.isin(experts, renaming[renamed]) & known & ~renamed
    if twice.sum() + owner_stayed.sum() > renamed.sum() // 8:
        return None
    renaming[twice | (~renamed & (~known | (kept < 0.5)))] = -1
    # A renaming says of most experts what they are called; one expert that stands beside another by chance does not.
    named_often = (named + named_again)[known]
    if named_often[renaming[known] >= 0].sum() < _EXPLAINED * named_often.sum():
        return None
    return renaming


def _together(a: Array, b: Array, num_experts: int) -> tuple[Array, Array]:
    """Return how often expert f of b stands in a row with expert e of a, [e, f], and how often a names e, [e]."""
    pairs = a[:, :, None].astype(np.int64) * num_experts + b[:, None, :]
    counts = np.bincount(pairs.reshape(-1), minlength=num_experts * num_experts)
    return counts.reshape(num_experts, num_experts), np.bincount(a.reshape(-1), minlength=num_experts)


def renaming_findings(
    renamings: Sequence[tuple[int, Array]], num_layers: int, place: Place, *, name_a: str, name_b: str
) -> Iterator[Finding]:
    """Yield one finding for each renaming, with the layers that share it.

    Args:
        renamings: (layer_number, as `find_renaming` returns it).
        num_layers: layers compared.
    """
    groups: list[tuple[Array, list[int]]] = []
    for number, renaming in renamings:
        # The same permutation in several layers is one fault, not one a layer.
        for other, numbers in groups:
            known = (renaming >= 0) & (other >= 0)
            if known.any() and (renaming[known] == other[known]).mean() >= _SAME:
                numbers.append(number)
                other[other < 0] = renaming[other < 0]
                break
        else:
            groups.append((renaming.copy(), [number]))
    kinds: dict[str, list[int]] = {}
    for renaming, numbers in groups:
        kinds.setdefault(_words(renaming, name_a, name_b), []).extend(numbers)
    for words, numbers in kinds.items():
        every = len(numbers) == num_layers
        subject = "in every layer" if every else f"in {layer_words(sorted(numbers))}"
        layer_numbers = () if every else tuple(sorted(numbers))
        yield finding_at(place, "experts_relabelled", f"{subject} {words}", layer_numbers=layer_numbers)


def _words(renaming: Array, name_a: str, name_b: str) -> str:
    num_experts = len(renaming)
    experts = np.arange(num_experts)
    known = renaming >= 0
    changed = np.flatnonzero(known & (renaming != experts))
    if len(changed) == 2 and renaming[changed[0]] == changed[1]:
        return f"experts {changed[0]} and {changed[1]} of {name_b} are exchanged"
    # An offset is how another rank's or a physical numbering shows: it is named before a permutation is spelt out.
    offsets = np.bincount((renaming - experts)[known] % num_experts)
    offset = int(offsets.argmax())
    if offset and offsets[offset] >= _SAME * known.sum():
        return f"expert ids of {name_b} are those of {name_a} plus {offset}, modulo {num_experts}"
    if len(changed) <= 6:
        pairs = ", ".join(f"{expert} is called {renaming[expert]}" for expert in changed)
        return f"{len(changed)} experts of {name_a} have other ids in {name_b}: {pairs}"
    pairs = ", ".join(f"{expert} is called {renaming[expert]}" for expert in changed[:3])
    return f"expert ids of {name_b} are a permutation of those of {name_a} ({len(changed)} differ): {pairs}, ..."
