"""The SVGs of docs/effect.md: lines with bands, on a linear or a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from examples.effect.results import freeze_table, gap_table, load, positions_table, rl_table

IMAGES = Path(__file__).parents[2] / "docs/images"
WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 590, 52, 246
COLOURS = {"red": ("#c2410c", "#fb923c"), "green": ("#0f766e", "#2dd4bf"), "blue": ("#1d4ed8", "#60a5fa")}
COLOURS |= {"violet": ("#7e22ce", "#c084fc"), "grey": ("#59636e", "#9198a1")}
LABEL_HEIGHT = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line: its values, a band around them (or none), its name, and one of `COLOURS`; a wide one shows beneath others."""

    name: str
    colour: str
    values: Sequence[float]
    band: Sequence[tuple[float, float]] = ()
    wide: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The y axis: from low to high, with marks, logarithmic or not."""

    low: float
    high: float
    marks: Sequence[float]
    logarithmic: bool = False
    percent: bool = False

    def y(self, value: float) -> float:
        """Return where a value is; what is outside is drawn on the edge."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return BOTTOM - (BOTTOM - TOP) * share

    def label(self, mark: float) -> str:
        return f"{mark:.1%}" if self.percent else f"{mark:.0e}" if self.logarithmic else f"{mark:g}"


