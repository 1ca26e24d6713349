"""Every python block and every router-replay command of README.md and docs/ is a test: sybil collects them from the pages."""

import pytest
from sybil import Sybil
from sybil.parsers.markdown import CodeBlockParser
from sybil.sybil import SybilCollection

from tests import snippets

TUTORIALS = ["docs/first_hour.md", "docs/own_loop.md"]
BLOCKS = [CodeBlockParser("python", snippets.run_python), CodeBlockParser("bash", snippets.run_commands)]
PRINTED = [*BLOCKS, CodeBlockParser("text", snippets.check_printed)]

pytest_collect_file = SybilCollection(
    [
        Sybil(
            parsers=PRINTED,
            patterns=["README.md"],
            excludes=["docs/README.md"],
            setup=snippets.enter_page,
            teardown=snippets.leave_page,
        ),
        Sybil(
            parsers=BLOCKS,
            patterns=["docs/*.md", "docs/trainers/*.md"],
            excludes=TUTORIALS,
            setup=snippets.enter_page,
            teardown=snippets.leave_page,
        ),
        Sybil(
            parsers=PRINTED,
            patterns=TUTORIALS,
            setup=snippets.enter_folder,
            teardown=snippets.leave_page,
        ),
    ]
).pytest()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the pages as slow."""
    for item in items:
        if item.path.suffix == ".md":
            item.add_marker(pytest.mark.slow)
