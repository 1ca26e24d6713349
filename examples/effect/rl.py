"""One training run of one arm, on this process: the pieces of examples/grpo.

Two things differ from `examples.grpo.loop`. The engine has int8 weights. And the ratio of PPO is taken to the engine's
log-probs, as many trainers do to save a forward (verl calls it bypass mode, slime use_rollout_logprobs), so that what the
engine and the trainer disagree on reaches the loss.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import megatron_router_replay as mrr
from examples.effect.arms import ARMS
from examples.effect.experts import use_batched_experts
from examples.effect.flat_adam import FlatAdam
from examples.effect.floor import forced_logprobs
from examples.effect.policy import POLICY, current_weights, initial_weights, int8_rounded
from examples.grpo.batch import RolloutBatch
from examples.grpo.loop import agreement
from examples.grpo.loss import group_advantages, k3_kl
from examples.grpo.rollout import Engine, TransformersEngine, roll_out
from examples.grpo.settings import Settings
from examples.grpo.task import EOS, ClassTask
from examples.grpo.trainer import Trainer
from examples.grpo.vllm_engine import VllmEngine
from examples.grpo.weights import save_hf_checkpoint

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Settings of a run.

    Args:
        out: folder for the checkpoint that the run starts from.
        arm: one of `ARMS`.
        engine: "transformers" or "vllm".
        measure_every: steps between measurements of the gap under the arm's routes.
        floors: also measure what of the gap is left at equal routes, see `floors_of`.
    """

    out: Path
    arm: str
    seed: int
    steps: int
    updates: int = 4
    lr: float = 2e-3
    engine: str = "transformers"
    python: str = ""
    measure_every: int = 4
    floors: bool = False

    def settings(self) -> Settings:
        """Return the settings of examples/grpo for this run."""
        return Settings(
            out=self.out,
            task=ClassTask(max_new_tokens=8),
            steps=self.steps,
            prompts=8,
            per_prompt=8,
            updates=self.updates,
            per_microbatch=64 // self.updates,
            lr=self.lr,
            kl_coef=0.0,
            seed=self.seed,
        )


def train(run: Run) -> list[Metrics]:
    """Return the metrics of every step; for a gloo worker."""
    settings = run.settings()
    settings.layout.initialize(seed=run.seed)
    initial = run.out / "initial"
    save_hf_checkpoint(initial, initial_weights(run.seed), POLICY)
    trainer = Trainer(settings, initial)
    use_batched_experts(trainer.models)
    trainer.optimizer = FlatAdam(trainer.chunks, lr=run.lr, clip_grad=settings.clip_grad)
    engine = make_engine(run, initial)
    try:
        return [one_step(run, trainer, engine, step) for step in range(run.steps)]
    finally:
        engine.close()


def make_engine(run: Run, initial: Path) -> Engine:
    if run.engine == "transformers":
        return TransformersEngine(initial, eos_token_id=EOS)
    options = {"python": Path(run.python)} if run.python else {}
    return VllmEngine(run.out / "engine", eos_token_id=EOS, config=POLICY, start_timeout_s=600.0, **options)


def one_step(run: Run, trainer: Trainer, engine: Engine, step: int) -> Metrics:
    """Roll out with the current weights, measure, train."""
    start = time.perf_counter()
    weights = current_weights(trainer.models)
    served = int8_rounded(weights)
    engine.load_weights(served)
    samples = roll_out(trainer.settings, engine, step)
    rewards = torch.tensor([sample.reward for sample in samples])
    batch = RolloutBatch(samples, group_advantages(rewards, [sample.group for sample in samples]))
    routes = mrr.concat_traces([sample.trace for sample in samples])

    live, recorded = trainer.record(batch)
    trace = ARMS[run.arm](routes, recorded, step)
    trained = batch.loss_mask.bool()
    sampled = batch.rollout_logprobs[trained]
    batch.old_logprobs = batch.ref_logprobs = batch.rollout_logprobs  # kl_coef is 0: the reference is in name only
    metrics = {
        "reward": float(rewards.mean()),
        "kl_live": mean_k3(sampled, live[trained]),
        "router_agreement": share(agreement(routes, recorded)),
        # Of the decisions replayed, those that the trainer's own router would make too; a session's is less that by chance.
        "replayed_agreement": 1.0 if trace is None else share(agreement(trace, recorded)),
    }
    if step % run.measure_every == 0:
        replayed = live if trace is None else trainer.logprobs(batch, trace)
        metrics["kl"] = mean_k3(sampled, replayed[trained])
    if run.floors:
        metrics |= floors_of(trainer, batch, weights, served, routes, recorded, live[trained])
    updated = trainer.update(batch, trace)
    metrics |= {name: updated[name] for name in ("clipped_share", "grad_norm")}
    return metrics | {"seconds": time.perf_counter() - start}


def floors_of(
    trainer: Trainer,
    batch: RolloutBatch,
    weights: Mapping[str, Tensor],
    served: Mapping[str, Tensor],
    routes: mrr.RoutingTrace,
    recorded: mrr.RoutingTrace,
    live: Tensor,
) -> Metrics:
    """Return the k3 KL that is left when both sides are forced to the same routes, two ways.

    Returns:
        kl_floor: the engine as it ran against the trainer's fp32 weights in transformers, forced to the engine's routes.
        kl_floor_engine: the engine's weights in bf16, forced to the trainer's routes, against the trainer as it ran.
    """
    trained = batch.loss_mask.bool()
    initial = trainer.settings.out / "initial"

    def forced(dtype: torch.dtype, of: Mapping[str, Tensor], trace: mrr.RoutingTrace) -> Tensor:
        engine = TransformersEngine(initial, eos_token_id=EOS, dtype=dtype)
        engine.load_weights(of)
        experts = trace.topk_indices.long().masked_fill(~trace.replay_mask.view(-1, 1, 1), -1)
        return forced_logprobs(engine.model, batch.samples, [experts[rows] for rows in batch.rows])

    return {
        "kl_floor": mean_k3(batch.rollout_logprobs[trained], forced(torch.float32, weights, routes)),
        "kl_floor_engine": mean_k3(forced(torch.bfloat16, served, recorded), live),
    }


def share(counts: tuple[int, int]) -> float:
    some, of_all = counts
    return some / of_all


def mean_k3(engine: Tensor, trainer: Tensor) -> float:
    """Return the mean k3 estimate of KL(engine || trainer), nats."""
    return float(k3_kl(engine, trainer).mean())
