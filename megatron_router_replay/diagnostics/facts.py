"""What a search found, and what two traces cover -> facts: sentences in which every number was counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_router_replay.diagnostics.counting import Counter, Samples
from megatron_router_replay.diagnostics.evidence import Evidence
from megatron_router_replay.diagnostics.fact import Fact
from megatron_router_replay.diagnostics.where import Claim, search
from megatron_router_replay.tables import number_words, percent, share


def find_facts(counts: Counter) -> list[Fact]:
    """Return what a pass over two traces points to: what they cover, and where the routes of b come from."""
    covered = [*_coverage(counts)]
    differs = counts.rows_different or not counts.layers or counts.rows_only_b
    if not differs or not counts.a.layer_numbers or not counts.b.layer_numbers:
        return covered
    evidence = Evidence(counts)
    words = _Words(evidence)
    held = sorted((words.fact(claim) for claim in search(evidence)), key=lambda fact: -fact.decisions)
    # One line says which rows moved, are missing or come twice; that lengths differ follows from it.
    if any(" missing in " in fact.text or " twice in " in fact.text or fact.source_samples for fact in held):
        covered = [fact for fact in covered if fact.kind != "samples" or fact.samples]
    return covered + held


def _coverage(counts: Counter) -> Iterator[Fact]:
    a, b, name_a, name_b = counts.a, counts.b, counts.a.name, counts.b.name
    if not counts.layers:
        yield Fact(
            kind="layers",
            text=f"no layer is in both: {name_a} has {number_words(a.layer_numbers)}, "
            f"{name_b} has {number_words(b.layer_numbers)}.",
            layer_numbers=b.layer_numbers,
        )
    if a.sequence_lengths and b.sequence_lengths and a.sequence_lengths != b.sequence_lengths:
        yield Fact(kind="samples", text=_length_words(a.sequence_lengths, b.sequence_lengths, name_a, name_b))
    if a.sample_ids and b.sample_ids and a.sample_ids != b.sample_ids and len(a.sample_ids) == len(b.sample_ids):
        other = tuple(i for i, (one, two) in enumerate(zip(a.sample_ids, b.sample_ids)) if one != two)
        same = " (the same in a different order)" if sorted(a.sample_ids) == sorted(b.sample_ids) else ""
        yield Fact(
            kind="samples",
            text=f"{len(other):,} of {len(a.sample_ids):,} samples have different names{same}: {number_words(other)}.",
            samples=other,
        )
    for name, other_name, only in (
        (name_a, name_b, counts.by_sample("only_a")),
        (name_b, name_a, counts.by_sample("only_b")),
    ):
        # One row a sample is what engines leave out: the last token is sampled and never fed back.
        samples = [i for i, rows in enumerate(only.tolist()) if rows > 1]
        if samples:
            yield Fact(
                kind="samples",
                text=f"{int(only[samples].sum()):,} rows of {sample_words(samples)} have a route in {name} and none in "
                f"{other_name}.",
                samples=tuple(samples),
            )
    agreeing = (counts.rows_compared - counts.different_by_layer).clamp(min=1)
    # Noise changes the order of near-ties too, of many experts often; nearly all decisions change by somebody's sorting.
    sorted_otherwise = (counts.other_order >= 0.9 * agreeing) & (2 * agreeing > counts.rows_compared) & (a.topk > 1)
    if listed := sorted_otherwise.nonzero().flatten().tolist():
        held, decisions = int(counts.other_order[listed].sum()), int(agreeing[listed].sum())
        numbers = tuple(counts.layers[i] for i in listed)
        yield Fact(
            kind="expert_order",
            text=f"{held:,} of {decisions:,} decisions that agree list their experts in a different order, "
            f"in {layer_words(numbers)}.",
            layer_numbers=numbers,
            held=held,
            decisions=decisions,
        )
    if counts.rows_other_token:
        yield Fact(
            kind="tokens",
            text=f"{counts.rows_other_token:,} of {counts.rows_with_tokens:,} rows hold a different token, first row "
            f"{counts.first_other_token:,}.",
            held=counts.rows_other_token,
            decisions=counts.rows_with_tokens,
        )


def _length_words(a: Sequence[int], b: Sequence[int], name_a: str, name_b: str) -> str:
    if len(a) != len(b):
        return f"{name_a} has {len(a):,} samples of {sum(a):,} rows, {name_b} has {len(b):,} of {sum(b):,} rows."
    other = [i for i, (one, two) in enumerate(zip(a, b)) if one != two]
    shown = ", ".join(f"sample {i} {a[i]:,} and {b[i]:,}" for i in other[:3]) + (", ..." if len(other) > 3 else "")
    return f"{len(other):,} of {len(a):,} samples have different lengths in {name_a} and in {name_b}: {shown} rows."


class _Words:
    """Puts what was found into sentences."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.a, self.b = evidence.a, evidence.b
        self.samples, self.samples_a = evidence.samples, evidence.samples_a

    def fact(self, claim: Claim) -> Fact:
        """Return a claim with its counts and its sentence."""
        evidence = self.evidence
        at = claim.at[(evidence.comparable if claim.kind == "nothing" else evidence.routed)[claim.at]]
        rows = (int(evidence.rows[claim.at[0]]), int(evidence.rows[claim.at[-1]]))
        moved = () if claim.order is None else np.flatnonzero(claim.order != np.arange(len(claim.order))).tolist()
        fact = Fact(
            kind=claim.kind,
            text="",
            layer_numbers=tuple(self.b.layer_numbers[layer] for layer in claim.layers),
            rows=rows,
            samples=tuple(moved) or self._samples_in(rows),
            source_samples=() if claim.order is None else tuple(claim.order[moved].tolist()),
            offset=claim.offset,
            source_layers=() if claim.source_layers is None else tuple(claim.source_layers.tolist()),
            held=int(claim.holds[at].sum()),
            decisions=len(at) * len(claim.layers),
        )
        return replace(fact, text=self._sentence(claim, fact))

    def _sentence(self, claim: Claim, fact: Fact) -> str:
        a, b = self.a.name, self.b.name
        rows = self._scattered_words(claim) if claim.scattered else self._row_words(fact)
        layers = layer_words(fact.layer_numbers)
        where = "in all layers" if fact.layer_numbers == self.b.layer_numbers else f"in {layers}"
        decisions = f"{fact.decisions:,} decisions{'' if self.evidence.complete else ' that were looked at'}"
        counted = f"{fact.held:,} of {decisions}"
        if fact.kind == "sample_order":
            return f"{self._order_words(fact)}, {where}: {counted}."
        if fact.kind == "row":
            missing = "" if claim.scattered else self._missing_words(claim, fact)
            return f"{missing or f'{rows} of {b}'} hold {self._source_words(claim, fact)}, {where}: {counted}."
        if fact.kind == "layer":
            moved = f", {_step_words(fact.offset)}" if fact.offset else ""
            hold = "hold" if len(fact.layer_numbers) > 1 else "holds"
            return f"{layers} of {b} {hold} {layer_words(fact.source_layers)} of {a}{moved}, in {rows}: {counted}."
        if fact.kind == "constant":
            route = f"experts {self._route(claim)}" if len(fact.layer_numbers) == 1 else "one route"
            return f"{rows} of {b} repeat {route} {where}: {counted}."
        if fact.kind == "names":
            return f"{b} names {_name_words(claim)}, {where}: so named, {counted} are near those of {a}."
        if fact.kind == "unused":
            return f"{b} never names {_expert_words(claim, fact)}: {a} does in {fact.held:,} decisions."
        near, by_chance = share(fact.held, fact.decisions), percent(self.evidence.by_chance[claim.layers].mean())
        return (
            f"{rows} of {b} are as unlike {a}'s as unrelated rows, {where}: {near} of {decisions} are near, and {by_chance} "
            "of unrelated ones."
        )

    def _scattered_words(self, claim: Claim) -> str:
        shown = ", ".join(f"{row:,}" for row in self.evidence.rows[claim.at[:3]])
        return f"{len(claim.at):,} rows ({shown}, ...)"

    def _row_words(self, fact: Fact) -> str:
        assert fact.rows is not None
        first, last = fact.rows
        if (first, last) == (0, self.b.num_tokens - 1):
            return f"all {last + 1:,} rows"
        if not fact.samples:
            return f"rows {first}..{last}"
        position = first - self.samples.bounds(fact.samples[0])[0]
        inside = f", from position {position}" if len(fact.samples) == 1 and position else ""
        return f"rows {first}..{last} ({sample_words(fact.samples)}{inside})"

    def _source_words(self, claim: Claim, fact: Fact) -> str:
        assert fact.rows is not None
        assert fact.offset is not None
        if claim.scattered:
            return f"{self.a.name}'s rows beside them ({_step_words(fact.offset)})"
        first, last = fact.rows[0] + fact.offset, fact.rows[1] + fact.offset
        whole = _whole_samples(self.samples_a, first, last)
        if whole and _whole_samples(self.samples, *fact.rows) and abs(fact.offset) > 1:
            return f"{self.a.name}'s {sample_words(whole)} (rows {first}..{last})"
        return f"{self.a.name}'s rows {first}..{last} ({_step_words(fact.offset)})"

    def _missing_words(self, claim: Claim, fact: Fact) -> str:
        """Say which rows of a b lacks or has twice, where all rows behind a place are moved and those before it are not."""
        assert fact.rows is not None
        assert fact.offset is not None
        to_the_end = fact.rows[1] == self.b.num_tokens - 1 and fact.layer_numbers == self.b.layer_numbers
        before = self.evidence.near_in_place[: claim.at[0]]
        if not to_the_end or fact.rows[0] <= max(0, -fact.offset) or not len(before):
            return ""
        if before.mean() < 0.5 or before[-1].mean() < 0.5:
            return ""
        first, last = sorted((fact.rows[0], fact.rows[0] + fact.offset))
        whole = _whole_samples(self.samples_a, first, last - 1)
        in_samples = f" ({sample_words(whole)})" if whole else ""
        rows, verbs = (
            (f"row {first}", ("is missing", "comes twice"))
            if last - first == 1
            else (f"rows {first}..{last - 1}", ("are missing", "come twice"))
        )
        return f"{self.a.name}'s {rows}{in_samples} {verbs[fact.offset < 0]} in {self.b.name}: {self._row_words(fact)}"

    def _order_words(self, fact: Fact) -> str:
        moved = f"{sample_words(fact.samples)} of {self.b.name}"
        if len(fact.samples) == 2:
            return f"samples {fact.samples[0]} and {fact.samples[1]} of {self.b.name} changed places"
        return f"{moved} hold {sample_words(fact.source_samples)} of {self.a.name}"

    def _samples_in(self, rows: tuple[int, int]) -> tuple[int, ...]:
        if not self.samples.known:
            return ()
        sample = self.samples.of_rows(np.array(rows))
        return tuple(range(int(sample[0]), min(int(sample[1]) + 1, self.samples.count)))

    def _route(self, claim: Claim) -> list[int]:
        ids: list[int] = self.evidence.ids[claim.at[claim.holds[claim.at, 0].argmax()], claim.layers[0]].tolist()
        return ids


