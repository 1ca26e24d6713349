"""The example that a newcomer reads first runs, and is short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "first_replay.py"
pytestmark = pytest.mark.slow


def test_it_replays_one_payload_and_prints_the_report():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    # vLLM returned 24 prompt and 40 generated tokens, and 63 rows: the last token was never fed back.
    assert "64 tokens (63 with a route)" in done.stdout
    printed = " ".join(done.stdout.split())
    assert "tokens replayed 63 (98.4% of the tokens) tokens routed live 1" in printed
    code = [line for line in SCRIPT.read_text().splitlines() if line.strip() and not line.strip().startswith('"""')]
    assert len(code) <= 30
