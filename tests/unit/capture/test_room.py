"""capture, fused and trainers are rooms: each imports the core, and no other room."""

import json
import subprocess
import sys

import pytest

ROOMS = {"transport", "capture", "diagnostics", "trainers", "fused", "testing", "cli", "demo", "mcore"}


@pytest.mark.parametrize(
    ("room", "names"),
    [
        ("capture", "create_capturer"),
        ("fused", "probe, route, selection_scores"),
        ("trainers", "take_routes, number_rows, packed, recorded"),
    ],
)
def test_the_room_loads_no_other_room_and_neither_megatron_nor_triton(room, names):
    code = f"import json, sys; from megatron_router_replay.{room} import {names}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded = json.loads(done.stdout)
    ours = {name.split(".")[1] for name in loaded if name.startswith("megatron_router_replay.")}
    assert room in ours
    assert ours & ROOMS == {room}
    assert not {"megatron", "triton", "transformers"} & {name.split(".")[0] for name in loaded}
