"""`FAULTS`: name -> what plants a fault into the second trace of a noisy pair, and what a fact must then say."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.unit.diagnostics.planted.noisy_pair import Pair, Shape, logits_of, top_experts

Plant = Callable[[Pair], str | None]
"""Changes the second trace; returns further words that the fact must have, if any."""
Rows = Callable[[Pair], Any]
Change = Callable[[Tensor], Tensor]
"""Routes [rows, layers, topk] -> as many others."""

USUAL = Shape()
EQUAL = Shape(shortest=96, longest=96)
# Samples with one prompt: what is exchanged shows in the answers only.
GROUPS = Shape(group=4, shortest=110, longest=110)


@dataclass(frozen=True)
class Fault:
    """What is planted, and what a fact must say of it; None: not asked, layers=(): all."""

    plant: Plant
    kind: str
    layers: tuple[int, ...] | None = None
    rows: tuple[int, int] | None = None
    samples: tuple[int, ...] | None = None
    offset: int | None = None
    words: str = ""
    shape: Shape = USUAL


def every(pair: Pair) -> slice:
    return slice(0, len(pair.b))


def sample(index: int, position: int = 0, stop: int | None = None, *, to: int | None = None) -> Rows:
    """The rows of a sample from a position on and up to another, or of all samples up to `to`."""

    def rows(pair: Pair) -> slice:
        start, end = pair.starts[index], pair.starts[(index if to is None else to) + 1]
        return slice(start + position, end if stop is None else start + stop)

    return rows


def change(function: Change, rows: Rows = every, layers: Any = slice(None)) -> Plant:
    """Change the routes of some rows in the layers of these indices."""

    def plant(pair: Pair) -> None:
        at = torch.arange(len(pair.b))[rows(pair)].unsqueeze(1)
        columns = torch.arange(pair.shape.num_layers)[layers]
        pair.b[at, columns] = function(pair.b[at, columns])

    return plant


def rolled(by: int, dim: int = 0) -> Change:
    return lambda part: part.roll(by, dim)


def shifted(by: int) -> Change:
    """Row r becomes row r - by; rows that come from outside keep the edge's route."""
    return lambda part: part[(torch.arange(len(part)) - by).clamp(0, len(part) - 1)]


def shuffled(part: Tensor) -> Tensor:
    return part[torch.randperm(len(part), generator=torch.Generator().manual_seed(2))]


def transposed(part: Tensor) -> Tensor:
    """[b, 96] read as [96, b]."""
    return part.view(-1, 96, *part.shape[1:]).transpose(0, 1).reshape(part.shape)


def flipped(dim: int) -> Change:
    return lambda part: part.flip(dim)


def constant(part: Tensor) -> Tensor:
    return torch.arange(part.shape[2]).expand_as(part)


def take(target: Rows, *sources: Rows) -> Plant:
    """The rows of the target become those of the sources, one behind the other."""

    def plant(pair: Pair) -> None:
        pair.b[target(pair)] = torch.cat([pair.b[source(pair)] for source in sources])

    return plant


def in_turn(*plants: Plant) -> Plant:
    def plant(pair: Pair) -> None:
        for each in plants:
            each(pair)

    return plant


def of_others(seed: int, rows: Rows = every, layers: slice = slice(None)) -> Plant:
    """Routes that have nothing to do with those of a: of other weights, or of another step."""

    def plant(pair: Pair) -> None:
        others = top_experts(logits_of(pair.shape, pair.lengths, seed), pair.shape)
        pair.b[rows(pair), layers] = others[rows(pair), layers]

    return plant


def permuted(rows: Rows = every, layers: Any = slice(None)) -> Plant:
    """Expert ids under other ids."""

    def plant(pair: Pair) -> None:
        order = torch.randperm(pair.shape.num_experts, generator=torch.Generator().manual_seed(3))
        change(lambda part: order[part], rows, layers)(pair)

    return plant


def plus(number: int, layers: Any = slice(None)) -> Plant:
    return lambda pair: change(lambda part: (part + number) % pair.shape.num_experts, layers=layers)(pair)


def exchange_two_experts(pair: Pair) -> str:
    """In the layer of index 7, the second and the fourth most frequent one."""
    layer = pair.b[:, 7].clone()
    one, other = layer.flatten().bincount(minlength=pair.shape.num_experts).topk(4).indices[[1, 3]].tolist()
    pair.b[:, 7] = torch.where(layer == one, other, torch.where(layer == other, one, layer))
    return f"{one} as {other}"


def fillers(pair: Pair) -> None:
    """The last three rows of each sample name the first experts."""
    for stop in pair.starts[1:]:
        pair.b[stop - 3 : stop] = torch.arange(pair.shape.topk)


