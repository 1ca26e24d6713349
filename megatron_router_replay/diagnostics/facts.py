"""State what two traces cover, and which rows, layers or ids of a the routes of b match, one sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from megatron_router_replay.diagnostics.counting import Counter
from megatron_router_replay.diagnostics.fact import Fact
from megatron_router_replay.diagnostics.search import Search
from megatron_router_replay.diagnostics.source import PairedSource, TraceSource
from megatron_router_replay.tables import number_words


def find_facts(counts: Counter) -> list[Fact]:
    """Return the coverage of two traces, and then the matches of b in a, those of most decisions first."""
    facts = list(_coverage(counts))
    differs = counts.rows_different or not counts.layers or counts.rows_only_b
    if differs and counts.b.num_tokens and counts.a.layer_numbers and counts.b.layer_numbers:
        search = Search(counts)
        found = sorted(search.facts(), key=lambda fact: -fact.decisions)
        facts += _in_order([replace(fact, text=_sentence(fact, search)) for fact in found], search)
    return facts


def _coverage(counts: Counter) -> Iterator[Fact]:
    a, b = counts.a, counts.b
    if not counts.layers:
        numbers = f"{a.name} has {number_words(a.layer_numbers)}, {b.name} has {number_words(b.layer_numbers)}"
        yield Fact(kind="layers", text=f"no layer is in both: {numbers}.", layer_numbers=b.layer_numbers)
    if isinstance(b, PairedSource):
        yield _paired(a, b)
    elif a.sequence_lengths and b.sequence_lengths and a.sequence_lengths != b.sequence_lengths:
        each = [f"{s.name} has {len(s.sequence_lengths or ()):,} samples of {s.num_tokens:,} rows" for s in (a, b)]
        yield Fact(kind="samples", text=f"the samples have different lengths: {' and '.join(each)}.")
    for name, other_name, only in ((a.name, b.name, counts.only_a), (b.name, a.name, counts.only_b)):
        # Engines leave out one row a sample: the last token is sampled and never fed back.
        samples = (only > 1).nonzero().flatten().tolist() if counts.samples.known else []
        if samples:
            rows = f"{int(only[samples].sum()):,} rows of {_words('sample', samples)}"
            text = f"{rows} have a route in {name} and none in {other_name}."
            yield Fact(kind="samples", text=text, samples=tuple(samples))
    agreeing = (counts.rows_compared - counts.different_by_layer).clamp(min=1)
    # Noise exchanges the order of near-ties; nearly all decisions are reordered by a sort.
    sorted_otherwise = (counts.other_order >= 0.9 * agreeing) & (2 * agreeing > counts.rows_compared) & (a.topk > 1)
    if listed := sorted_otherwise.nonzero().flatten().tolist():
        layers = tuple(counts.layers[i] for i in listed)
        held, decisions = int(counts.other_order[listed].sum()), int(agreeing[listed].sum())
        text = f"{held:,} of {decisions:,} decisions that agree list their experts in a different order, in "
        text += f"{_words('layer', layers)}."
        yield Fact(kind="expert_order", text=text, layer_numbers=layers, held=held, decisions=decisions)
    if counts.rows_other_token:
        text = f"{counts.rows_other_token:,} of {counts.rows_with_tokens:,} rows hold a different token, first row "
        text += f"{counts.first_other_token:,}."
        yield Fact(kind="tokens", text=text, held=counts.rows_other_token, decisions=counts.rows_with_tokens)


def _paired(a: TraceSource, b: PairedSource) -> Fact:
    moved = [(place, partner) for place, partner in enumerate(b.partners) if partner not in (-1, place)]
    missing = [place for place, partner in enumerate(b.partners) if partner < 0]
    said = [f"samples are matched by their tokens, and rows of {b.name} are numbered as in {a.name}"]
    if moved:
        places, partners = zip(*moved)
        said.append(f"{_words('sample', places)} of {a.name} are {_words('sample', partners)} of {b.name}")
    if missing:
        said.append(f"{_words('sample', missing)} of {a.name} have no equal in {b.name}")
    return Fact(kind="samples", text=f"{'; '.join(said)}.", samples=tuple(missing))


def _sentence(fact: Fact, search: Search) -> str:
    assert fact.rows is not None
    a, b, (first, last), experts = search.a.name, search.b.name, fact.rows, search.a.num_experts
    every_layer = fact.layer_numbers == search.b.layer_numbers
    where = "in all layers" if every_layer else f"in {_words('layer', fact.layer_numbers)}"
    decisions = _decisions(fact.held, fact.decisions, search)
    counted = f"{where}: {decisions}"
    position = first - int(search.samples_b.starts[fact.samples[0]]) if len(fact.samples) == 1 else 0
    samples = f"{_words('sample', fact.samples)}{f', from position {position}' if position else ''}"
    rows = f"rows {first}..{last}{f' ({samples})' if fact.samples else ''} of {b}"
    if (first, last) == (0, search.b.num_tokens - 1):
        rows = f"all {last + 1:,} rows of {b}"
    if fact.kind == "row":
        return f"{rows} match {a}'s {_source_words(fact)}, {counted}{_lost_words(fact, search)}."
    if fact.kind == "layer":
        layers = f"{_words('layer', fact.layer_numbers)} of {b} match {_words('layer', fact.source_layers)} of {a}"
        return f"{layers}, in {rows}: {decisions}."
    if fact.kind == "names":
        names = search.names[search.b.layer_numbers.index(fact.layer_numbers[0])]
        added, times = np.unique((names - np.arange(experts)) % experts, return_counts=True)
        # The names of rare experts may be wrong.
        is_sum = times.max() >= 0.9 * experts
        ids = f"by its id plus {added[times.argmax()]} (modulo {experts})" if is_sum else "by a different id"
        return f"{rows} name each expert {ids}, {counted}."
    if fact.kind == "constant":
        return f"{rows} repeat one route, {counted}."
    return f"{rows} are as unlike {a}'s as unrelated rows, {counted}."


def _source_words(fact: Fact) -> str:
    assert fact.rows is not None
    assert fact.offset is not None
    rows = f"rows {fact.rows[0] + fact.offset}..{fact.rows[1] + fact.offset}"
    if fact.source_samples and abs(fact.offset) > 3:
        return f"{_words('sample', fact.source_samples)} ({rows})"
    step = "1 row" if abs(fact.offset) == 1 else f"{abs(fact.offset):,} rows"
    return f"{rows} ({step} {'earlier' if fact.offset < 0 else 'later'})"


def _lost_words(fact: Fact, search: Search) -> str:
    """Return which rows of a are missing or there twice, if all rows from one on moved and those before it did not."""
    assert fact.rows is not None
    assert fact.offset is not None
    first, last = fact.rows
    to_the_end = last == search.b.num_tokens - 1 and fact.layer_numbers == search.b.layer_numbers
    if not to_the_end or first <= max(0, -fact.offset) or not search.agrees_before(first):
        return ""
    low, high = sorted((first, first + fact.offset))
    samples = search.samples_a.whole(low, high - 1)
    named = f"; {search.a.name}'s rows {low}..{high - 1}" + (f" ({_words('sample', samples)})" if samples else "")
    return f"{named} are {'missing' if fact.offset > 0 else 'there twice'}"


def _in_order(found: list[Fact], search: Search) -> list[Fact]:
    """Return facts, with a single fact for all samples that match different samples."""
    a, b = search.a, search.b
    moved = [fact for fact in found if fact.source_samples and fact.layer_numbers == b.layer_numbers and fact.rows]
    moved.sort(key=lambda fact: fact.rows or (0, 0))
    rows = [np.arange(fact.rows[0], fact.rows[1] + 1) for fact in moved if fact.rows]
    sources = [each + (fact.offset or 0) for each, fact in zip(rows, moved)]
    exchanged = len(moved) > 1 and np.array_equal(np.concatenate(rows), np.sort(np.concatenate(sources)))
    if not exchanged:
        moved = [fact for fact in moved if fact.rows and search.samples_b.whole(*fact.rows)]
    order = [sample for fact in moved for sample in fact.source_samples]
    # Samples of different lengths that are exchanged move those between them, too.
    places = sorted(order) if exchanged else [sample for fact in moved for sample in fact.samples]
    if len(moved) < 2 or order == places:
        return found
    samples, from_a = zip(*((place, sample) for place, sample in zip(places, order) if place != sample))
    held, decisions = sum(fact.held for fact in moved), sum(fact.decisions for fact in moved)
    words = f"{_words('sample', samples)} of {b.name} match {_words('sample', from_a)} of {a.name}"
    if exchanged and len(samples) == 2:
        words = f"samples {samples[0]} and {samples[1]} of {b.name} changed places"
    in_order = Fact(
        kind="sample_order",
        text=f"{words}, in all layers: {_decisions(held, decisions, search)}.",
        layer_numbers=b.layer_numbers,
        rows=((moved[0].rows or (0, 0))[0], (moved[-1].rows or (0, 0))[1]),
        samples=samples,
        source_samples=from_a,
        held=held,
        decisions=decisions,
    )
    return [in_order, *(fact for fact in found if fact not in moved)]


def _decisions(held: int, decisions: int, search: Search) -> str:
    return f"{held:,} of {decisions:,} decisions{'' if search.complete else ' that were read'}"


def _words(noun: str, numbers: Iterable[int]) -> str:
    """Return "layer 5", or "layers 2..4, 9"."""
    numbers = list(numbers)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {number_words(numbers)}"
