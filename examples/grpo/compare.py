"""off, r2 and r3 from the same start, and what the mismatch is when nothing moves (lr = 0): table, JSON, picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.grpo.loop import Metrics, train
from examples.grpo.plot import plot_runs
from examples.grpo.settings import REPLAYS, Settings
from megatron_router_replay.testing import run_ranks

LAST = 5
FROZEN_STEPS = 20
TIMEOUT_S = 3600.0

ROWS = (
    # (metric, label, format, over the last steps only)
    ("reward", f"reward, last {LAST} steps", "{:.3f}", True),
    ("rollout_kl", "KL(rollout || trainer), k3, nats", "{:.2e}", False),
    ("rollout_gap", "|log-prob difference|, nats", "{:.4f}", False),
    ("ratio_above_2", "tokens with ratio > 2", "{:.3%}", False),
    ("router_agreement", "router agreement, live trainer", "{:.2%}", False),
    ("router_replay/replayed_share", "tokens replayed (last ones have no route)", "{:.1%}", False),
    ("clipped_share", "tokens clipped", "{:.2%}", False),
    ("grad_norm", "gradient norm", "{:.2f}", False),
    ("seconds/update", "seconds of updates a step", "{:.2f}", False),
)


def compare(out: Path, *, steps: int, updates: int, lr: float) -> dict[str, Any]:
    """Run everything, write out/summary.json and out/curves.png, print the table; return the summary."""
    base = Settings(out=out, steps=steps, updates=updates, lr=lr, progress=True)
    runs: dict[str, list[Metrics]] = {}
    frozen: dict[str, list[Metrics]] = {}

    def run(name: str, settings: Settings) -> list[Metrics]:
        settings = replace(settings, out=out / name)
        settings.out.mkdir(parents=True, exist_ok=True)
        metrics: list[Metrics] = run_ranks(base.layout.world_size, train, settings, timeout_s=TIMEOUT_S)[0]
        return metrics

    for mode in REPLAYS:
        runs[mode] = run(mode, replace(base, replay=mode))
    for mode in ("off", "r3"):
        still = replace(base, replay=mode, lr=0.0, steps=FROZEN_STEPS, updates=1, kl_coef=0.0)
        frozen[mode] = run(f"{mode}_lr0", still)
    summary = summarise(runs, frozen)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    title = f"GRPO, tiny Qwen3-MoE: rollout in bf16, training in fp32, {updates} gradient steps a rollout"
    plot_runs(runs, out / "curves.png", title=title)
    print_summary(summary, Console())
    return summary


def summarise(runs: dict[str, list[Metrics]], frozen: dict[str, list[Metrics]]) -> dict[str, Any]:
    """Return the table's numbers by run, and the mean k3 KL at lr = 0 with the ratio of both."""
    table = {
        name: {metric: mean(steps[-LAST:] if last else steps, metric) for metric, _, _, last in ROWS}
        for name, steps in runs.items()
    }
    kl = {name: sum(step["rollout_kl"] for step in steps) / len(steps) for name, steps in frozen.items()}
    return {"runs": table, "frozen": {"steps": FROZEN_STEPS, "kl": kl, "ratio": kl["off"] / kl["r3"]}}


def mean(steps: Sequence[Metrics], metric: str) -> float | None:
    """Return the mean over the steps that have the metric; None if none has."""
    values = [step[metric] for step in steps if metric in step]
    return sum(values) / len(values) if values else None


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """Print what `summarise` returned."""
    table = Table(title="mean over all steps, unless said otherwise", title_justify="left")
    table.add_column("")
    for name in summary["runs"]:
        table.add_column(name, justify="right")
    for metric, label, style, _ in ROWS:
        values = [of_run[metric] for of_run in summary["runs"].values()]
        table.add_row(label, *("-" if value is None else style.format(value) for value in values))
    console.print(table)
    frozen = summary["frozen"]
    console.print(
        f"lr = 0, {frozen['steps']} steps: KL(rollout || trainer) {frozen['kl']['off']:.2e} nats off, "
        f"{frozen['kl']['r3']:.2e} with r3: {frozen['ratio']:.0f} times smaller"
    )
