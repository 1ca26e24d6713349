"""Pools of workers that are forked from a process which has imported verl."""

from collections.abc import Iterator

import pytest

from tests.support.workers import GlooWorkers

PRELOAD = ["tests.functional.verl.cases"]


@pytest.fixture(scope="session")
def workers_1() -> Iterator[GlooWorkers]:
    with GlooWorkers(1, preload=PRELOAD) as workers:
        yield workers


@pytest.fixture(scope="session")
def workers_2() -> Iterator[GlooWorkers]:
    with GlooWorkers(2, preload=PRELOAD) as workers:
        yield workers


@pytest.fixture(scope="session")
def workers_4() -> Iterator[GlooWorkers]:
    with GlooWorkers(4, preload=PRELOAD) as workers:
        yield workers
