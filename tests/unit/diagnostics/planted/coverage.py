"""Samples that one trace lacks, has twice, or has in part; layers and stages that it lacks or has of something else."""

import torch

from tests.unit.diagnostics.planted.noisy_pair import Pair, logits_of, top_experts
from tests.unit.diagnostics.planted.registry import EQUAL, Named, fault


def without(pair: Pair, first: int, stop: int) -> None:
    pair.b = torch.cat([pair.b[:first], pair.b[stop:]])


@fault("a sample is lost")
def _(pair: Pair) -> Named:
    without(pair, *pair.rows_of(5))
    pair.lengths_b = pair.lengths[:5] + pair.lengths[6:]
    return Named("row", rows=(pair.starts[5], len(pair.b) - 1), offset=pair.lengths[5], words="(sample 5) are missing")


@fault("a sample of many of one length is lost", EQUAL)
def _(pair: Pair) -> Named:
    without(pair, *pair.rows_of(5))
    pair.lengths_b = pair.lengths[1:]
    return Named("row", rows=(pair.starts[5], len(pair.b) - 1), offset=96, words="(sample 5) are missing")


@fault("the last sample is lost")
def _(pair: Pair) -> Named:
    without(pair, *pair.rows_of(15))
    pair.lengths_b = pair.lengths[:-1]
    return Named("samples", words="a has 16 samples of 1,912 rows, b has 15")


@fault("a sample is there twice")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(7)
    pair.b = torch.cat([pair.b[:stop], pair.b[first:]])
    pair.lengths_b = [*pair.lengths[:8], *pair.lengths[7:]]
    return Named("row", rows=(stop, len(pair.b) - 1), offset=-pair.lengths[7], words="(sample 7) come twice")


@fault("the last sample is there twice", EQUAL)
def _(pair: Pair) -> Named:
    pair.b = torch.cat([pair.b, pair.b[-96:]])
    pair.lengths_b = [*pair.lengths, 96]
    return Named("row", rows=(16 * 96, 17 * 96 - 1), offset=-96, words="(sample 15) come twice")


@fault("a sample is cut at its end")
def _(pair: Pair) -> Named:
    stop = pair.rows_of(4)[1]
    without(pair, stop - 30, stop)
    pair.lengths_b = [*pair.lengths[:4], pair.lengths[4] - 30, *pair.lengths[5:]]
    return Named("row", rows=(stop - 30, len(pair.b) - 1), offset=30, words="are missing")


@fault("a sample is cut at its beginning")
def _(pair: Pair) -> Named:
    first = pair.starts[4]
    without(pair, first, first + 30)
    pair.lengths_b = [*pair.lengths[:4], pair.lengths[4] - 30, *pair.lengths[5:]]
    return Named("row", rows=(first, len(pair.b) - 1), offset=30, words="are missing")


@fault("a sample has no routes")
def _(pair: Pair) -> Named:
    pair.mask_b = torch.ones(len(pair.b), dtype=torch.bool)
    pair.mask_b[slice(*pair.rows_of(9))] = False
    words = f"{pair.lengths[9]:,} rows of sample 9 have a route in a and none in b"
    return Named("samples", samples=(9,), words=words)


@fault("a stage is of another model")
def _(pair: Pair) -> Named:
    pair.b[:, 4:8] = top_experts(logits_of(pair.shape, pair.lengths, 79), pair.shape)[:, 4:8]
    return Named("nothing", layers=(6, 7, 8, 9), rows=(0, len(pair.b) - 1), words="in layers 6..9")


@fault("no layer in common")
def _(pair: Pair) -> Named:
    pair.layers_b = range(100, 100 + pair.shape.num_layers)
    return Named("layers", words="no layer is in both: a has 2..13, b has 100..111")


@fault("layers numbered from another first one")
def _(pair: Pair) -> Named:
    pair.layers_b = range(3, 3 + pair.shape.num_layers)
    return Named("layer", layers=tuple(range(3, 15)), words="hold layers 2..13 of a")


@fault("routes of another batch")
def _(pair: Pair) -> Named:
    pair.b = top_experts(logits_of(pair.shape, pair.lengths, 80), pair.shape)
    return Named("nothing", layers=tuple(range(2, 14)), rows=(0, len(pair.b) - 1))
