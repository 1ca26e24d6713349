"""Print pytest's options that leave out the slow tests which a change does not touch, and to stderr the reasons. With the
argument `steps`, print the steps of .ci/run that the change touches.

The change is all that differs from CI_BASE. Without CI_BASE, from where HEAD left origin's branch; where that is HEAD
itself or unknown, from the newest commit on HEAD's first-parent line that is a day older than HEAD, so that no landing of
that day is missed. Nothing is left out with CI_ALL=1, without such a commit, or for a path that no group is known to ignore.
"""

import os
import subprocess
import sys
from dataclasses import dataclass

BENCHMARKS = ("__init__", "__main__", "measure", "router", "step", "store", "memory", "capture", "decode")
PAGES_ALWAYS_RUN = ("docs/first_hour.md",)
"""Pages of docs/ whose blocks run in every CI, as README's do; others run when they changed."""
WHAT_RUNS_PAGES = ("conftest.py", "tests/conftest.py", "tests/snippets.py", "constraints.txt", "pyproject.toml")
DAY = 24 * 60 * 60
ENVIRONMENT = ("Makefile", "constraints.txt", "pyproject.toml", "conftest.py", "tests/conftest.py", "tests/support/")
"""Files that every test reads."""
PACKAGE = "megatron_router_replay"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Slow tests or a step of .ci/run, and the files that they are about: those alone touch it, and those of every test.

    What else these tests run, quick tests run in every CI, with the newest Megatron-Core and stand-ins of other software.

    Args:
        name: for the log.
        tests: paths that pytest leaves out.
        sources: beginnings of paths, besides those of `tests`.
        rooms: folders of the package.
    """

    name: str
    tests: tuple[str, ...]
    sources: tuple[str, ...] = ()
    rooms: tuple[str, ...] = ()

    def touched(self, changed: list[str]) -> list[str]:
        """Return the changed paths that may matter to these tests."""
        own = (*self.tests, *self.sources, *(f"{PACKAGE}/{room}/" for room in self.rooms), *ENVIRONMENT)
        return [path for path in changed if path.startswith(own) or is_in_no_room(path)]


def is_in_no_room(path: str) -> bool:
    """Return whether a path is a module that all of the package's rooms may use."""
    return path.startswith(f"{PACKAGE}/") and path.count("/") == 1


GROUPS = [
    Group(
        name="a real vLLM",
        tests=("tests/functional/grpo/test_vllm.py",),
        sources=("tests/functional/grpo/cases.py", "examples/grpo/", "constraints-vllm.txt"),
        rooms=("engines",),
    ),
    Group(
        name="effect",
        tests=("tests/functional/effect/test_effect.py",),
        sources=("examples/effect/", "examples/grpo/"),
    ),
    Group(
        name="wrong routes",
        tests=("tests/functional/effect/test_wrong_routes.py",),
        sources=("examples/effect/",),
        rooms=("mcore/judge",),
    ),
    Group(
        name="GRPO",
        tests=("tests/functional/grpo",),
        sources=("examples/grpo/",),
        rooms=("capture", "transport"),
    ),
    Group(
        name="benchmarks",
        tests=("tests/functional/test_benchmarks.py",),
        sources=tuple(f"benchmarks/{name}.py" for name in BENCHMARKS),
    ),
    Group(
        name="GPU benchmark",
        tests=("tests/functional/mcore/test_gpu_benchmark.py",),
        sources=("benchmarks/gpu/", "benchmarks/measure.py"),
    ),
    Group(
        name="the walk-throughs",
        tests=("tests/functional/diagnostics/test_walkthroughs.py",),
        sources=("examples/walkthroughs/",),
        rooms=("diagnostics", "testing"),
    ),
    Group(
        name="transports that fail",
        tests=("tests/functional/transport/test_faults.py", "tests/functional/transport/test_ray.py"),
        sources=("tests/functional/transport/",),
        rooms=("transport", "trace"),
    ),
    Group(
        name="layouts of the tests' model",
        tests=("tests/functional/testing/test_tiny_gpt.py",),
        rooms=("testing",),
    ),
    Group(
        name="replies that are drawn",
        tests=("tests/unit/engines/test_random_replies.py",),
        sources=("tests/unit/engines/engine_payloads.py",),
        rooms=("engines", "trace"),
    ),
    Group(
        name="random programs",
        tests=("tests/unit/mcore/test_random_programs.py",),
        sources=("tests/unit/mcore/tiny_chunk.py",),
        rooms=("layout", "mcore", "trace"),
    ),
]

