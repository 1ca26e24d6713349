"""What importing the diagnostics and the command line costs."""

import json
import subprocess
import sys


def loaded_by(module):
    code = (
        f"import json, sys, {module}; print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}} & "
        "{'megatron', 'ray', 'matplotlib', 'transformers', 'typer', 'jinja2', 'torch'})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_diagnostics_need_torch_and_numpy_only():
    modules = ("diagnostics", "diagnostics.page", "diagnostics.live", "diagnostics.where")
    assert loaded_by(", ".join(f"megatron_router_replay.{name}" for name in modules)) == ["torch"]


def test_the_live_comparison_loads_nothing_else_of_the_diagnostics():
    code = (
        "import sys, megatron_router_replay.diagnostics.live; print(sorted(name.removeprefix('megatron_router_replay.') for "
        "name in sys.modules if name.startswith(('megatron_router_replay.diagnostics.', 'megatron_router_replay.store'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "['diagnostics.fact', 'diagnostics.live']"


def test_the_command_line_starts_without_torch():
    assert loaded_by("megatron_router_replay.cli.commands") == ["typer"]
    assert loaded_by("megatron_router_replay.cli") == []
