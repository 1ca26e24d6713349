"""Rows of b that are those of a further up or down: everywhere, in one sample, from a position on, in some layers."""

from collections.abc import Callable
from typing import Any

import torch

from tests.unit.diagnostics.planted.noisy_pair import Pair
from tests.unit.diagnostics.planted.registry import Named, fault, number


def shift_rows(routes: torch.Tensor, first: int, stop: int, shift: int, layers: Any = slice(None)) -> None:
    """Row r of rows first..stop-1 becomes row r - shift; rows that come from outside keep the edge's route."""
    source = torch.arange(first, stop) - shift
    routes[first:stop, layers] = routes.clone()[source.clamp(first, stop - 1)][:, layers]


def rolled(name: str, by: int) -> None:
    @fault(name)
    def _(pair: Pair) -> Named:
        pair.b = pair.b.roll(by, 0)
        return Named("row", layers=(), offset=-by)


def shifted(
    name: str, rows: Callable[[Pair], tuple[int, int]], by: int, of: Any = slice(None), /, **named: Any
) -> None:
    """Register a shift of rows(pair) = (first, stop) in layers `of`, which must be named, and as what `named` says."""

    @fault(name)
    def _(pair: Pair) -> Named:
        first, stop = rows(pair)
        shift_rows(pair.b, first, stop, by, of)
        layers = () if of == slice(None) else tuple(map(number, of))
        return Named("row", **({"layers": layers, "rows": (first, stop - 1), "offset": -by} | named))


def all_rows(pair: Pair) -> tuple[int, int]:
    return 0, len(pair.b)


def sample(index: int, position: int = 0) -> Callable[[Pair], tuple[int, int]]:
    return lambda pair: (pair.starts[index] + position, pair.rows_of(index)[1])


rolled("all rows shifted down by one", 1)
rolled("all rows shifted up by two", -2)
rolled("all rows shifted by 300", 300)
shifted("one sample shifted down by one", sample(5), 1, samples=(5,), words="(1 row earlier)")
shifted("one sample shifted up by three", sample(0), -3, samples=(0,), rows=None, words="(3 rows later)")
shifted(
    "rows shifted from a row on to the end", lambda pair: (pair.starts[9], len(pair.b)), 1, samples=tuple(range(9, 16))
)
shifted("one layer shifted in all rows", all_rows, 1, [4], words="in layer 6")
shifted("one layer shifted in one sample", sample(3), 2, [8], samples=(3,))
shifted("one layer shifted from a position on", sample(11, 20), 1, [2], samples=(11,))
shifted("the layers of one pipeline stage shifted", all_rows, -1, [6, 7, 8, 9, 10, 11], words="in layers 8..13")


@fault("every sample shifted within itself")
def _(pair: Pair) -> Named:
    for i in range(len(pair.lengths)):
        shift_rows(pair.b, *pair.rows_of(i), 1)
    return Named("row", layers=(), offset=-1)


@fault("a lost chunk: one sample shifted from a position on")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(7)
    shift_rows(pair.b, first + 25, stop, -7)
    return Named("row", layers=(), rows=(first + 25, stop - 8), samples=(7,), offset=7, words="from position 25")
