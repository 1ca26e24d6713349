"""The drawing in CONVENTIONS.md is true: a part of the package imports only parts on lines above it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_router_replay"

THIRD_PARTY = {
    "megatron": {"mcore", "testing", "cli"},
    "ray": set(),
    "triton": {"mcore", "testing"},  # Megatron-Core loads it where it is installed
    "matplotlib": set(),
    "transformers": set(),
    "typer": {"cli"},
    "rich": {"cli"},
    "verl": set(),
}
"""Package -> parts that load it with their public names. `transport.ray` and `trainers.verl` are imported by name."""


def drawing() -> tuple[list[list[str]], list[list[str]]]:
    """Return the lines of the drawing: those of the core, and those below."""
    text = (ROOT / "CONVENTIONS.md").read_text()
    block = text.split("## Where code goes\n\n")[1].split("\n\n")[0]
    core, rooms = block.split("\n    ---")
    return [line.split() for line in core.splitlines()], [line.split() for line in rooms.splitlines()[1:]]


def wings() -> list[str]:
    """Return the wings of mcore, the lowest first."""
    text = (ROOT / "CONVENTIONS.md").read_text()
    return text.split("The wings of `mcore/`")[1].split("\n\n")[1].split()


CORE, ROOMS = drawing()
LINES = [*CORE, *ROOMS]
PARTS = [part for line in LINES for part in line]


def above(part: str) -> set[str]:
    """Return the parts that this one may load; the first line is loaded with the package itself."""
    line = next(i for i, parts in enumerate(LINES) if part in parts)
    return {other for parts in LINES[: max(1, line)] for other in parts}


@cache
def loaded() -> dict[str, dict[str, list[str]]]:
    with tempfile.TemporaryDirectory() as folder:  # the forks do not take away what wandb makes on import
        done = subprocess.run(
            [sys.executable, "-m", "tests.unit.loaded_modules", *PARTS],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("part"): line for line in lines}


def test_the_drawing_names_every_part_once() -> None:
    there = {
        path.stem
        for path in (ROOT / PACKAGE).iterdir()
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").is_file()
    }
    assert sorted(PARTS) == sorted(there)
    # The core and the rooms, as the rule has them; cli and demo may import everything.
    assert ROOMS == [["capture", "diagnostics", "testing", "trainers", "transport"], ["demo"], ["cli"]]


@pytest.mark.parametrize("package", sorted(THIRD_PARTY))
def test_public_names_load_other_packages_only_where_they_belong(package) -> None:
    """Parts below such a part in the drawing, cli and demo, may load the package with it."""
    loading = {part for part in PARTS if package in {name.split(".")[0] for name in loaded()[part]["loaded"]}}
    assert loading <= THIRD_PARTY[package]


def test_a_session_registers_nothing_for_the_end_of_the_process() -> None:
    seen = loaded()
    assert seen["mcore"]["atexit"] == []
    assert seen["transport"]["atexit"] == ["megatron_router_replay.transport.collective"], "so a hook would be seen"


@pytest.mark.parametrize(
    ("part", "room", "modules"),
    [
        # The MoE layers of a model's config; users of freeze_recompute have nothing to decode.
        ("mcore", "engines", {"families", "model_info"}),
        ("mcore", "store", set()),  # only replay("path") reads files
    ],
)
def test_a_session_loads_little_of_a_room_beside_it(part, room, modules) -> None:
    start = f"{PACKAGE}.{room}."
    names = {name.removeprefix(start) for name in loaded()[part]["loaded"] if name.startswith(start)}
    assert names == modules


def test_a_session_loads_no_sparse_attention() -> None:
    """Importing Megatron-Core's takes seconds, and most models have none."""
    assert not [name for name in loaded()["mcore"]["loaded"] if name.endswith(".dsa")]


def imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [f"{'.' * node.level}{node.module}.{name.name}" for name in node.names]
    return [name.name for name in node.names] if isinstance(node, ast.Import) else []


def test_a_part_imports_only_parts_above_it() -> None:
    """Imports inside functions, which run later, are checked too."""
    for path in (ROOT / PACKAGE).rglob("*.py"):
        part = path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        for name in (name for node in ast.walk(ast.parse(path.read_text())) for name in imported_names(node)):
            assert not name.startswith("."), f"{path}: imports are absolute"
            # An import of the package itself names its parts when it is used: mrr.replay.
            if name.startswith(f"{PACKAGE}.") and (imported := name.split(".")[1]) in PARTS:
                assert imported in {part, *above(part)}, f"{path} imports {name}"


def test_a_wing_of_mcore_imports_only_wings_below_it() -> None:
    order = wings()
    mcore = ROOT / PACKAGE / "mcore"
    assert sorted(order) == sorted(path.stem for path in mcore.iterdir() if not path.stem.startswith("_"))
    for path in mcore.rglob("*.py"):
        wing = path.relative_to(mcore).parts[0].removesuffix(".py")
        if wing == "__init__":
            continue
        names = [name for node in ast.walk(ast.parse(path.read_text())) for name in imported_names(node)]
        used = {name.split(".")[2] for name in names if name.startswith(f"{PACKAGE}.mcore.")}
        assert used <= {*order[: order.index(wing) + 1]}, f"{path} imports {sorted(used)}"
