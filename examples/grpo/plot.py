"""The curves of several runs side by side, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.grpo.loop import Metrics

PANELS = (
    # (metric, title, unit of the y axis, factor, logarithmic)
    ("reward", "Reward", "share of right tokens", 1.0, False),
    ("rollout_kl", "KL(rollout || trainer), k3", "nats per token", 1.0, True),
    ("rollout_gap", "|log-prob difference|, rollout and trainer", "nats, mean over tokens", 1.0, True),
    ("ratio_above_2", "Tokens with probability ratio > 2", "% of tokens", 100.0, False),
    ("router_agreement", "Router agreement, live trainer and rollout", "% of decisions", 100.0, False),
    ("grad_norm", "Gradient norm before clipping", "L2 norm, mean over updates", 1.0, False),
)
COLOURS = {"off": "#d1495b", "r2": "#edae49", "r3": "#00798c"}
STYLES = {"off": "-", "r2": (0, (4, 2)), "r3": "-"}


def plot_runs(runs: Mapping[str, Sequence[Metrics]], path: Path, *, title: str) -> None:
    """Write a PNG with one panel a metric and one line a run.

    Args:
        runs: name -> metrics of every step.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(14, 7.5), constrained_layout=True)
    for axis, (metric, name, unit, factor, logarithmic) in zip(axes.flat, PANELS):
        for run, steps in runs.items():
            values = [factor * step[metric] for step in steps]
            axis.plot(
                [step["step"] for step in steps],
                values,
                label=run,
                color=COLOURS.get(run),
                linestyle=STYLES.get(run, "-"),
                linewidth=1.8,
            )
        if logarithmic:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set_title(name, fontsize=11)
        axis.set_xlabel("step (one rollout)")
        axis.set_ylabel(unit)
        axis.grid(alpha=0.3)
    axes.flat[0].legend(title="replay", loc="lower right")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)
