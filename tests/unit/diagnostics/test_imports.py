"""What importing the diagnostics and the command line costs."""

import json
import subprocess
import sys


def loaded_by(module):
    code = (
        f"import json, sys, {module}; print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}} & "
        "{'megatron', 'ray', 'matplotlib', 'transformers', 'typer', 'rich'})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_diagnostics_need_torch_and_numpy_only():
    modules = ("diagnostics", "diagnostics.page", "diagnostics.live", "diagnostics.runlog")
    assert loaded_by(", ".join(f"megatron_router_replay.{name}" for name in modules)) == []


def test_the_command_line_starts_without_megatron_and_matplotlib():
    assert loaded_by("megatron_router_replay.cli") == ["rich", "typer"]
