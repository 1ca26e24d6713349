"""`FAULTS`: name -> the shape of a pair, and what plants the fault into its second trace and returns what must be named."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.unit.diagnostics.planted.noisy_pair import FIRST_LAYER, Pair, Shape


@dataclass(frozen=True)
class Named:
    """What a fact must say; None: not asked, layers=(): all."""

    kind: str
    layers: tuple[int, ...] | None = None
    rows: tuple[int, int] | None = None
    samples: tuple[int, ...] | None = None
    offset: int | None = None
    words: str = ""


Plant = Callable[[Pair], Named]
FAULTS: dict[str, tuple[Shape, Plant]] = {}
USUAL = Shape()
EQUAL = Shape(equal_lengths=True, shortest=96, longest=96)


def fault(name: str, shape: Shape = USUAL) -> Callable[[Plant], Plant]:
    """Register what plants a fault into a pair of this shape."""

    def register(plant: Plant) -> Plant:
        assert name not in FAULTS
        FAULTS[name] = (shape, plant)
        return plant

    return register


def number(layer: int) -> int:
    """Return the layer_number of a layer's index."""
    return layer + FIRST_LAYER
