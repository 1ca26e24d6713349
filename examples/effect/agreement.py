"""Which wrong routes does a session find, and does it ever stop a legal one?

Small mixture-of-experts language models are trained (`small_moe`). Their routes are taken as an engine would choose them, and
damaged as engines' own trackers report. Rows are compared and judged by the classes of a session, without a model around
them, so that thousands of sessions are cheap.

    python -m examples.effect.agreement faults           # each fault in four shapes of router, and the least dose that raises
    python -m examples.effect.agreement legal 3          # legal sessions of new models of 3 seeds: how many raise
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from examples.effect import small_moe
from examples.effect.small_moe import Network, Shape, text, top_k, with_loops
from megatron_router_replay.mcore.core.call import TopKRequest
from megatron_router_replay.mcore.judge.agreement import Agreement
from megatron_router_replay.mcore.judge.blocks import EVIDENCE
from megatron_router_replay.mcore.judge.verdict import group_verdict

SAMPLES, LENGTH, STEPS = 8, 512, 150
FLIPPED = 0.03
"""Share of decisions that another engine's kernels flip."""


# ---- a session without a model
def compared(
    shape: Shape, scores: Tensor, replayed: Tensor, *, microbatches: int = 1, ranks: int = 1, zigzag: bool = False
) -> list[Agreement]:
    """Compare routes as the ranks of a session do: all layers in its first micro-batch, then one in each.

    Args:
        scores: [layers, samples, positions, experts], of the live router.
        replayed: [layers, samples, positions, topk].
        ranks: that share each sample, by sequence parallelism, or by context parallelism if `zigzag`.
    """
    num_layers, num_samples, length, experts = scores.shape
    made = [
        Agreement(topk=shape.topk, num_experts=experts, num_layers=num_layers, every_layer=False, rank=rank)
        for rank in range(ranks)
    ]
    chunk: Any = SimpleNamespace(index=0, row_sharing=(0, ranks, 0))

    def live_topk(scores: Tensor, topk: int, **groups: Any) -> tuple[Tensor, Tensor]:
        return scores, top_k(scores, shape)

    for number in range(microbatches):
        some = slice(number * num_samples // microbatches, (number + 1) * num_samples // microbatches)
        for layer in range(num_layers) if not number else [(number - 1) % num_layers]:
            for rank, agreement in enumerate(made):
                positions = _positions(length, rank, ranks, zigzag=zigzag)
                microbatch: Any = SimpleNamespace(
                    number=number, shape=(len(positions), some.stop - some.start), rows=None
                )
                of_scores, of_replayed = (
                    each[layer, some][:, positions].transpose(0, 1).flatten(0, 1) for each in (scores, replayed)
                )
                request = TopKRequest(of_scores, shape.topk, *(shape.groups or (None, None)), live_topk)
                agreement.add(microbatch, chunk, layer + 1, request=request, replayed=of_replayed, counts=None)
    return made


def _positions(length: int, rank: int, ranks: int, *, zigzag: bool) -> Tensor:
    if not zigzag:
        return torch.arange(length).chunk(ranks)[rank]
    parts = torch.arange(length).chunk(2 * ranks)
    return torch.cat([parts[rank], parts[2 * ranks - 1 - rank]])


@dataclass(frozen=True)
class Outcome:
    """What a session says: "raises", "warns" or "", its largest evidence of wrong rows, its least agreement, the text."""

    says: str
    evidence: float
    least_layer: float
    text: str


def outcome(ranks: Sequence[Agreement]) -> Outcome:
    summaries = [rank.summary() for rank in ranks]
    found = group_verdict(summaries, 0.25)
    evidence = max((each[0] for of_rank in summaries for each in of_rank.anomalies), default=0.0)
    least = min((value for rank in ranks for value in rank.report().by_layer.values()), default=1.0)
    says = "raises" if found.problems else "warns" if found.warnings else ""
    return Outcome(says, evidence, least, "".join(found.problems or found.warnings))


def flipped(scores: Tensor, shape: Shape, share: float = FLIPPED, seed: int = 0, noise: Tensor | None = None) -> Tensor:
    """Return the top-k of scores with as much noise as flips a share of the decisions."""
    if noise is None:
        noise = torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed))
    live = top_k(scores, shape).sort(-1).values
    low, high = 0.0, float(scores.std())
    for _ in range(12):
        middle = (low + high) / 2
        differ = (top_k(scores + middle * noise, shape).sort(-1).values != live).any(-1).float().mean()
        low, high = (middle, high) if differ < share else (low, middle)
    return top_k(scores + high * noise, shape)


