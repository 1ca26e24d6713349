"""Conclude from the facts of a diff and its counts by layer: the cause that they leave, or the causes.

Routes have no scores, so a near-tie that another kernel decides otherwise looks as one that slightly different weights
decide otherwise. A conclusion names a place where the counts show one, and all causes that fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_router_replay.diagnostics.comparison import Comparison
from megatron_router_replay.diagnostics.fact import Fact
from megatron_router_replay.tables import number_words, numbered, percent, share

_FEW = 16
"""Differing decisions of a layer that show where differences begin; of fewer, layers below may have none by chance."""

_PRECISION_SHARE = 0.1
"""Share of decisions that another precision changes at most where it leads the causes: 2 to 8 % in bf16.

Up to twice as many, it is the last cause.
"""

_OPEN = "the routes alone do not say which; compare the weights first"
_ROUNDING = "rounding (another precision, kernel or layout)"
_CAPTURED = "routes that were recorded or captured wrongly"

_MATCHES = {
    "row": "rows of one trace lie at other places than in the other: a start that is off by one, a missing BOS token, a "
    "lost chunk, chunks in a different order",
    "sample_order": "the samples have a different order: replies that were stored as they arrived, or a batch that was "
    "filtered or repeated without its routes",
    "layer": "layers are numbered differently: dense layers, pipeline offsets or MTP in the map to layer_number, or weights "
    "that were loaded into another layer",
    "constant": "one route is repeated: a capture that stopped, filler, or a router that prefers its experts to all others",
}
"""The conclusion from matches of a kind."""

_CLUES = ("expert", "token", "first_rows", "earlier_expert")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rest:
    """The decisions that differ and that no match explains.

    Args:
        different: [num_layers] their number.
        shares: [num_layers] their share of the rows that are alike.
        by_one: the share of them that exchange one expert.
        few: the words for their number; counted: for their share.
        clues: the first fact of each kind of clue.
    """

    different: Sequence[int]
    shares: Sequence[float]
    by_one: float
    few: str
    counted: str
    clues: dict[str, Fact]


def conclude(diff: Comparison) -> str:
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


def _unexplained(diff: Comparison) -> int:
    """Return how many decisions differ that no match explains, of rows with the same tokens up to there."""
    return int(diff.unexplained[:, :-1].sum())


def _leaves_more(diff: Comparison) -> bool:
    """Return whether matches leave enough decisions for a conclusion of their own."""
    if any(fact.later_layers == "differ" for fact in diff.facts):  # which follow from that
        return False
    return _unexplained(diff) >= max(_FEW, diff.decisions_different // 10)


def _tokens(diff: Comparison) -> list[str]:
    if not diff.rows_other_token:
        return []
    if not diff.rows_alike:
        return ["the samples hold different tokens from their first row on, and so different routes."]
    rest = _unexplained(diff)
    routes = (
        "agree in every layer" if not rest else f"differ in {share(rest, diff.rows_alike * len(diff.layer_numbers))}"
    )
    after = "the samples hold different tokens, and so different routes from there on"
    return [f"{after}; the decisions of the {diff.rows_alike:,} rows before {routes}."]


def _matches(diff: Comparison) -> list[str]:
    """Return the conclusions from matches of rows, samples, layers and ids, those of most decisions first."""
    matches = [fact for fact in diff.facts if fact.rows is not None and fact.kind != "nothing"]
    if not diff.layer_numbers and not matches:
        return ["they have no layer in common."]
    # Routes that differ as those of unrelated rows repeat themselves here and there.
    matches = [fact for fact in matches if fact.kind != "constant" or not _is_in_unrelated(fact, diff)]
    sentences = []
    for kind in dict.fromkeys(fact.kind for fact in matches):
        text = _MATCHES.get(kind) or _names(next(fact for fact in matches if fact.kind == kind))
        sentences.append(text + ".")
    if matches and _leaves_more(diff):
        sentences.append(
            f"these facts leave {_unexplained(diff):,} of the {diff.decisions_different:,} differing decisions unexplained."
        )
    return sentences


def _is_in_unrelated(fact: Fact, diff: Comparison) -> bool:
    """Return whether the rows and layers of this fact are unrelated by a larger one."""
    assert fact.rows is not None
    return any(
        each.kind == "nothing"
        and each.rows is not None
        and each.rows[0] <= fact.rows[0]
        and fact.rows[1] <= each.rows[1]
        and set(fact.layer_numbers) <= set(each.layer_numbers)
        and each.decisions > fact.decisions
        for each in diff.facts
    )


def _names(fact: Fact) -> str:
    layers = numbered("layer", fact.layer_numbers)
    if fact.later_layers == "agree":
        return (
            f"the experts of {layers} have different ids and compute the same: a different order in the checkpoint, or ids "
            f"that were recorded otherwise, as physical ones; a replay needs the same ids"
        )
    if fact.later_layers == "differ":
        order = (
            "has its experts or its router's rows" if len(fact.layer_numbers) == 1 else "have experts or router rows"
        )
        return f"{layers} {order} in a different order, and not both: later layers differ"
    return (
        "experts have different ids: physical ids in place of logical ones, ids that were recorded wrongly, a different "
        "order in the checkpoint, or rows of a router that moved without its experts"
    )


def _by_layer(diff: Comparison) -> list[str]:
    """Return where the unexplained decisions begin to differ, their common facts, and the causes that fit."""
    rest = _rest(diff)
    if rest is None:
        return []
    # Rows of different tokens are unlike from the lowest layer on.
    lowest = diff.layer_numbers[0]
    unrelated = [fact for fact in diff.facts if fact.kind == "nothing" and lowest in fact.layer_numbers]
    causes = [_cause(rest.clues[kind], diff, rest) for kind in _CLUES if kind in rest.clues]
    if unrelated and _rows(unrelated) < 0.9 * diff.rows_alike:
        part = f"{_rows(unrelated):,} rows are as unlike as unrelated ones: "
        if any(None not in (each.token_a, each.token_b) for each in diff.differences):
            part += "their tokens are the same, so these are routes of other rows, or of another request or step."
        else:
            part += "other tokens in these rows (another answer, request or step), or routes of other rows."
        if sum(fact.decisions for fact in unrelated) >= 0.75 * sum(rest.different):
            return [part, f"{rest.counted}."]
        causes.insert(0, part)
    elif unrelated and len(unrelated[0].layer_numbers) == len(rest.shares) and not causes:
        return [
            "rows are as unlike as unrelated ones in every layer: different weights, step or request, rows in a different "
            f"order, or {_CAPTURED}; {rest.counted}."
        ]
    versions = _versions(diff)
    if versions:
        causes.insert(0, versions)
    onset = _onset(rest)
    if onset is not None:
        return [*_place(diff, onset, rest), *causes]
    if causes:
        return [*causes, f"{rest.counted}; {_depth(diff, rest.different)}."]
    if sum(rest.different) < _FEW:
        return [f"{rest.few}: too few to show where they begin. {_fits(rest)}"]
    return [f"no place stands out: {rest.counted}; {_depth(diff, rest.different)}. {_fits(rest)}"]


def _rest(diff: Comparison) -> _Rest | None:
    """Return the decisions that no match explains; None: there are none."""
    different = diff.unexplained[:, :-1].sum(dim=1).tolist()
    total = sum(different)
    if not total:
        return None
    by_one = int(diff.unexplained[:, -2].sum()) / total
    exchange = ("all of them" if total > 1 else "and") if by_one == 1 else f"{percent(by_one)} of them"
    return _Rest(
        different=different,
        shares=[count / diff.rows_alike for count in different],
        by_one=by_one,
        few=f"{total} decisions differ, {exchange} by one expert",
        counted=f"{share(total, diff.rows_alike * len(different))} of decisions differ, {exchange} by one expert",
        clues={fact.kind: fact for fact in reversed(diff.facts) if fact.kind in _CLUES},
    )


def _depth(diff: Comparison, different: Sequence[int]) -> str:
    first = next(i for i, count in enumerate(different) if count)
    lowest, highest = diff.layer_numbers[first], diff.layer_numbers[-1]
    words = f"{different[first]:,} of {diff.rows_alike:,} rows in layer {lowest}"
    return words + (f", {different[-1]:,} in layer {highest}" if highest != lowest else "")


def _fits(rest: _Rest) -> str:
    """Return the causes that fit where differences begin at no place."""
    little = "weights or a config that differ a little"
    if sum(rest.different) >= _FEW and (rest.by_one < 0.8 or rest.shares[0] > 2 * _PRECISION_SHARE):
        causes = f"weights or a config that differ, a random mask, different rows in some places, or {_CAPTURED}"
    elif sum(rest.different) < _FEW or sum(rest.shares) / len(rest.shares) <= _PRECISION_SHARE:
        causes = f"{_ROUNDING}, and as well {little}"
    else:
        causes = f"{little}, and as well {_ROUNDING}"
    return f"That fits {causes}: {_OPEN}."


def _place(diff: Comparison, onset: _Onset, rest: _Rest) -> list[str]:
    """Return the place of an onset, and the causes that it leaves."""
    i, number = onset.index, diff.layer_numbers[onset.index]
    before = f"layer {diff.layer_numbers[i - 1]}" if i else "the embedding"
    # The experts of the lowest layer change no layer before the next one.
    between = f"between {before} and layer {number}{', or after every layer,' if i == 1 else ''}"
    rows = f"{rest.different[i]:,} of {diff.rows_alike:,} rows differ in layer {number}"
    exchanged = diff.unexplained[i, -2].item() / max(1, rest.different[i])
    by_one = f", {percent(exchanged)} of them by one expert" if diff.topk > 1 else ""
    if onset.is_alone:
        return [
            f"layer {number} alone differs, and later layers do not follow: {rows}{by_one}. That fits {_CAPTURED}, ids "
            f"exchanged between two experts, or a recompute from saved inputs; a model that differs changes later layers too."
        ]
    # Another precision exchanges one expert of a few rows.
    precision = rest.shares[i] if exchanged >= 0.8 and rest.shares[i] <= 2 * _PRECISION_SHARE else None
    leads = precision is not None and precision <= _PRECISION_SHARE
    if not i:
        causes = ["weights, a config", "positions", "the attention's mask or its packing", "a random mask"]
        if leads:
            causes = [_ROUNDING, "weights or a config that differ a little", *causes[1:]]
        elif precision is not None:
            causes.append(_ROUNDING)
        elif exchanged < 0.5 or rest.shares[0] <= 2 * _PRECISION_SHARE:  # a model that differs so much moves more rows
            causes.append("different rows in some places")
        known = set(rest.clues) & {"token", "first_rows"} or _is_sure(diff, rest)
        is_open = "" if "expert" in rest.clues else f": {_OPEN}"  # the cause of an uncertain expert includes it
        fits = "" if known else f" That fits {', '.join(causes)}, or {_CAPTURED}{is_open}."
        return [f"something {between}, or everywhere, differs: {rows}{by_one}; {rest.counted}.{fits}"]
    below = "none" if onset.is_clean else f"{percent(max(rest.shares[:i]))} at most"
    causes = [_between(diff, i), "a random mask or noise there"]
    kernel = "another precision or kernel"
    causes = [kernel, *causes] if leads else [*causes, kernel] if precision is not None else causes
    fits = f" That fits {'; '.join(causes)}; or {_CAPTURED} from there on."
    if "earlier_expert" in rest.clues or _is_sure(diff, rest):
        fits = ""
    return [f"something {between} differs: {rows}{by_one}, and {below} in the layers below; {rest.counted}.{fits}"]


def _between(diff: Comparison, i: int) -> str:
    below, number = diff.layer_numbers[i - 1], diff.layer_numbers[i]
    dense = ", or of a dense layer between" if number > below + 1 else ""
    return (
        f"weights or a config of the experts of layer {below} or of their scores, of the norms, the attention or the router "
        f"of layer {number}{dense}"
    )


def _cause(fact: Fact, diff: Comparison, rest: _Rest) -> str:
    layers = numbered("layer", fact.layer_numbers)
    if fact.kind == "token":
        return (
            f"the rows with token {fact.token} differ before any layer: its embedding, the router of {layers}, or routes of "
            f"these rows that were captured wrongly."
        )
    if fact.kind == "first_rows":
        causes = "positions, the attention's queries or keys, or its mask differ"
        if rest.different[0]:
            causes += ", or embeddings of tokens that begin no sample"
        if any(each.kind == "nothing" for each in diff.facts):
            causes += ", or the rows after it have a different order"
        return f"a row that attends to no other row agrees: {causes}."
    if fact.kind == "earlier_expert":
        return f"expert {fact.expert} of {layers} seems to compute something different: its weights."
    ends = "s" if len(fact.layer_numbers) == 1 else ""
    if fact.expert is None:
        moved, source = "an expert of each", "biases or rows of these routers"
    else:
        moved, source = f"expert {fact.expert}", "that expert's bias or its row of the router"
    choice = {"gained": f"prefer{ends}", "lost": f"avoid{ends}", "": "prefer or avoid"}[fact.verb]
    if _is_sure(diff, rest):
        return f"{layers} of {diff.name_b} {choice} {moved}, which noise does not: {source} differ{ends}."
    return (
        f"{layers} of {diff.name_b} {choice} {moved} in a part of these rows, which noise does not: {source}, or weights "
        f"that shift the hidden states. {_OPEN[0].upper()}{_OPEN[1:]}."
    )


def _is_sure(diff: Comparison, rest: _Rest) -> bool:
    """Return whether nearly all differing decisions of a layer moved one expert, which shifted hidden states do not."""
    fact = rest.clues.get("expert")
    if fact is None:
        return False
    different = sum(rest.different[diff.layer_numbers.index(number)] for number in fact.layer_numbers)
    return fact.decisions >= 0.9 * different


def _rows(facts: Sequence[Fact]) -> int:
    """Return how many rows the facts are about; their decisions are those of all their layers."""
    return max(fact.decisions // max(1, len(fact.layer_numbers)) for fact in facts)


def _versions(diff: Comparison) -> str:
    a, b = diff.weight_versions_a, diff.weight_versions_b
    if not a or not b or set(a) & set(b):
        return ""
    return (
        f"the weights have different versions, {number_words(a, most=4)} in {diff.name_a} and {number_words(b, most=4)} in "
        f"{diff.name_b}, which is enough to change routes."
    )


def _onset(rest: _Rest) -> _Onset | None:
    """Return where differences begin that do not grow from those of lower layers; None: nowhere.

    Rounding begins near 0 in the lowest layer, and grows to a few times its share in a layer, because hidden states drift.
    """
    for i, count in enumerate(rest.different):
        below, later = rest.different[:i] or [0], rest.different[i + 1 :]
        if count < _FEW or count <= 3 * _most(max(below)):
            continue
        # A layer that a model computes otherwise changes those after it too.
        is_alone = bool(later) and max(later) <= 3 * _most(max(below))
        if i or is_alone or rest.shares[0] > _PRECISION_SHARE / 2:
            return _Onset(index=i, is_clean=not any(below), is_alone=is_alone)
    return None


def _most(count: int) -> float:
    """Return the count that may be expected where so many were found: two standard deviations above."""
    return count + 2 * math.sqrt(count) + (1 if count else _FEW / 3 - 1)
