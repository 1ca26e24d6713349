"""Prints the modules that the public names of each part of the package load, as one line of JSON a part.

Usage: python -m tests.unit.loaded_modules PART...

torch is loaded once, in the parent; every part is imported in a fork of it, before which this package is not loaded.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
from typing import Any

import torch  # noqa: F401  # before the forks, which then take a moment each

PACKAGE = "megatron_router_replay"

_hooks: list[str] = []
_register = atexit.register


def _note_and_register(function: Any, *args: Any, **kwargs: Any) -> Any:
    _hooks.append(str(getattr(function, "__module__", "")))
    return _register(function, *args, **kwargs)


def loaded_by(part: str) -> dict[str, list[str]]:
    """Load every public name of a part as users do; return the loaded modules and those with an atexit hook."""
    atexit.register = _note_and_register  # type: ignore[assignment]
    before = set(sys.modules)
    package = importlib.import_module(PACKAGE)
    # As users reach it: the package's own packages resolve without an import of their own.
    module = getattr(package, part) if part in package.__all__ else importlib.import_module(f"{PACKAGE}.{part}")
    assert module.__name__ == f"{PACKAGE}.{part}"
    for name in getattr(module, "__all__", ()):  # lazy packages load their parts by name
        try:
            getattr(module, name)
        except ModuleNotFoundError as error:  # of an optional package
            if error.name is None or error.name.startswith(PACKAGE):
                raise
    hooks = [name for name in _hooks if name.startswith(PACKAGE)]
    return {"loaded": sorted(set(sys.modules) - before), "atexit": hooks}


def main() -> None:
    for part in sys.argv[1:]:
        child = os.fork()
        if not child:
            try:
                print(json.dumps({"part": part, **loaded_by(part)}), flush=True)
                os._exit(0)
            except BaseException as error:
                print(f"{part}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
