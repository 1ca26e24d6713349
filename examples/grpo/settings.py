"""What a run is made of; every field is an option of `python -m examples.grpo train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from examples.grpo.task import ClassTask
from megatron_router_replay.testing import ParallelSizes

REPLAYS = ("off", "r2", "r3")
ENGINES = ("transformers", "vllm")
TRANSPORTS = ("local", "distributed", "ray")
EXPERTS = ("native", "contiguous", "batched")
RECOMPUTES = ("none", "full", "block", "selective")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One training run.

    Args:
        out: folder of metrics.jsonl, checkpoints and the weights that the engine reads.
        replay: "off"; "r2", the routes of the trainer's own old-policy forward; "r3", the rollout engine's.
        fill_missing: with r3, tokens without an engine's route take r2's; else the live router decides them.
        engine: "transformers", embedded, or "vllm", a server of its own.
        experts: of the embedded engine, "native", "contiguous" or "batched"; see `TransformersEngine`.
        transport: how routes reach the training ranks: "local", handed over by rank 0; "distributed" or "ray", sent by
            rollout workers, processes of their own; see `examples.grpo.routes`.
        rollout_workers: that share the prompts of a rollout. "local" has no workers and takes the shares in turn, so
            the same number of shares gives the same run under every transport.
        steps: rollouts; each is trained on in `updates` gradient steps.
        prompts, per_prompt: prompts a rollout and answers to each.
        per_microbatch: samples packed into one row of a micro-batch.
        lr: of Adam. 0 measures mismatch alone: the weights never move.
        clip, kl_coef: PPO's clip, and the weight of the KL to the initial policy.
        recompute: of activations; "block" recomputes the first layer of each chunk only.
        checkpoint_every: steps between checkpoints, 0: none. resume: continue from the last one.
        save_routes: a file that the last rollout's routes are written to, all rows and layers, for `mrr.load_trace`.
    """

    out: Path
    replay: str = "r3"
    fill_missing: bool = False
    engine: str = "transformers"
    experts: str = "native"
    transport: str = "local"
    rollout_workers: int = 1
    layout: ParallelSizes = field(default_factory=ParallelSizes)
    task: ClassTask = field(default_factory=ClassTask)
    steps: int = 30
    prompts: int = 8
    per_prompt: int = 8
    updates: int = 4
    per_microbatch: int = 8
    lr: float = 2e-3
    clip: float = 0.2
    kl_coef: float = 1e-3
    clip_grad: float = 1.0
    recompute: str = "none"
    checkpoint_every: int = 0
    resume: bool = False
    save_routes: Path | None = None
    seed: int = 0
    progress: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("replay", self.replay, REPLAYS),
            ("engine", self.engine, ENGINES),
            ("experts", self.experts, EXPERTS),
            ("transport", self.transport, TRANSPORTS),
            ("recompute", self.recompute, RECOMPUTES),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(allowed)}.")
        if not 1 <= self.rollout_workers <= self.prompts:
            raise ValueError(
                f"rollout_workers={self.rollout_workers} must lie in 1..{self.prompts}: each takes a prompt or more."
            )
        if (self.prompts * self.per_prompt) % self.updates:
            raise ValueError(
                f"{self.prompts} prompts x {self.per_prompt} answers do not divide into {self.updates} gradient steps."
            )
        if self.fill_missing and self.replay != "r3":
            raise ValueError(f"fill_missing fills the engine's routes: it needs replay='r3', got {self.replay!r}.")

    @property
    def num_samples(self) -> int:
        """Samples of a rollout."""
        return self.prompts * self.per_prompt

    def prompts_of(self, worker: int) -> range:
        """Return the prompts of a rollout worker."""
        first, behind = (self.prompts * number // self.rollout_workers for number in (worker, worker + 1))
        return range(first, behind)

    def samples_of(self, worker: int) -> range:
        """Return the samples of a rollout worker."""
        prompts = self.prompts_of(worker)
        return range(prompts.start * self.per_prompt, prompts.stop * self.per_prompt)

    def gradient_steps(self) -> list[list[int]]:
        """Return the samples of each gradient step; the same for every rollout and layout."""
        order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(self.seed))
        return [samples.tolist() for samples in order.chunk(self.updates)]

    def partition(self, dp_size: int) -> list[list[int]]:
        """Return the samples that each data-parallel rank trains on, in increasing order: its part of every step."""
        steps = self.gradient_steps()
        return [sorted(sample for samples in steps for sample in samples[rank::dp_size]) for rank in range(dp_size)]
