"""The page of a diff: facts, a map and text, in a single file."""

import re
from xml.etree import ElementTree

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.diagnostics.page import save_page
from megatron_router_replay.errors import TraceError
from tests.unit.store.store_traces import make_trace


def page_of(folder, a, b, **options):
    diff = mrr.diff_traces(a, b, name_a="the <engine>", name_b="trainer")
    html = save_page(diff, folder / "page.html", **options).read_text(encoding="utf-8")
    return html, ElementTree.fromstring(re.search("<svg.*?</svg>", html, re.S).group())


def test_the_page_has_facts_text_and_a_map_and_needs_no_other_file(tmp_path):
    a = make_trace(3, layer_numbers=(5, 7), num_experts=8, token_ids=torch.tensor([17, 18, 19]))
    routes = a.topk_indices.clone()
    routes[1, 0] = (routes[1, 0] + 1) % 8
    b = a._with(topk_indices=routes, replay_mask=torch.tensor([True, True, False]))
    html, svg = page_of(tmp_path, a, b)
    assert re.findall("(?:src|href)=|url\\(|@import|http|<script", html) == []
    assert "the &lt;engine&gt;" in html
    assert "<engine>" not in html
    assert "<strong>The traces differ.</strong>" in html
    titles = [title.text.splitlines() for title in svg.iter("title")]
    experts = [f"experts {a.topk_indices[1, 0].tolist()}", f"experts {routes[1, 0].tolist()}"]
    assert titles == [
        [
            "layer 5, 1: 1 of 1 decisions differ.",
            "First: layer 5, row 1",
            f"    the <engine>: {experts[0]}",
            f"    trainer: {experts[1]}",
            "    token 18",
        ]
    ]
    assert [text.text for text in svg.iter("text")] == ["5", "7", "0"]
    classes = [rect.get("class") for rect in svg.iter("rect")]
    # Two layers of three positions: the second differs in layer 5, the third has no route in b.
    assert classes == [None, None, "differ", "none", None, None, "none"]


def test_facts_come_first(tmp_path):
    a = make_trace(600, layer_numbers=(2, 3, 4), num_experts=16, sequence_lengths=(350, 250))
    html, _ = page_of(tmp_path, a, a._with(topk_indices=a.topk_indices.roll(1, 0)), title="Monday")
    assert "<h1>Monday</h1>" in html
    assert '<p class="note">Rows 1..599 (samples 0..1) of trainer match the &lt;engine&gt;&#x27;s rows 0..598' in html


@pytest.mark.parametrize(("num_tokens", "layers"), [(0, (1,)), (1, (1,)), (300, tuple(range(1, 62)))])
def test_empty_tiny_and_deep_traces_have_pages_too(num_tokens, layers, tmp_path):
    a, b = (make_trace(num_tokens, layer_numbers=layers, seed=seed) for seed in (0, 1))
    _, svg = page_of(tmp_path, a, b)
    assert [text.text for text in svg.iter("text")][: len(layers)] == [str(number) for number in layers]
    _, svg = page_of(tmp_path, a, make_trace(num_tokens, layer_numbers=(99,)))
    assert not list(svg.iter("rect"))


def test_token_text_is_gone_by_name(tmp_path):
    with pytest.raises(TraceError, match=r"MRR101: save_page\(token_text=...\) is gone in 0.3"):
        page_of(tmp_path, make_trace(), make_trace(), token_text=str)
