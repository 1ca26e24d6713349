"""Cost of replay in a training step: forward, backward and optimizer of whole models, with and without.

A step with a session opens it, runs Megatron's schedule, closes it (where it verifies) and, for record, makes the trace.
A replay finds its rows by the tokens of each forward, as a user's does; the trace's index is made in a step of the warm-up.
The learning rate is 0, so that all steps do the same work with the same routes, and their losses must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import megatron_router_replay as mrr
from benchmarks.measure import ratio, rounded, rounds, table, verdict
from megatron_router_replay.testing import ParallelSizes
from tests.support.schedule import random_microbatches, run_schedule
from tests.support.tiny_gpt import build_tiny_gpt, tiny_gpt_config
from tests.support.workers import GlooWorkers

TITLE = "Step: whole training steps, as ratios to a step without"
KINDS = ["off", "record", "replay", "freeze"]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPT and its batch."""

    name: str
    hidden: int
    layers: int
    experts: int
    topk: int
    vocab: int
    batch: int
    sequence: int
    microbatches: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how it is run, and how often."""

    model: Model
    repeats: int
    runs: int = 1
    """In new processes, each of `repeats` rounds: processes differ by up to 0.04 of a tiny step."""
    pp_size: int = 1
    recompute: bool = False


TINY = Model(name="tiny", hidden=64, layers=4, experts=8, topk=2, vocab=320, batch=2, sequence=64, microbatches=4)
LARGER = Model(
    name="larger", hidden=512, layers=8, experts=32, topk=4, vocab=1024, batch=1, sequence=512, microbatches=2
)
MANY_EXPERTS = Model(
    name="many experts", hidden=256, layers=4, experts=128, topk=8, vocab=1024, batch=1, sequence=1024, microbatches=2
)
CASES = [
    Case(model=TINY, repeats=13, runs=8),
    Case(model=TINY, repeats=13, runs=8, recompute=True),
    Case(model=TINY, repeats=13, runs=8, pp_size=2),
    Case(model=TINY, repeats=13, runs=8, pp_size=2, recompute=True),
    Case(model=LARGER, repeats=15),
    Case(model=LARGER, repeats=15, recompute=True),
    Case(model=LARGER, repeats=15, pp_size=2),
    Case(model=MANY_EXPERTS, repeats=25),
    Case(model=MANY_EXPERTS, repeats=15, recompute=True),
]


class Trainer:
    """A model of a case on this rank, its batch, an optimizer, and a trace of the batch."""

    def __init__(self, case: Case) -> None:
        model = case.model
        self.layout = ParallelSizes(pp_size=case.pp_size)
        self.layout.initialize()
        config = tiny_gpt_config(
            self.layout,
            num_layers=model.layers,
            hidden_size=model.hidden,
            num_attention_heads=model.hidden // 16 if model.hidden < 128 else model.hidden // 64,
            kv_channels=16 if model.hidden < 128 else 64,
            ffn_hidden_size=2 * model.hidden,
            moe_ffn_hidden_size=model.hidden // 4,
            num_moe_experts=model.experts,
            moe_router_topk=model.topk,
            deterministic_mode=False,
            **(FULL if case.recompute else {}),
        )
        self.chunks = build_tiny_gpt(config, self.layout, vocab_size=model.vocab)
        self.microbatches = random_microbatches(
            model.microbatches, batch_size=model.batch, sequence_length=model.sequence, vocab_size=model.vocab
        )
        parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
        self.losses: dict[str, list[float]] = {}
        # Stages wait for each other, which costs no processor time.
        self.clock = time.perf_counter if case.pp_size > 1 else time.thread_time
        self.inner: dict[str, list[float]] = {kind: [] for kind in KINDS}
        with torch.no_grad(), mrr.record(self.chunks, padding_token_ids=[]) as recording:
            self.run(forward_only=True)
        self.trace = recording.trace()

    def run(self, **options: Any) -> list[float]:
        """Run the schedule; return the losses on the last stage."""
        return [float(loss) for loss in run_schedule(self.chunks, self.layout, self.microbatches, **options)]

    def step(self, kind: str) -> None:
        """Run one training step; note the time of the schedule and the optimizer alone."""
        with self.session(kind) as session:
            start = self.clock()
            self.losses[kind] = self.run()
            self.optimizer.step()
            self.inner[kind].append(rounded(self.clock() - start))
        if kind == "record":
            session.trace()

    def session(self, kind: str) -> Any:
        """Return a session of a kind of KINDS, to be entered."""
        if kind == "record":
            return mrr.record(self.chunks, padding_token_ids=[])
        if kind == "replay":
            return mrr.replay(self.chunks, self.trace)
        return mrr.freeze_recompute(self.chunks) if kind == "freeze" else nullcontext()


def time_steps(case: Case) -> dict[str, Any]:
    """Run on each rank: seconds of the steps of every kind."""
    trainer = Trainer(case)
    prepare: dict[str, Callable[[], object]] = dict.fromkeys(KINDS, dist.barrier)
    seconds = rounds(
        {kind: partial(trainer.step, kind) for kind in KINDS},
        repeats=case.repeats,
        warm_up=2,
        prepare=prepare if case.pp_size > 1 else None,
        clock=trainer.clock,
    )
    losses = list(trainer.losses.values())
    assert all(of_kind == losses[0] for of_kind in losses), trainer.losses
    return {
        "seconds": seconds,
        "inner_seconds": {kind: inner[-case.repeats :] for kind, inner in trainer.inner.items()},
        "parameters": sum(parameter.numel() for chunk in trainer.chunks for parameter in chunk.parameters()),
    }


def measure(cases: list[Case] = CASES) -> list[dict[str, Any]]:
    """Time every case; ranks and peaks in processes of their own."""
    raw = []
    for case in cases:
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        inner: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(case.runs):
            with GlooWorkers(case.pp_size) as workers:
                ranks = workers.run(time_steps, case, timeout_s=900.0)
            for which, gathered in (("seconds", seconds), ("inner_seconds", inner)):
                for kind in KINDS:
                    # A step ends when its slowest rank does.
                    gathered[kind] += [max(of_ranks) for of_ranks in zip(*(rank[which][kind] for rank in ranks))]
        parameters = sum(rank["parameters"] for rank in ranks)
        raw.append({**asdict(case), "parameters": parameters, "seconds": seconds, "inner_seconds": inner})
    return raw


def render(raw: list[dict[str, Any]]) -> str:
    """Return the table, and the targets under it."""
    rows, targets, models = [], [], {}
    for case in raw:
        seconds, model = case["seconds"], case["model"]
        models[model["name"]] = model | {"parameters": case["parameters"]}
        how = (
            f"{model['name']}{', PP2' if case['pp_size'] == 2 else ''}{', full recompute' if case['recompute'] else ''}"
        )
        ms = sorted(seconds["off"])[len(seconds["off"]) // 2] * 1000
        rows.append([how, f"{ms:.0f}", *(ratio(case["inner_seconds"], kind, "off") for kind in KINDS[1:])])
        rows[-1] += [f"{ratio(seconds, kind, 'off').median:.3f}" for kind in KINDS[1:]]
        targets.append(verdict(f"replay / off, {how}", ratio(case["inner_seconds"], "replay", "off"), 1.00))
    described = [
        f"{m['name']}: hidden {m['hidden']}, {m['layers']} layers, {m['experts']} experts, top-{m['topk']}, "
        f"{m['parameters'] / 1e6:.1f} M parameters, {m['microbatches']} x {m['batch']} x {m['sequence']} tokens"
        for m in models.values()
    ]
    head = ["model", "off, ms", *(f"{kind} / off" for kind in KINDS[1:])]
    head += [f"{kind}, opened and closed" for kind in KINDS[1:]]
    return "\n".join(
        [
            f"{'; '.join(described)}; fp32, SGD with momentum. A step is all micro-batches and the optimizer. *Opened and "
            "closed*: with a session for this step alone, which finds and checks the routers and verifies at the end; record "
            "also makes its trace. Median of the ratios within a round and its 95% confidence interval; processor time of "
            "the one thread, under PP2 the time of the slower of two processes. The tiny model's rounds are of several runs "
            "in new processes, which differ by up to 0.04.",
            "",
            table(head, rows),
            "",
            "Targets:",
            "",
            *targets,
        ]
    )