# ---- faults
@dataclass(frozen=True)
class Fault:
    """A fault of a capture.

    Args:
        name: with its dose.
        tracker: where it was reported.
        plant: (right routes [layers, samples, positions, topk], those of a foreign model, the dose) -> wrong routes.
        dose: as reported: rows, or per cent of rows.
        most: the highest dose that is tried; None: the fault has no dose.
    """

    name: str
    tracker: str
    plant: Callable[[Tensor, Tensor, int], Tensor]
    dose: int = 0
    most: int | None = None


def _rows(begin: int, source: Callable[[Tensor, Tensor, int], Tensor], sample: int = 3) -> Any:
    """Write over some rows of a sample, from `begin` on, in all layers."""

    def plant(right: Tensor, foreign: Tensor, dose: int) -> Tensor:
        wrong = right.clone()
        stop = min(right.shape[2], begin + dose)
        wrong[:, sample, begin:stop] = source(right, foreign, stop)
        return wrong

    return plant


def _scattered(right: Tensor, foreign: Tensor, dose: int) -> Tensor:
    wrong = right.clone()
    rows = torch.rand(right.shape[1:3], generator=torch.Generator().manual_seed(1)) < dose / 100
    wrong[:, rows] = right.roll(1, 1)[:, rows]
    return wrong


def _permuted(share: float, layers: slice) -> Any:
    """Exchange the ids of some experts in a ring."""

    def plant(right: Tensor, foreign: Tensor, dose: int) -> Tensor:
        experts = int(foreign.max()) + 1
        ids = torch.arange(experts)
        num = max(2, int(share * experts))
        ids[:num] = ids[:num].roll(1)
        wrong = right.clone()
        wrong[layers] = ids[right[layers]]
        return wrong

    return plant


def _draft(begin: int) -> Any:
    def plant(right: Tensor, foreign: Tensor, dose: int) -> Tensor:
        wrong = right.clone()
        wrong[0, :, begin:] = foreign[0, :, begin:]
        return wrong

    return plant


def _one_layer(right: Tensor, foreign: Tensor, dose: int) -> Tensor:
    wrong = right.clone()
    wrong[3, 5] = right[3, 1]
    return wrong


def _filler(right: Tensor, foreign: Tensor, stop: int) -> Tensor:
    return torch.arange(right.shape[-1])