def draw(title: str, subtitle: str, note: str, axis: Axis, lines: Sequence[Line]) -> str:
    """Return a picture as SVG, each line's name at its end."""
    steps = len(lines[0].values)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        f"<style>{_style()}</style>",
        # The browser chooses between light and dark, the page may show the other: a ground of its own keeps text readable.
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        f'<text x="{LEFT}" y="22" font-weight="600">{title}</text>',
        f'<text x="{LEFT}" y="40" class="small">{subtitle}</text>',
    ]
    for mark in axis.marks:
        y = axis.y(mark)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{axis.label(mark)}</text>')
    for line in lines:
        if line.band:
            lows = [f"{_x(i, steps):.1f},{axis.y(low):.1f}" for i, (low, _) in enumerate(line.band)]
            highs = [f"{_x(i, steps):.1f},{axis.y(high):.1f}" for i, (_, high) in enumerate(line.band)]
            parts.append(f'<polygon class="band {line.colour}" points="{" ".join(lows + highs[::-1])}"/>')
    for line, y in zip(lines, _label_places([axis.y(fmean(line.values[-10:])) for line in lines])):
        points = " ".join(f"{_x(i, steps):.1f},{axis.y(value):.1f}" for i, value in enumerate(line.values))
        parts.append(f'<polyline class="{line.colour}{" wide" if line.wide else ""}" points="{points}"/>')
        parts.append(f'<text class="{line.colour}" x="{RIGHT + 6}" y="{y + 4:.1f}">{line.name}</text>')
    for step in (1, steps // 2, steps):
        x = _x(step - 1, steps)
        parts.append(f'<text class="small" x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text class="small" x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 38}" text-anchor="middle">{note}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _x(step: int, steps: int) -> float:
    return LEFT + 6 + (RIGHT - LEFT - 12) * step / (steps - 1)


def _label_places(wanted: Sequence[float]) -> list[float]:
    """Return heights near those wanted at which labels do not overlap, none below the axis."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = list(wanted)
    for above, below in pairwise(order):
        places[below] = max(places[below], places[above] + LABEL_HEIGHT)
    limit = BOTTOM
    for index in reversed(order):
        places[index] = min(places[index], limit)
        limit = places[index] - LABEL_HEIGHT
    return places


def _style() -> str:
    light = ".ground{fill:#fff}text{font:13px system-ui,sans-serif;fill:#1f2328}"
    light += ".small{font-size:12px;fill:#59636e}.grid{stroke:#d1d9e0}"
    dark = ".ground{fill:#0d1117}text{fill:#e6edf3}.small{fill:#9198a1}.grid{stroke:#3d444d}"
    shapes = "polyline{fill:none;stroke-width:2}.wide{stroke-width:8;opacity:.45}"
    shapes += ".band{stroke:none;opacity:.15}text[class]{stroke:none}"
    for name, (on_light, on_dark) in COLOURS.items():
        rule = "polyline.%s{stroke:%s}polygon.%s,text.%s{fill:%s}"
        light += rule % (name, on_light, name, name, on_light)
        dark += rule % (name, on_dark, name, name, on_dark)
    return f"{light}{shapes}@media(prefers-color-scheme:dark){{{dark}}}"


def of_seeds(name: str, colour: str, seeds: Sequence[Sequence[float]]) -> Line:
    """Return the mean over the seeds, and the band between the lowest and the highest."""
    steps = list(zip(*seeds, strict=True))
    return Line(name=name, colour=colour, values=list(map(fmean, steps)), band=[(min(s), max(s)) for s in steps])


def rl_picture(results: dict[str, Any]) -> str:
    arms = results["arms"]
    styles = {"off": "red", "r2": "grey", "r3": "green", "r3_shifted": "violet", "r3_third_lost": "blue"}
    names = {"off": "without replay", "r2": "R2", "r3": "R3", "r3_shifted": "R3, shifted by a row"}
    names["r3_third_lost"] = "R3, a third lost"
    lines = [of_seeds(names[arm], colour, arms[arm]["reward"]) for arm, colour in styles.items()]
    return draw(
        "Reward of training runs: without replay, with it, and with it wrong",
        f"share of right tokens in a rollout; mean of {len(arms['off']['reward'])} seeds, lowest to highest",
        "step; Qwen3-MoE of 64 experts, top-2; engine with int8 weights in bf16, Megatron-Core in fp32",
        Axis(low=0, high=1, marks=(0, 0.25, 0.5, 0.75, 1)),
        lines,
    )


def gap_picture(results: dict[str, Any], engine: str) -> str:
    lines = [
        Line(name="live router", colour="red", values=results["kl_live"]),
        Line(name="equal routes", colour="grey", values=results["kl_floor"], wide=True),
        Line(name="R3", colour="green", values=results["kl"]),
    ]
    return draw(
        "The gap under replay equals the gap of equal routes",
        f"mean k3 KL(engine || trainer) of each rollout, nats; engine: {engine}",
        "step of an R3 run; equal routes: a second implementation of the trainer, forced to the engine's experts",
        Axis(low=1e-5, high=1, marks=[10.0**k for k in range(-5, 1)], logarithmic=True),
        lines,
    )


def freeze_picture(results: dict[str, Any]) -> str:
    lines = [
        Line(name="recompute", colour="red", values=results["live"]["steps"]["error"]),
        Line(name="freeze_recompute", colour="green", values=results["frozen"]["steps"]["error"]),
    ]
    return draw(
        "Recomputes that flip make wrong gradients",
        "relative L2 error of each step's gradient, against the same forward without recompute",
        "step of plain training in bf16 under full activation checkpointing",
        Axis(low=1e-3, high=1, marks=(1e-3, 1e-2, 1e-1, 1), logarithmic=True, percent=True),
        lines,
    )


def pictures() -> dict[str, str]:
    """Return the text of each SVG by its name."""
    return {
        "effect_rl.svg": rl_picture(load("rl")),
        "effect_gap.svg": gap_picture(load("gap_transformers"), "transformers, int8 weights in bf16"),
        "effect_freeze.svg": freeze_picture(load("freeze")),
    }


def tables() -> list[str]:
    """Return the tables of docs/effect.md."""
    freeze = load("freeze")
    return [
        gap_table({"transformers, bf16": load("gap_transformers"), "vLLM 0.30.0, bf16": load("gap_vllm")}),
        freeze_table({"recompute": freeze["live"], "`freeze_recompute`": freeze["frozen"]}),
        rl_table(load("rl")["arms"]),
        positions_table(load("positions")),
    ]


def write_all() -> str:
    """Write the SVGs; return the tables."""
    for name, text in pictures().items():
        (IMAGES / name).write_text(text)
    return "\n\n".join(tables())