def masked(layers: Any) -> Plant:
    """The second most frequent expert of each of these layers gives way to one that the decision does not name."""

    def plant(pair: Pair) -> None:
        for layer in layers:
            part = pair.b[:, layer]
            expert = int(part.flatten().bincount(minlength=pair.shape.num_experts).argsort()[-2])
            scores = torch.rand(len(part), pair.shape.num_experts, generator=torch.Generator().manual_seed(4))
            scores.scatter_(1, part, -1.0)[:, expert] = -1.0
            pair.b[:, layer] = torch.where(part == expert, scores.argmax(dim=1, keepdim=True), part)

    return plant


def copy_rows(pair: Pair, step: int, offset: int) -> None:
    """Every step-th row holds the row at this offset from it."""
    rows = torch.arange(step, len(pair.b) - 1, step)
    pair.b[rows] = pair.b[rows + offset]


def exchanged_with_lengths(pair: Pair) -> None:
    """Samples 4 and 5, as a batch in another order brings them."""
    take(sample(4, to=5), sample(5), sample(4))(pair)
    pair.lengths_b = [*pair.lengths[:4], pair.lengths[5], pair.lengths[4], *pair.lengths[6:]]


def cut(index: int, position: int = 0, stop: int | None = None) -> Plant:
    """A sample without these positions of it."""

    def plant(pair: Pair) -> None:
        lost = sample(index, position, stop)(pair)
        pair.b = torch.cat([pair.b[: lost.start], pair.b[lost.stop :]])
        left = pair.lengths[index] - (lost.stop - lost.start)
        pair.lengths_b = [*pair.lengths[:index], *[left][: left > 0], *pair.lengths[index + 1 :]]

    return plant


def twice(index: int) -> Plant:
    def plant(pair: Pair) -> None:
        rows = sample(index)(pair)
        pair.b = torch.cat([pair.b[: rows.stop], pair.b[rows.start :]])
        pair.lengths_b = [*pair.lengths[: index + 1], *pair.lengths[index:]]

    return plant


def lose_routes(pair: Pair) -> None:
    """Of sample 9."""
    pair.mask_b = torch.ones(len(pair.b), dtype=torch.bool)
    pair.mask_b[sample(9)(pair)] = False


def numbered_from(first: int) -> Plant:
    def plant(pair: Pair) -> None:
        pair.layers_b = range(first, first + pair.shape.num_layers)

    return plant


