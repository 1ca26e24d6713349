"""The page of a diff holds all it needs; what it looks like is checked by hand, once a release."""

import json
import re
from tempfile import TemporaryDirectory

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.diagnostics import page
from tests.unit.store.store_traces import make_trace


def make_diff(num_tokens=40, layers=(2, 3, 7), lengths=(30, 10), **values):
    a = make_trace(num_tokens, layer_numbers=layers, sequence_lengths=lengths, **values)
    routes = a.topk_indices.clone()
    routes[::5] = make_trace(num_tokens, layer_numbers=layers, seed=1).topk_indices[::5]
    b = a._with(topk_indices=routes)
    return mrr.diff_traces(a, b, name_a="the <engine>", name_b="trainer")


def shifted_diff(tmp_path):
    """Two files, every row of layer 4 one place further in the second."""
    trace = make_trace(
        600,
        layer_numbers=(2, 3, 4),
        num_experts=16,
        token_ids=torch.arange(600) + 1000,
        sequence_lengths=(350, 250),
        weight_version=3,
    )
    moved = trace.topk_indices.clone()
    moved[:, 2] = moved[:, 2].roll(1, 0)
    mrr.save_trace(trace, tmp_path / "a.safetensors")
    mrr.save_trace(trace._with(topk_indices=moved), tmp_path / "b.safetensors")
    return mrr.diff_traces(tmp_path / "a.safetensors", tmp_path / "b.safetensors", name_a="engine", name_b="trainer")


def page_of(diff, **options):
    with TemporaryDirectory() as folder:
        return page.save_page(diff, f"{folder}/page.html", **options).read_text(encoding="utf-8")


def cells_of(html):
    return json.loads(re.search('<script type="application/json" id="cells">(.*?)</script>', html, re.S).group(1))


def test_it_holds_all_it_needs_and_names_and_texts_of_tokens_are_escaped():
    html = page_of(make_diff(token_ids=torch.arange(40)), token_text=lambda token: "</script><b>\u2028")
    assert "the &lt;engine&gt;" in html
    assert "<engine>" not in html
    assert re.findall("(?:src|href)=|url\\(|@import|http", html) == []
    assert html.count("<script") == html.count("</script>") == 2
    assert "</script><b>" in cells_of(html)["examples"]["2,0"][0][5]


def test_files_and_facts_stand_at_the_top_or_how_routing_differs_without_one(tmp_path):
    diff = shifted_diff(tmp_path)
    html = page_of(diff)
    written = diff.provenance_a.written
    assert f"<p>engine: {tmp_path / 'a.safetensors'}, written {written} UTC, weights 3</p>" in html
    (fact,) = diff.facts
    assert f"<li>{fact.text}</li>".replace("'", "&#x27;") in html
    assert '<p id="noise">No rows or layers stand out' in page_of(make_diff())


def test_a_cell_holds_its_rows_both_expert_sets_and_the_token():
    a = make_trace(3, layer_numbers=(5,), num_experts=8, token_ids=torch.tensor([7, 8, 9]))
    routes = a.topk_indices.clone()
    routes[1, 0] = torch.tensor([7, 6], dtype=torch.uint8) - a.topk_indices[1, 0] // 7  # some other set
    diff = mrr.diff_traces(a, a._with(topk_indices=routes))
    cells = cells_of(page_of(diff, token_text="abcdefghij".__getitem__))
    experts = [a.topk_indices[1, 0].tolist(), routes[1, 0].tolist()]
    assert cells["examples"] == {"5,1": [[1, None, None, *experts, "'i' (8)"]]}
    assert (cells["layers"], cells["bins"]) == ([5], ["0", "1", "2"])
    assert (cells["rows"], cells["differ"]) == ([1, 1, 1], [[0, 1, 0]])


@pytest.mark.parametrize(("num_tokens", "layers"), [(0, (1,)), (1, (1,)), (300, tuple(range(1, 62)))])
def test_empty_tiny_and_deep_traces_have_pages_too(num_tokens, layers):
    diff = make_diff(num_tokens, layers, None)
    html = page_of(diff)
    assert "NaN" not in html
    assert cells_of(html)["layers"] == list(layers)
    assert "<!-- " not in html


def test_layers_that_only_one_trace_has_leave_an_empty_map():
    diff = mrr.diff_traces(make_trace(5, layer_numbers=(1,)), make_trace(5, layer_numbers=(2,)))
    assert cells_of(page_of(diff))["layers"] == []
