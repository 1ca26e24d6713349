"""A trainer's code from a folder that an environment variable names, unedited.

Nothing of a trainer is part of this project: without the variable its tests are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
