"""How tests are named: what they show, in at most 80 characters."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_name_of_a_test_is_longer_than_80_characters():
    names = [name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())]
    assert len(names) > 1000
    assert [name for name in names if len(name) > 80] == []
