"""A trainer's code from a folder that an environment variable names, with its file of examples/trainers applied.

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

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One trainer.

    Args:
        name: of its page, docs/trainers/<name>.md, and its edits, examples/trainers/<name>.patch.
        packages: the folders of its repository that are copied and imported.
    """

    name: str
    packages: tuple[str, ...]

    @property
    def variable(self) -> str:
        return f"{self.name.upper()}_DIR"

    @property
    def patch(self) -> Path:
        return ROOT / "examples" / "trainers" / f"{self.name}.patch"

    def commit(self) -> str:
        """Return the commit that the page names."""
        page = ROOT / "docs" / "trainers" / f"{self.name}.md"
        found = re.search(r"commit `([0-9a-f]{8,40})`", page.read_text())
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
        """Copy the trainer to `to` and apply the patch there.

        Args:
            to: a folder that is not there yet.
            without: texts, each of one added line: this edit is left out. "#2 text" is the second line that holds it.
        """
        self.unedited(to)
        patch = self.patch
        if without:
            diff = patch.read_text()
            for text in without:
                diff = without_edit(diff, text)
            patch = to / "edited.patch"
            patch.write_text(diff)
        # Else an enclosing repository decides what is applied.
        subprocess.run(["git", "init", "-q", "."], cwd=to, check=True)
        counts = ["--recount"] if without else []
        done = subprocess.run(["git", "apply", *counts, str(patch)], cwd=to, text=True, capture_output=True)
        assert done.returncode == 0, f"{self.patch} does not apply:\n{done.stderr}"
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
