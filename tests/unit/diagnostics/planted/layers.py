"""Layers of b that hold another layer's routes: swapped, off by one, copied."""

import torch

from tests.unit.diagnostics.planted.noisy_pair import Pair
from tests.unit.diagnostics.planted.registry import Named, fault


@fault("two layers swapped")
def _(pair: Pair) -> Named:
    pair.b[:, [3, 9]] = pair.b[:, [9, 3]]
    return Named("layer", layers=(5, 11), words="layers 5, 11 of b hold layers 11, 5 of a")


@fault("two layers swapped in every third token")
def _(pair: Pair) -> Named:
    pair.b[::3, [3, 9]] = pair.b[::3, [9, 3]]
    return Named("layer", layers=(5, 11), words="the others are in place")


@fault("two layers swapped in a random third of the tokens")
def _(pair: Pair) -> Named:
    rows = torch.rand(len(pair.b), generator=torch.Generator().manual_seed(1)) < 1 / 3
    swapped = pair.b[rows]
    swapped[:, [1, 2]] = swapped[:, [2, 1]]
    pair.b[rows] = swapped
    return Named("layer", layers=(3, 4), words="hold layers 4, 3 of a, the others are in place")


@fault("two layers swapped in the first third of the tokens")
def _(pair: Pair) -> Named:
    third = len(pair.b) // 3
    pair.b[:third, [3, 9]] = pair.b[:third, [9, 3]]
    return Named("layer", layers=(5, 11), rows=(0, third - 1), words="hold layers 11, 5 of a")


@fault("two layers swapped in one sample")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(12)
    pair.b[first:stop, [0, 1]] = pair.b[first:stop, [1, 0]]
    return Named("layer", layers=(2, 3), rows=(first, stop - 1), samples=(12,), words="(sample 12)")


@fault("all layers off by one")
def _(pair: Pair) -> Named:
    pair.b = pair.b.roll(1, 1)
    return Named("layer", layers=(), words="hold layers 13, 2..12 of a")


@fault("one layer is a copy of another")
def _(pair: Pair) -> Named:
    pair.b[:, 6] = pair.b[:, 2]
    return Named("layer", layers=(8,), words="layer 8 of b holds layer 4 of a")


@fault("rows and layers shifted at once")
def _(pair: Pair) -> Named:
    pair.b = pair.b.roll(1, 0)
    pair.b[:, [3, 9]] = pair.b[:, [9, 3]]
    return Named("layer", layers=(5, 11), words="hold layers 11, 5 of a")
