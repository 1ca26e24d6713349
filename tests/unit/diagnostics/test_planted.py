"""diff says what was planted into a noisy pair of traces, only what is so, and nothing of plain noise."""

from dataclasses import replace

import pytest
import torch

from tests.unit.diagnostics.planted import FAULTS, Named, Pair, Shape, noisy_pair
from tests.unit.diagnostics.planted.noisy_pair import FIRST_LAYER
from tests.unit.diagnostics.planted.truth import share_of_truth

NEAR = 2
"""Rows by which the end of a run may be off: a decision at the end may agree or differ by chance."""

SMALL = {"topk": 2, "num_experts": 8, "num_layers": 6}
"""As many layers and experts as a tiny test model has."""


def is_said(fact, named: Named, pair: Pair) -> bool:
    layers = named.layers
    if layers == ():
        layers = tuple(pair.layers_b or range(FIRST_LAYER, FIRST_LAYER + pair.shape.num_layers))
    return (
        fact.kind == named.kind
        and layers in (None, fact.layer_numbers)
        and named.samples in (None, fact.samples)
        and named.offset in (None, fact.offset)
        and (
            named.rows is None
            or (fact.rows is not None and all(abs(x - y) <= NEAR for x, y in zip(fact.rows, named.rows)))
        )
        and named.words in fact.text
    )


def shown(facts) -> str:
    return "\n".join(f"  {fact.kind} {fact.layer_numbers} {fact.rows} {fact.samples} {fact}" for fact in facts)


def facts_of(name: str, different: float, **changes) -> tuple[Pair, Named, tuple]:
    shape, plant = FAULTS[name]
    pair = noisy_pair(replace(shape, **changes), different=different)
    named = plant(pair)
    return pair, named, pair.diff().facts


@pytest.mark.parametrize(
    ("different", "sizes"),
    [(0.02, {}), (0.08, {}), (0.08, {"topk": 8, "num_experts": 128})],
    ids=["2 %", "8 %", "8 % of top-8 of 128"],
)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_said_with_its_rows_and_nothing_untrue_is(name, different, sizes):
    pair, named, facts = facts_of(name, different, **sizes)
    named = replace(named, words=named.words.replace("modulo 32", f"modulo {pair.shape.num_experts}"))
    assert any(is_said(fact, named, pair) for fact in facts), f"{named}\n{shown(facts)}"
    assert len(facts) <= 4, shown(facts)
    for fact in facts:
        assert share_of_truth(fact, pair) >= 0.9, (str(fact), share_of_truth(fact, pair))


# Layers that a small model does not have, and orders that its few sets of experts do not show.
NOT_SMALL = ("layer", "plus 8", "pipeline", "list", "another order", "stage")


@pytest.mark.parametrize("name", [name for name in FAULTS if not any(word in name for word in NOT_SMALL)])
def test_of_a_small_model_it_is_said_too(name):
    pair, named, facts = facts_of(name, 0.02, **SMALL)
    named = replace(named, layers=None, words="")
    assert any(is_said(fact, named, pair) for fact in facts), f"{named}\n{shown(facts)}"
    for fact in facts:
        assert share_of_truth(fact, pair) >= 0.9, (str(fact), share_of_truth(fact, pair))


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
    "short samples": Shape(samples=60, shortest=1, longest=40),
    "384 experts": Shape(topk=8, num_experts=384),
    "groups of four": Shape(group=4),
}
CONTROLS = {
    "2 % of decisions flip": lambda shape, seed: noisy_pair(shape, different=0.02, seed=seed),
    "8 % of decisions flip": lambda shape, seed: noisy_pair(shape, different=0.08, seed=seed),
    "2 % of decisions change all experts": lambda shape, seed: flipped(
        noisy_pair(shape, different=0.0, seed=seed), 0.02
    ),
    "8 % of decisions change all experts": lambda shape, seed: flipped(
        noisy_pair(shape, different=0.0, seed=seed), 0.08
    ),
    "a drift that grows with depth": lambda shape, seed: noisy_pair(
        shape, different=tuple(0.01 + 0.5 * i / shape.num_layers for i in range(shape.num_layers)), seed=seed
    ),
    "30 % of decisions flip": lambda shape, seed: noisy_pair(shape, different=0.3, seed=seed),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("control", CONTROLS)
def test_of_plain_disagreement_nothing_is_said(control, shape):
    diff = CONTROLS[control](SHAPES[shape], 1).diff()
    assert not diff.same
    assert diff.facts == (), shown(diff.facts)


@pytest.mark.parametrize("control", CONTROLS)
def test_of_plain_disagreement_without_known_samples_nothing_is_said(control):
    diff = CONTROLS[control](Shape(), 0).diff(known_samples=False)
    assert diff.facts == (), shown(diff.facts)


def test_all_faults_of_the_list_are_tested():
    assert len(FAULTS) >= 66
