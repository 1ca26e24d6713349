"""A noisy pair of traces as two real runs give it.

A token's route follows from its embedding, from its neighbours and from each layer's weights, with popular and rare
experts; the second run adds noise to the logits until a chosen share of decisions names another set. Tokens repeat as
words of a language do.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

import torch

import megatron_router_replay as mrr
from megatron_router_replay.diagnostics.trace_diff import TraceDiff

FIRST_LAYER = 2


@dataclass(frozen=True)
class Shape:
    num_layers: int = 12
    topk: int = 4
    num_experts: int = 32
    samples: int = 16
    shortest: int = 60
    longest: int = 170
    group: int = 1  # samples that share their first `prompt` rows
    prompt: int = 40


@dataclass
class Pair:
    """Routes of two runs [num_tokens, num_layers, topk], and their samples' lengths; layer i has number i + 2.

    What the second trace says of itself is the same, unless a fault gives it `lengths_b`, `mask_b` or `layers_b`.
    """

    a: torch.Tensor
    b: torch.Tensor
    lengths: list[int]
    shape: Shape
    lengths_b: list[int] | None = None
    mask_b: torch.Tensor | None = None
    layers_b: range | None = None

    @property
    def starts(self) -> list[int]:
        """The first row of each sample, and the number of rows."""
        return [0, *accumulate(self.lengths)]

    def diff(self, *, known_samples: bool = True) -> TraceDiff:
        numbers = range(FIRST_LAYER, FIRST_LAYER + self.shape.num_layers)
        one, other = (
            mrr.RoutingTrace(
                topk_indices=routes,
                layer_numbers=layers,
                num_experts=self.shape.num_experts,
                sequence_lengths=lengths if known_samples else None,
                replay_mask=mask,
            )
            for routes, layers, lengths, mask in (
                (self.a, numbers, self.lengths, None),
                (self.b, self.layers_b or numbers, self.lengths_b or self.lengths, self.mask_b),
            )
        )
        return mrr.diff_traces(one, other)


def logits_of(shape: Shape, lengths: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    vocabulary, width = 400, 48
    frequency = 1.0 / torch.arange(1, vocabulary + 1)
    tokens = torch.multinomial(frequency, sum(lengths), replacement=True, generator=generator)
    embedding = torch.randn(vocabulary, width, generator=generator)[tokens]
    context = torch.randn(sum(lengths), width, generator=generator)
    for i in range(1, len(context)):
        context[i] = 0.6 * context[i - 1] + 0.8 * context[i]
    starts = [0, *accumulate(lengths)]
    for sample in range(len(lengths) if shape.group > 1 else 0):
        first, start = starts[sample - sample % shape.group], starts[sample]
        for values in (embedding, context):
            values[start : start + shape.prompt] = values[first : first + shape.prompt]
    logits = []
    for layer in range(shape.num_layers):
        mixed = embedding * (1.0 - 0.5 * layer / shape.num_layers) + context
        weight = torch.randn(width, shape.num_experts, generator=generator) / width**0.5
        popularity = 0.5 * torch.randn(shape.num_experts, generator=generator)
        logits.append(mixed @ weight + popularity)
    return torch.stack(logits, dim=1)


def top_experts(logits: torch.Tensor, shape: Shape) -> torch.Tensor:
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
        shape.shortest + (int(torch.randint(spread + 1, (), generator=generator)) if spread else 0)
        for _ in range(shape.samples)
    ]
    logits = logits_of(shape, lengths, seed)
    noise = torch.randn(logits.shape, generator=generator)
    a = top_experts(logits, shape)
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
