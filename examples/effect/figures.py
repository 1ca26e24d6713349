"""The SVGs of docs/effect.md: lines with names, on a linear or a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.effect.results import freeze_table, gap_table, load, rl_table

IMAGES = Path(__file__).parents[2] / "docs/images"
WIDTH, HEIGHT = 560, 300  # narrow, so that a phone shows its text at 8 pixels and more
LEFT, RIGHT, TOP, BOTTOM = 60, 546, 52, 246
COLOURS = {"red": ("#c2410c", "#fb923c"), "green": ("#0f766e", "#2dd4bf"), "grey": ("#59636e", "#9198a1")}
LETTER_WIDTH = 8.5  # of the largest letters, about; a name must clear the part of its line that it stands at


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line: its values, its name, and one of `COLOURS`; a wide one shows beneath others, its name below it."""

    name: str
    colour: str
    values: Sequence[float]
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
        """Return the height of a value; a value outside is drawn on the edge."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return BOTTOM - (BOTTOM - TOP) * share

    def label(self, mark: float) -> str:
        return f"{mark:.0%}" if self.percent else f"{mark:g}"


def draw(title: str, subtitle: str, note: str, axis: Axis, lines: Sequence[Line]) -> str:
    """Return a picture as SVG, each line's name at its right end."""
    steps = len(lines[0].values)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{title}">',
        f"<style>{_style()}</style>",
        # The browser chooses between light and dark, the page may show the other: a ground of its own keeps text readable.
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        f'<text x="{LEFT}" y="22" font-weight="600">{title}</text>',
        f'<text x="{LEFT}" y="41" class="small">{subtitle}</text>',
    ]
    for mark in axis.marks:
        y = axis.y(mark)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{axis.label(mark)}</text>')
    for line in lines:
        points = [(_x(i, steps), axis.y(value)) for i, value in enumerate(line.values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="{line.colour}{" wide" if line.wide else ""}" points="{path}"/>')
        reach = RIGHT - LETTER_WIDTH * len(line.name)
        heights = [y for x, y in points if x >= reach]
        y = max(heights) + 24 if line.wide else min(heights) - 10
        parts.append(f'<text class="{line.colour}" x="{RIGHT}" y="{y:.1f}" text-anchor="end">{line.name}</text>')
    for step in (1, steps // 2, steps):
        x = _x(step - 1, steps)
        parts.append(f'<text class="small" x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text class="small" x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 38}" text-anchor="middle">{note}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _x(step: int, steps: int) -> float:
    return LEFT + 6 + (RIGHT - LEFT - 12) * step / (steps - 1)


def _style() -> str:
    light = ".ground{fill:#fff}text{font:15px system-ui,sans-serif;fill:#1f2328}"
    light += ".small{font-size:13px;fill:#59636e}.grid{stroke:#d1d9e0}"
    dark = ".ground{fill:#0d1117}text{fill:#e6edf3}.small{fill:#9198a1}.grid{stroke:#3d444d}"
    shapes = "polyline{fill:none;stroke-width:2}.wide{stroke-width:8;opacity:.45}"
    for name, (on_light, on_dark) in COLOURS.items():
        rule = "polyline.%s{stroke:%s}text.%s{fill:%s}"
        light += rule % (name, on_light, name, on_light)
        dark += rule % (name, on_dark, name, on_dark)
    return f"{light}{shapes}@media(prefers-color-scheme:dark){{{dark}}}"


def gap_picture(results: dict[str, Any]) -> str:
    lines = [
        Line(name="without replay", colour="red", values=results["kl_live"]),
        Line(name="the same experts, forced by hand", colour="grey", values=results["kl_floor"], wide=True),
        Line(name="with replay", colour="green", values=results["kl"]),
    ]
    return draw(
        "Replay removes the part of the KL that routing causes",
        "mean KL(engine || trainer) of each rollout, in nats, on a CPU",
        "training step; a tiny Qwen3-MoE; engine int8 and bf16, trainer fp32",
        Axis(low=3e-5, high=1e-1, marks=(1e-4, 1e-3, 1e-2, 1e-1), logarithmic=True),
        lines,
    )


def freeze_picture(results: dict[str, Any]) -> str:
    lines = [
        Line(name="recompute with the live router", colour="red", values=results["live"]["steps"]["error"]),
        Line(name="recompute with freeze_recompute", colour="green", values=results["frozen"]["steps"]["error"]),
    ]
    return draw(
        "Recomputes that pick different experts spoil gradients",
        "relative L2 error of the gradient, against no recompute",
        "training step; bf16, full activation checkpointing, on a CPU",
        Axis(low=0, high=0.06, marks=(0, 0.02, 0.04, 0.06), percent=True),
        lines,
    )


def pictures() -> dict[str, str]:
    """Return the text of each SVG by its name."""
    return {
        "effect_gap.svg": gap_picture(load("gap_transformers")),
        "effect_freeze.svg": freeze_picture(load("freeze")),
    }


def tables() -> list[str]:
    """Return the tables of docs/effect.md."""
    freeze = load("freeze")
    return [
        gap_table(
            {"transformers, bf16": load("gap_transformers"), "vLLM 0.30.0, bf16, a live server": load("gap_vllm")}
        ),
        freeze_table({"recompute": freeze["live"], "`freeze_recompute`": freeze["frozen"]}),
        rl_table(load("rl")["arms"]),
    ]


def write_all() -> str:
    """Write the SVGs; return the tables."""
    for name, text in pictures().items():
        (IMAGES / name).write_text(text)
    return "\n\n".join(tables())