FAULTS = (
    Fault("a row repeated 67 times", "SGLang #36404", _rows(200, lambda r, f, e: r[:, 3, 199:200]), 67, 256),
    Fault("a foreign row repeated 67 times", "SGLang #36467", _rows(200, lambda r, f, e: f[:, 0, :1]), 67, 256),
    Fault("a prefix of 256 of another request", "SGLang #26975", _rows(0, lambda r, f, e: r[:, 5, :e]), 256, 512),
    Fault("a prefix of one page, 64", "SGLang #39027", _rows(0, lambda r, f, e: r[:, 7, :e]), 64, 512),
    Fault("a draft's routes in the first layer", "vLLM #48622", _draft(0)),
    Fault("the same, in generated tokens", "SGLang #26980", _draft(LENGTH // 2)),
    Fault("scattered rows, 2 %", "vLLM-Ascend #10717", _scattered, 2, 50),
    Fault("32 rows of the next step", "vLLM-Ascend #10727", _rows(300, lambda r, f, e: r[:, 1, 300:e]), 32, 200),
    Fault(
        "a stream 8 tokens late, 256 rows", "vLLM #37094", _rows(256, lambda r, f, e: r[:, 3, 248 : e - 8]), 256, 256
    ),
    Fault("a sample one token late", "SGLang #20964", _rows(1, lambda r, f, e: r[:, 3, : e - 1]), 511, 511),
    Fault("64 rows one token late", "own", _rows(100, lambda r, f, e: r[:, 3, 99 : e - 1]), 64, 400),
    Fault("a batch one token late", "own", lambda r, f, d: r.roll(1, 2)),
    Fault("two layers exchanged", "own", lambda r, f, d: r[[0, 1, 3, 2, 4, 5]]),
    Fault("physical ids in a layer", "EPLB", _permuted(1.0, slice(2, 3))),
    Fault("a quarter of the experts have physical ids, in a layer", "EPLB", _permuted(0.25, slice(2, 3))),
    Fault("a quarter of the experts have physical ids, in all layers", "EPLB", _permuted(0.25, slice(None))),
    Fault(
        "64 lost rows, the last one repeated", "NeMo-RL #3208", _rows(400, lambda r, f, e: r[:, 3, 399:400]), 64, 112
    ),
    Fault("64 lost rows, `arange(topk)`", "NeMo-RL #3208", _rows(400, _filler), 64, 112),
    Fault("two samples exchanged", "own", lambda r, f, d: r[:, [0, 1, 2, 5, 4, 3, 6, 7]]),
    Fault("a sample of another rank", "SGLang #26123", _rows(0, lambda r, f, e: f[:, 1, :e]), 512, 512),
    Fault("a layer of one sample of another one", "own", _one_layer),
)


def routes_to_damage(network: Network, seed: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Return live scores, right routes of another engine, and routes of a foreign model."""
    tokens = with_loops(text(SAMPLES, LENGTH, torch.Generator().manual_seed(seed)))
    scores = small_moe.scores_of(network, tokens)
    noise = torch.randn(scores.shape, generator=torch.Generator().manual_seed(3))
    foreign = top_k(scores.flip(0).roll(3, -1) + scores.std() * noise, network.shape)
    return scores, flipped(scores, network.shape), foreign


def least_dose(fault: Fault, shape: Shape, routes: tuple[Tensor, Tensor, Tensor]) -> int | None:
    """Return the least dose that raises, by bisection; None: the highest does not."""
    scores, right, foreign = routes
    assert fault.most is not None, "it has a dose"

    def raises(dose: int) -> bool:
        return outcome(compared(shape, scores, fault.plant(right, foreign, dose))).says == "raises"

    low, high = 0, fault.most
    if not raises(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if raises(middle) else (middle, high)
    return high


def show_faults(networks: Sequence[Network]) -> None:
    """Print what a session says of each fault, where all layers are compared, and the least dose that raises."""
    print("| fault | tracker | " + " | ".join(network.shape.name for network in networks) + " |")
    print("|" + " --- |" * (2 + len(networks)))
    routes = [routes_to_damage(network) for network in networks]
    count: Counter[str] = Counter()
    rotating: Counter[str] = Counter()
    for fault in FAULTS:
        cells = []
        for network, (scores, right, foreign) in zip(networks, routes):
            shape, wrong = network.shape, fault.plant(right, foreign, fault.dose)
            says = outcome(compared(shape, scores, wrong)).says
            count[shape.name] += says == "raises"
            rotating[shape.name] += outcome(compared(shape, scores, wrong, microbatches=8)).says == "raises"
            dose = "" if fault.most is None else f" ({least_dose(fault, shape, (scores, right, foreign)) or 'never'})"
            cells.append(f"{says or 'nothing'}{dose}")
        print(f"| {fault.name} | {fault.tracker} | " + " | ".join(cells) + " |", flush=True)
    for name, of_shapes in (("of 21 raise", count), ("of 21 raise, one sample a micro-batch", rotating)):
        print(f"| {name} | | " + " | ".join(str(of_shapes[network.shape.name]) for network in networks) + " |")


# ---- legal sessions
def legal_tokens(seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield kinds of text that a rollout may have."""
    plain = text(SAMPLES, LENGTH, torch.Generator().manual_seed(seed))
    yield "text", plain
    yield "loops", with_loops(plain)
    tokens = plain.clone()
    tokens[:, 100:] = tokens[:, 100:101]
    yield "answers of one token", tokens
    tokens = plain.clone()
    tokens[:, 128:384] = 3
    yield "placeholders", tokens
    tokens = plain.clone()
    tokens[:, :200] = tokens[:1, :200]
    yield "shared prompt", tokens
    tokens = plain.clone()
    for sample in range(SAMPLES):
        tokens[sample, 32:] = tokens[sample, 32 + torch.arange(LENGTH - 32) % (4 + 5 * sample)]
    yield "loops to the end", tokens
    yield "a tiny batch", plain[:2, :48]


def legal_engines(network: Network, seed: int) -> dict[str, Network]:
    """Return the weights with which an engine may have routed."""
    short = text(4, 192, torch.Generator().manual_seed(77 + seed))
    engines = {name: small_moe.changed(network, change) for name, change in small_moe.ENGINES.items()}
    engines |= {f"older, KL {kl:g}": small_moe.aged(network, short, kl, seed) for kl in (0.01, 0.03, 0.1, 0.2)}
    engines["KL 0.1 and int4"] = small_moe.changed(engines["older, KL 0.1"], small_moe.ENGINES["int4"])
    engines["dropout 0.1"] = small_moe.changed(network, lambda weight: weight, 0.1)
    return engines


BEYOND = ("int3", "older, KL 0.2", "dropout 0.1")
"""Engines further away than int4 weights and a KL of 0.1."""
AGES = (1, 10, 50)
"""Steps of training, at a low rate, by which an engine's weights are older."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "8 micro-batches": {"microbatches": 8},
    "TP4 with sequence parallelism": {"ranks": 4},
    "CP4": {"ranks": 4, "zigzag": True},
}


def is_beyond(engine: str, shape: Shape) -> bool:
    """Return if an engine is further away than int4 weights and a KL of 0.1."""
    # The bias of a sigmoid router moves in every step of training: one step is a KL of 0.3 here.
    return engine in BEYOND or (shape.sigmoid and engine.endswith("steps"))


def legal_sessions(
    network: Network,
    seed: int,
    older: Mapping[int, Network] | None = None,
    layouts: Sequence[str] = tuple(LAYOUTS),
) -> Iterator[tuple[str, str, str, Outcome]]:
    """Yield (engine, text, layout, outcome) of legal sessions.

    Args:
        older: steps -> the network before so many steps of training.
        layouts: names of LAYOUTS.
    """
    shape, engines = network.shape, legal_engines(network, seed)
    engines |= {f"older, {steps} steps": each for steps, each in (older or {}).items()}
    for of_text, tokens in legal_tokens(seed):
        scores = small_moe.scores_of(network, tokens)
        routes = {name: top_k(small_moe.scores_of(each, tokens), shape) for name, each in engines.items()}
        half, prefix = tokens.shape[0] // 2, tokens.shape[1] // 2
        for name in ("older, KL 0.1", "older, KL 0.03"):
            routes[f"half of the samples {name}"] = torch.cat([routes["bf16"][:, :half], routes[name][:, half:]], 1)
            routes[f"prefixes {name}"] = torch.cat([routes[name][:, :, :prefix], routes["bf16"][:, :, prefix:]], 2)
        for name, replayed in routes.items():
            for layout in layouts:
                yield name, of_text, layout, outcome(compared(shape, scores, replayed, **LAYOUTS[layout]))


def show_legal(shapes: Sequence[Shape], seeds: int) -> None:
    """Print for each model and engine how many sessions stop, and the largest evidence; then each session that stops."""
    total: Counter[str] = Counter()
    for seed in range(seeds):
        for shape in shapes:
            network, older = small_moe.trained_further(small_moe.trained(shape, seed, STEPS), AGES, seed)
            found: dict[str, list[Outcome]] = {}
            for engine, of_text, layout, each in legal_sessions(network, seed, older):
                found.setdefault(engine, []).append(each)
                where = "beyond" if is_beyond(engine, shape) else "within"
                total[where] += 1
                total[f"{where} raises"] += each.says == "raises"
                if each.says == "raises":
                    print(f"RAISES {shape.name}, {engine}, {of_text}, {layout}: {each.text[:160]}", flush=True)
            for engine, outcomes in found.items():
                stop = sum(each.says == "raises" for each in outcomes)
                warn = sum(each.says == "warns" for each in outcomes)
                most, least = max(each.evidence for each in outcomes), min(each.least_layer for each in outcomes)
                row = [shape.name, engine, seed, len(outcomes), stop, warn, f"{most:.0f}", f"{least:.2f}"]
                print(f"| {' | '.join(map(str, row))} |", flush=True)
        print(dict(total), f"evidence that raises: {EVIDENCE:.0f}", flush=True)


def main(what: str = "faults", seeds: int = 1, names: Sequence[str] = ()) -> None:
    torch.set_num_threads(1)
    shapes: Sequence[Shape] = small_moe.SHAPES if what == "faults" else (*small_moe.SHAPES, *small_moe.OTHERS)
    shapes = [shape for shape in shapes if not names or shape.name in names]
    if what == "faults":
        show_faults([small_moe.trained(shape, 0, STEPS) for shape in shapes])
    else:
        show_legal(shapes, seeds)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(arguments[0] if arguments else "faults", int(arguments[1]) if arguments[1:] else 1, arguments[2:])
