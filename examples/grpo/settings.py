"""What a run is made of; every field is an option of `python -m examples.grpo train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from examples.grpo.task import ClassTask
from megatron_router_replay.testing import ParallelLayout

REPLAYS = ("off", "r2", "r3")
ENGINES = ("transformers", "vllm")
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
        steps: rollouts; each is trained on in `updates` gradient steps.
        prompts, per_prompt: prompts a rollout and answers to each.
        per_microbatch: samples packed into one row of a micro-batch.
        lr: of Adam. 0 measures mismatch alone: the weights never move.
        clip, kl_coef: PPO's clip, and the weight of the KL to the initial policy.
        recompute: of activations; "block" recomputes the first layer of each chunk only.
        checkpoint_every: steps between checkpoints, 0: none. resume: continue from the last one.
    """

    out: Path
    replay: str = "r3"
    fill_missing: bool = False
    engine: str = "transformers"
    experts: str = "native"
    layout: ParallelLayout = field(default_factory=ParallelLayout)
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
    seed: int = 0
    progress: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("replay", self.replay, REPLAYS),
            ("engine", self.engine, ENGINES),
            ("experts", self.experts, EXPERTS),
            ("recompute", self.recompute, RECOMPUTES),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(allowed)}.")
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
