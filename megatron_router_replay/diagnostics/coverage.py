"""State what two traces cover: layers, samples and tokens that differ, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_router_replay.diagnostics.counting import Counter
from megatron_router_replay.diagnostics.fact import Fact
from megatron_router_replay.diagnostics.source import TraceSource
from megatron_router_replay.tables import number_words, numbered


def coverage(counts: Counter) -> Iterator[Fact]:
    """Yield the layers, samples and tokens that only one trace has, and layers whose experts are sorted."""
    a, b = counts.a, counts.b
    if not counts.layers:
        numbers = f"{a.name} has {number_words(a.layer_numbers)}, {b.name} has {number_words(b.layer_numbers)}"
        yield Fact(kind="layers", text=f"no layer is in both: {numbers}.")
    if b.matched_by == "tokens":
        yield Fact(kind="samples", text=_paired(a.name, b.name, b.partners or ()))
    elif b.matched_by == "number":
        yield Fact(kind="samples", text=_lengths(a, b))
    elif a.sequence_lengths and b.sequence_lengths and a.sequence_lengths != b.sequence_lengths:
        each = [f"{s.name} has {len(s.sequence_lengths or ()):,} samples of {s.num_tokens:,} rows" for s in (a, b)]
        text = f"the samples have different lengths: {' and '.join(each)}."
        if sorted(a.sequence_lengths) == sorted(b.sequence_lengths):
            text = f"the samples of {b.name} have the lengths of those of {a.name} in a different order."
        yield Fact(kind="samples", text=text)
    for name, other_name, only in ((a.name, b.name, counts.only_a), (b.name, a.name, counts.only_b)):
        # Engines leave out one row a sample: the last token is sampled and never fed back.
        # Rows after the last sample, which are counted last, are of none.
        samples = (only[:-1] > 1).nonzero().flatten().tolist() if counts.samples.known else []
        if samples:
            rows = f"{int(only[samples].sum()):,} rows of {numbered('sample', samples)}"
            yield Fact(kind="samples", text=f"{rows} have a route in {name} and none in {other_name}.")
    agreeing = (counts.rows_compared - counts.different_by_layer).clamp(min=1)
    # Noise exchanges the order of near-ties; nearly all decisions are reordered by a sort.
    is_sorted = (counts.other_order >= 0.9 * agreeing) & (2 * agreeing > counts.rows_compared) & (a.topk > 1)
    if listed := is_sorted.nonzero().flatten().tolist():
        layers, decisions = tuple(counts.layers[i] for i in listed), int(agreeing[listed].sum())
        text = (
            f"{int(counts.other_order[listed].sum()):,} of {decisions:,} decisions that agree list their experts in a "
        )
        text += f"different order, in {numbered('layer', layers)}."
        yield Fact(kind="expert_order", text=text, layer_numbers=layers, decisions=decisions)
    if counts.rows_other_token:
        text = f"{counts.rows_other_token:,} of {counts.rows_compared:,} rows hold a different token, "
        text += f"first row {int(counts.first_other_token.min()):,}"
        firsts = counts.first_other_token[:-1]
        known = np.flatnonzero(firsts < np.iinfo(np.int64).max)
        if counts.samples.known and len(known) > 1:
            positions = firsts[known] - counts.samples.starts[known]
            text += f"; {numbered('sample', known.tolist())} differ from position {int(positions.min())}"
            text += f" to {int(positions.max())} on" if positions.min() < positions.max() else " on"
        yield Fact(kind="tokens", text=f"{text}.")


def _lengths(a: TraceSource, b: TraceSource) -> str:
    pairs = list(zip(a.sequence_lengths or (), b.lengths_before))
    different = [(sample, *pair) for sample, pair in enumerate(pairs) if pair[0] != pair[1]]
    each = [
        f"sample {sample} has {one:,} rows in {a.name} and {other:,} in {b.name}"
        for sample, one, other in different[:4]
    ]
    more = f"; {len(different) - 4:,} more samples have different lengths" if len(different) > 4 else ""
    return f"{'; '.join(each)}{more}. Samples are matched by their numbers, and rows of {b.name} are numbered as in {a.name}."


def _paired(a: str, b: str, partners: Sequence[int]) -> str:
    moved = [(place, partner) for place, partner in enumerate(partners) if partner not in (-1, place)]
    missing = [place for place, partner in enumerate(partners) if partner < 0]
    text = f"samples are matched by their tokens, and rows of {b} are numbered as in {a}"
    if moved:
        places, from_b = zip(*moved)
        text += f"; {numbered('sample', places)} of {a} are {numbered('sample', from_b)} of {b}"
    return text + (f"; {numbered('sample', missing)} of {a} have no equal in {b}." if missing else ".")
