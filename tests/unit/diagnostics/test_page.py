"""The page of a diff: it holds all it needs, and a real browser shows it at any width, light and dark."""

import json
import re
from tempfile import TemporaryDirectory

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.diagnostics import expert_load, page
from megatron_router_replay.errors import TraceError
from tests.unit.diagnostics.browser import Browser, chromium
from tests.unit.store.store_traces import make_trace

pytest.importorskip("jinja2", reason="the page needs jinja2")


def make_diff(num_tokens=40, layers=(2, 3, 7), lengths=(30, 10), **values):
    a = make_trace(num_tokens, layer_numbers=layers, sequence_lengths=lengths, **values)
    routes = a.topk_indices.clone()
    routes[::5] = make_trace(num_tokens, layer_numbers=layers, seed=1).topk_indices[::5]
    b = a._with(topk_indices=routes)
    diff = mrr.diff_traces(a, b, name_a="the <engine>", name_b="trainer")
    return diff, {"the <engine>": expert_load(a), "trainer": expert_load(b)}


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


def test_it_holds_all_it_needs_and_escapes_names():
    diff, loads = make_diff()
    html = page_of(diff, loads=loads, token_text=lambda token: "</script><b>")
    assert "the &lt;engine&gt;" in html
    assert "<engine>" not in html
    assert re.findall("(?:src|href)=|url\\(|@import|http", html) == []
    assert html.count("<script") == html.count("</script>") == 2


def test_hostile_token_texts_stay_inside_the_data():
    diff, _ = make_diff(token_ids=torch.arange(40))
    html = page_of(diff, token_text=lambda token: "</script><b>\u2028")
    assert html.count("<script") == html.count("</script>") == 2
    assert "</script><b>" in cells_of(html)["examples"]["2,0"][0][5]


def test_under_each_finding_stands_what_to_do_next(tmp_path):
    diff = shifted_diff(tmp_path)
    html = page_of(diff)
    (finding,) = diff.findings
    assert f"{finding.text}<br><em>What to do next:</em> {finding.advice}" in html


def test_it_says_where_the_traces_come_from(tmp_path):
    diff = shifted_diff(tmp_path)
    table = re.search('<table id="table-provenance">.*?</table>', page_of(diff)).group(0)
    for words in ("engine", str(tmp_path / "a.safetensors"), diff.provenance_a.written, "weight version"):
        assert words in table


def test_a_cell_holds_its_rows_both_expert_sets_the_token_and_the_margin():
    a = make_trace(3, layer_numbers=(5,), num_experts=8, token_ids=torch.tensor([7, 8, 9]))
    routes = a.topk_indices.clone()
    routes[1, 0] = torch.tensor([7, 6], dtype=torch.uint8) - a.topk_indices[1, 0] // 7  # some other set
    diff = mrr.diff_traces(a, a._with(topk_indices=routes))
    margins = {5: torch.tensor([0.5, 0.125, float("nan")])}
    cells = cells_of(page_of(diff, token_text="abcdefghij".__getitem__, margins=margins))
    experts = [a.topk_indices[1, 0].tolist(), routes[1, 0].tolist()]
    assert cells["examples"] == {"5,1": [[1, None, None, *experts, "'i' (8)", 0.125]]}
    assert (cells["layers"], cells["bins"]) == ([5], ["0", "1", "2"])
    assert (cells["rows"], cells["differ"]) == ([1, 1, 1], [[0, 1, 0]])
    # What nobody knows is null, never NaN, which no browser reads.
    unknown = {5: torch.full((3,), float("nan"))}
    assert cells_of(page_of(diff, margins=unknown))["examples"]["5,1"][0][5:] == ["8", None]


def test_margins_that_are_too_short_are_an_error():
    diff, _ = make_diff()
    with pytest.raises(TraceError, match="margins of layer 3 have the shape"):
        page_of(diff, margins={3: torch.zeros(1)})


