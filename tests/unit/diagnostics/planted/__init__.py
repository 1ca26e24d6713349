"""Faults planted into a noisy pair of traces: `FAULTS` has them by name."""

from tests.unit.diagnostics.planted import coverage, experts, groups, layers, lost, rows, shifts  # noqa: F401  each registers its faults
from tests.unit.diagnostics.planted.noisy_pair import Pair, Shape, noisy_pair
from tests.unit.diagnostics.planted.registry import FAULTS, Named

__all__ = ["FAULTS", "Named", "Pair", "Shape", "noisy_pair"]
