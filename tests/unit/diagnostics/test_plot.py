"""Figures: they exist for every shape of diff and say what they show."""

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.diagnostics import expert_load
from tests.unit.store.store_traces import make_trace

pytest.importorskip("matplotlib", reason="plots need matplotlib")

from megatron_router_replay.diagnostics import plot


def make_diff(num_tokens=40, layers=(2, 3, 7), lengths=None):
    a = make_trace(num_tokens, layer_numbers=layers, sequence_lengths=lengths)
    routes = a.topk_indices.clone()
    routes[::5] = make_trace(num_tokens, layer_numbers=layers, seed=1).topk_indices[::5]
    b = a._with(topk_indices=routes)
    return mrr.diff_traces(a, b, name_a="the <engine>", name_b="trainer"), {"a": expert_load(a), "b": expert_load(b)}


def texts(figure):
    return [text.get_text() for text in figure.findobj(lambda item: hasattr(item, "get_text"))]


def test_the_heatmap_says_what_where_and_in_which_unit():
    diff, _ = make_diff(lengths=(30, 10))
    shown = texts(plot.plot_disagreement(diff))
    assert "Where routing differs: the <engine> and trainer" in shown
    assert {"layer", "position in the sample (tokens)", "decisions that differ (%)", "2", "3", "7"} <= set(shown)


def test_the_heatmap_shows_the_share_of_each_layer_and_position():
    diff, _ = make_diff(lengths=(20, 20))
    image = plot.plot_disagreement(diff).axes[0].images[0].get_array()
    assert image.shape == (3, 20)
    assert image.tolist() == (diff.different_by_position / 2 * 100).tolist()


def test_agreement_bars_are_the_agreement_and_a_cut_axis_says_so():
    diff, _ = make_diff()
    axes = plot.plot_agreement(diff).axes[0]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx((diff.agreement_by_layer * 100).tolist())
    same = make_trace(40)
    axes = plot.plot_agreement(mrr.diff_traces(same, same)).axes[0]
    assert "axis from" in axes.get_ylabel()


@pytest.mark.parametrize(("num_tokens", "layers"), [(0, (1,)), (1, (1,)), (300, tuple(range(1, 62)))])
def test_empty_tiny_and_deep_traces_have_figures_too(num_tokens, layers, tmp_path):
    diff, loads = make_diff(num_tokens, layers)
    figures = plot.diff_figures(diff, loads) | {"load_map": plot.plot_load_map(loads["a"], layers)}
    for name, figure in figures.items():
        path = plot.save_png(figure, tmp_path / f"{name}.png", dpi=40)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_curves_keep_gaps():
    axes = plot.plot_curves([1, 2, 3], {"k3": [0.1, None, 0.3]}, unit="nats").axes[0]
    assert axes.get_ylabel() == "nats"
    assert torch.tensor(axes.lines[0].get_ydata()).isnan().tolist() == [False, True, False]
