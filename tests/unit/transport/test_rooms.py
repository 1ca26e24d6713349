"""Transport is a room: it loads the core and no other room, and nobody loads it unasked."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ROOMS = ("transport", "capture", "diagnostics", "trainers", "fused", "testing", "cli", "demo", "mcore")
"""The rooms, and mcore, which is core but needs Megatron-Core."""


def _rooms_loaded_by(module: str) -> list[str]:
    code = (
        f"import json, sys, {module}; names = [name.split('.') for name in sys.modules]; "
        "print(json.dumps([name[1] for name in names if name[0] == 'megatron_router_replay' and len(name) > 1]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return sorted(set(json.loads(done.stdout)) & set(ROOMS))


def test_transport_loads_no_other_room() -> None:
    assert _rooms_loaded_by("megatron_router_replay.transport") == ["transport"]


def test_transport_over_ray_loads_no_other_room() -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'megatron-router-replay[ray]'")
    assert _rooms_loaded_by("megatron_router_replay.transport.ray") == ["transport"]


def test_mcore_does_not_load_transport() -> None:
    pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
    assert "transport" not in _rooms_loaded_by("megatron_router_replay.mcore")
