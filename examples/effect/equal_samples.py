"""Are equal samples of two weight versions told from equal samples with other images?

Small mixture-of-experts language models are trained (`small_moe`). Each pair of samples has the same tokens, and routes by
two computations: with other weights or other kernels, which must pass; or with other images behind equal placeholders, with
the routes of a different text, or one row late, which must be refused.

    python -m examples.effect.equal_samples 1 2          # models of these seeds: pairs that are refused, by number of layers
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import megatron_router_replay as mrr
from examples.effect import agreement, small_moe
from examples.effect.small_moe import Network, Shape, text, top_k
from megatron_router_replay.mcore.batches.equal_samples import unlike

SHAPES = (small_moe.TOP_1, small_moe.TOP_2, small_moe.TOP_4, Shape("top-8 of 64", 64, 8), small_moe.TOP_8)
LAYERS = {1: [5], 2: [1, 4], 4: [0, 2, 3, 5], 6: [0, 1, 2, 3, 4, 5]}
"""Number of layers with routes -> which of the model's."""
LENGTHS = (2, 3, 9, 17, 65, 130, 200, 500)
FLIPPED = 0.1
"""Share of decisions that noise flips, as published of an engine and a trainer."""
IMAGES = (16, 32, 64)
SAMPLES = 16


def legal_engines(network: Network, older: dict[int, Network], seed: int) -> dict[str, Network]:
    """Return models whose routes must count as the network's: rounded, or older by a KL of up to 0.1."""
    short = text(4, 192, torch.Generator().manual_seed(77 + seed))
    engines = {name: small_moe.changed(network, small_moe.ENGINES[name]) for name in ("bf16", "fp8", "int4")}
    engines |= {f"KL {kl:g}": small_moe.aged(network, short, kl, seed) for kl in (0.003, 0.01, 0.03, 0.1)}
    engines["KL 0.1 and int4"] = small_moe.changed(engines["KL 0.1"], small_moe.ENGINES["int4"])
    return engines | {f"{steps} steps": each for steps, each in older.items()}


def noisy(scores: Tensor, shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the top-k of scores with noise: of each score alone, or large in all scores of some tokens."""
    noise = torch.randn(scores.shape, generator=generator)
    of_tokens = (1.5 * torch.randn(1, *scores.shape[1:3], 1, generator=generator)).exp()
    return {
        "independent noise": agreement.flipped(scores, shape, FLIPPED, noise=noise),
        "noise clustered by token": agreement.flipped(scores, shape, FLIPPED, noise=noise * of_tokens),
    }


Pair = tuple[str, Tensor, Tensor]
"""What differs, and two times the routes of a sample, [layers, positions, topk]."""


def legal_pairs(network: Network, older: dict[int, Network], seed: int) -> Iterator[Pair]:
    """Yield pairs of weight versions, roundings and noise, one of each kind, text and length."""
    engines, generator, number = legal_engines(network, older, seed), torch.Generator().manual_seed(seed), 0
    for _, tokens in agreement.legal_tokens(500 + seed):
        scores = small_moe.scores_of(network, tokens)
        right = top_k(scores, network.shape)
        routes = {name: top_k(small_moe.scores_of(each, tokens), network.shape) for name, each in engines.items()}
        for name, other in (routes | noisy(scores, network.shape, generator)).items():
            for length in LENGTHS:
                if length <= tokens.shape[1]:
                    number += 1
                    sample = number % len(tokens)
                    yield name, right[:, sample, : length - 1], other[:, sample, : length - 1]


def other_images(network: Network, seed: int) -> Iterator[Pair]:
    """Yield pairs of samples of 200 tokens that have other embeddings in 16, 32 or 64 of them."""
    generator = torch.Generator().manual_seed(900 + seed)
    tokens = text(SAMPLES, 200, generator)
    embedded = network.embedding.detach()[tokens]
    for size in IMAGES:
        starts = torch.randint(40, 120, (SAMPLES,), generator=generator).tolist()
        for kind in ("of unrelated patches", "of like patches", "that are text"):
            pair = []
            for _ in range(2):
                patches = torch.randn(SAMPLES, size, small_moe.WIDTH, generator=generator)
                if kind == "of like patches":
                    patches = (patches + torch.randn(SAMPLES, 1, small_moe.WIDTH, generator=generator)) / 2**0.5
                elif kind == "that are text":
                    patches = network.embedding.detach()[text(SAMPLES, size, generator)]
                inputs = embedded.clone()
                for sample, start in enumerate(starts):
                    inputs[sample, start : start + size] = patches[sample]
                pair.append(top_k(small_moe.scores_of(network, tokens, inputs), network.shape))
            for sample in range(SAMPLES):
                yield f"images of {size} tokens {kind}", pair[0][:, sample], pair[1][:, sample]


def wrong_routes(network: Network, seed: int) -> Iterator[Pair]:
    """Yield pairs with the routes of a different text, or of the token before."""
    tokens = text(SAMPLES, 512, torch.Generator().manual_seed(700 + seed))
    routes = top_k(small_moe.scores_of(network, tokens), network.shape)
    for length in LENGTHS:
        if length > 16:
            for sample in range(SAMPLES):
                right = routes[:, sample, : length - 1]
                yield "routes of a different text", right, routes[:, sample - 1, : length - 1]
                yield "routes one row late", right, routes[:, sample, 1:length]


def is_refused(shape: Shape, one: Tensor, other: Tensor) -> bool:
    """Return if a session refuses two samples with these routes, [layers, positions, topk]."""
    trace = mrr.RoutingTrace(
        topk_indices=torch.cat([one, other], 1).transpose(0, 1),
        layer_numbers=range(1, len(one) + 1),
        num_experts=shape.experts,
    )
    return bool(unlike(trace, 0, one.shape[1], one.shape[1]))


def show(shapes: Sequence[Shape], seeds: Sequence[int]) -> None:
    """Print how many pairs are refused, by what differs and by the number of layers that have routes."""
    for shape in shapes:
        pairs: Counter[str] = Counter()
        refused: Counter[tuple[str, int]] = Counter()
        for seed in seeds:
            network, older = small_moe.trained_further(small_moe.trained(shape, seed, agreement.STEPS), (50,), seed)
            legal = [("legal: " + name, *routes) for name, *routes in legal_pairs(network, older, seed)]
            for name, one, other in (*legal, *other_images(network, seed), *wrong_routes(network, seed)):
                pairs[name] += 1
                for number, layers in LAYERS.items():
                    refused[name, number] += is_refused(shape, one[layers], other[layers])
        for name, number in pairs.items():
            counts = " | ".join(str(refused[name, layers]) for layers in LAYERS)
            print(f"| {shape.name} | {name} | {number} | {counts} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    show(SHAPES, [int(seed) for seed in sys.argv[1:]] or [1])
