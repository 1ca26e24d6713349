"""Diffs, loads and runs -> figures (matplotlib, imported by the functions): readable on a slide, same colours throughout.

Every function returns a matplotlib Figure; `save_png` writes it. No display and no pyplot state is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
from torch import Tensor

from megatron_router_replay.diagnostics.diff import TraceDiff
from megatron_router_replay.diagnostics.load import imbalance
from megatron_router_replay.errors import RouterReplayError

Figure = Any
"""A matplotlib Figure; matplotlib is an extra, so its types are not asked for."""

P = ParamSpec("P")

_A, _B, _GREY = "#0b6e99", "#d1495b", "#6c757d"
_SIZE, _WIDE = (8.0, 4.5), (10.0, 4.5)
_STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
    "svg.hashsalt": "megatron_router_replay",
}


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw in the style of this module, whatever the user's matplotlib settings."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        try:
            matplotlib = import_module("matplotlib")
        except ModuleNotFoundError:
            raise RouterReplayError(
                "plots need matplotlib: pip install 'megatron-router-replay[plot]' brings it."
            ) from None
        # A user's dark or seaborn style would change axes and colours that texts and tests speak of.
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
            return draw(*args, **kwargs)

    return styled


@_styled
def plot_disagreement(diff: TraceDiff) -> Figure:
    """Heatmap: share of decisions that differ, layer x position."""
    figure, axes = _figure()
    compared = diff.compared_by_position.double()
    shares = (diff.different_by_position.double() / compared).numpy() * 100.0
    width, layers = diff.position_width, len(diff.layer_numbers)
    axes.grid(visible=False)
    if shares.size:
        top = max(1e-9, float(np.nanmax(np.append(shares, 0.0))))
        extent = (0.0, float(width * shares.shape[1]), layers - 0.5, -0.5)
        image = axes.imshow(
            np.ma.masked_invalid(shares),
            aspect="auto",
            cmap="magma_r",
            vmin=0.0,
            vmax=top,
            extent=extent,
            interpolation="nearest",
        )
        figure.colorbar(image, ax=axes, label="decisions that differ (%)")
    _layer_ticks(axes, diff.layer_numbers, axis="y")
    where = "position in the sample (tokens)" if diff.compared_by_sample is not None else "row"
    axes.set(xlabel=where, ylabel="layer", title=f"Where routing differs: {diff.name_a} and {diff.name_b}")
    return figure


@_styled
def plot_agreement(diff: TraceDiff) -> Figure:
    """Bars by layer: agreement (decisions that agree), and overlap (experts that both name)."""
    figure, axes = _figure()
    agreement, overlap = diff.agreement_by_layer.numpy() * 100.0, diff.overlap_by_layer.numpy() * 100.0
    places = np.arange(len(agreement))
    axes.bar(places, agreement, color=_A, width=0.7, label="agreement (% of decisions)")
    axes.plot(places, overlap, color=_B, marker="o", markersize=4, linewidth=1.5, label="overlap (% of experts)")
    lowest = float(np.nanmin(np.append(np.concatenate([agreement, overlap]), 100.0)))
    # Zoomed where all is close to 100, with the axis saying so; otherwise from 0.
    bottom = 0.0 if lowest < 80.0 else max(0.0, lowest - (100.0 - lowest) - 0.5)
    axes.set_ylim(bottom, 100.0 + 0.02 * (100.0 - bottom))
    _layer_ticks(axes, diff.layer_numbers, axis="x")
    cut = f" (axis from {bottom:.1f} %)" if bottom else ""
    axes.set(xlabel="layer", ylabel=f"share (%){cut}")
    axes.set_title(f"Agreement and overlap by layer: {diff.name_a} and {diff.name_b}", pad=30)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
    return figure


@_styled
def plot_load(loads: Mapping[str, Tensor], layer_numbers: Sequence[int]) -> Figure:
    """Expert load of one or two traces: imbalance by layer, and the load of the experts of the most uneven layer.

    Args:
        loads: name -> [num_layers, num_experts] int64; the first is "before".
        layer_numbers: of all of them.
    """
    figure, (left, right) = _figure(columns=2)
    names, places = list(loads), np.arange(len(layer_numbers))
    uneven = {name: np.nan_to_num(imbalance(load).numpy(), nan=0.0) for name, load in loads.items()}
    bar = 0.8 / max(1, len(names))
    for i, (name, colour) in enumerate(zip(names, (_A, _B))):
        left.bar(places + (i - (len(names) - 1) / 2) * bar, uneven[name], width=bar, color=colour, label=name)
    left.axhline(1.0, color=_GREY, linewidth=1, linestyle="--")
    _layer_ticks(left, layer_numbers, axis="x")
    left.set(xlabel="layer", ylabel="busiest expert / mean load")
    left.set_title("Imbalance by layer (1 = even)", pad=30)
    if len(layer_numbers):
        layer = int(np.argmax(np.max(np.stack(list(uneven.values())), axis=0)))
        for name, colour, line in zip(names, (_A, _B), ("-", "--")):
            share = loads[name][layer].double() / max(1, int(loads[name][layer].sum())) * 100.0
            right.step(
                np.arange(len(share) + 1) - 0.5,
                np.append(share.numpy(), share[-1]),
                where="post",
                color=colour,
                linestyle=line,
                label=name,
            )
        even = 100.0 / max(1, next(iter(loads.values())).shape[1])
        right.axhline(even, color=_GREY, linewidth=1, linestyle="--")
        right.set_ylim(bottom=0.0)
        right.set(xlabel="expert", ylabel="share of the layer's load (%)")
        right.set_title(f"Expert load in layer {layer_numbers[layer]}", pad=30)
    if len(names) > 1:
        left.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
    return figure


@_styled
def plot_load_map(load: Tensor, layer_numbers: Sequence[int], *, name: str = "the trace") -> Figure:
    """Heatmap of one trace's expert load, layer x expert, relative to an even load.

    Args:
        load: [num_layers, num_experts] int64.
    """
    figure, axes = _figure()
    axes.grid(visible=False)
    relative = (load.double() / load.double().mean(dim=1, keepdim=True)).numpy()
    if relative.size:
        image = axes.imshow(np.ma.masked_invalid(relative), aspect="auto", cmap="viridis", vmin=0.0)
        figure.colorbar(image, ax=axes, label="load / mean load of the layer")
    _layer_ticks(axes, layer_numbers, axis="y")
    axes.set(xlabel="expert", ylabel="layer", title=f"Expert load of {name} (1 = even)")
    return figure


@_styled
def plot_curves(steps: Sequence[int], series: Mapping[str, Sequence[float | None]], *, unit: str = "") -> Figure:
    """Curves over training steps.

    Args:
        steps: x values.
        series: name -> one value a step; None leaves a gap.
        unit: of all values, for the axis.
    """
    figure, axes = _figure()
    for i, (name, values) in enumerate(series.items()):
        known = np.array([np.nan if value is None else float(value) for value in values])
        axes.plot(steps, known, marker="o", markersize=3, linewidth=1.5, color=f"C{i}", label=name)
    axes.set(xlabel="step", ylabel=unit)
    axes.set_title("Over training steps", pad=30)
    if series:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def diff_figures(diff: TraceDiff, loads: Mapping[str, Tensor] | None = None) -> dict[str, Figure]:
    """Return the figures of a diff by file stem: "disagreement", "agreement", and "load" where loads are given."""
    figures = {"disagreement": plot_disagreement(diff), "agreement": plot_agreement(diff)}
    if loads:
        figures["load"] = plot_load(loads, diff.layer_numbers)
    return figures


def save_png(figure: Figure, path: str | os.PathLike[str], *, dpi: int = 144) -> Path:
    """Write a figure as PNG and return its path."""
    figure.savefig(path, format="png", dpi=dpi)
    return Path(path)


def _figure(columns: int = 1) -> tuple[Figure, Any]:
    # Without pyplot: it keeps every figure alive, and picks a window system that a server lacks.
    figure = import_module("matplotlib.figure").Figure(figsize=_SIZE if columns == 1 else _WIDE, layout="constrained")
    import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def _layer_ticks(axes: Any, layer_numbers: Sequence[int], *, axis: str) -> None:
    """Name at most 16 layers on an axis."""
    step = max(1, -(-len(layer_numbers) // 16))
    places = list(range(0, len(layer_numbers), step))
    getattr(axes, f"set_{axis}ticks")(places, [str(layer_numbers[place]) for place in places])
