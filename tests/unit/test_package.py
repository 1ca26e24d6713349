"""What importing the package costs, and that its public names are there."""

import json
import subprocess
import sys

import megatron_router_replay as mrr

PUBLIC = (
    "RoutingTrace RouterReplay RouterReplayAction record replay freeze_recompute explain install uninstall save_trace "
    "load_trace concat_traces merge_traces diff_traces engines RouterReplayError"
).split()


def in_a_fresh_interpreter(code: str) -> object:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_importing_it_loads_neither_megatron_nor_ray_nor_matplotlib():
    loaded = in_a_fresh_interpreter(
        "import json, sys, megatron_router_replay; "
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules} & "
        "{'megatron', 'ray', 'matplotlib', 'transformers', 'typer', 'rich', 'safetensors'})))"
    )
    assert loaded == []


def test_importing_it_takes_under_50_ms_beyond_torch():
    code = (
        "import json, time, torch; start = time.perf_counter(); import megatron_router_replay; "
        "print(json.dumps(time.perf_counter() - start))"
    )
    assert min(in_a_fresh_interpreter(code) for _ in range(3)) < 0.050


def test_every_public_name_is_there_and_listed():
    for name in PUBLIC:
        assert getattr(mrr, name) is not None
        assert name in mrr.__all__
        assert name in dir(mrr)
