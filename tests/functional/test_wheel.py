"""What a wheel holds, that its demo keeps its promise where neither this checkout nor its tests are, and other Pythons."""

import json
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
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("WHEEL" not in os.environ, reason="`make test-wheel` builds it, and an environment for it"),
]
PROMISED = (
    "decisions differ_without_replay differ_with_replay recomputes_checked recomputes_identical rows_replayed rows_live "
    "rows_padding logprob_gap_without logprob_gap_with"
).split()


@pytest.fixture(scope="module")
def folder():
    """The folder with the wheel, and `venv` with it installed as [demo]."""
    return ROOT / os.environ["WHEEL"]


@pytest.fixture(scope="module")
def wheel(folder):
    (built,) = folder.glob("*.whl")
    return built


def test_it_holds_the_package_its_data_and_its_metadata_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = f"megatron_router_replay-{mrr.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        errors = archive.read("megatron_router_replay/cli/errors.md").decode()
    assert {name.split("/")[0] for name in names} == {"megatron_router_replay", info}
    assert {"megatron_router_replay/py.typed", "megatron_router_replay/demo/data/config.json"} <= set(names)
    assert errors == (ROOT / "docs/errors.md").read_text(), "the text that `router-replay explain` prints"
    assert "License-Expression: Apache-2.0" in metadata
    description = metadata.partition("\n\n")[2]
    assert description.startswith("# megatron_router_replay")
    assert [link for link in re.findall(r"\]\(([^)]*)\)", description) if not link.startswith("https://")] == []
    assert "Requires-Python: >=3.11" in metadata
    assert "router-replay = megatron_router_replay.cli:run" in scripts


def test_its_modules_are_those_of_this_checkout_and_no_removed_one(wheel):
    planted = ROOT / "build/lib/megatron_router_replay/removed.py"
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron_router_replay").rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.endswith(".py")} == here
    assert not planted.exists(), "the build emptied its folder"


def test_its_demo_replays_a_real_engines_routes_exactly(folder, tmp_path):
    done = subprocess.run(
        [folder / "venv/bin/router-replay", "demo", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
        env={**os.environ, "COLUMNS": "80", "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(PROMISED) <= result.keys()
    assert all(isinstance(value, int | float) for value in result.values())
    # 2 prompts of 33 and 29 tokens, 4 answers each: 248 and 177 tokens in all. The last of each has no route; 3 MoE layers.
    assert (result["samples"], result["tokens_generated"]) == (8, 177)
    assert result["decisions"] == (248 + 177 - 8) * 3
    assert result["differ_without_replay"] > 0
    assert result["differ_with_replay"] == 0
    assert result["recomputes_identical"] == result["recomputes_checked"] == 3 * 4  # layers x micro-batches
    assert (result["rows_replayed"], result["rows_live"], result["rows_padding"]) == (417, 8, 4 * 2 * 73 - 425)
    assert result["logprob_gap_with"] < result["logprob_gap_without"]
    assert result["kl_with"] < result["kl_without"]
    assert "mrr.explain(model_chunks)" in done.stderr, "the next step"
    assert readme_row("router decisions compared with the engine's") == [result["decisions"]] * 2
    # Rounding differs between machines.
    differ = [result["differ_without_replay"], 0]
    assert readme_row("of which differ") == pytest.approx(differ, rel=0.5)
    kl = [result["kl_without"], result["kl_with"]]
    assert readme_row("mean k3 KL(engine || trainer) (nats)") == pytest.approx(kl, rel=0.5)


def readme_row(label):
    """Return the two numbers that README shows of a demo, without and with replay."""
    numbers = re.search(rf"^ +{re.escape(label)} +([\d.,]+) +([\d.,]+)$", (ROOT / "README.md").read_text(), re.M)
    return [float(number.replace(",", "")) for number in numbers.groups()]


def test_its_doctor_finds_nothing_in_the_way(folder, tmp_path):
    program = folder / "venv/bin/router-replay"
    done = subprocess.run([program, "doctor"], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


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
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=120)
    its_python = tmp_path / "venv/bin/python"
    # As the Makefile installs, which names the program: uv takes a second where pip takes twenty.
    install = [sys.executable, "-m", *os.environ.get("INSTALL", "pip install").split(), "--quiet"]
    where = os.environ | {"PIP_PYTHON": str(its_python), "UV_PYTHON": str(its_python), "PIP_NO_COMPILE": "1"}
    needed = ["--constraint", ROOT / "constraints.txt", "numpy", "safetensors", "xxhash", "typer", "rich"]
    subprocess.run([*install, *needed], env=where, check=True, timeout=300)
    subprocess.run([*install, "--no-deps", wheel], env=where, check=True, timeout=120)
    (package,) = (tmp_path / "venv/lib").glob("python3.*/site-packages/megatron_router_replay")
    subprocess.run([its_python, "-W", "error", "-m", "compileall", "-q", "-f", package], check=True, timeout=120)
    program = tmp_path / "venv/bin/router-replay"
    version = subprocess.run([program, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    assert version.strip() == mrr.__version__
    doctor = subprocess.run([program, "doctor"], capture_output=True, text=True, timeout=60)
    assert doctor.returncode == 1, doctor.stderr
    assert "problem: torch is not installed" in doctor.stdout
