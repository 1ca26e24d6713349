"""Routes of b that have nothing to do with those of a: of other weights or another step, stuck, constant."""

import torch

from tests.unit.diagnostics.planted.noisy_pair import Pair, logits_of, top_experts
from tests.unit.diagnostics.planted.registry import Named, fault


@fault("one layer of other weights")
def _(pair: Pair) -> Named:
    pair.b[:, 5] = top_experts(logits_of(pair.shape, pair.lengths, 77), pair.shape)[:, 5]
    return Named("nothing", layers=(7,), words="in layer 7")


@fault("one sample of another step")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(6)
    pair.b[first:stop] = top_experts(logits_of(pair.shape, pair.lengths, 78), pair.shape)[first:stop]
    return Named("nothing", layers=(), rows=(first, stop - 1), samples=(6,), words="(sample 6)")


@fault("a stuck row: one sample repeats it from a position on")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(8)
    pair.b[first + 30 : stop] = pair.b[first + 30].clone()
    return Named("constant", layers=(), rows=(first + 30, stop - 1), samples=(8,), words="from position 31")


@fault("constant rows: a stretch of fillers")
def _(pair: Pair) -> Named:
    pair.b[400:440] = torch.arange(pair.shape.topk)
    return Named("constant", layers=(), rows=(400, 439), words="repeat one route")


@fault("one layer constant")
def _(pair: Pair) -> Named:
    pair.b[:, 3] = torch.arange(pair.shape.topk)
    return Named("constant", layers=(5,), words="repeat experts [0, 1, 2, 3")


@fault("one layer constant in one sample")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(14)
    pair.b[first:stop, 3] = torch.arange(pair.shape.topk)
    return Named("constant", layers=(5,), rows=(first, stop - 1), samples=(14,), words="(sample 14)")
