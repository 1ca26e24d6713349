"""Rows of b that hold rows from elsewhere in a: samples and chunks exchanged, rows shuffled, axes read in the other order."""

import torch

from tests.unit.diagnostics.planted.noisy_pair import Pair, Shape
from tests.unit.diagnostics.planted.registry import EQUAL, Named, fault


@fault("two samples of one length exchanged", EQUAL)
def _(pair: Pair) -> Named:
    (first, stop), (other, other_stop) = pair.rows_of(2), pair.rows_of(9)
    pair.b[first:stop], pair.b[other:other_stop] = pair.b[other:other_stop].clone(), pair.b[first:stop].clone()
    return Named("samples_moved", layers=(), samples=(2, 9), words="samples 2 and 9 of b are exchanged")


@fault("two neighbouring samples of other lengths exchanged")
def _(pair: Pair) -> Named:
    (first, stop), (other, other_stop) = pair.rows_of(4), pair.rows_of(5)
    pair.b[first:other_stop] = torch.cat([pair.b[other:other_stop], pair.b[first:stop]])
    return Named("samples_moved", layers=(), samples=(4,), words="sample 4 of b holds the routes of sample 5 of a")


@fault("samples in order of arrival", EQUAL)
def _(pair: Pair) -> Named:
    order = [0, 3, 1, 2, 6, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    pair.b = torch.cat([pair.b[slice(*pair.rows_of(i))] for i in order])
    return Named(
        "samples_moved", layers=(), samples=(1, 2, 3, 4, 5, 6), words="sample 1 of b holds the routes of sample 3 of a"
    )


@fault("one sample holds a copy of another", EQUAL)
def _(pair: Pair) -> Named:
    pair.b[slice(*pair.rows_of(6))] = pair.b[slice(*pair.rows_of(13))]
    return Named("samples_moved", layers=(), samples=(6,), words="sample 6 of b holds the routes of sample 13 of a")


@fault("two chunks of one sample exchanged", Shape(shortest=200, longest=260, samples=8))
def _(pair: Pair) -> Named:
    first = pair.starts[3]
    one, other = slice(first + 10, first + 50), slice(first + 120, first + 160)
    pair.b[one], pair.b[other] = pair.b[other].clone(), pair.b[one].clone()
    return Named(
        "rows_moved", layers=(), rows=(first + 10, first + 159), samples=(3,), words="two chunks are exchanged"
    )


@fault("rows shuffled in one data-parallel rank's part")
def _(pair: Pair) -> Named:
    first, stop = pair.starts[4], pair.starts[8]
    order = torch.randperm(stop - first, generator=torch.Generator().manual_seed(2)) + first
    pair.b[first:stop] = pair.b[order]
    return Named("rows_shuffled", layers=(), rows=(first, stop - 1), samples=(4, 5, 6, 7), words="shuffled")


@fault("rows shuffled in one pipeline rank's part")
def _(pair: Pair) -> Named:
    order = torch.randperm(len(pair.b), generator=torch.Generator().manual_seed(2))
    pair.b[:, 4:8] = pair.b[order][:, 4:8]
    return Named("rows_shuffled", layers=(6, 7, 8, 9), words="layers 6..9 of b holds the rows of a shuffled")


@fault("rows shuffled within one sample")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(10)
    order = torch.randperm(stop - first, generator=torch.Generator().manual_seed(2)) + first
    pair.b[first:stop] = pair.b[order]
    return Named("rows_shuffled", layers=(), rows=(first, stop - 1), samples=(10,), words="in sample 10")


@fault("one sample in reverse")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(10)
    pair.b[first:stop] = pair.b[first:stop].flip(0)
    return Named("rows_shuffled", layers=(), rows=(first, stop - 1), samples=(10,), words="in reverse")


@fault("[b, s] read as [s, b]", EQUAL)
def _(pair: Pair) -> Named:
    shape = pair.b.shape
    pair.b = pair.b.view(16, 96, *shape[1:]).transpose(0, 1).reshape(shape)
    return Named("rows_transposed", layers=(), words="16 x 96 as 96 x 16 ([b, s] as [s, b] or back)")


@fault("[b, s] read as [s, b] in one micro-batch", EQUAL)
def _(pair: Pair) -> Named:
    first, stop = pair.starts[4], pair.starts[8]
    part = pair.b[first:stop]
    pair.b[first:stop] = part.view(4, 96, *part.shape[1:]).transpose(0, 1).reshape(part.shape)
    words = "4 x 96 as 96 x 4 ([b, s] as [s, b] or back)"
    return Named("rows_transposed", layers=(), rows=(first, stop - 1), samples=(4, 5, 6, 7), words=words)


@fault("context-parallel chunks left in zigzag order", Shape(shortest=256, longest=256, equal_lengths=True, samples=4))
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(2)
    chunks = pair.b[first:stop].chunk(4)
    pair.b[first:stop] = torch.cat([chunks[0], chunks[3], chunks[1], chunks[2]])
    return Named(("rows_moved", "rows_shifted"), layers=(), samples=(2,))


@fault("a long sample begins with a copy of a short one")
def _(pair: Pair) -> Named:
    long, short = (pair.lengths.index(choose(pair.lengths)) for choose in (max, min))
    assert pair.lengths[short] < 0.6 * pair.lengths[long], "a copy that is most of the long sample shows nothing"
    first, (begin, end) = pair.starts[long], pair.rows_of(short)
    pair.b[first : first + end - begin] = pair.b[begin:end].clone()
    words = f"sample {long} of b holds the routes of sample {short} of a"
    return Named("samples_moved", layers=(), samples=(long,), words=words)
