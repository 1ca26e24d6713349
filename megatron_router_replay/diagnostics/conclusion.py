"""Conclude from the facts of a diff and its counts by layer: the cause that they leave, or the causes.

Routes have no scores, so a near-tie that another kernel decides otherwise looks as one that slightly different weights
decide otherwise. A conclusion names a place where the counts show one, and all causes that fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_router_replay.diagnostics.fact import Fact
from megatron_router_replay.tables import number_words, percent, share

if TYPE_CHECKING:
    from megatron_router_replay.diagnostics.trace_diff import TraceDiff

_FEW = 16
"""Differing decisions of a layer that show where differences begin; of fewer, layers below may have none by chance."""

_PRECISION_SHARE = 0.1
"""Share of the lowest layer's decisions that another precision changes: 2 to 8 % in bf16."""

_OPEN = "the routes alone do not say which; compare the weights first"

_MATCHES = {
    "row": "rows of one trace lie at other places than in the other: a start that is off by one, a missing BOS token, a "
    "lost chunk",
    "sample_order": "the samples have a different order: replies that were stored as they arrived, or a batch that was "
    "filtered or repeated without its routes",
    "layer": "layers are numbered differently: dense layers, pipeline offsets or MTP in the map to layer_number, or weights "
    "that were loaded into another layer",
    "constant": "one route is repeated: a capture that stopped, filler, or a router that prefers its experts to all others",
}
"""The conclusion from matches of a kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Onset:
    """The layer where differences begin, or become more than they would by growing from layer to layer.

    Args:
        index: of the layer.
        is_clean: no decision of a lower layer differs.
        is_alone: later layers differ as little as lower ones.
    """

    index: int
    is_clean: bool
    is_alone: bool


def conclude(diff: TraceDiff) -> str:
    """Return the conclusion in one or a few sentences; the first, whether the traces differ, begins in lower case."""
    if diff.same:
        return "the traces are the same."
    if diff.same_in_common and diff.decisions:
        return "the traces differ in what they cover; what both cover is the same."
    sentences = [*_tokens(diff), *_matches(diff)]
    if not sentences or _leaves_more(diff):
        sentences += _by_layer(diff)
    return "the traces differ: " + " ".join(
        f"{each[:1].upper()}{each[1:]}" if i else each for i, each in enumerate(sentences)
    )


def _rest(diff: TraceDiff) -> int:
    """Return how many decisions differ that no match explains, of rows with the same tokens up to there."""
    return int(diff.unexplained[:, :-1].sum())


def _leaves_more(diff: TraceDiff) -> bool:
    """Return whether matches leave enough decisions for a conclusion of their own."""
    if any("later layers differ" in fact.text for fact in diff.facts):  # which follow from that
        return False
    return _rest(diff) >= max(_FEW, diff.decisions_different // 10)


def _tokens(diff: TraceDiff) -> list[str]:
    if not diff.rows_other_token:
        return []
    if not diff.rows_alike:
        return ["the samples hold different tokens from their first row on, and so different routes."]
    rest = _rest(diff)
    routes = (
        "agree in every layer" if not rest else f"differ in {share(rest, diff.rows_alike * len(diff.layer_numbers))}"
    )
    after = "the samples hold different tokens, and so different routes from there on"
    return [f"{after}; the decisions of the {diff.rows_alike:,} rows before {routes}."]


def _matches(diff: TraceDiff) -> list[str]:
    """Return the conclusions from matches of rows, samples, layers and ids, those of most decisions first."""
    matches = [fact for fact in diff.facts if fact.rows is not None and fact.kind != "nothing"]
    if not diff.layer_numbers and not matches:
        return ["they have no layer in common."]
    sentences = []
    for kind in dict.fromkeys(fact.kind for fact in matches):
        text = _MATCHES.get(kind) or _names(next(fact for fact in matches if fact.kind == kind), diff)
        sentences.append(text + ".")
    if matches and _leaves_more(diff):
        sentences.append(
            f"these facts leave {_rest(diff):,} of the {diff.decisions_different:,} differing decisions unexplained."
        )
    return sentences


def _names(fact: Fact, diff: TraceDiff) -> str:
    layers = _layers(fact.layer_numbers)
    if "later layers agree" in fact.text:
        return (
            f"the experts of {layers} have different ids and compute the same: their order in the checkpoint, no fault"
        )
    if "later layers differ" in fact.text:
        return f"{layers} has its experts or its router's rows in a different order, and not both: later layers differ"
    return "experts have different ids: physical ids in place of logical ones, or a different order in the checkpoint"


def _by_layer(diff: TraceDiff) -> list[str]:
    """Return where the unexplained decisions begin to differ, their common facts, and the causes that fit."""
    different = diff.unexplained[:, :-1].sum(dim=1).tolist()
    if not sum(different):
        return []
    clues = {fact.kind: fact for fact in reversed(diff.facts) if fact.kind in _CLUES}
    # Rows of different tokens are unlike from the lowest layer on.
    lowest = diff.layer_numbers[0]
    unrelated = [fact for fact in diff.facts if fact.kind == "nothing" and lowest in fact.layer_numbers]
    shares = [count / diff.rows_alike for count in different]
    onset = _onset(different, shares)
    one_expert = int(diff.unexplained[:, -2].sum()) / sum(different)
    exchange = ("all of them" if sum(different) > 1 else "and") if one_expert == 1 else f"{percent(one_expert)} of them"
    counted = f"{share(sum(different), diff.rows_alike * len(shares))} of decisions differ, {exchange} by one expert"
    causes = [_cause(clues[kind], diff) for kind in _CLUES if kind in clues]
    if unrelated and _rows(unrelated) < 0.9 * diff.rows_alike:
        part = f"{_rows(unrelated):,} rows are as unlike as unrelated ones: "
        if any(None not in (each.token_a, each.token_b) for each in diff.differences):
            part += "their tokens are the same, so these are routes of other rows, or of another request or step."
        else:
            part += "other tokens in these rows (another answer, request or step), or routes of other rows."
        if sum(fact.decisions for fact in unrelated) >= 0.75 * sum(different):
            return [part, f"{counted}."]
        causes.insert(0, part)
    elif unrelated and len(unrelated[0].layer_numbers) == len(shares) and not causes:
        return [f"rows are as unlike as unrelated ones in every layer: different weights, step or request; {counted}."]
    versions = _versions(diff)
    if versions:
        causes.insert(0, versions)
    if onset is not None:
        return [*_place(diff, onset, different, shares, counted, clues), *causes]
    if causes:
        return [*causes, f"{counted}; {_depth(diff, different)}."]
    if sum(different) < _FEW:
        return [
            f"{sum(different)} decisions differ, {exchange} by one expert: too few to show where they begin. {_fits(diff)}"
        ]
    return [f"no place stands out: {counted}; {_depth(diff, different)}. {_fits(diff, one_expert, shares)}"]


def _depth(diff: TraceDiff, different: Sequence[int]) -> str:
    first = next(i for i, count in enumerate(different) if count)
    lowest, highest = diff.layer_numbers[first], diff.layer_numbers[-1]
    words = f"{different[first]:,} of {diff.rows_alike:,} rows in layer {lowest}"
    return words + (f", {different[-1]:,} in layer {highest}" if highest != lowest else "")


def _fits(diff: TraceDiff, one_expert: float = 1.0, shares: Sequence[float] = ()) -> str:
    if one_expert >= 0.8 and (not shares or shares[0] <= 2 * _PRECISION_SHARE):
        return (
            f"That fits rounding (another precision, kernel or layout), and as well weights or a config that differ a "
            f"little: {_OPEN}."
        )
    return f"That fits weights or a config that differ, a random mask, or different rows in a few places: {_OPEN}."


def _place(
    diff: TraceDiff,
    onset: _Onset,
    different: Sequence[int],
    shares: Sequence[float],
    counted: str,
    clues: dict[str, Fact],
) -> list[str]:
    """Return the place of an onset, and the causes that it leaves."""
    i, number = onset.index, diff.layer_numbers[onset.index]
    before = f"layer {diff.layer_numbers[i - 1]}" if i else "the embedding"
    # The experts of the lowest layer change no layer before the next one.
    between = f"between {before} and layer {number}{', or after every layer,' if i == 1 else ''}"
    rows = f"{different[i]:,} of {diff.rows_alike:,} rows differ in layer {number}"
    exchanged = diff.unexplained[i, -2].item() / max(1, different[i])
    by_one = f", {percent(exchanged)} of them by one expert" if diff.topk > 1 else ""
    if onset.is_alone:
        return [
            f"layer {number} alone differs, and later layers do not follow: {rows}{by_one}. That fits routes that were "
            f"recorded or captured wrongly, or a recompute from saved inputs; a model that differs changes later layers too."
        ]
    if not i:
        names = "weights, a config, positions, the attention's mask or its packing, or a random mask"
        if shares[0] <= 2 * _PRECISION_SHARE and exchanged >= 0.8:
            names = "rounding (another precision, kernel or layout), " + names.replace(
                "weights, a config", "weights or a config that differ a little"
            )
        elif exchanged < 0.8 and shares[0] <= 2 * _PRECISION_SHARE:  # a model that differs so much moves more rows
            names = names.replace("or a random mask", "a random mask, or different rows in a few places")
        known = set(clues) & {"token", "first_rows"} or _is_sure(clues, diff)
        is_open = "" if "expert" in clues else f": {_OPEN}"  # the cause of an expert that is not sure says so itself
        fits = "" if known else f" That fits {names}{is_open}."
        return [f"something {between}, or everywhere, differs: {rows}{by_one}; {counted}.{fits}"]
    below = "none" if onset.is_clean else f"{percent(max(shares[:i]))} at most"
    kernel = "another precision or kernel, " if shares[i] <= 2 * _PRECISION_SHARE and exchanged >= 0.8 else ""
    fits = "" if "earlier_expert" in clues or _is_sure(clues, diff) else f" That fits {kernel}{_between(diff, i)}."
    return [f"something {between} differs: {rows}{by_one}, and {below} in the layers below; {counted}.{fits}"]


def _between(diff: TraceDiff, i: int) -> str:
    below, number = diff.layer_numbers[i - 1], diff.layer_numbers[i]
    return (
        f"weights or a config of the experts of layer {below} or of their scores, of the norms, the attention or the router "
        f"of layer {number}"
        f"{', or of a dense layer between' if number > below + 1 else ''}; or a random mask or noise there"
    )


_CLUES = ("expert", "token", "first_rows", "earlier_expert")


def _cause(fact: Fact, diff: TraceDiff) -> str:
    if fact.kind == "expert":
        words = fact.text.split()
        expert, number, verb = words[1], words[4], words[6]
        choice = "prefers" if verb == "gained" else "avoids"
        if not _is_sure({"expert": fact}, diff):
            return (
                f"layer {number} of {diff.name_b} {choice} expert {expert} in a part of these rows, which noise does not: "
                f"that expert's bias or its row of the router, or weights that shift the hidden states. "
                f"{_OPEN[0].upper()}{_OPEN[1:]}."
            )
        return (
            f"layer {number} of {diff.name_b} {choice} expert {expert}, which noise does not: that expert's bias or its row "
            f"of the router differs."
        )
    if fact.kind == "token":
        token = fact.text.split(" rows with ")[1].split()[1]
        return f"the rows with token {token} differ before any layer: its embedding."
    if fact.kind == "first_rows":
        return (
            "a row that attends to no other row agrees: positions, the attention's queries or keys, or its mask differ."
        )
    words = fact.text.split(" used expert ")[1].split()
    return f"expert {words[0]} of layer {words[3].rstrip(',')} seems to compute something different: its weights."


def _is_sure(clues: dict[str, Fact], diff: TraceDiff) -> bool:
    """Return whether nearly all differing decisions of a layer moved one expert, which shifted hidden states do not."""
    fact = clues.get("expert")
    if fact is None:
        return False
    different = int(diff.unexplained[diff.layer_numbers.index(fact.layer_numbers[0]), :-1].sum())
    return fact.decisions >= 0.9 * different


def _rows(facts: Sequence[Fact]) -> int:
    """Return how many rows the facts are about; their decisions are those of all their layers."""
    return max(fact.decisions // max(1, len(fact.layer_numbers)) for fact in facts)


def _versions(diff: TraceDiff) -> str:
    a, b = diff.weight_versions_a, diff.weight_versions_b
    if not a or not b or set(a) & set(b):
        return ""
    return (
        f"the weights have different versions, {number_words(a, most=4)} in {diff.name_a} and {number_words(b, most=4)} in "
        f"{diff.name_b}, which is enough to change routes."
    )


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' if len(numbers) > 1 else ''} {number_words(numbers)}"


def _onset(different: Sequence[int], shares: Sequence[float]) -> _Onset | None:
    """Return where differences begin that do not grow from those of lower layers; None: nowhere.

    Rounding begins near 0 in the lowest layer, and grows to a few times its share in a layer, because hidden states drift.
    """
    for i, count in enumerate(different):
        below, later = different[:i] or [0], different[i + 1 :]
        if count < _FEW or count <= 3 * _most(max(below)):
            continue
        # A layer that a model computes otherwise changes those after it too.
        is_alone = bool(later) and max(later) <= 3 * _most(max(below))
        if i or is_alone or shares[0] > _PRECISION_SHARE / 2:
            return _Onset(index=i, is_clean=not any(below), is_alone=is_alone)
    return None


def _most(count: int) -> float:
    """Return the count that may be expected where so many were found: two standard deviations above."""
    return count + 2 * math.sqrt(count) + (1 if count else _FEW / 3 - 1)
