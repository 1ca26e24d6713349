"""Blocks and links of README.md and docs/; sybil runs the blocks themselves (conftest.py)."""

import re
from collections import Counter
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


def test_the_page_of_stable_names_has_the_version_of_trace_files():
    from megatron_router_replay.store.file import VERSION

    assert f"the file format of traces, version {VERSION}." in (DOCS / "stable.md").read_text()


def test_the_page_to_decide_counts_the_recipes_of_the_table():
    lines = (DOCS.parent / "benchmarks/replay_recipes.tsv").read_text().splitlines()[1:]
    counts = Counter()
    for number, trainer, *_, run_as, _, _ in (line.split("\t") for line in lines):
        first, _, last = number.partition("-")
        how_many = int(last or first) - int(first) + 1
        counts[trainer] += how_many
        counts[trainer, re.match(r"\w+", run_as)[0]] += how_many
    rows = re.findall(r"^\| (.*) \|$", (DOCS / "decide.md").read_text(), re.M)
    cells = {trainer: rest for trainer, *rest in (row.split(" | ") for row in rows)}

    def counted(trainer):
        return [counts[trainer], *(counts[trainer, kind] for kind in ("recipe", "class", "shape", "refused"))]

    assert [int(re.match(r"\d*", cell)[0] or 0) for cell in cells["miles"]] == counted("miles") == [29, 16, 1, 10, 2]
    assert cells["NeMo-RL, SkyRL, slime"][:2] == ["5, 3, 2", "all"]
    assert [counted(trainer)[:2] for trainer in ("NeMo-RL", "SkyRL", "slime")] == [[5, 5], [3, 3], [2, 2]]
    assert counted("verl") == [2, 1, 0, 1, 0]
    assert sum(counts[trainer] for trainer in ("miles", "NeMo-RL", "SkyRL", "slime", "verl")) == 41
