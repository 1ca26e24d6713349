"""Pools of workers that are forked from a process which has imported verl."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.workers import GlooWorkers


def pool_of(num_ranks: int) -> Any:
    @pytest.fixture(scope="session", name=f"workers_{num_ranks}")
    def workers() -> Iterator[GlooWorkers]:
        with GlooWorkers(num_ranks, preload=["tests.functional.verl.cases"]) as pool:
            yield pool

    return workers


workers_1, workers_2, workers_4 = map(pool_of, (1, 2, 4))
