"""RESULTS.md is what the kept samples say."""

import json

import pytest

from benchmarks.__main__ import PARTS, RAW, RESULTS, results


def test_results_are_those_of_the_samples():
    assert results() == RESULTS.read_text()


@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_samples(part):
    kept = json.loads((RAW / f"{part}.json").read_text())
    assert kept["raw"]
    assert "load average" in kept["environment"]


def test_samples_stay_small():
    assert sum(path.stat().st_size for path in RAW.iterdir()) < 1_000_000
