"""Blocks and links of README.md and docs/; sybil runs the blocks themselves (conftest.py)."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
PAGES = [DOCS.parent / "README.md", *sorted(path for path in DOCS.rglob("*.md") if path.name != "README.md")]


def test_every_block_is_python_or_bash_that_is_run():
    fenced = [language for page in PAGES for language in re.findall(r"^```(\w*)$", page.read_text(), re.M)]
    assert set(fenced[::2]) <= {"python", "bash", "text", "diff"}
    assert set(fenced[1::2]) == {""}


def test_links_lead_somewhere():
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#]+)", prose):
            assert target.startswith("https://") or (page.parent / target).exists(), (page, target)
        for path in re.findall(r"`((?:examples|tests|benchmarks)/[\w/.]+)`", page.read_text()):
            assert (DOCS.parent / path).exists(), (page, path)
