"""The command line where what it works with is missing or broken: the very moment in which a newcomer runs it."""

import json
import subprocess
import sys

HIDE = "import sys; [sys.modules.__setitem__(name, None) for name in {names!r}]; "
RUN = "sys.argv[0] = 'router-replay'; from megatron_router_replay.cli import run; run()"


def run_without(names, *arguments, code):
    """Run the command line in a Python in which these modules cannot be imported."""
    command = [sys.executable, "-c", HIDE.format(names=names) + RUN, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert "fault of router-replay" not in done.stderr
    return done


def test_doctor_without_torch_says_that_it_is_missing():
    done = run_without(["torch", "megatron"], "doctor", "--json", code=1)
    values = json.loads(done.stdout)
    assert values["problems"] == ["torch is not installed", "megatron-core is not installed"]
    assert values["environment"]["packages"]["torch"] is None
    assert values["environment"]["packages"]["numpy"]["version"]


def test_doctor_with_torch_missing_beside_a_megatron_core_that_is_there():
    done = run_without(["torch"], "doctor", code=1)
    assert "problem: torch is not installed" in done.stdout
    assert "problem: megatron-core cannot be imported: " in done.stdout


def test_doctor_names_the_module_that_a_megatron_core_lacks():
    # As one of 0.18 and later without triton.
    done = run_without(["megatron.core.tensor_parallel"], "doctor", code=1)
    assert "megatron-core cannot be imported: " in done.stdout
    assert "tensor_parallel" in done.stdout.partition("cannot be imported: ")[2]


def test_another_command_says_what_to_install():
    done = run_without(["torch"], "inspect", "a.safetensors", code=2)
    assert "router-replay needs torch, which is not installed" in done.stderr


def test_a_result_is_written_to_a_file_without_torch(tmp_path):
    run_without(["torch", "megatron"], "doctor", "--out", str(tmp_path / "doctor.json"), code=1)
    assert json.loads((tmp_path / "doctor.json").read_text())["problems"]
