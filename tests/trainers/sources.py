"""A trainer's code from a folder that an environment variable names, with the edits of its documented page applied.

Nothing of a trainer is part of this project: without the variable its tests are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "trainers"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One trainer.

    Args:
        name: of its page, docs/trainers/<name>.md.
        packages: the folders of its repository that are copied and imported.
    """

    name: str
    packages: tuple[str, ...]

    @property
    def variable(self) -> str:
        return f"{self.name.upper()}_DIR"

    def diff(self) -> str:
        """Return the unified diff of the page."""
        found = re.findall(r"^```diff\n(.*?)^```$", (DOCS / f"{self.name}.md").read_text(), re.DOTALL | re.MULTILINE)
        assert found, f"docs/trainers/{self.name}.md has no diff"
        return "".join(found)

    def commit(self) -> str:
        """Return the commit that the page names."""
        found = re.search(r"commit `([0-9a-f]{8,40})`", (DOCS / f"{self.name}.md").read_text())
        assert found, f"docs/trainers/{self.name}.md names no commit"
        return found[1]

    def unedited(self, to: Path) -> Path:
        """Copy the trainer to `to`, a folder that is not there yet."""
        folder = os.environ.get(self.variable)
        if folder is None:
            pytest.skip(f"{self.variable} does not name a checkout of {self.name}, commit {self.commit()}.")
        for package in self.packages:
            shutil.copytree(Path(folder, package), to / package, ignore=shutil.ignore_patterns("*.pyc", "*.so", ".git"))
        return to

    def edited(self, to: Path, *, without: Sequence[str] = ()) -> Path:
        """Copy the trainer to `to` and apply the page's diff there.

        Args:
            to: a folder that is not there yet.
            without: texts, each of one added line: this edit is left out. "#2 text" is the second line that holds it.
        """
        self.unedited(to)
        diff = self.diff()
        for text in without:
            diff = without_edit(diff, text)
        subprocess.run(
            ["git", "init", "-q", "."], cwd=to, check=True
        )  # else an enclosing repository decides what is applied
        done = subprocess.run(
            ["git", "apply", "--recount", "--whitespace=nowarn", "-"],
            cwd=to,
            input=diff,
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, f"the diff of docs/trainers/{self.name}.md does not apply:\n{done.stderr}"
        return to


def without_edit(diff: str, text: str) -> str:
    """Return a diff without the block of changed lines that holds `text`; what it took away stays."""
    lines = diff.splitlines(keepends=True)
    which, text = re.fullmatch(r"(?:#(\d) )?(.*)", text).groups(default="1")  # type: ignore[union-attr]
    at = [i for i, line in enumerate(lines) if line.startswith("+") and text in line]
    assert at, f"no added line holds {text!r}"
    first = last = at[int(which) - 1]
    if lines[first - 1].startswith("-"):  # a changed line
        while lines[first - 1].startswith("-"):
            first -= 1
        while lines[last + 1].startswith("+"):
            last += 1
    kept = [" " + line[1:] for line in lines[first : last + 1] if line.startswith("-")]
    return "".join([*lines[:first], *kept, *lines[last + 1 :]])


def counted(diff: str) -> tuple[int, int]:
    """Return how many lines a diff adds and takes away."""
    lines = [line for line in diff.splitlines() if not line.startswith(("+++", "---"))]
    return sum(line.startswith("+") for line in lines), sum(line.startswith("-") for line in lines)
