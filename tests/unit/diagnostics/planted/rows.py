"""Rows of b that hold rows from elsewhere in a: samples and chunks exchanged, rows shuffled, axes read in the other order."""

import torch

from tests.unit.diagnostics.planted.noisy_pair import Pair, Shape
from tests.unit.diagnostics.planted.registry import EQUAL, Named, fault


@fault("two samples of one length exchanged", EQUAL)
def _(pair: Pair) -> Named:
    (first, stop), (other, other_stop) = pair.rows_of(2), pair.rows_of(9)
    pair.b[first:stop], pair.b[other:other_stop] = pair.b[other:other_stop].clone(), pair.b[first:stop].clone()
    return Named(
        "row", layers=(), rows=(first, stop - 1), samples=(2,), offset=other - first, words="hold a's sample 9 ("
    )


@fault("two neighbouring samples of other lengths exchanged")
def _(pair: Pair) -> Named:
    (first, stop), (other, other_stop) = pair.rows_of(4), pair.rows_of(5)
    pair.b[first:other_stop] = torch.cat([pair.b[other:other_stop], pair.b[first:stop]])
    return Named("row", layers=(), rows=(first, first + other_stop - other - 1), offset=other - first)


@fault("samples in order of arrival", EQUAL)
def _(pair: Pair) -> Named:
    order = [0, 3, 1, 2, 6, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    pair.b = torch.cat([pair.b[slice(*pair.rows_of(i))] for i in order])
    return Named("row", layers=(), samples=(1,), words="hold a's sample 3 (")


@fault("one sample holds a copy of another", EQUAL)
def _(pair: Pair) -> Named:
    pair.b[slice(*pair.rows_of(6))] = pair.b[slice(*pair.rows_of(13))]
    return Named("row", layers=(), samples=(6,), words="hold a's sample 13 (")


@fault("two chunks of one sample exchanged", Shape(shortest=200, longest=260, samples=8))
def _(pair: Pair) -> Named:
    first = pair.starts[3]
    one, other = slice(first + 10, first + 50), slice(first + 120, first + 160)
    pair.b[one], pair.b[other] = pair.b[other].clone(), pair.b[one].clone()
    return Named("row", layers=(), rows=(first + 10, first + 49), samples=(3,), offset=110)


@fault("rows shuffled in one data-parallel rank's part")
def _(pair: Pair) -> Named:
    first, stop = pair.starts[4], pair.starts[8]
    order = torch.randperm(stop - first, generator=torch.Generator().manual_seed(2)) + first
    pair.b[first:stop] = pair.b[order]
    return Named("row_order", layers=(), rows=(first, stop - 1), samples=(4, 5, 6, 7))


@fault("rows shuffled in one pipeline rank's part")
def _(pair: Pair) -> Named:
    order = torch.randperm(len(pair.b), generator=torch.Generator().manual_seed(2))
    pair.b[:, 4:8] = pair.b[order][:, 4:8]
    return Named("row_order", layers=(6, 7, 8, 9), rows=(0, len(pair.b) - 1), words="in layers 6..9")


@fault("rows shuffled within one sample")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(10)
    order = torch.randperm(stop - first, generator=torch.Generator().manual_seed(2)) + first
    pair.b[first:stop] = pair.b[order]
    return Named("row_order", layers=(), rows=(first, stop - 1), samples=(10,), words="(sample 10)")


@fault("one sample in reverse")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(10)
    pair.b[first:stop] = pair.b[first:stop].flip(0)
    return Named("row_order", layers=(), rows=(first, stop - 1), samples=(10,), words="steps to the next row are -1")


@fault("[b, s] read as [s, b]", EQUAL)
def _(pair: Pair) -> Named:
    shape = pair.b.shape
    pair.b = pair.b.view(16, 96, *shape[1:]).transpose(0, 1).reshape(shape)
    return Named("row_order", layers=(), words="steps to the next row are +96")


@fault("[b, s] read as [s, b] in one micro-batch", EQUAL)
def _(pair: Pair) -> Named:
    first, stop = pair.starts[4], pair.starts[8]
    part = pair.b[first:stop]
    pair.b[first:stop] = part.view(4, 96, *part.shape[1:]).transpose(0, 1).reshape(part.shape)
    return Named(
        "row_order", layers=(), rows=(first, stop - 1), samples=(4, 5, 6, 7), words="steps to the next row are +96"
    )


@fault("context-parallel chunks left in zigzag order", Shape(shortest=256, longest=256, equal_lengths=True, samples=4))
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(2)
    chunks = pair.b[first:stop].chunk(4)
    pair.b[first:stop] = torch.cat([chunks[0], chunks[3], chunks[1], chunks[2]])
    return Named("row", layers=(), rows=(first + 64, first + 127), samples=(2,), offset=128)


@fault("a long sample begins with a copy of a short one")
def _(pair: Pair) -> Named:
    long, short = (pair.lengths.index(choose(pair.lengths)) for choose in (max, min))
    assert pair.lengths[short] < 0.6 * pair.lengths[long], "a copy that is most of the long sample shows nothing"
    first, (begin, end) = pair.starts[long], pair.rows_of(short)
    pair.b[first : first + end - begin] = pair.b[begin:end].clone()
    return Named("row", layers=(), rows=(first, first + end - begin - 1), samples=(long,), offset=begin - first)
