"""Groups of samples with one prompt, whose first rows are alike: what is exchanged shows in the answers only."""

import torch

from tests.unit.diagnostics.planted.noisy_pair import Pair, Shape
from tests.unit.diagnostics.planted.registry import Named, fault
from tests.unit.diagnostics.planted.shifts import shift_rows

GROUPS = Shape(samples=16, group=4, equal_lengths=True, shortest=110, longest=110)
UNEQUAL = Shape(samples=16, group=8, shortest=80, longest=160)


@fault("two answers of a group exchanged", GROUPS)
def _(pair: Pair) -> Named:
    one, other = slice(*pair.rows_of(5)), slice(*pair.rows_of(6))
    pair.b[one], pair.b[other] = pair.b[other].clone(), pair.b[one].clone()
    return Named("row", layers=None, samples=(5,), words="a's sample 6")


@fault("answers of a group in order of arrival", GROUPS)
def _(pair: Pair) -> Named:
    order = [10, 8, 11, 9]
    pair.b[slice(pair.starts[8], pair.starts[12])] = torch.cat([pair.b[slice(*pair.rows_of(i))] for i in order])
    return Named("row", samples=(9,), words="a's sample 8")


@fault("an answer of a group copied over another", GROUPS)
def _(pair: Pair) -> Named:
    pair.b[slice(*pair.rows_of(2))] = pair.b[slice(*pair.rows_of(3))]
    return Named("row", samples=(2,), words="a's sample 3")


@fault("two whole groups exchanged", GROUPS)
def _(pair: Pair) -> Named:
    one, other = slice(pair.starts[0], pair.starts[4]), slice(pair.starts[8], pair.starts[12])
    pair.b[one], pair.b[other] = pair.b[other].clone(), pair.b[one].clone()
    return Named("row", samples=(0, 1, 2, 3), words="a's samples 8..11")


@fault("an answer of a group shifted behind its prompt", GROUPS)
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(7)
    shift_rows(pair.b, first + 40, stop, 1)
    return Named("row", rows=(first + 40, stop - 1), samples=(7,), offset=-1)


@fault("answers of a large group shuffled", GROUPS)
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(13)
    order = torch.randperm(stop - first - 40, generator=torch.Generator().manual_seed(2)) + first + 40
    pair.b[first + 40 : stop] = pair.b[order]
    return Named("row_order", rows=(first + 40, stop - 1), samples=(13,))


@fault("answers of unequal lengths exchanged in a group of eight", UNEQUAL)
def _(pair: Pair) -> Named:
    (first, stop), (_, end) = pair.rows_of(3), pair.rows_of(4)
    pair.b[first:end] = torch.cat([pair.b[stop:end], pair.b[first:stop]])
    return Named("row", words="a's rows")
