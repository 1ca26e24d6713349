"""A noisy pair of traces as two real runs give it, and faults planted into the second.

A token's route follows from its embedding, from its neighbours and from each layer's weights, with popular and rare
experts; the second run adds noise to the logits until a chosen share of decisions names another set. Tokens repeat as
words of a language do.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

import megatron_router_replay as mrr
from megatron_router_replay.diagnostics import TraceDiff

FIRST_LAYER = 2


@dataclass(frozen=True)
class Shape:
    num_layers: int = 12
    topk: int = 4
    num_experts: int = 32
    samples: int = 16
    shortest: int = 60
    longest: int = 170
    equal_lengths: bool = False


@dataclass
class Pair:
    """Routes of two runs [num_tokens, num_layers, topk], and their samples' lengths; layer i has number i + 2."""

    a: torch.Tensor
    b: torch.Tensor
    lengths: list[int]
    shape: Shape

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:i]) for i in range(len(self.lengths))]

    def rows_of(self, sample: int) -> tuple[int, int]:
        return self.starts[sample], self.starts[sample] + self.lengths[sample]

    def diff(self, *, known_samples: bool = True) -> TraceDiff:
        numbers = range(FIRST_LAYER, FIRST_LAYER + self.shape.num_layers)
        lengths = self.lengths if known_samples else None
        one, other = (
            mrr.RoutingTrace(
                topk_indices=routes,
                layer_numbers=numbers,
                num_experts=self.shape.num_experts,
                sequence_lengths=lengths,
            )
            for routes in (self.a, self.b)
        )
        return mrr.diff_traces(one, other)


