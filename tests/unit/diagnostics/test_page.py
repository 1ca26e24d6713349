"""The page of a diff: facts, a map and text, in a single file."""

import errno
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.diagnostics.page import save_page
from megatron_router_replay.errors import TraceError
from tests.unit.store.store_traces import make_trace


def page_of(folder, a, b):
    diff = mrr.diff_traces(a, b, name_a="the <engine>", name_b="trainer")
    html = save_page(diff, folder / "page.html").read_text(encoding="utf-8")
    return html, ElementTree.fromstring(re.search('<div class="map">(<svg.*?</svg>)', html, re.S).group(1))


def test_a_page_of_something_else_names_the_order_of_arguments(tmp_path):
    diff = mrr.diff_traces(make_trace(3), make_trace(3))
    with pytest.raises(
        TraceError, match=r"MRR101: cannot write a page of a str: the diff comes first, save_page\(diff, path\)"
    ):
        save_page(str(tmp_path / "page.html"), diff)


def test_the_page_has_facts_text_and_a_map_and_needs_no_other_file(tmp_path):
    a = make_trace(3, layer_numbers=(5, 7), num_experts=8, token_ids=torch.tensor([17, 18, 19]))
    routes = a.topk_indices.clone()
    routes[1, 0] = (routes[1, 0] + 1) % 8
    b = a._with(topk_indices=routes, replay_mask=torch.tensor([True, True, False]))
    html, svg = page_of(tmp_path, a, b)
    assert re.findall("(?:src|href)=|url\\(|@import|http|<script", html) == []
    assert "<engine>" not in html
    assert "<h1>Routing of the &lt;engine&gt; and trainer</h1>" in html
    assert "<strong>The traces differ: " in html
    assert [title.text for title in svg.iter("title")] == [
        "layer 5, 1: 1 of 1 decisions differ.\n"
        "First: layer 5, row 1\n"
        f"    the <engine>: experts {a.topk_indices[1, 0].tolist()}\n"
        f"    trainer: experts {routes[1, 0].tolist()}\n"
        "    token 18"
    ]
    assert [text.text for text in svg.iter("text")] == ["5", "7", "0", "row", "layer"]
    assert re.findall("</svg>([^<]+)</span>", html) == [
        "all agree", "1 decision differs", "8 differ", "no row with a route in both"
    ]  # fmt: skip
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


def test_a_disk_that_is_full_leaves_the_page_that_was_there(tmp_path, monkeypatch):
    a, b = (make_trace(3, seed=seed) for seed in (0, 1))
    page = save_page(mrr.diff_traces(a, b), tmp_path / "page.html")
    before = page.read_bytes()
    write = Path.write_text

    def full(self, text, **options):
        write(self, text[:2048], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        save_page(mrr.diff_traces(a, a), page)
    assert page.read_bytes() == before
    assert list(tmp_path.iterdir()) == [page]


def test_a_narrow_screen_is_told_that_the_map_scrolls_where_it_is_wider(tmp_path):
    def scrolls_below(num_tokens):
        html, svg = page_of(tmp_path, make_trace(num_tokens), make_trace(num_tokens, seed=1))
        assert "it scrolls sideways." in html
        return int(re.search(r"max-width: (\d+)px", html).group(1)) - 32, int(svg.get("width"))

    for num_tokens in (3, 100):
        below, width = scrolls_below(num_tokens)
        assert below == width
