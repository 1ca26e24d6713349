"""Results: JSON files in this folder, and the tables of docs/effect.md."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from examples.effect.arms import ARMS

FOLDER = Path(__file__).parent / "results"
LAST = 10
"""Steps at the end of a run that its final reward is the mean of."""

Steps = Sequence[Mapping[str, float]]


def save(name: str, results: Mapping[str, Any]) -> Path:
    """Write results/NAME.json, numbers with five digits."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(_short(results)) + "\n")
    return path


def load(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def columns(steps: Steps, names: Sequence[str]) -> dict[str, list[float]]:
    """Return the values of each metric by step; of a metric that some steps lack, the values of the other steps."""
    return {name: [step[name] for step in steps if name in step] for name in names}


def removed(gap: Mapping[str, Sequence[float]], floor: str = "kl_floor") -> list[float]:
    """Return for every step which share of the k3 KL that routing causes replay removes: (live - R3) / (live - floor)."""
    return [(live - r3) / (live - left) for live, r3, left in zip(gap["kl_live"], gap["kl"], gap[floor], strict=True)]


def gap_table(gaps: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    rows = ["| engine | steps | own routing | replay | equal routes |", "| --- " * 5 + "|"]
    for name, gap in gaps.items():
        kl = " | ".join(f"{fmean(gap[of]):.2e}" for of in ("kl_live", "kl", "kl_floor"))
        rows.append(f"| {name} | {len(gap['kl'])} | {kl} |")
    return "\n".join(rows)


def freeze_table(runs: Mapping[str, Any]) -> str:
    rows = ["| | recomputed decisions that flipped | gradient error | routers' gradient error |", "| --- " * 4 + "|"]
    for name, run in runs.items():
        steps = run["steps"]
        decisions = len(steps["flips"]) * run["decisions"]
        errors = " | ".join(f"{100 * fmean(steps[of]):.2f} %" for of in ("error", "router_error"))
        rows.append(f"| {name} | {sum(steps['flips']):,} of {decisions:,} | {errors} |")
    return "\n".join(rows)


RUNS = {
    "off": "no replay",
    "r2": "R2",
    "r3": "R3",
    "r3_shifted": "R3, shifted by a row",
    "r3_third_lost": "R3, a third of the routes lost",
}
"""Arm -> how the page calls it."""


def rl_table(arms: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]) -> str:
    rows = [
        f"| run | reward of the last {LAST} steps, by seed: mean (worst to best of five) | k3 KL | tokens clipped |",
        "| --- " * 4 + "|",
    ]
    for arm in ARMS:
        of_seeds = arms[arm]
        rewards = [fmean(seed[-LAST:]) for seed in of_seeds["reward"]]
        kl, clipped = (fmean(fmean(seed) for seed in of_seeds[name]) for name in ("kl", "clipped_share"))
        reward = f"{fmean(rewards):.2f} ({min(rewards):.2f} to {max(rewards):.2f})"
        rows.append(f"| {RUNS[arm]} | {reward} | {kl:.1e} | {100 * clipped:.1f} % |")
    return "\n".join(rows)


def _short(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_short(each) for each in value]
    if isinstance(value, float):
        assert math.isfinite(value), "a result is not a number"
        return float(f"{value:.5g}")
    return value
