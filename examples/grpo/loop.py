"""One training run, the same code on every rank: roll out, measure, train, log.

Rank 0 rolls out and gives every rank all samples, which is right for one machine. On many, send each rank the routes of its
own tokens and layers only; `megatron_router_replay.transport` does that.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import megatron_router_replay as mrr
from examples.grpo.batch import RolloutBatch
from examples.grpo.loss import group_advantages, k3_kl
from examples.grpo.rollout import Engine, Sample, TransformersEngine
from examples.grpo.settings import Settings
from examples.grpo.task import EOS
from examples.grpo.trainer import Trainer
from examples.grpo.weights import CONFIG, gather_hf_weights, random_hf_weights, save_hf_checkpoint

Metrics = dict[str, float]
T = TypeVar("T")


def train(settings: Settings) -> list[Metrics]:
    """Run the training loop on this rank and return every step's metrics (on rank 0; nothing elsewhere)."""
    settings.layout.initialize(seed=settings.seed)
    is_first = dist.get_rank() == 0
    initial = settings.out / "initial"
    if is_first:
        save_hf_checkpoint(initial, random_hf_weights(settings.seed))
    dist.barrier()
    trainer = Trainer(settings, initial)
    start = load_checkpoint(trainer, settings.out) if settings.resume else 0
    logger = MetricsLog(settings, start) if is_first else None
    engine = make_engine(settings) if is_first else None
    try:
        for step in range(start, settings.steps):
            metrics = one_step(trainer, engine, step)
            if logger is not None:
                logger.write({"step": step, **metrics})
            if settings.checkpoint_every and (step + 1) % settings.checkpoint_every == 0:
                save_checkpoint(trainer, settings.out, step + 1)
    finally:
        if engine is not None:
            engine.close()
        if logger is not None:
            logger.close()
    return [] if logger is None else logger.lines


def one_step(trainer: Trainer, engine: Engine | None, step: int) -> Metrics:
    """Roll out with the current weights, then train on it.

    Args:
        engine: on rank 0.

    Raises:
        RouterReplayError: the engine's routes are damaged; on every rank, before anything is trained.
    """
    settings = trainer.settings
    seconds: dict[str, float] = defaultdict(float)
    with timed(seconds, "sync"):
        weights = gather_hf_weights(trainer.models, CONFIG)
        from_first(lambda: engine.load_weights(weights) if engine is not None else None)
    with timed(seconds, "rollout"):
        samples: list[Sample] = from_first(lambda: roll_out(settings, engine, step))
    rewards = torch.tensor([sample.reward for sample in samples])
    batch = RolloutBatch(samples, group_advantages(rewards, [sample.group for sample in samples]))
    rollout_trace = mrr.concat_traces([sample.trace for sample in samples])

    with timed(seconds, "old_logprobs"):
        batch.old_logprobs, recorded = trainer.record(batch)
        trace = choose_trace(settings, rollout_trace, recorded)
        if settings.replay == "r3":
            assert trace is not None, "r3 replays"
            batch.old_logprobs = trainer.logprobs(batch, trace)
        if settings.kl_coef:
            batch.ref_logprobs = trainer.reference_logprobs(batch)
    with timed(seconds, "update"):
        metrics = trainer.update(batch, trace)
    metrics |= mismatch(batch) | {
        "reward": float(rewards.mean()),
        "router_disagreement": disagreement(rollout_trace, recorded),
        "tokens": float(batch.loss_mask.sum()),
    }
    return metrics | {f"seconds/{name}": value for name, value in seconds.items()}


def roll_out(settings: Settings, engine: Engine | None, step: int) -> list[Sample]:
    """Return this step's samples with their rewards."""
    assert engine is not None, "rank 0 has the engine"
    seed = settings.seed * 1_000_003 + step
    prompts = settings.task.prompts(settings.prompts, seed=seed)
    samples = engine.generate(
        prompts, per_prompt=settings.per_prompt, max_new_tokens=settings.task.max_new_tokens, seed=seed
    )
    return [
        replace(sample, reward=settings.task.reward(prompts[sample.group], sample.token_ids[sample.generated]))
        for sample in samples
    ]


def choose_trace(settings: Settings, rollout: mrr.RoutingTrace, recorded: mrr.RoutingTrace) -> mrr.RoutingTrace | None:
    """Return the routes to train with; None: the live router's."""
    if settings.replay == "off":
        return None
    if settings.replay == "r2":
        return recorded
    return fill_missing(rollout, recorded) if settings.fill_missing else rollout


