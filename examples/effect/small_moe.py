"""Small mixture-of-experts language models: trained, rounded as an engine rounds, and aged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCAB, WIDTH, LAYERS = 256, 24, 6


@dataclass(frozen=True)
class Shape:
    """What a router chooses from.

    Args:
        skew: is added to one expert's logit.
        sigmoid: scores are sigmoids, and a bias that balances is added to choose.
        groups: (number of groups, groups that a token may use); None: no groups.
    """

    name: str
    experts: int
    topk: int
    skew: float = 0.0
    sigmoid: bool = False
    groups: tuple[int, int] | None = None


TOP_1, TOP_2, TOP_4, TOP_8 = (
    Shape(f"top-{topk} of {experts}", experts, topk) for topk, experts in ((1, 16), (2, 8), (4, 32), (8, 128))
)
SHAPES = (TOP_1, TOP_2, TOP_4, TOP_8)
OTHERS = (
    Shape("top-1 of 8", 8, 1),
    Shape("top-1 of 8, skewed", 8, 1, 1.0),
    Shape("top-8 of 32, sigmoid with bias", 32, 8, sigmoid=True),
    Shape("top-4 of 32, 4 of 8 groups, sigmoid with bias", 32, 4, sigmoid=True, groups=(8, 4)),
    Shape("top-2 of 32, 1 of 8 groups", 32, 2, groups=(8, 1)),
)


class Layer(nn.Module):
    """Attention, then a mixture of experts."""

    bias: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Parameter(torch.randn(shape.experts, WIDTH) / WIDTH**0.5)
        self.up = nn.Parameter(torch.randn(shape.experts, WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(shape.experts, WIDTH, WIDTH) / WIDTH**0.5)
        self.mix = nn.Linear(3 * WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.zeros(shape.experts))

    def forward(self, x: Tensor, dropout: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (hidden states, what the top-k is taken of [b, s, experts], the top-k, the balance of loads)."""
        shape = self.shape
        q, k, v = self.mix(F.rms_norm(x, (WIDTH,)).repeat(1, 1, 3)).chunk(3, -1)
        x = x + F.dropout(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)), dropout)
        normed = F.rms_norm(x, (WIDTH,))
        logits = normed @ self.router.t() + shape.skew * F.one_hot(torch.tensor(0), shape.experts)
        probabilities = logits.sigmoid() if shape.sigmoid else logits.softmax(-1)
        scores = probabilities + self.bias
        chosen = top_k(scores, shape)
        weights = probabilities.gather(-1, chosen)
        n, picked = normed.flatten(0, 1), chosen.flatten(0, 1)
        inner = F.silu(torch.einsum("nw,nkwh->nkh", n, self.up[picked])) * weights.flatten(0, 1).unsqueeze(-1)
        mixed = torch.einsum("nkh,nkhw->nw", inner, self.down[picked]).view_as(x)
        load = F.one_hot(picked, shape.experts).sum(1).float().mean(0)
        if shape.sigmoid and self.training:
            self.bias += 0.01 * (load.mean() - load).sign()
        balance = (load * probabilities.mean((0, 1))).sum() * shape.experts
        return x + F.dropout(mixed, dropout), scores, chosen, balance


