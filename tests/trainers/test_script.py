"""Megatron-RL's script, started through this package: its hooks wait for the modules that the script imports."""

import os
import subprocess
import sys

import pytest

from tests.trainers import rebuilt

SCRIPT = """
import sys
from megatron_router_replay.trainers import megatron_rl, replayer
assert __name__ == "__main__" and sys.argv[1:] == ["--seed", "3"], sys.argv
assert not replayer.is_installed() and "megatron.rl.rl_utils" not in sys.modules
from megatron.core.inference import inference_request

class FinishedRequestRecord:  # an older Megatron-Core has none
    @classmethod
    def from_request(cls, request):
        return cls(policy_epoch=request.policy_epoch)

inference_request.FinishedRequestRecord = FinishedRequestRecord
from megatron.rl.rl_utils import prepare_data_for_update
assert hasattr(prepare_data_for_update, "mrr_original")
print(replayer.active().trainer)
"""


@pytest.mark.slow
def test_a_script_that_runs_through_this_package_has_the_hooks(tmp_path):
    for name, text in rebuilt.MEGATRON_RL.items():
        if name.startswith("megatron/rl"):  # the rest is installed, or is not imported here
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (tmp_path / "train_rl.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "megatron_router_replay.trainers.megatron_rl", str(tmp_path / "train_rl.py")]
    # From a different folder: the script finds the modules beside it, as `python train_rl.py` does.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([*command, "--seed", "3"], capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == "Megatron-RL"