def fill_missing(rollout: mrr.RoutingTrace, recorded: mrr.RoutingTrace) -> mrr.RoutingTrace:
    """Return R3 where the engine sent a route, R2 where it sent none (the last token of each sample, say)."""
    has_route = rollout.replay_mask
    return mrr.RoutingTrace(
        topk_indices=torch.where(has_route.view(-1, 1, 1), rollout.topk_indices, recorded.topk_indices),
        layer_numbers=rollout.layer_numbers,
        num_experts=rollout.num_experts,
        replay_mask=has_route | recorded.replay_mask,
        token_ids=rollout.token_ids,
        sequence_lengths=rollout.sequence_lengths,
    )


def mismatch(batch: RolloutBatch) -> Metrics:
    """Compare rollout and trainer on the generated tokens, before the first gradient step.

    Returns:
        rollout_kl: mean k3 estimate of KL(rollout || trainer), nats. rollout_gap: mean |difference| of log-probs, nats.
        ratio_above_2: share of tokens that one of the two finds more than twice as likely as the other.
    """
    trained = batch.loss_mask.bool()
    rollout, trainer = batch.rollout_logprobs[trained], batch.old_logprobs[trained]
    gap = (trainer - rollout).abs()
    return {
        "rollout_kl": float(k3_kl(rollout, trainer).mean()),
        "rollout_gap": float(gap.mean()),
        "ratio_above_2": float((gap.exp() > 2).float().mean()),
    }


def disagreement(rollout: mrr.RoutingTrace, recorded: mrr.RoutingTrace) -> float:
    """Return the share of (token, layer) decisions for which the live trainer chose another set of experts."""
    routed = rollout.replay_mask & recorded.replay_mask
    ours, theirs = recorded.topk_indices[routed].sort(dim=2).values, rollout.topk_indices[routed].sort(dim=2).values
    return float((ours != theirs).any(dim=2).float().mean())


def make_engine(settings: Settings) -> Engine:
    """Return rank 0's engine."""
    if settings.engine == "vllm":
        from examples.grpo.vllm_engine import VllmEngine

        return VllmEngine(settings.out / "engine", eos_token_id=EOS)
    return TransformersEngine(settings.out / "initial", eos_token_id=EOS, experts=settings.experts)


def from_first(action: Callable[[], T]) -> T:
    """Run `action()` on rank 0 and return its result on every rank; what it raises is raised on every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def save_checkpoint(trainer: Trainer, out: Path, step: int) -> None:
    """Write this rank's state; `last.json` names the step once every rank has written."""
    folder = out / "checkpoints" / f"step_{step:05d}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(trainer.state_dict(), folder / f"rank_{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (out / "new.json").write_text(json.dumps({"step": step, "layout": _layout(trainer)}))
        (out / "new.json").replace(out / "last.json")


def load_checkpoint(trainer: Trainer, out: Path) -> int:
    """Load the last complete checkpoint and return the number of steps done; 0 where there is none."""
    if not (out / "last.json").exists():
        return 0
    last = json.loads((out / "last.json").read_text())
    if last["layout"] != _layout(trainer):
        raise ValueError(f"{out}: its checkpoint is of {last['layout']}, this run is {_layout(trainer)}.")
    folder = out / "checkpoints" / f"step_{last['step']:05d}"
    trainer.load_state_dict(torch.load(folder / f"rank_{dist.get_rank()}.pt"))
    return int(last["step"])


def _layout(trainer: Trainer) -> str:
    return f"{trainer.settings.layout} on {dist.get_world_size()} processes"


class MetricsLog:
    """metrics.jsonl, one line a step, and the progress bar; a resumed run drops lines of steps it repeats."""

    def __init__(self, settings: Settings, start: int) -> None:
        self.path = settings.out / "metrics.jsonl"
        self.lines: list[Metrics] = []
        if start:
            self.lines = [line for line in read_metrics(self.path) if line["step"] < start]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        self.progress = _progress(settings, start) if settings.progress else None

    def write(self, metrics: Metrics) -> None:
        """Append one step."""
        self.lines.append(metrics)
        with self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        if self.progress is not None:
            self.progress.update(
                self.progress.task_ids[0],
                advance=1,
                description=f"reward {metrics['reward']:.3f}  KL {metrics['rollout_kl']:.2e}",
            )

    def close(self) -> None:
        """End the progress bar."""
        if self.progress is not None:
            self.progress.stop()


def _progress(settings: Settings, start: int) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(f"{settings.replay:>3}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, TextColumn("{task.description}"))
    progress.add_task("starting", total=settings.steps, completed=start)
    progress.start()
    return progress


def read_metrics(path: Path) -> list[Metrics]:
    """Return the lines of a metrics.jsonl; the half line of a killed run is left out."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the block's wall time to seconds[name]."""
    start = time.perf_counter()
    yield
    seconds[name] += time.perf_counter() - start
