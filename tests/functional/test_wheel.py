"""What a wheel holds, and that it runs where neither this checkout nor its tests are."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import megatron_router_replay as mrr

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("megatron_router_replay", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_it_holds_the_package_its_data_and_its_metadata_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = f"megatron_router_replay-{mrr.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {"megatron_router_replay", info}
    assert {"megatron_router_replay/py.typed", "megatron_router_replay/demo/data/qwen3moe/config.json"} <= set(names)
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert "router-replay = megatron_router_replay.cli:run" in scripts


def test_it_runs_from_another_folder(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import megatron_router_replay.cli as cli; print(cli.__file__, flush=True); cli.run()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    data = tmp_path / "site/megatron_router_replay/demo/data"
    arguments = [str(data / "vllm_0.30.0_bf16_response.json"), "out.npz", "--engine", "vllm", "--key", "response"]
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", *arguments, "--model", str(data / "qwen3moe")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert "551 tokens (543 with a route)" in done.stdout
