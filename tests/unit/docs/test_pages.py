"""Blocks and links of README.md and docs/, and the recipe for W&B; sybil runs the blocks themselves (conftest.py)."""

import re
import time
from pathlib import Path

import pytest

import megatron_router_replay as mrr

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.name != "README.md"),
    "../README.md",
]


def test_every_block_is_python_or_bash_that_is_run():
    fenced = [language for page in PAGES for language in re.findall(r"^```(\w*)$", (DOCS / page).read_text(), re.M)]
    assert set(fenced[::2]) <= {"python", "bash", "text", "diff"}
    assert set(fenced[1::2]) == {""}


def test_links_lead_somewhere():
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#]+)", prose):
            assert target.startswith("https://") or ((DOCS / page).parent / target).exists(), (page, target)
        for path in re.findall(r"`((?:examples|tests|benchmarks)/[\w/.]+)`", (DOCS / page).read_text()):
            assert (DOCS.parent / path).exists(), (page, path)


@pytest.mark.slow
def test_the_recipe_for_weights_and_biases_writes_the_numbers_of_a_report(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is part of [loggers]")
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "monitoring.md").read_text(), re.M | re.S)
    (recipe,) = [block for block in blocks if "import wandb" in block]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    report = mrr.mcore.SessionReport(kind="replay", rows_replayed=7, rows_live=1)
    exec(compile(recipe, "monitoring.md", "exec"), {"metrics": report.metrics()})
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    (file,) = folder.glob("*.wandb")
    deadline = time.monotonic() + 60
    while b"replayed_share" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)  # W&B's own process writes it a moment after the run was finished
    written = file.read_bytes()
    assert b"router_replay/replayed_share" in written
    assert b"0.875" in written
