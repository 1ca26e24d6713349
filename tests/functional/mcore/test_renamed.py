"""A Megatron-Core that renames what a router asks is one file to change here: model/upstream.py."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest

import megatron_router_replay

ROOT = Path(__file__).parents[3]
NAMES = {r"(?<!moe\.)\brouter_replay\b": "expert_replay", r"\bget_replay_topk\b": "choose_experts"}
"""The keyword, which the router's attribute bears too (the module of that name stays), and the method."""

HEART = ["test_recomputes.py", "test_verify.py", "test_drop_in.py"]


def rename(path: Path, name: str) -> None:
    path.write_text(re.sub(name, NAMES[name], path.read_text()))


@pytest.mark.slow
def test_the_hearts_tests_pass_with_renamed_names_after_two_edited_lines(tmp_path):
    no_data = shutil.ignore_patterns("__pycache__", "data", "functional", "trainers", "*.so")
    shutil.copytree(Path(megatron.core.__file__).parent, tmp_path / "megatron/core", ignore=no_data)
    shutil.copytree(Path(megatron_router_replay.__file__).parent, tmp_path / "megatron_router_replay")
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=no_data)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    moe, (keyword, method) = tmp_path / "megatron/core/transformer/moe", NAMES
    for path, name in [("router", keyword), ("moe_utils", keyword), ("moe_utils", method), ("router_replay", method)]:
        rename(moe / f"{path}.py", name)

    def run() -> subprocess.CompletedProcess[str]:
        files = [f"tests/unit/mcore/{name}" for name in HEART]
        options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "--tb=line"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-m", "pytest", *options, *files]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)

    assert run().returncode != 0, "the copy is not what runs"
    upstream = tmp_path / "megatron_router_replay/mcore/model/upstream.py"
    text = upstream.read_text().replace('= "router_replay"', '= "expert_replay"')
    upstream.write_text(text.replace('= "get_replay_topk"', '= "choose_experts"'))
    # The tests drive routers by hand too, by Megatron-Core's names.
    for path in (tmp_path / "tests/unit/mcore").glob("*.py"):
        path.write_text(re.sub(r"\.router_replay\b(?! import)", ".expert_replay", path.read_text()))
    done = run()
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d{2,} passed", done.stdout)