STEPS = [
    Group(
        name="verl",
        tests=("tests/functional/verl",),
        sources=("tests/trainers/", "constraints-verl.txt"),
        rooms=("mcore/judge", "mcore/sessions", "trainers"),
    ),
    Group(
        name="transformer-engine",
        tests=("tests/functional/transformer_engine",),
        sources=("tests/functional/mcore/cases.py", "tests/unit/mcore/tiny_chunk.py"),
        rooms=("mcore/core", "mcore/model", "mcore/sessions", "testing"),
    ),
    Group(
        name="versions",
        tests=("tests/unit/mcore", "tests/functional/mcore"),
        rooms=("mcore/core", "mcore/model", "testing"),
    ),
    Group(
        name="wheel",
        tests=("tests/functional/test_wheel.py",),
        sources=("setup.py", "README.md"),
        rooms=("cli", "demo", "testing"),
    ),
]
"""Steps of .ci/run besides the slow tests."""


def git(*arguments: str) -> str:
    """Return what a git command prints."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def base() -> str | None:
    """Return the commit that the change is held against; None if it cannot be told."""
    if given := os.environ.get("CI_BASE"):
        return git("rev-parse", given)
    for branch in ("origin/HEAD", "origin/main"):
        try:
            common = git("merge-base", "HEAD", branch)
        except subprocess.CalledProcessError:
            continue  # no such branch here
        if common != git("rev-parse", "HEAD"):
            return common
    commits = [line.split() for line in git("log", "--first-parent", "--format=%H %ct").splitlines()]
    newest = int(commits[0][1])
    return next((commit for commit, seconds in commits if int(seconds) < newest - DAY), None)


def untouched_pages(changed: list[str]) -> list[str]:
    """Return the pages of docs/ whose blocks may be left out."""
    if set(changed) & set(WHAT_RUNS_PAGES):
        return []
    pages = git("ls-files", "docs/*.md").splitlines()
    return [page for page in pages if page not in changed and page not in PAGES_ALWAYS_RUN]


def main() -> None:
    """Print the options, or the steps, and the reasons."""
    groups, what = (STEPS, "steps") if sys.argv[1:] == ["steps"] else (GROUPS, "slow tests")
    changed: list[str] | None = None
    reason = "all of them"
    try:
        commit = None if os.environ.get("CI_ALL") == "1" else base()
        if commit is not None:
            changed = [*git("diff", "--name-only", "--no-renames", commit).splitlines()]
            changed += git("ls-files", "--others", "--exclude-standard").splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        reason = f"all of them, for git does not say what changed: {error}"
    if changed is None:
        print(f"{what}: {reason}", file=sys.stderr)
    printed: list[str] = []
    for group in groups:
        touched = None if changed is None else group.touched(changed)
        if touched == []:
            print(
                f"{what}: LEFT OUT {group.name}: nothing that it is about changed since {commit[:10]}", file=sys.stderr
            )
        elif touched:
            print(f"{what}: {group.name}, because of {touched[0]} and {len(touched) - 1} more", file=sys.stderr)
        if groups is STEPS and touched != []:
            printed.append(group.name)
        elif groups is GROUPS and touched == []:
            printed += [f"--ignore={test}" for test in group.tests]
    if groups is GROUPS and changed is not None and (pages := untouched_pages(changed)):
        print(f"{what}: LEFT OUT {len(pages)} pages that did not change since {commit[:10]}", file=sys.stderr)
        printed += [f"--ignore={page}" for page in pages]
    # On one line: make would run each further line of OPTIONS as a command of its own, which "-" lets fail in silence.
    print(*printed)


if __name__ == "__main__":
    main()
