"""How far does the live router agree with routes that are right, and with routes that are wrong?

Small mixture-of-experts language models are trained. Their routes are taken as an engine would choose them (bf16, fp8 and
int4 weights, weights that are stale by a KL), and damaged as captures were. `mrr.replay` counts both with the same functions.

    python -m examples.effect.agreement          # the table, and what part of sessions would stop without a reason
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron_router_replay.mcore.sessions.agreement import EVIDENCE, LEAST_ROWS, Pairs, blocks_of, count_rows

VOCAB, WIDTH, LAYERS, LENGTH, SAMPLES, LEAST = 256, 24, 2, 192, 2048, 0.25


@dataclass(frozen=True)
class Model:
    """Sizes of a model."""

    name: str
    experts: int
    topk: int
    skew: float = 0.0  # added to one expert's logit


MODELS = (
    Model("top-2 of 8", 8, 2),
    Model("top-4 of 32", 32, 4),
    Model("top-1 of 8, skewed", 8, 1, 1.0),
    Model("top-1 of 8", 8, 1),
)


class Layer(nn.Module):
    """Attention, then a mixture of experts."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.router = nn.Parameter(torch.randn(model.experts, WIDTH) / WIDTH**0.5)
        self.up = nn.Parameter(torch.randn(model.experts, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(model.experts, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.mix = nn.Linear(3 * WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.mix(F.rms_norm(x, (WIDTH,)).repeat(1, 1, 3)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        normed = F.rms_norm(x, (WIDTH,))
        logits = normed @ self.router.t()
        logits = logits + self.model.skew * F.one_hot(torch.tensor(0), self.model.experts)
        probabilities = logits.softmax(-1)
        chosen = logits.topk(self.model.topk, -1).indices
        weights = torch.zeros_like(logits).scatter(-1, chosen, probabilities.gather(-1, chosen))
        inner = F.silu(torch.einsum("bsw,ewh->bseh", normed, self.up)) * weights.unsqueeze(-1)
        balance = model_load(weights, probabilities)
        return x + torch.einsum("bseh,ehw->bsw", inner, self.down), chosen, balance


def model_load(weights: Tensor, probabilities: Tensor) -> Tensor:
    return ((weights > 0).float().mean((0, 1)) * probabilities.mean((0, 1))).sum() * weights.shape[-1]


class Network(nn.Module):
    """A language model."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.layers = nn.ModuleList(Layer(model) for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (log-probs [b, s, VOCAB], routes [layers, b, s, topk], the balance of loads)."""
        x, routes, balance = self.embedding[tokens], [], torch.zeros(())
        for layer in self.layers:
            x, chosen, load = layer(x)
            routes.append(chosen)
            balance = balance + load
        return (
            (F.rms_norm(x, (WIDTH,)) @ self.embedding.t() / WIDTH**0.5 * 4).log_softmax(-1),
            torch.stack(routes),
            balance,
        )


def text(samples: int, generator: torch.Generator) -> Tensor:
    """Tokens of a noisy chain; every eighth sample falls into a loop, or a run of one token (white space, an image)."""
    step = torch.randint(VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(7))
    tokens = torch.randint(VOCAB, (samples, LENGTH), generator=generator)
    pick = (torch.rand(samples, LENGTH, generator=generator) ** 2 * 4.6).long()
    for i in range(1, LENGTH):
        follows = step[tokens[:, i - 1]].gather(1, pick[:, i : i + 1].clamp(max=3))[:, 0]
        tokens[:, i] = torch.where(pick[:, i] < 4, follows, tokens[:, i])
    for sample in range(0, samples, 8):
        begin, period = LENGTH // 3 * (sample // 8 % 3), (1, 3, 10)[sample // 8 % 3]
        loop = torch.arange(begin, min(LENGTH, begin + LENGTH // 2))
        tokens[sample, loop] = tokens[sample, begin + (loop - begin) % period]
    return tokens


def trained(model: Model, seed: int, steps: int) -> Network:
    torch.manual_seed(seed)
    network, generator = Network(model), torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam(network.parameters(), 2e-3)
    for _ in range(steps):
        tokens = text(8, generator)
        log_probs, _, balance = network(tokens)
        loss = F.nll_loss(log_probs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + 0.01 * balance
        adam.zero_grad()
        loss.backward()
        adam.step()
    return network


def changed(network: Network, model: Model, change: Callable[[Tensor], Tensor]) -> Network:
    other = Network(model)
    other.load_state_dict({name: change(value.clone()) for name, value in network.state_dict().items()})
    return other


def to_int4(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 7
    return (weight / scale).round() * scale


def noisy(network: Network, model: Model, scale: float, seed: int) -> Network:
    generator = torch.Generator().manual_seed(seed)
    return changed(network, model, lambda w: w + scale * w.std() * torch.randn(w.shape, generator=generator))


@torch.no_grad()
def kl(one: Tensor, other: Tensor) -> float:
    return float((one.exp() * (one - other)).sum(-1).mean())


@torch.no_grad()
def stale(network: Network, model: Model, tokens: Tensor, target: float, seed: int) -> Network:
    """Weights whose KL to the network's is this a token."""
    right, low, high = network(tokens[:16])[0], 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        beyond = kl(right, noisy(network, model, middle, seed)(tokens[:16])[0]) > target
        low, high = (low, middle) if beyond else (middle, high)
    return noisy(network, model, high, seed)


def measured(model: Model, live: Tensor, used: Tensor) -> tuple[dict[int, float], list[tuple[int, float]]]:
    """Return {layer: agreement} and (sample and layer, agreement) of every block; eight samples a micro-batch."""
    table = torch.randint(1 << 16, (2 * model.experts,), generator=torch.Generator().manual_seed(0))
    layers, blocks = {}, []
    for layer in range(LAYERS):
        pairs = []
        for first in range(0, live.shape[1], 8):
            ids = torch.cat([live[layer, first : first + 8], used[layer, first : first + 8]], -1)
            rows = count_rows(ids.flatten(0, 1), None, table).numpy()  # one sample after another
            sequence, block = blocks_of(torch.ones(ids.shape[:2], dtype=torch.bool).numpy())
            for number, unit in Pairs.of((first + sequence) << 20 | block, rows).measure(model.topk).items():
                if unit.rows >= LEAST_ROWS and unit.evidence >= EVIDENCE:
                    blocks.append(((number >> 20) * LAYERS + layer, unit.agreement))
            pairs.append(Pairs.of(sequence * 0 + layer, rows))
        layers[layer] = Pairs.merge(pairs).measure(model.topk)[layer].agreement
    return layers, blocks


def tail(values: list[float], at: float) -> float:
    """Return the part of values below `at`: counted, or from an exponential fitted to the lowest hundredth (50 at least)."""
    ordered = sorted(values)
    count = max(50, len(ordered) // 100)
    if len(ordered) <= count or ordered[0] < at:
        return sum(value < at for value in ordered) / max(1, len(ordered))
    threshold = ordered[count]
    mean = sum(threshold - value for value in ordered[:count]) / count
    return count / len(ordered) * math.exp(-(threshold - at) / max(mean, 1e-9))


def stops(blocks: list[tuple[int, float]], samples: int = 512) -> float:
    """Return what part of sessions of so many samples, each asked in one layer, would raise without a reason.

    Two blocks of a sample are low, or three and one in a thousand of all. A session in which all layers are asked comes once.
    """
    by_sample: dict[int, list[float]] = {}
    for sample, value in blocks:
        by_sample.setdefault(sample, []).append(value)
    second = [sorted(values)[1] for values in by_sample.values() if len(values) > 1]
    lone, units = tail([value for _, value in blocks], LEAST), samples * len(blocks) / max(1, len(by_sample))
    least, expected = max(3, int(units / 1000) + 1), units * lone
    many = sum(
        math.exp(-expected + n * math.log(max(expected, 1e-300)) - math.lgamma(n + 1)) for n in range(least, least + 60)
    )
    return samples * tail(second, LEAST) + many


LEGAL: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda w: w.bfloat16().float(),
    "fp8 weights": lambda w: w.to(torch.float8_e4m3fn).float(),
    "int4 weights": to_int4,
}
STALE = (0.01, 0.03, 0.1, 0.2)
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "one late": lambda used: used.roll(1, 2),
    "layers swapped": lambda used: used.roll(1, 0),
    "samples exchanged": lambda used: used.roll(1, 1),
    "constant": lambda used: used[:, :1, :1].expand_as(used),
}


def routes_of(network: Network, tokens: Tensor) -> Tensor:
    return torch.cat([network(part)[1] for part in tokens.split(64)], 1)


@torch.no_grad()
def rows_of(model: Model, seed: int, network: Network, other: Network) -> list[tuple[str, Tensor, Tensor]]:
    tokens = text(SAMPLES, torch.Generator().manual_seed(seed + 100))
    live = routes_of(network, tokens)
    rows = [(name, live, routes_of(changed(network, model, change), tokens)) for name, change in LEGAL.items()]
    rows += [
        (f"stale, KL {target:g}", live, routes_of(stale(network, model, tokens, target, seed), tokens))
        for target in STALE
    ]
    rows += [(f"WRONG {name}", live, damage(live)) for name, damage in WRONG.items()]
    rows.append(("WRONG ids permuted", live, live[:, :, :].add(model.experts // 2 - 1) % model.experts))
    return [*rows, ("WRONG other checkpoint", live, routes_of(other, tokens))]


def main(steps: int = 100) -> None:
    torch.set_num_threads(1)
    print(
        f"{'':22}{'routes':26}{'least layer':>12}{'least block':>12}{'most layer':>12}{'blocks < .25':>16}{'false stops':>13}"
    )
    for seed, model in enumerate(MODELS):
        network, other = trained(model, seed, steps), trained(model, seed + 50, steps)
        for name, live, used in rows_of(model, seed, network, other):
            layers, blocks = measured(model, live, used)
            values = [value for _, value in blocks]
            low = f"{sum(value < LEAST for value in values)} of {len(values)}"
            rate = "" if name.startswith("WRONG") else f"{stops(blocks):.0e}"
            print(
                f"{model.name:22}{name:26}{min(layers.values()):12.2f}{min(values, default=1.0):12.2f}"
                f"{max(layers.values()):12.2f}{low:>16}{rate:>13}",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
