"""What a wheel holds, and that it runs where neither this checkout nor its tests are."""

import os
import re
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
    assert {"megatron_router_replay/py.typed", "megatron_router_replay/demo/data/config.json"} <= set(names)
    assert "License-Expression: Apache-2.0" in metadata
    description = metadata.partition("\n\n")[2]
    assert description.startswith("# megatron_router_replay")
    assert [link for link in re.findall(r"\]\(([^)]*)\)", description) if not link.startswith("https://")] == []
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
        [sys.executable, "-c", code, "convert", *arguments, "--model", str(data)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert "551 tokens (543 with a route)" in done.stdout


def find_python(version):
    """Return a Python of this version that runs, also one of pyenv's that is not switched on; None if there is none."""
    name = f"python{version}"
    candidates = [shutil.which(name), *Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}")]
    works = (each for each in candidates if each and not subprocess.run([each, "-V"], capture_output=True).returncode)
    return next(works, None)


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_it_installs_and_starts_on_another_python(wheel, tmp_path, version):
    # Without torch, whose wheel for these is gigabytes of CUDA; `make test-wheel PYTHON=...` has it and runs the demo.
    python = find_python(version)
    if python is None:
        pytest.skip(f"Python {version} is not on this machine")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    its_python = tmp_path / "venv/bin/python"
    pip = [its_python, "-m", "pip", "install", "--quiet"]
    needed = ["--constraint", ROOT / "constraints.txt", "numpy", "safetensors", "typer", "rich"]
    subprocess.run([*pip, *needed], check=True, timeout=300)
    subprocess.run([*pip, "--no-deps", wheel], check=True, timeout=120)
    (package,) = (tmp_path / "venv/lib").glob("python3.*/site-packages/megatron_router_replay")
    subprocess.run([its_python, "-W", "error", "-m", "compileall", "-q", "-f", package], check=True, timeout=120)
    program = tmp_path / "venv/bin/router-replay"
    version = subprocess.run([program, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    assert version.strip() == mrr.__version__
    doctor = subprocess.run([program, "doctor"], capture_output=True, text=True, timeout=60)
    assert doctor.returncode == 1, doctor.stderr
    assert "problem: torch is not installed" in doctor.stdout
