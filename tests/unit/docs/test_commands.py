"""Every command that README.md and docs/ name, in a block or inside a sentence, is one that there is."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("router-replay", "python", "make", "pip")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def commands():
    """(page, command): lines of bash blocks without their comments, and inline code that begins with a program's name."""
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
        inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
        inline = [code for code in inline if code.split()[0] in PROGRAMS and " " in code]
        found += [(page.name, command) for command in [*lines, *inline] if command.strip()]
    return sorted(set(found))


@pytest.mark.parametrize(("page", "command"), commands())
def test_the_command_is_one_that_there_is(page, command):
    program, *arguments = shlex.split(command, comments=True)
    assert program in PROGRAMS
    globals()[f"check_{program.replace('-', '_')}"](arguments)


def test_what_does_not_exist_is_noticed():
    for wrong in (
        "make nothing",
        "router-replay inspct",
        "router-replay diff --htlm x",
        "python -m examples.grpo --steps 3",
    ):
        program, *arguments = shlex.split(wrong)
        with pytest.raises(AssertionError):
            globals()[f"check_{program.replace('-', '_')}"](arguments)
    with pytest.raises(AssertionError):
        check_pip(["install", ".[demos]"])


BY_NAME = re.compile(
    r"\b(?:pip|uv|uvx|pipx|poetry|pdm|conda)\b[^\n]*\b(?:install|add|with|from)\b[^\n]*?[\s'\"=]"
    r"megatron[-_.]router[-_.]replay(?![\w/-]|\.\w|(?:\[[^\]]*\])? *@)",
    re.IGNORECASE,
)
"""A command that takes the package from an index. Nobody registered its name there, so whoever does could run anything."""


@pytest.mark.parametrize(
    "command",
    [
        "uv add megatron-router-replay        # in the checkout",
        "pip install 'megatron-router-replay[ray]'",
        "python -m pip install -U megatron_router_replay==0.3.0",
        "uv run --with megatron-router-replay python",
    ],
)
def test_an_installation_by_the_bare_name_is_noticed(command):
    assert BY_NAME.search(command)


def test_no_file_installs_the_package_by_its_bare_name():
    for right in (
        "pip install '.[ray]'",
        "uv add /shared/megatron_router_replay",
        "uv add git+https://host/megatron_router_replay",
        "pip install 'megatron-router-replay @ git+https://host/us.git'",
        "uv run python -m megatron_router_replay.trainers.seams",
    ):
        assert BY_NAME.search(right) is None, right
    kinds = {".md", ".py", ".toml", ".yml", ".sh", ""}
    folders = [ROOT / name for name in ("docs", "tests", "examples", "benchmarks", "megatron_router_replay")]
    files = [*ROOT.glob("*"), *(path for folder in folders for path in folder.rglob("*"))]
    for path in files:
        if path.is_file() and path.suffix in kinds and path != Path(__file__):
            assert BY_NAME.search(path.read_text(errors="ignore")) is None, path


def check_make(arguments):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    targets = [argument for argument in arguments if "=" not in argument]
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert targets
    assert set(targets) <= rules
    variables = {argument.split("=")[0] for argument in arguments if "=" in argument}
    assert variables <= set(re.findall(r"^(\w+) [?:]?=", (ROOT / "Makefile").read_text(), re.M))
    done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_pip(arguments):
    assert arguments[0] == "install"
    for argument in arguments[1:]:
        extras = re.fullmatch(r"\.\[([\w,]+)\]", argument)
        if extras is not None:
            assert set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])


def check_router_replay(arguments):
    typer = pytest.importorskip("typer", reason="typer is part of [cli]")
    from megatron_router_replay.cli.commands import app

    check_options(typer.main.get_command(app), arguments)


def check_options(group, arguments):
    """Check the command's name and the names of its options: what is inside a sentence need not be complete."""
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    if name is None:
        assert set(arguments) <= {option for parameter in group.params for option in parameter.opts} | {"--help"}
        return
    assert name in group.commands, arguments
    known = {
        option for parameter in group.commands[name].params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    assert {argument for argument in arguments if argument.startswith("--")} <= known | {"--help"}


def check_python(arguments):
    if arguments[0] != "-m":
        assert (ROOT / arguments[0]).is_file()
        return
    path = ROOT.joinpath(*arguments[1].split("."))
    assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), arguments
    if arguments[1] == "examples.grpo":
        typer = pytest.importorskip("typer", reason="typer is part of [cli]")
        from examples.grpo.__main__ import app

        check_options(typer.main.get_command(app), arguments[2:])
