"""benchmarks/gpu runs to its end on a GPU made of software, and finds the faults that are planted."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.guard import PARTS

ROOT = Path(__file__).parents[3]


def run(*arguments):
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


def report_of(path, *arguments):
    done = run("--device", "soft", "--out", str(path), *arguments)
    return done, path.read_text()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Run without and with planted faults at the same time, first the one with a part that hangs, which is waited for."""
    folder = tmp_path_factory.mktemp("reports")
    runs = {
        "hang": ("--plant", "hang", "--limit-s", "60"),
        "no fault": (),
        "wrong": ("--plant", "wait", "pageable", "layer", "exception"),
    }
    with ThreadPoolExecutor(2) as pool:
        started = {name: pool.submit(report_of, folder / name, *options) for name, options in runs.items()}
        return {name: each.result() for name, each in started.items()}


@pytest.mark.slow
def test_every_part_runs_to_its_end_and_is_as_promised(reports):
    done, report = reports["no fault"]
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in report.splitlines() if line.startswith("| ")][2:]
    assert list(dict.fromkeys(row[0].removeprefix("| ") for row in rows)) == list(PARTS)
    assert {len(row) for row in rows} == {10}
    replays = [row for row in rows if row[0] == "| step" and row[1].startswith("replay")]
    assert [row[-1] for row in replays] == ["exact |"] * 3
    assert "All of it is as promised." in report


@pytest.mark.slow
def test_planted_faults_are_found_and_end_no_other_part(reports):
    done, report = reports["wrong"]
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = (line for line in report.splitlines() if line.startswith("| step | replay, rows |"))
    for problem in ("decisions are not those of the trace", "4 waits more than", "2 pageable uploads more than"):
        assert problem in row
    empty = " |  |  |  |  |  |  |  |  | **wrong**: "
    assert f"| step, full recompute{empty}RuntimeError: a planted exception" in report
    assert "step, full recompute: RuntimeError: a planted exception" in report.splitlines()[-1]
    done, report = reports["hang"]
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"| step{empty}no answer in 60 s" in report
    assert "| step, full recompute | replay, rows |" in report


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA GPU is here")
def test_without_a_gpu_it_says_so():
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert "no CUDA GPU is available" in done.stderr
