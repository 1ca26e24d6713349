"""One training run, the same code on every rank: roll out, measure, train, log.

Every rank knows all texts, log-probs and rewards, and the routes of its own samples and layers only; `routes.py` brings them.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_router_replay as mrr
from examples.grpo.batch import RolloutBatch
from examples.grpo.loss import group_advantages, k3_kl
from examples.grpo.routes import Rollouts, make_rollouts
from examples.grpo.settings import Settings
from examples.grpo.trainer import Trainer
from examples.grpo.weights import CONFIG, gather_hf_weights, random_hf_weights, save_hf_checkpoint

Metrics = dict[str, float]


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
    try:
        with make_rollouts(settings, trainer) as rollouts:
            for step in range(start, settings.steps):
                metrics = one_step(trainer, rollouts, step)
                if logger is not None:
                    logger.write({"step": step, **metrics}, note=rollouts.line())
                if settings.checkpoint_every and (step + 1) % settings.checkpoint_every == 0:
                    save_checkpoint(trainer, settings.out, step + 1)
    finally:
        if logger is not None:
            logger.close()
    return [] if logger is None else logger.lines


def one_step(trainer: Trainer, rollouts: Rollouts, step: int) -> Metrics:
    """Roll out with the current weights, then train on it.

    Raises:
        RouterReplayError: the engine's routes are damaged; on every rank, before anything is trained.
    """
    settings = trainer.settings
    seconds: dict[str, float] = defaultdict(float)
    with timed(seconds, "sync"):
        weights = gather_hf_weights(trainer.models, CONFIG)
        rollouts.load_weights(weights)
    with timed(seconds, "rollout"):
        texts = rollouts.generate(step)
    rewards = torch.tensor([text.reward for text in texts])
    batch = RolloutBatch(texts, group_advantages(rewards, [text.group for text in texts]), rollouts.own)

    with timed(seconds, "old_logprobs"):
        batch.old_logprobs, recorded = trainer.record(batch)
        rollout_trace = rollouts.receive()
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
        "router_agreement": trainer.share(*agreement(rollout_trace, recorded)),
        "tokens": float(batch.loss_mask.sum()),
    }
    metrics |= rollouts.times.metrics()
    if settings.save_routes is not None and step == settings.steps - 1:
        save_routes(settings.save_routes, batch, rollout_trace, is_copy=trainer.is_copy)
    return metrics | {f"seconds/{name}": value for name, value in seconds.items()}


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


def agreement(rollout: mrr.RoutingTrace, recorded: mrr.RoutingTrace) -> tuple[int, int]:
    """Return for how many (token, layer) decisions the live trainer chose the same set of experts, and of how many."""
    routed = rollout.replay_mask & recorded.replay_mask
    ours, theirs = recorded.topk_indices[routed].sort(dim=2).values, rollout.topk_indices[routed].sort(dim=2).values
    same = (ours == theirs).all(dim=2)
    return int(same.sum()), same.numel()


def save_routes(path: Path, batch: RolloutBatch, own: mrr.RoutingTrace, *, is_copy: bool) -> None:
    """Write the routes of the whole rollout, all samples and layers; every rank calls it.

    Args:
        own: the routes of this rank's samples and layers.
        is_copy: another rank has the same.
    """
    routed = batch.own_rows[own.replay_mask]
    routes = torch.full((batch.num_rows, own.num_layers, own.topk), -1, dtype=torch.int16)
    routes[routed] = own.topk_indices[own.replay_mask].short()
    part = mrr.RoutingTrace(
        topk_indices=routes,
        layer_numbers=own.layer_numbers,
        num_experts=own.num_experts,
        token_ids=torch.cat([text.token_ids for text in batch.samples]),
        sequence_lengths=[len(rows) for rows in batch.rows],
    )
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(None if is_copy else part, ranks if dist.get_rank() == 0 else None)
    if dist.get_rank() == 0:
        mrr.save_trace(mrr.merge_traces([rank for rank in ranks if rank is not None]), path)


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

    def write(self, metrics: Metrics, *, note: str = "") -> None:
        """Append one step; print the note."""
        self.lines.append(metrics)
        with self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        if self.progress is not None:
            if note:
                self.progress.console.print(note, highlight=False)
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
