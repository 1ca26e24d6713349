"""docs/api/*.md have the signatures and first lines of the code."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def api_pages():
    spec = importlib.util.spec_from_file_location("api_pages", ROOT / "docs/site/api_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_those_of_the_code(api_pages):
    assert api_pages.stale_pages() == [], "run: python docs/site/api_pages.py"
    names = "".join(re.findall(r"<!-- names: .*", "".join(p.read_text() for p in (ROOT / "docs/api").glob("*.md"))))
    assert all(f"megatron_router_replay.{room} " in names for room in ("trace", "mcore", "layout", "store"))


def test_a_name_whose_signature_or_docstring_changed_is_noticed(api_pages, tmp_path, monkeypatch):
    (tmp_path / "small_room.py").write_text(
        '__all__ = ["cut"]\ndef cut(rows: int, *, at: "int | None" = None) -> int:\n    """Cut rows. More."""\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    page = tmp_path / "page.md"
    page.write_text("# room\n<!-- names: small_room -->\n<!-- end of names -->\nmore\n")
    assert api_pages.stale_pages(tmp_path) == ["page.md"]
    page.write_text(api_pages.filled(page.read_text()))
    assert "| `cut(rows, *, at=None)` | Cut rows. |" in page.read_text()
    assert page.read_text().endswith("<!-- end of names -->\nmore\n")
    assert api_pages.stale_pages(tmp_path) == []
    monkeypatch.setattr(sys.modules["small_room"], "cut", lambda rows: rows)
    assert api_pages.stale_pages(tmp_path) == ["page.md"]
