"""The page of a diff: facts, a map and text, in a single file."""

import re
from xml.etree import ElementTree

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.diagnostics.page import save_page
from tests.unit.store.store_traces import make_trace


def page_of(folder, a, b):
    diff = mrr.diff_traces(a, b, name_a="the <engine>", name_b="trainer")
    html = save_page(diff, folder / "page.html").read_text(encoding="utf-8")
    return html, ElementTree.fromstring(re.search("<svg.*?</svg>", html, re.S).group())


def test_the_page_has_facts_text_and_a_map_and_needs_no_other_file(tmp_path):
    a = make_trace(3, layer_numbers=(5, 7), num_experts=8, token_ids=torch.tensor([17, 18, 19]))
    routes = a.topk_indices.clone()
    routes[1, 0] = (routes[1, 0] + 1) % 8
    b = a._with(topk_indices=routes, replay_mask=torch.tensor([True, True, False]))
    html, svg = page_of(tmp_path, a, b)
    assert re.findall("(?:src|href)=|url\\(|@import|http|<script", html) == []
    assert "<engine>" not in html
    assert "<h1>Routing of the &lt;engine&gt; and trainer</h1>" in html
    assert "<strong>The traces differ.</strong>" in html
    assert '<p class="note">Something between the embedding and layer 5 changed' in html
    assert [title.text for title in svg.iter("title")] == [
        "layer 5, 1: 1 of 1 decisions differ.\n"
        "First: layer 5, row 1\n"
        f"    the <engine>: experts {a.topk_indices[1, 0].tolist()}\n"
        f"    trainer: experts {routes[1, 0].tolist()}\n"
        "    token 18"
    ]
    assert [text.text for text in svg.iter("text")] == ["5", "7", "0"]
    classes = [rect.get("class") for rect in svg.iter("rect")]
    # Two layers of three positions: the second differs in layer 5, the third has no route in b.
    assert classes == [None, None, "differ", "none", None, None, "none"]


@pytest.mark.parametrize(("num_tokens", "layers"), [(0, (1,)), (1, (1,)), (300, tuple(range(1, 62)))])
def test_empty_tiny_and_deep_traces_have_pages_too(num_tokens, layers, tmp_path):
    a, b = (make_trace(num_tokens, layer_numbers=layers, seed=seed) for seed in (0, 1))
    _, svg = page_of(tmp_path, a, b)
    assert [text.text for text in svg.iter("text")][: len(layers)] == [str(number) for number in layers]
    _, svg = page_of(tmp_path, a, make_trace(num_tokens, layer_numbers=(99,)))
    assert not list(svg.iter("rect"))
