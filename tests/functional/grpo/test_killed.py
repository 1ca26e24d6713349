"""A run that is killed in the middle of a step goes on from its checkpoint as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.grpo.loop import read_metrics
from examples.grpo.vllm_engine import REPO
from tests.functional.grpo.cases import without_times

OPTIONS = "--prompts 4 --per-prompt 4 --updates 2 --per-microbatch 2 --checkpoint-every 1 --pp 2".split()


def start(out: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "examples.grpo", "train", "--out", str(out), *OPTIONS, *more]
    return subprocess.Popen(command, cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)}, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_numbers(tmp_path):
    assert start(tmp_path / "whole", "--steps", "6").wait(300) == 0
    expected = read_metrics(tmp_path / "whole/metrics.jsonl")
    assert len(expected) == 6

    killed = start(tmp_path / "killed", "--steps", "60")
    deadline = time.monotonic() + 300
    while len(read_metrics(tmp_path / "killed/metrics.jsonl")) < 3:
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    time.sleep(3)  # its workers notice that it is gone, and end
    done = len(read_metrics(tmp_path / "killed/metrics.jsonl"))
    assert 3 <= done < 6

    assert start(tmp_path / "killed", "--steps", "6", "--resume").wait(300) == 0
    resumed = read_metrics(tmp_path / "killed/metrics.jsonl")
    assert [step["step"] for step in resumed] == list(range(6))
    assert without_times(resumed) == without_times(expected)
