"""Ranks that loaded Transformer Engine before Megatron-Core, and whether there is one."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import GlooWorkers

if "TE_DIR" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


def pool_of(num_ranks: int) -> Any:
    @pytest.fixture(scope="session", name=f"workers_{num_ranks}")
    def workers() -> Iterator[GlooWorkers]:
        with GlooWorkers(num_ranks, preload=["tests.functional.transformer_engine.cases"]) as pool:
            yield pool

    return workers


workers_2, workers_4 = map(pool_of, (2, 4))

_counted: list[Any] = []


@pytest.fixture
def count() -> Any:
    """Take a case's counts on each rank, for the last lines of the log."""
    return lambda *counts: _counted.append(counts)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts = [each for ranks in _counted for each in ranks]
    if counts:
        planted = [each for each in counts if each.recomputes and each.planted is not None]
        terminalreporter.write_line(
            f"{Path(os.environ['TE_DIR']).name}: {len(_counted)} cases on {len(counts)} ranks; "
            f"{sum(each.decisions for each in counts)} recomputed decisions, none wrong; without the library "
            f"{sum(each.planted for each in planted)} of {sum(each.decisions for each in planted)} flip"
        )
