"""CI leaves out the slow tests that no changed path can affect."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci/left_out.py"
GROUPS, STEPS = map(runpy.run_path(str(SCRIPT), run_name="left_out").get, ("GROUPS", "STEPS"))


@pytest.mark.parametrize(
    ("path", "groups", "steps"),
    [
        ("docs/trainers.md", [], []),
        ("README.md", [], ["wheel"]),
        ("tests/unit/layout/test_rows.py", [], []),
        ("examples/grpo/loop.py", ["a real vLLM", "effect", "GRPO"], []),
        ("megatron_router_replay/transport/plan.py", ["GRPO", "transports that fail"], []),
        ("megatron_router_replay/trainers/verl.py", [], ["verl"]),
        ("megatron_router_replay/mcore/core/tape.py", ["random programs"], ["transformer-engine", "versions"]),
        ("tests/functional/transformer_engine/cases.py", [], ["transformer-engine"]),
        (
            "megatron_router_replay/trace/ids.py",
            ["transports that fail", "replies that are drawn", "random programs"],
            [],
        ),
        ("megatron_router_replay/mcore/judge/blocks.py", ["wrong routes", "random programs"], ["verl"]),
        ("megatron_router_replay/unheard_of.py", [group.name for group in GROUPS], [step.name for step in STEPS]),
        ("Makefile", [group.name for group in GROUPS], [step.name for step in STEPS]),
    ],
)
def test_a_path_touches_the_groups_that_are_about_it(path, groups, steps):
    assert [group.name for group in GROUPS if group.touched([path, "CHANGELOG.md"])] == groups
    assert [step.name for step in STEPS if step.touched([path, "CHANGELOG.md"])] == steps


def test_a_page_runs_if_it_changed_or_what_runs_it(monkeypatch):
    script = runpy.run_path(str(SCRIPT), run_name="left_out")
    monkeypatch.chdir(ROOT)
    pages = script["untouched_pages"]
    assert {"docs/support.md", "docs/exactness.md"} < set(pages(["README.md"]))
    assert set(pages(["README.md"])) - set(pages(["docs/support.md"])) == {"docs/support.md"}
    assert "docs/first_hour.md" not in pages([])
    assert pages(["tests/snippets.py"]) == []


def test_what_a_group_names_is_there():
    package = ROOT / "megatron_router_replay"
    for group in (*GROUPS, *STEPS):
        paths = [*(ROOT / path for path in (*group.tests, *group.sources)), *(package / room for room in group.rooms)]
        assert [path for path in paths if not path.exists()] == []


def run(folder, *arguments, **environment):
    environment["PATH"] = "/usr/bin:/bin"
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, "make takes one line of options"
    return done.stdout.split(), done.stderr


def commit(folder, day):
    """Add a file, on this day of November 2026."""
    (folder / f"{len(list(folder.iterdir()))}.md").write_text("")
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    dates = {f"GIT_{who}_DATE": f"2026-11-{day:02} 12:00:00 +0000" for who in ("AUTHOR", "COMMITTER")}
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    environment = {**names, **dates, "PATH": "/usr/bin:/bin"}
    subprocess.run(["git", "commit", "-q", "-m", "one"], cwd=folder, check=True, env=environment)


def test_what_a_change_since_the_day_before_does_not_touch_is_left_out_and_said(tmp_path):
    options, said = run(tmp_path)
    assert options == []
    assert "all of them, for git does not say" in said
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    commit(tmp_path, 1)
    commit(tmp_path, 1)
    assert run(tmp_path) == ([], "slow tests: all of them\n"), "a history of less than a day"
    commit(tmp_path, 3)
    commit(tmp_path, 3)
    options, said = run(tmp_path)
    assert "--ignore=tests/functional/grpo" in options
    assert said.count("LEFT OUT") == 11
    assert run(tmp_path, CI_ALL="1") == ([], "slow tests: all of them\n")
    assert run(tmp_path, CI_BASE="HEAD~1")[0] == options
    assert run(tmp_path, "steps")[0] == []
    assert run(tmp_path, "steps", CI_ALL="1")[0] == [step.name for step in STEPS]
    (tmp_path / "Makefile").write_text("")  # uncommitted files count, too
    assert run(tmp_path)[0] == []
    assert run(tmp_path, "steps")[0] == [step.name for step in STEPS]
