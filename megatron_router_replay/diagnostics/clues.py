"""State facts that the differing decisions share: an expert, a token, the first rows of samples, an earlier expert.

These are facts about decisions that no match of rows, samples, layers or ids explains. Noise exchanges near-ties, and gives
each expert as many decisions as it takes; a fact is stated only of counts that noise does not give.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_router_replay.diagnostics.counting import Array, count_shared
from megatron_router_replay.diagnostics.fact import Fact
from megatron_router_replay.tables import numbered, percent

_MIN_DECISIONS = 12  # of fewer, nothing is stated
_SIGMAS = 4.5  # of a count of two equally likely outcomes: a few hundred experts and layers are tried
_SHARE = 0.25  # of the decisions that an expert must have gained or lost; other causes move several experts
_CHANCE = 1e-4  # of counts that are stated as no chance
_MOST_EXPERTS = 3  # that have a sentence each


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decisions:
    """Decisions of n rows and L layers that both traces have, for the same tokens before.

    Args:
        layer_numbers: [L], in order.
        num_experts: of each layer.
        ids_a, ids_b: [n, L, topk].
        different: [n, L] bool, they name different sets, and no other fact explains it.
        tokens: [n] token ids, -1: unknown.
        is_first: [n] bool, the row is the first of its sample.
        is_distinct: [n] bool, no earlier row has the same routes in a: a prompt of a group is evidence once.
    """

    layer_numbers: Sequence[int]
    num_experts: int
    ids_a: Array
    ids_b: Array
    different: Array
    tokens: Array
    is_first: Array
    is_distinct: Array


def find_clues(decisions: Decisions) -> Iterator[Fact]:
    """Yield the facts, those of lower layers first."""
    if not decisions.different.any():
        return
    moved = list(_moved_experts(decisions))
    yield from _experts(moved)
    # The rows of a token may all have an expert that its router prefers.
    token = list(_token(decisions, by_chance=all(each.layer_number > decisions.layer_numbers[0] for each in moved)))
    yield from token
    # The token changes the rows that attend to it, and begins no sample here.
    if not token:
        yield from _first_rows(decisions)
    # A router that prefers an expert is the cause of its layer's differences, which lower layers are not.
    if not moved:
        yield from _earlier_expert(decisions)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moved:
    """An expert that most differing decisions of a layer gained, or lost.

    Args:
        verb: "gained" or "lost".
        times, back: decisions that did so, and that did the reverse.
        different: decisions of the layer that differ.
    """

    expert: int
    verb: str
    layer_number: int
    times: int
    back: int
    different: int


def _moved_experts(given: Decisions) -> Iterator[_Moved]:
    """Yield the expert of each layer that most differing decisions gained, or lost."""
    for i, number in enumerate(given.layer_numbers):
        rows = np.flatnonzero(given.different[:, i])
        if len(rows) < _MIN_DECISIONS:
            continue
        a, b = given.ids_a[rows, i], given.ids_b[rows, i]
        # A bias moves one expert; a route of another row or model exchanges several, and has popular experts of its own.
        if (count_shared(a, b) == a.shape[1] - 1).mean() < 0.8:
            continue
        gained, lost = (_members(*pair, given.num_experts) for pair in ((b, a), (a, b)))
        once = given.is_distinct[rows]
        gained_once, lost_once = (
            _members(*pair, given.num_experts) for pair in ((b[once], a[once]), (a[once], b[once]))
        )
        net = gained_once - lost_once
        expert = int(np.abs(net).argmax())
        # Near-ties go both ways: noise gives an expert about as many decisions as it takes.
        least = max(_SIGMAS * np.sqrt(gained_once[expert] + lost_once[expert]), _SHARE * once.sum())
        if once.sum() < _MIN_DECISIONS or abs(net[expert]) < least:
            continue
        times, back = (int(counts[expert]) for counts in ((gained, lost) if net[expert] > 0 else (lost, gained)))
        verb = "gained" if net[expert] > 0 else "lost"
        yield _Moved(expert=expert, verb=verb, layer_number=number, times=times, back=back, different=len(rows))


def _experts(moved: Sequence[_Moved]) -> Iterator[Fact]:
    """Yield one fact for each expert, or one for all if they are many: biases of all layers are one cause."""
    by_expert: dict[tuple[int, str], list[_Moved]] = defaultdict(list)
    for each in moved:
        by_expert[each.expert, each.verb].append(each)
    groups = list(by_expert.values()) if len(by_expert) <= _MOST_EXPERTS else [list(moved)]
    for group in groups:
        times, back, different = (sum(getattr(each, name) for each in group) for name in ("times", "back", "different"))
        numbers = tuple(each.layer_number for each in group)
        expert, verb, layers = group[0].expert, group[0].verb, numbered("layer", numbers)
        if len(by_expert) <= _MOST_EXPERTS:
            returned = f", and {'lost' if verb == 'gained' else 'gained'} in {back:,}" if back else ""
            text = (
                f"expert {expert} of {layers} was {verb} in {times:,} of {different:,} differing decisions{returned}."
            )
            yield Fact(kind="expert", text=text, layer_numbers=numbers, decisions=times, expert=expert, verb=verb)
            continue
        listed = [f"{each.expert} of layer {each.layer_number} was {each.verb}" for each in group[:_MOST_EXPERTS]]
        text = (
            f"an expert of each of {layers} was gained or lost in {times:,} of {different:,} differing decisions: "
            f"expert {', '.join(listed)}, ..."
        )
        yield Fact(kind="expert", text=text, layer_numbers=numbers, decisions=times)


def _members(ids: Array, others: Array, num_experts: int) -> Array:
    """Return how often each expert is in a row of ids and not in that of others, [num_experts]."""
    missing = np.ones(ids.shape, bool)
    for column in others.T:
        missing &= ids != column[:, None]
    return np.bincount(ids[missing].astype(np.int64), minlength=num_experts)


def _token(given: Decisions, by_chance: bool) -> Iterator[Fact]:
    """Yield the token with the only different rows of the lowest layer, or with far more of them than all others.

    Args:
        by_chance: rows that differ by as little as those of other tokens count, if they are too many for chance.
    """
    known = given.tokens >= 0
    rows = np.flatnonzero(given.different[:, 0] & known)
    if len(rows) < 2:
        return
    topk = given.ids_a.shape[2]
    exchanged = topk - count_shared(given.ids_a[rows, 0], given.ids_b[rows, 0])
    tokens, times = np.unique(given.tokens[rows], return_counts=True)
    most = np.array([exchanged[given.tokens[rows] == token].min() for token in tokens])
    for token in tokens[np.lexsort((-times, -most))][:4].tolist():
        mine = given.tokens[rows] == token
        with_token = int((given.tokens == token).sum())
        # A row that follows one of the token's own may differ little, as every later row may.
        if mine.sum() < 0.9 * with_token or (mine & given.is_distinct[rows]).sum() < 2:
            continue
        others, other_rows = int((~mine).sum()), int(known.sum()) - with_token
        chance = len(np.unique(given.tokens)) * (max(1, others) / max(1, other_rows)) ** int(
            (mine & given.is_distinct[rows]).sum()
        )
        far = exchanged[mine].min() >= 2 and (exchanged[~mine] < exchanged[mine].min()).all()
        if not far and (chance > _CHANCE or not by_chance):
            continue
        number, least, highest = given.layer_numbers[0], exchanged[mine].min(), exchanged[mine].max()
        count = f"{least}" if least == highest else f"{least} to {highest}"
        text = (
            f"{mine.sum()} of the {with_token} rows with token {token} differ in layer {number}, by {count} of {topk} "
            f"experts; of the other {other_rows:,} rows {others} differ"
        )
        text += f", by {exchanged[~mine].max()} at most." if others else "."
        yield Fact(kind="token", text=text, layer_numbers=(number,), decisions=int(mine.sum()), token=token)
        return


def _first_rows(given: Decisions) -> Iterator[Fact]:
    """Yield that the first rows of samples agree where others do not: they alone take nothing from other rows."""
    first = given.is_first
    if not first.any() or given.different[first].any() or first.all():
        return
    # Samples that begin with one token have one first row.
    distinct = len(np.unique(np.sort(given.ids_a[first], axis=2).reshape(first.sum(), -1), axis=0))
    shares = given.different[~first].mean(axis=0)
    if (1 - shares.max()) ** distinct > _CHANCE:
        return
    text = (
        f"the first rows of all {first.sum():,} samples agree in every layer, and {percent(float(shares.mean()))} of the "
        f"decisions of other rows differ."
    )
    yield Fact(kind="first_rows", text=text)


def _earlier_expert(given: Decisions) -> Iterator[Fact]:
    """Yield the expert that the rows used which differ first in one layer, in the layer below."""
    begins = given.different.any(axis=1)
    lowest = given.different.argmax(axis=1)
    for i in range(1, len(given.layer_numbers)):
        rows = np.flatnonzero(begins & (lowest == i))
        once = rows[given.is_distinct[rows]]
        if len(once) < _MIN_DECISIONS or given.different[:, :i].any():
            continue
        used = np.bincount(given.ids_a[rows, i - 1].ravel().astype(np.int64), minlength=given.num_experts)
        of_all = np.bincount(given.ids_a[:, i - 1].ravel().astype(np.int64), minlength=given.num_experts)
        share = of_all / len(given.ids_a)
        used_once = np.bincount(given.ids_a[once, i - 1].ravel().astype(np.int64), minlength=given.num_experts)
        expected = share * len(once)
        sigmas = (used_once - expected) / np.sqrt(np.maximum(expected * (1 - share), 0.25))
        expert = int(sigmas.argmax())
        below, number = given.layer_numbers[i - 1], given.layer_numbers[i]
        # Rows that use an expert resemble each other, and so do their near-ties.
        if sigmas[expert] >= 2 * _SIGMAS and used[expert] >= 0.4 * len(rows):
            text = (
                f"{used[expert]:,} of {len(rows):,} rows that differ first in layer {number} used expert {expert} of layer "
                f"{below}, as {percent(float(share[expert]))} of all rows did."
            )
            decisions = int(used[expert])
            yield Fact(kind="earlier_expert", text=text, layer_numbers=(below,), decisions=decisions, expert=expert)
        return
