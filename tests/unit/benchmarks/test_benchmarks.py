"""Timing and counting helpers of benchmarks, by hand; RESULTS.md is made from the kept samples."""

import ast
import inspect
import json
import operator

import pytest
import torch

from benchmarks.__main__ import PARTS, RAW, RESULTS, results
from benchmarks.measure import outside_interval, ratio, rounds
from benchmarks.memory import Held


@pytest.mark.parametrize(("samples", "rank"), [(1, 1), (5, 1), (6, 1), (9, 2), (15, 4), (25, 8), (41, 14)])
def test_the_confidence_interval_of_a_median(samples, rank):
    # Ranks from the sign test's table, two-sided 5%: (rank)th smallest to (rank)th largest.
    assert outside_interval(samples) == rank - 1


def test_a_ratio_needs_the_same_rounds():
    with pytest.raises(ValueError):
        ratio({"ours": [1.0, 2.0], "theirs": [1.0]}, "ours", "theirs")


def test_each_round_times_every_alternative_once_without_its_preparation():
    calls, now = [], [0.0]

    def spend(name: str, seconds: float) -> None:
        calls.append(name)
        now[0] += seconds

    alternatives = {name: lambda name=name, each=each: spend(name, each) for name, each in (("a", 2.0), ("b", 3.0))}
    prepare = {"b": lambda: spend("before b", 50.0)}
    seconds = rounds(alternatives, repeats=3, warm_up=1, prepare=prepare, clock=lambda: now[0])
    assert seconds == {"a": [2.0] * 3, "b": [3.0] * 3}
    assert calls.count("a") == 4
    assert all(calls[i - 1] == "before b" for i, name in enumerate(calls) if name == "b")


def test_a_storage_is_counted_once_also_where_autograd_alone_has_it():
    held = Held()
    sparse = torch.eye(3).to_sparse()  # has no storage
    before = held.count()
    whole = torch.zeros(1000, dtype=torch.uint8)
    views = [whole[:10], whole[10:]]
    assert held.count() - before == 1000
    held.save(views[0])
    assert held.count() - before == 1000
    weight = torch.ones(10, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(held.save, lambda tensor: tensor):
        loss = (weight.exp() * 1.0).sum()  # exp keeps its result, 40 bytes
    assert held.count() - before == 1000 + 40 + 40 + 4
    del loss, sparse


def test_results_are_those_of_the_samples_of_every_part():
    assert results() == RESULTS.read_text()
    for part in PARTS:
        kept = json.loads((RAW / f"{part}.json").read_text())
        assert kept["raw"]
        assert "load average" in kept["environment"]
    assert sum(path.stat().st_size for path in RAW.iterdir()) < 1_000_000, "samples stay small"


def test_the_gpu_benchmark_calls_functions_that_torch_has():
    """Names and keywords of torch.cuda and of the profiler, which no run on the software GPU calls."""
    found = 0
    for path in (RAW.parent / "gpu").glob("*.py"):
        for node in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = ast.unparse(node.func)
            if not name.startswith("torch.cuda."):
                continue
            function = operator.attrgetter(name.removeprefix("torch."))(torch)
            inspect.signature(function).bind(*node.args, **{each.arg: None for each in node.keywords})
            found += 1
    assert found > 10
