"""benchmarks/gpu.py runs where no GPU is: all of it but the timing of CUDA kernels."""

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
def test_it_runs_on_a_cpu_and_finds_everything_correct(tmp_path):
    done = run("--device", "cpu", "--quick", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Correct against Megatron-Core's replay and a float64 formula: all passed" in done.stdout
    assert done.stdout.count("\n| 64 | ") == 16 + 8  # routers, dtypes and passes; host times of bf16
    assert "| full | " in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA GPU is here")
def test_without_a_gpu_it_says_so(tmp_path):
    done = run(folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no CUDA GPU is available" in done.stderr
