"""Rows of b that are those of a further up or down: everywhere, in one sample, from a position on, in some layers."""

from typing import Any

import torch

from tests.unit.diagnostics.planted.noisy_pair import Pair
from tests.unit.diagnostics.planted.registry import Named, fault, number


def shift_rows(routes: torch.Tensor, first: int, stop: int, shift: int, layers: Any = slice(None)) -> None:
    """Row r of rows first..stop-1 becomes row r - shift; rows that come from outside keep the edge's route."""
    source = torch.arange(first, stop) - shift
    routes[first:stop, layers] = routes.clone()[source.clamp(first, stop - 1)][:, layers]


@fault("all rows shifted down by one")
def _(pair: Pair) -> Named:
    pair.b = pair.b.roll(1, 0)
    return Named("row", layers=(), offset=-1)


@fault("all rows shifted up by two")
def _(pair: Pair) -> Named:
    pair.b = pair.b.roll(-2, 0)
    return Named("row", layers=(), offset=2)


@fault("all rows shifted by 300")
def _(pair: Pair) -> Named:
    pair.b = pair.b.roll(300, 0)
    return Named("row", layers=(), offset=-300)


@fault("one sample shifted down by one")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(5)
    shift_rows(pair.b, first, stop, 1)
    return Named("row", layers=(), samples=(5,), rows=(first, stop - 1), offset=-1, words="(1 row earlier)")


@fault("one sample shifted up by three")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(0)
    shift_rows(pair.b, first, stop, -3)
    return Named("row", layers=(), samples=(0,), offset=3, words="(3 rows later)")


@fault("every sample shifted within itself")
def _(pair: Pair) -> Named:
    for i in range(len(pair.lengths)):
        shift_rows(pair.b, *pair.rows_of(i), 1)
    return Named("row", layers=(), offset=-1)


@fault("rows shifted from a row on to the end")
def _(pair: Pair) -> Named:
    first = pair.starts[9]
    shift_rows(pair.b, first, len(pair.b), 1)
    return Named("row", layers=(), rows=(first, len(pair.b) - 1), samples=tuple(range(9, 16)), offset=-1)


@fault("a lost chunk: one sample shifted from a position on")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(7)
    shift_rows(pair.b, first + 25, stop, -7)
    return Named("row", layers=(), rows=(first + 25, stop - 8), samples=(7,), offset=7, words="from position 25")


@fault("one layer shifted in all rows")
def _(pair: Pair) -> Named:
    shift_rows(pair.b, 0, len(pair.b), 1, [4])
    return Named("row", layers=(number(4),), offset=-1, words="in layer 6")


@fault("one layer shifted in one sample")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(3)
    shift_rows(pair.b, first, stop, 2, [8])
    return Named("row", layers=(number(8),), rows=(first, stop - 1), samples=(3,), offset=-2)


@fault("one layer shifted from a position on")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(11)
    shift_rows(pair.b, first + 20, stop, 1, [2])
    return Named("row", layers=(number(2),), rows=(first + 20, stop - 1), samples=(11,), offset=-1)


@fault("the layers of one pipeline stage shifted")
def _(pair: Pair) -> Named:
    shift_rows(pair.b, 0, len(pair.b), -1, [6, 7, 8, 9, 10, 11])
    return Named("row", layers=tuple(range(8, 14)), offset=1, words="in layers 8..13")
