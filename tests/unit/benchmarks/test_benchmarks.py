"""Timing and counting helpers of benchmarks, by hand; RESULTS.md is made from the kept samples."""

import ast
import inspect
import json
import operator

import pytest
import torch

from benchmarks.__main__ import PARTS, RAW, RESULTS, results
from benchmarks.measure import Ratio, outside_interval, ratio, rounds, verdict
from benchmarks.memory import Held


@pytest.mark.parametrize(("samples", "rank"), [(1, 1), (5, 1), (6, 1), (9, 2), (15, 4), (25, 8), (41, 14)])
def test_the_confidence_interval_of_a_median(samples, rank):
    # Ranks from the sign test's table, two-sided 5%: (rank)th smallest to (rank)th largest.
    assert outside_interval(samples) == rank - 1


def test_a_ratio_needs_the_same_rounds():
    with pytest.raises(ValueError):
        ratio({"ours": [1.0, 2.0], "theirs": [1.0]}, "ours", "theirs")


def test_each_round_runs_every_alternative_once_behind_its_preparation():
    calls = []
    ticks = iter(range(100))
    seconds = rounds(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        repeats=3,
        warm_up=1,
        prepare={"b": lambda: calls.append("before b")},
        clock=lambda: next(ticks),
    )
    assert seconds == {"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0]}
    assert calls.count("a") == 4
    assert all(calls[i - 1] == "before b" for i, name in enumerate(calls) if name == "b")


def test_what_is_prepared_is_not_timed():
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    alternatives = {"a": lambda: spend(2.0)}
    prepare = {"a": lambda: spend(50.0)}
    assert rounds(alternatives, repeats=2, prepare=prepare, clock=lambda: now[0]) == {"a": [2.0, 2.0]}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Ratio(1.05, 1.04, 1.05), "met, 1.050 (1.040 to 1.050)"),
        (Ratio(1.06, 1.055, 1.1), "not met, 1.060 (1.055 to 1.100)"),
        (Ratio(1.04, 1.0, 1.1), "met, within the noise, 1.040 (1.000 to 1.100)"),
        (Ratio(1.06, 1.0, 1.1), "not met, within the noise, 1.060 (1.000 to 1.100)"),
    ],
)
def test_a_target_is_met_up_to_its_limit_or_not_told_apart_from_noise(found, words):
    assert verdict("replay", found, 1.05) == f"- replay <= 1.05: {words}"


def test_a_storage_is_counted_once_however_many_views_it_has():
    held = Held()
    before = held.count()
    whole = torch.zeros(1000, dtype=torch.uint8)
    views = [whole[:10], whole[10:]]
    assert held.count() - before == 1000
    held.save(views[0])
    assert held.count() - before == 1000


def test_what_only_autograd_holds_is_counted():
    held = Held()
    before = held.count()
    weight = torch.ones(10, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(held.save, lambda tensor: tensor):
        loss = (weight.exp() * 1.0).sum()  # exp keeps its result, 40 bytes
    assert held.count() - before == 40 + 40 + 4
    del loss


def test_a_tensor_without_a_storage_is_left_out():
    sparse = torch.eye(3).to_sparse()
    assert Held().count() > 0
    del sparse


def test_results_are_those_of_the_samples():
    assert results() == RESULTS.read_text()


@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_samples(part):
    kept = json.loads((RAW / f"{part}.json").read_text())
    assert kept["raw"]
    assert "load average" in kept["environment"]


def test_samples_stay_small():
    assert sum(path.stat().st_size for path in RAW.iterdir()) < 1_000_000


def test_the_gpu_benchmark_calls_what_torch_has():
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