def top_k(scores: Tensor, shape: Shape) -> Tensor:
    """Return the ids of the experts that a router chooses, best first; groups count by their best two experts."""
    if shape.groups:
        number, used = shape.groups
        of_groups = scores.unflatten(-1, (number, -1))
        best = of_groups.topk(min(2, of_groups.shape[-1]), -1).values.sum(-1).topk(used, -1).indices
        allowed = torch.zeros(*scores.shape[:-1], number, dtype=torch.bool).scatter_(-1, best, True)
        hidden = ~allowed.repeat_interleave(shape.experts // number, -1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.topk(shape.topk, -1).indices


class Network(nn.Module):
    """A language model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.dropout = shape, 0.0
        self.embedding = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(LAYERS))

    def forward(
        self, tokens: Tensor, embedded: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
        """Return (log-probs [b, s, VOCAB], scores and routes of each layer, the balance of loads)."""
        x = self.embedding[tokens] if embedded is None else embedded
        scores, routes, balance = [], [], torch.zeros(())
        for layer in self.layers:
            x, of_layer, chosen, load = layer(x, self.dropout)
            scores.append(of_layer)
            routes.append(chosen)
            balance = balance + load
        logits = F.rms_norm(x, (WIDTH,)) @ self.embedding.t() / WIDTH**0.5 * 4
        return logits.log_softmax(-1), scores, routes, balance


@torch.no_grad()
def scores_of(network: Network, tokens: Tensor, embedded: Tensor | None = None) -> Tensor:
    """Return what the routers take their top-k of, [layers, samples, positions, experts].

    Args:
        embedded: [samples, positions, WIDTH], in place of the tokens' embeddings.
    """
    parts = torch.arange(len(tokens)).split(max(1, 2048 // tokens.shape[1]))
    inputs = [(tokens[part], None if embedded is None else embedded[part]) for part in parts]
    return torch.cat([torch.stack(network(*each)[1]) for each in inputs], 1)


# ---- tokens
def text(samples: int, length: int, generator: torch.Generator) -> Tensor:
    """Tokens of a noisy chain."""
    step = torch.randint(VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(7))
    tokens = torch.randint(VOCAB, (samples, length), generator=generator)
    pick = (torch.rand(samples, length, generator=generator) ** 2 * 4.6).long()
    for i in range(1, length):
        follows = step[tokens[:, i - 1]].gather(1, pick[:, i : i + 1].clamp(max=3))[:, 0]
        tokens[:, i] = torch.where(pick[:, i] < 4, follows, tokens[:, i])
    return tokens


def with_loops(tokens: Tensor, periods: tuple[int, ...] = (1, 3, 6, 8, 10, 13, 17, 30)) -> Tensor:
    """Let every second sample repeat a passage of a few tokens over half of its length."""
    tokens, length = tokens.clone(), tokens.shape[1]
    for sample in range(0, len(tokens), 2):
        begin, period = length // 4 * (sample // 2 % 3), periods[sample // 2 % len(periods)]
        loop = torch.arange(begin, min(length, begin + length // 2))
        tokens[sample, loop] = tokens[sample, begin + (loop - begin) % period]
    return tokens


# ---- weights
def trained(shape: Shape, seed: int, steps: int) -> Network:
    """Return a model after some steps on `text`, half of it with loops."""
    torch.manual_seed(seed)
    network, generator = Network(shape), torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam(network.parameters(), 2e-3)
    for _ in range(steps):
        train_step(network, adam, generator)
    return network.eval()


def train_step(network: Network, adam: torch.optim.Optimizer, generator: torch.Generator) -> None:
    tokens = with_loops(text(8, 192, generator))
    log_probs, _, _, balance = network(tokens)
    aux = 0.0 if network.shape.sigmoid else 0.01 * balance
    loss = F.nll_loss(log_probs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + aux
    adam.zero_grad()
    loss.backward()
    adam.step()


def trained_further(network: Network, ages: Sequence[int], seed: int) -> tuple[Network, dict[int, Network]]:
    """Train a copy at a tenth of the rate; return it, and what it was as many steps before as each of `ages` says."""
    newest, generator = changed(network, lambda weight: weight).train(), torch.Generator().manual_seed(1000 + seed)
    adam, older = torch.optim.Adam(newest.parameters(), 2e-4), {}
    for step in range(max(ages), 0, -1):
        if step in ages:
            older[step] = changed(newest, lambda weight: weight)
        train_step(newest, adam, generator)
    return newest.eval(), older


def changed(network: Network, change: Callable[[Tensor], Tensor], dropout: float = 0.0) -> Network:
    """Return a copy with other weights."""
    other = Network(network.shape)
    other.load_state_dict({name: change(value.clone()) for name, value in network.state_dict().items()})
    other.dropout = dropout
    return other.eval()


def to_integers(weight: Tensor, most: int) -> Tensor:
    """Round to integers of -most to most, one scale a row."""
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-6) / most
    return (weight / scale).round() * scale


ENGINES: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda w: w.bfloat16().float(),
    "fp8": lambda w: w.to(torch.float8_e4m3fn).float(),
    "int8": lambda w: to_integers(w, 127),
    "int4": lambda w: to_integers(w, 7),
    "int3": lambda w: to_integers(w, 3),
}
"""How an engine rounds the weights."""


def _noisy(network: Network, scale: float, seed: int) -> Network:
    generator = torch.Generator().manual_seed(seed)
    return changed(network, lambda w: w + scale * w.std() * torch.randn(w.shape, generator=generator))


@torch.no_grad()
def kl(one: Tensor, other: Tensor) -> float:
    return float((one.exp() * (one - other)).sum(-1).mean())


@torch.no_grad()
def aged(network: Network, tokens: Tensor, target: float, seed: int) -> Network:
    """Return a model with other weights, whose KL to the network's is this a token."""
    right, low, high = network(tokens)[0], 0.0, 1.0
    for _ in range(10):
        middle = (low + high) / 2
        beyond = kl(right, _noisy(network, middle, seed)(tokens)[0]) > target
        low, high = (low, middle) if beyond else (middle, high)
    return _noisy(network, high, seed)
