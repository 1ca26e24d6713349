"""The demo, as a user runs it."""

import json
import os
import subprocess
import sys

PROMISED = (
    "decisions differ_without_replay differ_with_replay recomputes_checked recomputes_identical rows_replayed rows_live "
    "rows_padding logprob_gap_without logprob_gap_with step_seconds_without step_seconds_with"
).split()


def test_the_demo_replays_a_real_engines_routes_exactly(tmp_path):
    out = tmp_path / "demo.json"
    done = subprocess.run(
        [sys.executable, "-m", "megatron_router_replay.cli", "demo", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert set(PROMISED) <= result.keys()
    assert all(isinstance(value, int | float) for value in result.values())
    # 8 samples of 231 prompt and 320 generated tokens in all; the last of each has no route; 3 MoE layers.
    assert (result["prompts"], result["tokens_generated"]) == (8, 320)
    assert result["decisions"] == (231 + 320 - 8) * 3
    assert result["differ_without_replay"] > 0
    assert result["differ_with_replay"] == 0
    assert result["recomputes_identical"] == result["recomputes_checked"] == 3 * 4  # layers x micro-batches
    assert (result["rows_replayed"], result["rows_live"], result["rows_padding"]) == (543, 8, 4 * 2 * 84 - 551)
    assert result["logprob_gap_with"] < result["logprob_gap_without"]
    assert result["kl_with"] < result["kl_without"]
    assert "of which differ" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
