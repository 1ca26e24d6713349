"""A trainer's code from a folder that an environment variable names, unedited, on the Megatron-LM that it ships or pins.

Nothing of a trainer is part of this project: without the variable its tests are skipped. A second variable,
<NAME>_MEGATRON_DIR, names the checkout of Megatron-LM that must be imported; without it, any Megatron-Core will do. A run has
one Megatron-Core:

    MILES_DIR=... MILES_MEGATRON_DIR=$FORK PYTHONPATH=$FORK python -m pytest tests/trainers -k miles
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_router_replay.trainers import seams


@dataclass(frozen=True, kw_only=True)
class Source:
    """One trainer.

    Args:
        name: of its page, docs/trainers/<name>.md.
        packages: the folders of its repository that are copied and imported.
        variable: of the environment, that names a checkout; "": <NAME>_DIR.
    """

    name: str
    packages: tuple[str, ...]
    variable: str = ""

    def folder(self) -> str:
        """Return the folder of the checkout, or skip the test."""
        variable = self.variable or f"{self.name.upper()}_DIR"
        folder = os.environ.get(variable)
        if folder is None:
            pytest.skip(f"{variable} does not name a checkout of {self.name}; its page in docs names the commit.")
        check_megatron(os.environ.get(f"{self.name.upper()}_MEGATRON_DIR"))
        return folder

    def unedited(self, to: Path) -> Path:
        """Copy the trainer to `to`, a folder that is not there yet."""
        folder = self.folder()
        for package in self.packages:
            shutil.copytree(Path(folder, package), to / package, ignore=shutil.ignore_patterns("*.pyc", "*.so", ".git"))
        return to

    def importing(self, to: Path, *, file: int, is_first: bool) -> Path:
        """Copy the trainer to `to`, with the line of its page as the first or last of a file that the page names."""
        folder, page = self.unedited(to), Path(__file__).parents[2] / "docs/trainers" / f"{self.name}.md"
        (line, files) = re.findall(r"add the line `(import [\w.]+)` (.*?)\n\n", page.read_text(), re.S)[0]
        path = folder / re.findall(r"`([\w/]+\.py)`", files)[file]
        text = path.read_text()
        path.write_text(f"{line}\n{text}" if is_first else f"{text}\n{line}\n")
        return folder


def check_megatron(folder: str | None) -> None:
    """Skip the test unless the imported Megatron-Core is that of this checkout; None: any will do."""
    import megatron.core

    if folder is not None and not Path(megatron.core.__path__[0]).resolve().is_relative_to(Path(folder).resolve()):
        pytest.skip(f"Megatron-Core is not that of the checkout: run with PYTHONPATH={folder}.")


def check_renames(name: str, folder: str, capsys: Any) -> None:
    """Rename each function, parameter and word of each seam, one after the other; the script names it."""
    assert seams.main([name, folder]) == 0
    for seam in importlib.import_module(f"megatron_router_replay.trainers.{name}").SEAMS:
        path = next(Path(folder).glob(f"{seam.module.replace('.', '/')}*.py"))
        text, where = path.read_text(), re.escape(f"MRR808: {seam.module}.{seam.name}")
        names = [(seam.name.split(".")[-1], " is gone")]
        names += [(each, rf" has the parameters .*\['{each}'\]") for each in seam.parameters.split()]
        names += [(each, rf" no longer names \['{each}'\]") for each in seam.words.split()]
        for old, message in names:
            path.write_text(re.sub(rf"\b{old}\b", "renamed", text))
            capsys.readouterr()
            assert seams.main([name, folder]) >= 1
            assert re.search(where + message, capsys.readouterr().out), (seam.name, old)
        path.write_text(text)
