"""diff names what was planted into a noisy pair of traces, and calls plain noise no fault."""

from dataclasses import replace

import pytest
import torch

from tests.unit.diagnostics.planted import FAULTS, Named, Pair, Shape, noisy_pair

NEAR = 2
"""Rows by which the end of a run may be off: a decision at the end may agree or differ by chance."""


def is_named(finding, named: Named) -> bool:
    kinds = (named.kind,) if isinstance(named.kind, str) else named.kind
    return (
        finding.kind in kinds
        and (named.layers is None or finding.layer_numbers == named.layers)
        and (named.samples is None or finding.samples == named.samples)
        and (named.shift is None or finding.shift == named.shift)
        and (
            named.rows is None
            or (finding.rows is not None and all(abs(x - y) <= NEAR for x, y in zip(finding.rows, named.rows)))
        )
        and named.words in finding.text
    )


def shown(findings) -> str:
    return "\n".join(f"  {f.kind} {f.layer_numbers} {f.rows} {f.samples} {f.text}" for f in findings)


@pytest.mark.parametrize("different", [0.02, 0.08])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_with_its_layers_samples_and_rows(name, different):
    shape, plant = FAULTS[name]
    pair = noisy_pair(shape, different=different)
    named = plant(pair)
    findings = pair.diff().findings
    assert any(is_named(finding, named) for finding in findings), f"{named}\n{shown(findings)}"
    assert len(findings) <= 3, shown(findings)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_at_top_8_of_128_too_and_no_renaming_beside_it(name):
    shape, plant = FAULTS[name]
    pair = noisy_pair(replace(shape, topk=8, num_experts=128), different=0.08)
    named = plant(pair)
    findings = pair.diff().findings
    assert any(is_named(finding, named) for finding in findings), f"{named}\n{shown(findings)}"
    assert len(findings) <= 3, shown(findings)
    # Few rows name many experts: one that stands beside another by chance is no renaming.
    if "experts_relabelled" not in named.kind:
        assert "experts_relabelled" not in [finding.kind for finding in findings], shown(findings)


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
def test_plain_disagreement_is_called_no_fault(control, shape):
    diff = CONTROLS[control](SHAPES[shape], 1).diff()
    assert not diff.same
    assert diff.findings == (), shown(diff.findings)


@pytest.mark.parametrize("control", CONTROLS)
def test_plain_disagreement_without_known_samples_is_called_no_fault(control):
    diff = CONTROLS[control](Shape(), 0).diff(known_samples=False)
    assert diff.findings == (), shown(diff.findings)


def test_all_faults_of_the_list_are_tested():
    assert len(FAULTS) >= 34
