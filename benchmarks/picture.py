"""`python -m benchmarks.picture`: the README's picture, docs/images/kl.svg, from the figures in raw/grpo_still.json."""

from __future__ import annotations

import json
import math
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "benchmarks/raw/grpo_still.json"
PICTURE = ROOT / "docs/images/kl.svg"

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 600, 52, 246
DECADES = (-5, -2)
"""The y axis runs from 1e-5 to 1e-2 nats."""

SUBTITLE = "mean k3 KL(rollout || trainer) of each rollout, nats; the policy held still"
NAMES = {"off": "without replay", "r3": "with replay (R3)"}
STYLE = """text{font:13px system-ui,sans-serif;fill:#1f2328}.small{font-size:12px;fill:#59636e}.grid{stroke:#d1d9e0}
.off{stroke:#c2410c;fill:none;stroke-width:2}.r3{stroke:#0f766e;fill:none;stroke-width:2}
text.off{fill:#c2410c;stroke:none}text.r3{fill:#0f766e;stroke:none}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}.grid{stroke:#3d444d}
.off{stroke:#fb923c}.r3{stroke:#2dd4bf}text.off{fill:#fb923c}text.r3{fill:#2dd4bf}}"""


def draw(kl: dict[str, list[float]]) -> str:
    """Return the picture as SVG: one line a run, the mean of each at its end.

    Args:
        kl: run -> k3 KL of each step, nats.
    """
    steps = len(kl["off"])
    means = {run: sum(values) / len(values) for run, values in kl.items()}
    factor = means["off"] / means["r3"]
    title = f"Replay cuts the KL between rollout and trainer {factor:.0f}-fold (mean of {steps} rollouts)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT}" y="22" font-weight="600">{title}</text>',
        f'<text x="{LEFT}" y="40" class="small">{SUBTITLE}</text>',
    ]
    for decade in range(DECADES[0], DECADES[1] + 1):
        y = _y(10.0**decade)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{decade}</text>')
    for run, values in kl.items():
        points = " ".join(f"{_x(i, steps):.1f},{_y(value):.1f}" for i, value in enumerate(values))
        parts.append(f'<polyline class="{run}" points="{points}"/>')
        y = _y(means[run])
        parts.append(f'<text class="{run}" x="{RIGHT + 10}" y="{y - 2:.1f}">{NAMES[run]}</text>')
        parts.append(f'<text class="small" x="{RIGHT + 10}" y="{y + 14:.1f}">mean {means[run]:.1e}</text>')
    for step in (1, steps // 2, steps):
        x = _x(step - 1, steps)
        parts.append(f'<text class="small" x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{step}</text>')
    note = "rollout; tiny Qwen3-MoE, rollout in bf16, Megatron-Core in fp32"
    parts.append(f'<text class="small" x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 38}" text-anchor="middle">{note}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _x(step: int, steps: int) -> float:
    return LEFT + 10 + (RIGHT - LEFT - 20) * step / (steps - 1)


def _y(value: float) -> float:
    low, high = DECADES
    return BOTTOM - (BOTTOM - TOP) * (math.log10(value) - low) / (high - low)


if __name__ == "__main__":
    PICTURE.write_text(draw(json.loads(FIGURES.read_text())["rollout_kl"]))
