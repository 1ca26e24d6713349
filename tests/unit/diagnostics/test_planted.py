"""diff says what was planted into a noisy pair of traces, only what is so, and nothing of plain noise."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.unit.diagnostics.planted.faults import FAULTS, Fault
from tests.unit.diagnostics.planted.noisy_pair import FIRST_LAYER, Pair, Shape, noisy_pair

NEAR = 2
"""Rows by which the end of a run may be off: a decision at the end may agree or differ by chance."""

SMALL = {"topk": 2, "num_experts": 8, "num_layers": 6}
"""As many layers and experts as a tiny test model has."""


def is_said(fact, fault: Fault, pair: Pair) -> bool:
    layers = fault.layers
    if layers == ():
        layers = tuple(pair.layers_b or range(FIRST_LAYER, FIRST_LAYER + pair.shape.num_layers))
    return (
        fact.kind == fault.kind
        and layers in (None, fact.layer_numbers)
        and fault.samples in (None, fact.samples)
        and fault.offset in (None, fact.offset)
        and (
            fault.rows is None
            or (fact.rows is not None and all(abs(x - y) <= NEAR for x, y in zip(fact.rows, fault.rows)))
        )
        and fault.words in fact.text
    )


def share_of_truth(fact, pair: Pair) -> float:
    """Return the share of the named decisions that are as a fact says; 1.0 of what names none."""
    if fact.rows is None:
        return 1.0
    first_b = pair.layers_b.start if pair.layers_b else FIRST_LAYER
    layers = torch.tensor(fact.layer_numbers) - first_b
    sources = torch.tensor(fact.source_layers) - FIRST_LAYER if fact.source_layers else layers
    if fact.kind == "names":
        return fact.held / fact.decisions  # counted by hand in test_where.py
    if fact.kind == "unused":
        named = [routes[:, layer].flatten().bincount(minlength=99) for routes in (pair.a, pair.b) for layer in layers]
        lost = [int(torch.where(b == 0, a, 0).max()) for a, b in zip(named, named[len(layers) :])]
        return float(min(lost) > 0 and sum(lost) == fact.held)
    rows = torch.arange(fact.rows[0], fact.rows[1] + 1)
    if " rows (" in fact.text and ", ...)" in fact.text:
        # Far apart: the rows that differ in most of these layers.
        differs = ~near(pair.b[rows][:, layers], pair.a[rows][:, layers])
        rows = rows[differs.double().mean(dim=1) >= 0.5]
    b = pair.b[rows][:, layers]
    if fact.kind == "constant":
        return sum(most_common(b[:, i]) for i in range(len(layers))) / len(layers)
    source = rows + (fact.offset or 0)
    if fact.kind == "sample_order":
        order = list(range(len(pair.lengths)))
        for place, moved in zip(fact.samples, fact.source_samples):
            order[place] = moved
        source = torch.cat([torch.arange(pair.starts[i], pair.starts[i + 1]) for i in order])[rows]
    held = near(b, pair.a[source.clamp(0, len(pair.a) - 1)][:, sources])
    held[(source < 0) | (source >= len(pair.a))] = False
    assert (int(held.sum()), held.numel()) == (fact.held, fact.decisions), "what a fact counts is counted right"
    share = float(held.double().mean())
    return 1 - share if fact.kind == "nothing" else share


def near(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return which decisions share more than half of their experts, [n, layers]."""
    return 2 * (b.unsqueeze(3) == a.unsqueeze(2)).any(dim=3).sum(dim=2) > b.shape[2]


def most_common(routes: torch.Tensor) -> float:
    """Return the share of rows that name the most common set of experts."""
    _, counts = routes.sort(dim=1).values.unique(dim=0, return_counts=True)
    return float(counts.max() / len(routes))


def shown(facts) -> str:
    return "\n".join(f"  {fact.kind} {fact.layer_numbers} {fact.rows} {fact.samples} {fact}" for fact in facts)


def check_fault(fault: Fault, different: float, sizes: dict[str, int], **said) -> None:
    """Plant a fault; the first fact must say it, but for what `said` gives instead, and no fact anything untrue."""
    pair = noisy_pair(replace(fault.shape, **sizes), different=different)
    words = (fault.plant(pair) or fault.words).replace("modulo 32", f"modulo {pair.shape.num_experts}")
    fault, facts = replace(fault, **({"words": words} | said)), pair.diff().facts
    assert facts, fault
    assert is_said(facts[0], fault, pair), f"{fault}\n{shown(facts)}"
    assert len(facts) <= 2, shown(facts)
    for fact in facts:
        assert share_of_truth(fact, pair) >= 0.9, (str(fact), share_of_truth(fact, pair))


@pytest.mark.parametrize(
    ("different", "sizes"),
    [(0.02, {}), (0.08, {}), (0.08, {"topk": 8, "num_experts": 128})],
    ids=["2 %", "8 %", "8 % of top-8 of 128"],
)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_said_with_its_rows_and_nothing_untrue_is(name, different, sizes):
    check_fault(FAULTS[name], different, sizes)


# Layers that a small model does not have, and orders that its few sets of experts do not show.
NOT_SMALL = ("layer", "plus 8", "pipeline", "list", "another order", "stage")


@pytest.mark.parametrize("name", [name for name in FAULTS if not any(word in name for word in NOT_SMALL)])
def test_of_a_small_model_it_is_said_too(name):
    check_fault(FAULTS[name], 0.02, SMALL, layers=None, words="")


def flipped(pair: Pair, share: float, seed: int = 5) -> Pair:
    """Replace the whole set of a share of the decisions: the worst kind of plain disagreement."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(*pair.b.shape[:2], pair.shape.num_experts, generator=generator)
    flip = torch.rand(pair.b.shape[:2], generator=generator) < share
    pair.b = torch.where(flip.unsqueeze(2), scores.topk(pair.shape.topk, dim=2).indices, pair.b)
    return pair


SHAPES = {
    "top-4 of 32": Shape(),
    "top-8 of 128": Shape(topk=8, num_experts=128),
    "top-1 of 16": Shape(topk=1, num_experts=16),
    "top-2 of 8": Shape(topk=2, num_experts=8),
    "three layers": Shape(num_layers=3),
    "one layer": Shape(num_layers=1),
    "unknown samples": Shape(),
    "short samples": Shape(samples=60, shortest=1, longest=40),
    "384 experts": Shape(topk=8, num_experts=384),
    "groups of four": Shape(group=4),
}
CONTROLS = {
    "2 % of decisions flip": partial(noisy_pair, different=0.02),
    "8 % of decisions flip": partial(noisy_pair, different=0.08),
    "30 % of decisions flip": partial(noisy_pair, different=0.3),
    "2 % of decisions change all experts": lambda shape, seed: flipped(noisy_pair(shape, different=0.0, seed=seed), 0.02),
    "8 % of decisions change all experts": lambda shape, seed: flipped(noisy_pair(shape, different=0.0, seed=seed), 0.08),
    "a drift that grows with depth": lambda shape, seed: noisy_pair(
        shape, different=tuple(0.01 + 0.5 * i / shape.num_layers for i in range(shape.num_layers)), seed=seed
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("control", CONTROLS)
def test_of_plain_disagreement_nothing_is_said(control, shape):
    diff = CONTROLS[control](SHAPES[shape], seed=1).diff(known_samples=shape != "unknown samples")
    assert not diff.same
    assert diff.facts == (), shown(diff.facts)