ALL = tuple(range(2, 14))
SWAPPED = "hold layers 11, 5 of a"
UNLIKE = "as unlike a's as unrelated rows"
FAULTS = {
    # Rows of b that are those of a further up or down: everywhere, in one sample, from a position on, in some layers.
    "all rows shifted down by one": Fault(change(rolled(1)), "row", (), offset=-1),
    "all rows shifted up by two": Fault(change(rolled(-2)), "row", (), offset=2),
    "one sample shifted down by one": Fault(
        change(shifted(1), sample(5)), "row", (), (625, 769), (5,), -1, "(1 row earlier)"),
    "one sample shifted up by three": Fault(
        change(shifted(-3), sample(0)), "row", (), None, (0,), 3, "(3 rows later)"),
    "rows shifted from a row on to the end": Fault(
        change(shifted(1), sample(9, to=15)), "row", (), (1104, 1911), tuple(range(9, 16)), -1),
    "one layer shifted in all rows": Fault(
        change(shifted(1), layers=[4]), "row", (6,), (0, 1911), None, -1, "in layer 6"),
    "one layer shifted in one sample": Fault(change(shifted(2), sample(3), [8]), "row", (10,), (364, 497), (3,), -2),
    "one layer shifted from a position on": Fault(
        change(shifted(1), sample(11, 20), [2]), "row", (4,), (1352, 1405), (11,), -1),
    "the layers of one pipeline stage shifted": Fault(
        change(shifted(-1), layers=slice(6, 12)), "row", ALL[6:], (0, 1911), None, 1, "in layers 8..13"),
    "every sample shifted within itself": Fault(
        in_turn(*(change(shifted(1), sample(i)) for i in range(16))), "row", (), offset=-1),
    "a lost chunk: one sample shifted from a position on": Fault(
        change(shifted(-7), sample(7, 25)), "row", (), (867, 946), (7,), 7, "from position 25"),
    "every eighth row is a copy of the one before": Fault(
        lambda pair: copy_rows(pair, 8, -1), "row", (), offset=-1, words="(1 row earlier)"),
    # Samples of b that are other samples of a.
    "samples 0 and 1 changed places": Fault(
        take(sample(0, to=1), sample(1), sample(0)), "sample_order", (), None, (0, 1), None, "0 and 1 of b changed places"),
    "two samples of one length exchanged": Fault(
        take(sample(2, to=9), sample(9), sample(3, to=8), sample(2)),
        "sample_order", (), (192, 959), (2, 9), None, "2 and 9 of b changed places", EQUAL),
    "samples 2 and 7 of other lengths exchanged": Fault(
        take(sample(2, to=7), sample(7), sample(3, to=6), sample(2)), "sample_order", (), None, (2, 7)),
    "two samples exchanged with their lengths": Fault(exchanged_with_lengths, "sample_order", (), None, (4, 5)),
    "samples in order of arrival": Fault(
        take(sample(1, to=6), *map(sample, (3, 1, 2, 6, 4, 5))),
        "sample_order", (), None, tuple(range(1, 7)), None, "hold samples 3, 1..2, 6, 4..5 of a", EQUAL),
    "all samples in another order": Fault(
        take(sample(0, to=15), *map(sample, (3, 0, 12, 9, 1, 15, 7, 2, 6, 14, 4, 10, 13, 5, 11, 8))),
        "sample_order", (), (0, 1911), words="hold samples 3, 0, 12, 9, 1, 15"),
    "two answers of a group exchanged": Fault(
        take(sample(5, to=6), sample(6), sample(5)), "sample_order", None, None, (5, 6), shape=GROUPS),
    "answers of a group in order of arrival": Fault(
        take(sample(8, to=11), *map(sample, (10, 8, 11, 9))),
        "sample_order", None, None, (8, 9, 10, 11), None, "hold samples 10, 8, 11, 9", GROUPS),
    "two whole groups exchanged": Fault(
        take(sample(0, to=11), sample(8, to=11), sample(4, to=7), sample(0, to=3)),
        "sample_order", None, None, (0, 1, 2, 3, 8, 9, 10, 11), None, "hold samples 8..11, 0..3", GROUPS),
    # Rows of b that hold rows from elsewhere in a.
    "one sample holds a copy of another": Fault(
        take(sample(6), sample(13)), "row", (), None, (6,), None, "hold a's sample 13 (", EQUAL),
    "an answer of a group copied over another": Fault(
        take(sample(2), sample(3)), "row", None, (260, 329), (2,), 110, shape=GROUPS),
    "an answer of a group shifted behind its prompt": Fault(
        change(shifted(1), sample(7, 40)), "row", None, (810, 879), (7,), -1, shape=GROUPS),
    "two chunks of one sample exchanged": Fault(
        take(sample(3, 10, 160), sample(3, 120, 160), sample(3, 50, 120), sample(3, 10, 50)),
        "row", (), None, (3,), shape=Shape(shortest=200, longest=260, samples=8)),
    "context-parallel chunks left in zigzag order": Fault(
        take(sample(2), sample(2, 0, 64), sample(2, 192, 256), sample(2, 64, 192)),
        "row", (), None, (2,), shape=Shape(shortest=256, longest=256, samples=4)),
    "a long sample begins with a copy of a short one": Fault(
        take(sample(12, 0, 72), sample(6)), "row", (), (1406, 1477), (12,), -636),
    # Layers of b that hold another layer's routes.
    "two layers swapped": Fault(
        change(flipped(1), layers=[3, 9]), "layer", (5, 11), words=f"layers 5, 11 of b {SWAPPED}"),
    "two layers swapped in every third token": Fault(
        change(flipped(1), lambda pair: slice(None, None, 3), [3, 9]), "layer", (5, 11), words=SWAPPED),
    "two layers swapped in the first third of the tokens": Fault(
        change(flipped(1), lambda pair: slice(637), [3, 9]), "layer", (5, 11), (0, 636), words=SWAPPED),
    "two layers swapped in one sample": Fault(
        change(flipped(1), sample(12), [0, 1]), "layer", (2, 3), (1406, 1572), (12,), words="(sample 12)"),
    "all layers off by one": Fault(change(rolled(1, 1)), "layer", (), words="hold layers 13, 2..12 of a"),
    "one layer is a copy of another": Fault(
        change(lambda part: part[:, [0, 0]], layers=[2, 6]), "layer", (8,), words="layer 8 of b holds layer 4 of a"),
    "rows and layers shifted at once": Fault(
        in_turn(change(rolled(1)), change(flipped(1), layers=[3, 9])), "row", offset=-1),
    # Experts of b under other ids, named in another order, or never named.
    "expert ids permuted in every layer": Fault(permuted(), "names", (), words="by different ids"),
    "expert ids permuted in one layer": Fault(permuted(layers=[7]), "names", (9,), words="by different ids"),
    "two experts exchanged in one layer": Fault(exchange_two_experts, "names", (9,)),
    "expert ids with an offset in every layer": Fault(plus(8), "names", (), words="by its id plus 8 (modulo 32)"),
    "expert ids off by one in one layer": Fault(plus(1, [0]), "names", (2,), words="by its id plus 1 (modulo 32)"),
    "experts of a decision in another order": Fault(
        change(flipped(2)), "expert_order", (), words="list their experts in a different order"),
    "experts of one layer in another order": Fault(
        change(lambda part: part.sort(dim=2).values, layers=[4]), "expert_order", (6,), words="in layer 6."),
    "one expert is masked in one layer": Fault(masked([7]), "unused", (9,), words="b never names expert"),
    "one expert is masked in every layer": Fault(masked(range(12)), "unused", (), words="in layer 2, expert"),
    # Routes of b that have nothing to do with those of a, are shuffled or under other ids in some rows.
    "one layer of other weights": Fault(of_others(77, layers=slice(5, 6)), "nothing", (7,), words="in layer 7"),
    "one sample of another step": Fault(
        of_others(78, sample(6)), "nothing", (), (770, 841), (6,), words="(sample 6)"),
    "a stage is of another model": Fault(
        of_others(79, layers=slice(4, 8)), "nothing", ALL[4:8], (0, 1911), words="in layers 6..9"),
    "routes of another batch": Fault(of_others(80), "nothing", ALL, (0, 1911)),
    "rows shuffled in one data-parallel rank's part": Fault(
        change(shuffled, sample(4, to=7)), "nothing", (), (498, 953), (4, 5, 6, 7), words=UNLIKE),
    "rows shuffled in one pipeline rank's part": Fault(
        change(shuffled, layers=slice(4, 8)), "nothing", ALL[4:8], (0, 1911), words="in layers 6..9"),
    "[b, s] read as [s, b]": Fault(change(transposed), "nothing", (), (0, 1535), words=UNLIKE, shape=EQUAL),
    "expert ids permuted in two samples": Fault(
        permuted(sample(3, to=4)), "nothing", None, (364, 624), (3, 4), words=UNLIKE),
    # Routes of b that are stuck or constant.
    "a stuck row: one sample repeats it from a position on": Fault(
        change(lambda part: part[:1].expand_as(part), sample(8, 30)),
        "constant", (), (984, 1103), (8,), words="from position 31"),
    "constant rows: a stretch of fillers": Fault(
        change(constant, lambda pair: slice(400, 440)), "constant", (), (400, 439), words="repeat one route"),
    "filler rows at the end of each sample": Fault(fillers, "constant", (), words="48 rows (73, 74, 75, ...) of b repeat"),
    "one layer constant": Fault(
        change(constant, layers=[3]), "constant", (5,), words="repeat experts [0, 1, 2, 3"),
    "one layer constant in one sample": Fault(
        change(constant, sample(14), [3]), "constant", (5,), (1689, 1772), (14,), words="(sample 14)"),
    # Samples that one trace lacks, has twice, or has in part; layers that it lacks or has under other numbers.
    "a sample is lost": Fault(cut(5), "row", None, (625, 1766), None, 145, "(sample 5) are missing"),
    "a sample of many of one length is lost": Fault(
        cut(5), "row", None, (480, 1439), None, 96, "(sample 5) are missing", EQUAL),
    "the last sample is lost": Fault(cut(15), "samples", words="a has 16 samples of 1,912 rows, b has 15"),
    "a sample is there twice": Fault(twice(7), "row", None, (954, 2023), None, -112, "(sample 7) come twice"),
    "the last sample is there twice": Fault(
        twice(15), "row", None, (1536, 1631), None, -96, "(sample 15) come twice", EQUAL),
    "a sample is cut at its end": Fault(cut(4, 97), "row", None, (595, 1881), None, 30, "are missing"),
    "a sample is cut at its beginning": Fault(cut(4, 0, 30), "row", None, (498, 1881), None, 30, "are missing"),
    "a sample has no routes": Fault(
        lose_routes, "samples", None, None, (9,), None, "116 rows of sample 9 have a route in a and none in b"),
    "no layer in common": Fault(
        numbered_from(100), "layers", words="no layer is in both: a has 2..13, b has 100..111"),
    "layers numbered from another first one": Fault(
        numbered_from(3), "layer", tuple(range(3, 15)), words="hold layers 2..13 of a"),
}  # fmt: skip