def _whole_samples(samples: Samples, first: int, last: int) -> list[int]:
    """Return the samples that are exactly these rows; none if they begin or end inside of one."""
    if not samples.known or first < 0 or last >= samples.num_rows:
        return []
    one, other = samples.of_rows(np.array([first, last])).tolist()
    whole = other < samples.count and samples.bounds(one)[0] == first and samples.bounds(other)[1] == last + 1
    return list(range(one, other + 1)) if whole else []


def _name_words(claim: Claim) -> str:
    assert claim.names is not None
    experts = np.arange(claim.names.shape[1])
    offsets = (claim.names - experts) % len(experts)
    if np.all(offsets == offsets[0, 0]):
        return f"each expert by its id plus {offsets[0, 0]} (modulo {len(experts)})"
    moved = np.flatnonzero(claim.names[0] != experts)
    shown = ", ".join(f"{expert} as {claim.names[0, expert]}" for expert in moved[:4].tolist())
    return f"experts by different ids ({shown}{', ...' if len(moved) > 4 or len(claim.names) > 1 else ''})"


def _expert_words(claim: Claim, fact: Fact) -> str:
    assert claim.experts is not None
    if len(set(claim.experts.tolist())) == 1:
        return f"expert {claim.experts[0]} in {layer_words(fact.layer_numbers)}"
    shown = [f"expert {expert} in layer {layer}" for expert, layer in zip(claim.experts, fact.layer_numbers)]
    return ", ".join(shown[:4]) + (", ..." if len(shown) > 4 else "")


def _step_words(offset: int) -> str:
    rows = "1 row" if abs(offset) == 1 else f"{abs(offset):,} rows"
    return f"{rows} {'earlier' if offset < 0 else 'later'}"


def layer_words(numbers: Sequence[int]) -> str:
    """Return "layer 5", or "layers 2..4, 9"."""
    return f"layer{'s' if len(numbers) > 1 else ''} {number_words(numbers)}"


def sample_words(numbers: Sequence[int]) -> str:
    """Return "sample 5", or "samples 2..4, 9"."""
    return f"sample{'s' if len(numbers) > 1 else ''} {number_words(numbers)}"