@pytest.mark.parametrize(("num_tokens", "layers"), [(0, (1,)), (1, (1,)), (300, tuple(range(1, 62)))])
def test_empty_tiny_and_deep_traces_have_pages_too(num_tokens, layers):
    diff, loads = make_diff(num_tokens, layers, None)
    html = page_of(diff, loads=loads)
    assert "NaN" not in html
    assert len(re.findall('<tr><th scope="row">', html)) == len(layers)


def test_layers_that_only_one_trace_has_leave_an_empty_map():
    diff = mrr.diff_traces(make_trace(5, layer_numbers=(1,)), make_trace(5, layer_numbers=(2,)))
    assert cells_of(page_of(diff))["layers"] == []


CONTRAST = """(() => {
  const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = node => { for (; node; node = node.parentElement) { const colour = getComputedStyle(node).backgroundColor;
    if (colour !== "rgba(0, 0, 0, 0)") return colour; } return "rgb(255, 255, 255)"; };
  const shown = [...document.querySelectorAll("h1, h2, p, li, em, td, th, footer")].filter(node => node.innerText.trim());
  return shown.map(node => {
    const [low, high] = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => a - b);
    return [(high + 0.05) / (low + 0.05), node.tagName, node.innerText.slice(0, 40)]; }).sort((a, b) => a[0] - b[0])[0];
})()"""


@pytest.mark.skipif(chromium() is None, reason="no chromium in PATH")
def test_a_headless_browser_shows_it_at_both_widths_light_and_dark(tmp_path):
    diff = shifted_diff(tmp_path)
    margins = {number: torch.full((600,), 0.25) for number in diff.layer_numbers}
    loads = {name: torch.ones(3, 16, dtype=torch.int64) for name in ("engine", "trainer")}
    path = page.save_page(
        diff, tmp_path / "diff.html", loads=loads, token_text=lambda token: f"tok{token}", margins=margins
    )
    last = next(found for found in diff.differences if found.layer_number == 4 and found.row == 1)
    (tmp_path / "profile").mkdir()
    backgrounds = []
    with Browser(tmp_path / "profile") as browser:
        for width in (1200, 390):
            for dark in (False, True):
                browser.open(path, width=width, height=800, dark=dark)
                assert browser.run("innerWidth") == width
                # Nothing but the tables' own boxes scrolls sideways.
                assert browser.run("document.documentElement.scrollWidth <= innerWidth")
                assert browser.run("document.getElementById('verdict').innerText") == "The traces differ."
                assert browser.run("document.querySelectorAll('#heat tr').length") == 3
                assert browser.run("document.querySelectorAll('#table-layers tbody tr').length") == 3
                contrast, *where = browser.run(CONTRAST)
                assert contrast >= 4.5, (where, contrast)
                backgrounds.append(browser.run("getComputedStyle(document.body).backgroundColor"))
                assert browser.run("document.getElementById('cell').hidden")
                browser.point_at("#heat tr:nth-child(3) td:nth-child(2)")  # layer 4, the first bin
                assert not browser.run("document.getElementById('cell').hidden")
                words = browser.run("document.getElementById('cell').innerText")
                assert words.startswith("layer 4, 0..2\n")
                for content in (
                    "1 (sample 0, position 1)",
                    ", ".join(map(str, last.experts_a)),
                    ", ".join(map(str, last.experts_b)),
                    "'tok1001' (1001)",
                    "0.250",
                ):
                    assert content in words
                box = browser.run(
                    "(b => [b.left >= 0, b.top >= 0, b.right <= innerWidth, b.bottom <= innerHeight])"
                    "(document.getElementById('cell').getBoundingClientRect())"
                )
                assert box == [True] * 4
                browser.point_at("h1")
                assert browser.run("document.getElementById('cell').hidden")
                methods = [event["method"] for event in browser.events]
                assert methods.count("Network.requestWillBeSent") == 1  # the page itself
                assert "Runtime.exceptionThrown" not in methods
    assert backgrounds[0] == backgrounds[2] == "rgb(255, 255, 255)"
    assert backgrounds[1] == backgrounds[3] == "rgb(22, 24, 27)"
