"""Each file, folder and name that tests/README.md has in its tables exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS, PACKAGE = ROOT / "tests", ROOT / "megatron_router_replay"
CODE = set(re.findall(r"`([\w/.]+)`", (TESTS / "README.md").read_text()))
PATHS = sorted(each for each in CODE if each.endswith((".py", "/")))
EXISTING = [
    f"/{path.relative_to(ROOT)}" + "/" * path.is_dir()
    for top in (TESTS, PACKAGE, ROOT / ".ci")
    for path in top.rglob("*")
]


@pytest.mark.parametrize("name", PATHS)
def test_a_file_or_folder_exists(name):
    assert any(path.endswith(f"/{name}") for path in EXISTING)


def test_there_are_files_and_folders():
    assert len(PATHS) > 40