def _logits(shape: Shape, lengths: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    vocabulary, width = 400, 48
    frequency = 1.0 / torch.arange(1, vocabulary + 1)
    tokens = torch.multinomial(frequency, sum(lengths), replacement=True, generator=generator)
    embedding = torch.randn(vocabulary, width, generator=generator)[tokens]
    context = torch.randn(sum(lengths), width, generator=generator)
    for i in range(1, len(context)):
        context[i] = 0.6 * context[i - 1] + 0.8 * context[i]
    logits = []
    for layer in range(shape.num_layers):
        mixed = embedding * (1.0 - 0.5 * layer / shape.num_layers) + context
        weight = torch.randn(width, shape.num_experts, generator=generator) / width**0.5
        popularity = 0.5 * torch.randn(shape.num_experts, generator=generator)
        logits.append(mixed @ weight + popularity)
    return torch.stack(logits, dim=1)


def _top(logits: torch.Tensor, shape: Shape) -> torch.Tensor:
    return logits.topk(shape.topk, dim=2).indices


def noisy_pair(shape: Shape = Shape(), *, different: float | tuple[float, ...] = 0.05, seed: int = 0) -> Pair:
    """Two runs in which a share of decisions (of all layers, or of each layer) names another set."""
    pair = _made_pair(shape, different, seed)
    return replace(pair, a=pair.a.clone(), b=pair.b.clone())


@cache
def _made_pair(shape: Shape, different: float | tuple[float, ...], seed: int) -> Pair:
    generator = torch.Generator().manual_seed(100 + seed)
    spread = shape.longest - shape.shortest
    lengths = [
        shape.shortest + (0 if shape.equal_lengths else int(torch.randint(spread + 1, (), generator=generator)))
        for _ in range(shape.samples)
    ]
    logits = _logits(shape, lengths, seed)
    noise = torch.randn(logits.shape, generator=generator)
    a = _top(logits, shape)
    shares = different if isinstance(different, tuple) else (different,) * shape.num_layers
    b = a.clone()
    for layer, share in enumerate(shares):
        low, high = 0.0, 4.0
        for _ in range(12):
            middle = (low + high) / 2
            b[:, layer] = (logits[:, layer] + middle * noise[:, layer]).topk(shape.topk, dim=1).indices
            changed = (b[:, layer].sort(dim=1).values != a[:, layer].sort(dim=1).values).any(dim=1).double().mean()
            low, high = (middle, high) if changed < share else (low, middle)
    return Pair(a=a, b=b, lengths=lengths, shape=shape)


@dataclass(frozen=True)
class Named:
    """What a finding must name; None: not asked."""

    kind: str | tuple[str, ...]
    layers: tuple[int, ...] | None = None
    rows: tuple[int, int] | None = None
    samples: tuple[int, ...] | None = None
    shift: int | None = None
    words: str = ""


Plant = Callable[[Pair], Named]
FAULTS: dict[str, tuple[Shape, Plant]] = {}
EQUAL = Shape(equal_lengths=True, shortest=96, longest=96)


def fault(name: str, shape: Shape = Shape()) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        assert name not in FAULTS
        FAULTS[name] = (shape, plant)
        return plant

    return register


def number(layer: int) -> int:
    return layer + FIRST_LAYER


def shift_rows(routes: torch.Tensor, first: int, stop: int, shift: int, layers: Any = slice(None)) -> None:
    """Row r of rows first..stop-1 becomes row r - shift; rows that come from outside keep the edge's route."""
    source = torch.arange(first, stop) - shift
    routes[first:stop, layers] = routes.clone()[source.clamp(first, stop - 1)][:, layers]


@fault("all rows shifted down by one")
def _(pair: Pair) -> Named:
    pair.b = pair.b.roll(1, 0)
    return Named("rows_shifted", layers=(), shift=1, words="shifted down by one row")


@fault("all rows shifted up by two")
def _(pair: Pair) -> Named:
    pair.b = pair.b.roll(-2, 0)
    return Named("rows_shifted", layers=(), shift=-2, words="shifted up by 2 rows")


@fault("all rows shifted by 300")
def _(pair: Pair) -> Named:
    pair.b = pair.b.roll(300, 0)
    return Named("rows_shifted", layers=(), shift=300, words="shifted down by 300 rows")


@fault("one sample shifted down by one")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(5)
    shift_rows(pair.b, first, stop, 1)
    return Named("rows_shifted", layers=(), samples=(5,), rows=(first, stop - 1), shift=1, words="in sample 5")


@fault("one sample shifted up by three")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(0)
    shift_rows(pair.b, first, stop, -3)
    return Named("rows_shifted", layers=(), samples=(0,), shift=-3, words="in sample 0")


@fault("every sample shifted within itself")
def _(pair: Pair) -> Named:
    for i in range(len(pair.lengths)):
        shift_rows(pair.b, *pair.rows_of(i), 1)
    return Named("rows_shifted", layers=(), shift=1)


@fault("rows shifted from a row on to the end")
def _(pair: Pair) -> Named:
    first = pair.starts[9]
    shift_rows(pair.b, first, len(pair.b), 1)
    return Named("rows_shifted", layers=(), rows=(first, len(pair.b) - 1), samples=tuple(range(9, 16)), shift=1)


@fault("a lost chunk: one sample shifted from a position on")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(7)
    shift_rows(pair.b, first + 25, stop, -7)
    return Named("rows_shifted", layers=(), rows=(first + 25, stop - 8), samples=(7,), shift=-7, words="positions 25..")


@fault("one layer shifted in all rows")
def _(pair: Pair) -> Named:
    shift_rows(pair.b, 0, len(pair.b), 1, [4])
    return Named("rows_shifted", layers=(number(4),), shift=1, words="layer 6")


@fault("one layer shifted in one sample")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(3)
    shift_rows(pair.b, first, stop, 2, [8])
    return Named("rows_shifted", layers=(number(8),), rows=(first, stop - 1), samples=(3,), shift=2)


@fault("one layer shifted from a position on")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(11)
    shift_rows(pair.b, first + 20, stop, 1, [2])
    return Named("rows_shifted", layers=(number(2),), rows=(first + 20, stop - 1), samples=(11,), shift=1)


@fault("the layers of one pipeline stage shifted")
def _(pair: Pair) -> Named:
    shift_rows(pair.b, 0, len(pair.b), -1, [6, 7, 8, 9, 10, 11])
    return Named("rows_shifted", layers=tuple(range(8, 14)), shift=-1, words="layers 8..13")


@fault("two layers swapped")
def _(pair: Pair) -> Named:
    pair.b[:, [3, 9]] = pair.b[:, [9, 3]]
    return Named("layers_moved", layers=(5, 11), words="layers 5 and 11 of b are swapped")


@fault("two layers swapped in every third token")
def _(pair: Pair) -> Named:
    pair.b[::3, [3, 9]] = pair.b[::3, [9, 3]]
    return Named("layers_moved", layers=(5, 11), words="of the rows, first row 0")


@fault("two layers swapped in a random third of the tokens")
def _(pair: Pair) -> Named:
    rows = torch.rand(len(pair.b), generator=torch.Generator().manual_seed(1)) < 1 / 3
    swapped = pair.b[rows]
    swapped[:, [1, 2]] = swapped[:, [2, 1]]
    pair.b[rows] = swapped
    return Named(
        "layers_moved", layers=(3, 4), words="layers 3 and 4 of b are swapped: each looks like the other in a, in "
    )


@fault("two layers swapped in the first third of the tokens")
def _(pair: Pair) -> Named:
    third = len(pair.b) // 3
    pair.b[:third, [3, 9]] = pair.b[:third, [9, 3]]
    return Named("layers_moved", layers=(5, 11), rows=(0, third - 1), words="swapped")


@fault("two layers swapped in one sample")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(12)
    pair.b[first:stop, [0, 1]] = pair.b[first:stop, [1, 0]]
    return Named("layers_moved", layers=(2, 3), rows=(first, stop - 1), samples=(12,), words="in sample 12")


@fault("all layers off by one")
def _(pair: Pair) -> Named:
    pair.b = pair.b.roll(1, 1)
    return Named("layers_moved", layers=tuple(range(3, 14)), words="layers 3..13 of b look like layers 2..12 of a")


@fault("one layer is a copy of another")
def _(pair: Pair) -> Named:
    pair.b[:, 6] = pair.b[:, 2]
    return Named("layers_moved", layers=(8,), words="layer 8 of b looks like layer 4 of a")


@fault("rows and layers shifted at once")
def _(pair: Pair) -> Named:
    pair.b = pair.b.roll(1, 0)
    pair.b[:, [3, 9]] = pair.b[:, [9, 3]]
    return Named("layers_moved", layers=(5, 11), words="swapped")


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
    return Named("rows_transposed", layers=(), words="[b, s] as [s, b]")


@fault("[b, s] read as [s, b] in one micro-batch", EQUAL)
def _(pair: Pair) -> Named:
    first, stop = pair.starts[4], pair.starts[8]
    part = pair.b[first:stop]
    pair.b[first:stop] = part.view(4, 96, *part.shape[1:]).transpose(0, 1).reshape(part.shape)
    return Named("rows_transposed", layers=(), rows=(first, stop - 1), samples=(4, 5, 6, 7), words="[b, s] as [s, b]")


@fault("context-parallel chunks left in zigzag order", Shape(shortest=256, longest=256, equal_lengths=True, samples=4))
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(2)
    chunks = pair.b[first:stop].chunk(4)
    pair.b[first:stop] = torch.cat([chunks[0], chunks[3], chunks[1], chunks[2]])
    return Named(("rows_moved", "rows_shifted"), layers=(), samples=(2,))


@fault("expert ids permuted in every layer")
def _(pair: Pair) -> Named:
    order = torch.randperm(pair.shape.num_experts, generator=torch.Generator().manual_seed(3))
    pair.b = order[pair.b]
    return Named("experts_relabelled", layers=(), words="in every layer expert ids of b are a permutation")


@fault("expert ids permuted in one layer")
def _(pair: Pair) -> Named:
    order = torch.randperm(pair.shape.num_experts, generator=torch.Generator().manual_seed(3))
    pair.b[:, 7] = order[pair.b[:, 7]]
    return Named("experts_relabelled", layers=(9,), words="in layer 9 expert ids of b are a permutation")


@fault("expert ids permuted in two samples")
def _(pair: Pair) -> Named:
    first, stop = pair.starts[3], pair.starts[5]
    order = torch.randperm(pair.shape.num_experts, generator=torch.Generator().manual_seed(3))
    pair.b[first:stop] = order[pair.b[first:stop]]
    return Named("experts_relabelled", rows=(first, stop - 1), samples=(3, 4), words="permutation")


@fault("two experts exchanged in one layer")
def _(pair: Pair) -> Named:
    layer = pair.b[:, 7].clone()
    one, other = layer.flatten().bincount(minlength=pair.shape.num_experts).topk(4).indices[[1, 3]].tolist()
    pair.b[:, 7] = torch.where(layer == one, other, torch.where(layer == other, one, layer))
    low, high = sorted((one, other))
    return Named("experts_relabelled", layers=(9,), words=f"in layer 9 experts {low} and {high} of b are exchanged")


@fault("expert ids with an offset in every layer")
def _(pair: Pair) -> Named:
    pair.b = (pair.b + 8) % pair.shape.num_experts
    return Named("experts_relabelled", layers=(), words="those of a plus 8")


@fault("expert ids off by one in one layer")
def _(pair: Pair) -> Named:
    pair.b[:, 0] = (pair.b[:, 0] + 1) % pair.shape.num_experts
    return Named("experts_relabelled", layers=(2,), words="those of a plus 1")


@fault("one layer of other weights")
def _(pair: Pair) -> Named:
    pair.b[:, 5] = _top(_logits(pair.shape, pair.lengths, 77), pair.shape)[:, 5]
    return Named("layer_outlier", layers=(7,), words="layer 7")


@fault("one sample of another step")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(6)
    pair.b[first:stop] = _top(_logits(pair.shape, pair.lengths, 78), pair.shape)[first:stop]
    return Named("rows_unrelated", layers=(), rows=(first, stop - 1), samples=(6,), words="in sample 6")


@fault("a stuck row: one sample repeats it from a position on")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(8)
    pair.b[first + 30 : stop] = pair.b[first + 30].clone()
    return Named("rows_stuck", layers=(), rows=(first + 30, stop - 1), samples=(8,), words="positions 30..")


@fault("constant rows: a stretch of fillers")
def _(pair: Pair) -> Named:
    pair.b[400:440] = torch.arange(pair.shape.topk)
    return Named("rows_stuck", layers=(), rows=(400, 439), words="[0, 1, 2, 3")


@fault("one layer constant")
def _(pair: Pair) -> Named:
    pair.b[:, 3] = torch.arange(pair.shape.topk)
    return Named("layer_constant", layers=(5,), words="layer 5 of b sends every token to the same experts [0, 1, 2, 3")


@fault("one layer constant in one sample")
def _(pair: Pair) -> Named:
    first, stop = pair.rows_of(14)
    pair.b[first:stop, 3] = torch.arange(pair.shape.topk)
    return Named("layer_constant", layers=(5,), rows=(first, stop - 1), samples=(14,), words="in sample 14")


@fault("experts of a decision in another order")
def _(pair: Pair) -> Named:
    pair.b = pair.b.flip(2)
    return Named("order_changed", layers=(), words="in every layer b names the same experts in another order")


@fault("experts of one layer in another order")
def _(pair: Pair) -> Named:
    pair.b[:, 4] = pair.b[:, 4].sort(dim=1).values
    return Named("order_changed", layers=(6,), words="in layer 6")
