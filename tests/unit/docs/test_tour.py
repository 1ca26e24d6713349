"""CONTRIBUTING's tour of the core: each file, test and name that it has exists."""

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOUR = (ROOT / "CONTRIBUTING.md").read_text().split("## A tour of the core")[1].split("\n## ")[0]
CODE = set(re.findall(r"`([\w/.]+)`", TOUR))
FILES = sorted(each for each in CODE if each.endswith(".py"))
NAMES = sorted(each for each in CODE if "." in each and not each.endswith(".py") and each != "TopKRouter.routing")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_tour_exists(name):
    module, *attributes = name.split(".")
    (path,) = (ROOT / "megatron_router_replay/mcore").glob(f"*/{module}.py")
    found = importlib.import_module(f"megatron_router_replay.mcore.{path.parent.name}.{module}")
    assert callable(reduce(getattr, attributes, found))


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_tour_exists(name):
    assert any((ROOT / folder / name).is_file() for folder in ("megatron_router_replay/mcore", "tests"))


def test_the_tour_has_names_and_files():
    assert len(NAMES) > 15
    assert len(FILES) > 12
