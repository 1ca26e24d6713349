"""benchmarks/gpu.py runs where no GPU is: its parts on a CPU, its counts on a GPU made of software."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"


def run(*arguments, folder):
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "titles"), [("cpu", 9), ("soft", 2)])
def test_it_runs_where_no_gpu_is_and_finds_everything_exact(tmp_path, device, titles):
    done = run("--device", device, "--quick", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("### (") == titles
    assert done.stdout.count("\n| none | ") == 9 * (2 if device == "cpu" else 1)
    assert done.stdout.count(" | 4 | 0 |") >= 2, "torch's checkpoints: two routers, forward and recompute, none wrong"
    assert "Exact, and no wait of ours: all of it" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA GPU is here")
def test_without_a_gpu_it_says_so(tmp_path):
    done = run(folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no CUDA GPU is available" in done.stderr
