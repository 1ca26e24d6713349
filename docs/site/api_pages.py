"""Write the signatures and first lines of public names into docs/api/*.md; `--check` fails where a page differs.

A page holds a table between two marks. Its first mark names the module:

    <!-- names: megatron_router_replay.trace -->
    <!-- end of names -->
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

PAGES = Path(__file__).parents[1] / "api"
TABLE = re.compile(r"(<!-- names: ([\w.]+) -->\n).*?(<!-- end of names -->)", re.S)


def signature(value: Any) -> str:
    """Return the parameters of a function or class without annotations; "" for other values."""
    is_plain = isinstance(value, ModuleType) or (isinstance(value, type) and issubclass(value, (Exception, Enum)))
    if is_plain or not callable(value):
        return ""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    text = str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return re.sub(r"<[^>]*>", "...", text).replace("|", "\\|")


def first_line(value: Any) -> str:
    """Return the first sentence of the docstring of a function, class or module, or of an object's class."""
    if getattr(value, "__module__", "").startswith("megatron.core"):
        return "Megatron-Core's own."  # its docstring differs between versions
    documented = isinstance(value, (type, ModuleType)) or inspect.isroutine(value)
    text = " ".join((inspect.getdoc(value if documented else type(value)) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0].replace("|", "\\|")


def table(name: str) -> str:
    """Return the table of a module's public names, in the order of `__all__`."""
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None) or [
        each for each, value in vars(module).items() if each[0] != "_" and getattr(value, "__module__", "") == name
    ]
    rows = [(each, getattr(module, each)) for each in public]
    lines = [f"| `{each}{signature(value)}` | {first_line(value)} |" for each, value in rows]
    return "\n".join(["", "| name | purpose |", "| --- | --- |", *lines, "", ""])


def filled(page: str) -> str:
    """Return a page with its tables as the code has them now."""
    return TABLE.sub(lambda found: f"{found[1]}{table(found[2])}{found[3]}", page)


def stale_pages(folder: Path = PAGES) -> list[str]:
    """Return the names of the pages whose tables differ from the code."""
    return [path.name for path in sorted(folder.glob("*.md")) if filled(path.read_text()) != path.read_text()]


def main(arguments: list[str]) -> int:
    """Write the pages, or check them; return the exit code."""
    stale = stale_pages()
    if "--check" in arguments:
        if stale:
            print(
                f"docs/api: {', '.join(stale)} differ from the code. Run: python docs/site/api_pages.py",
                file=sys.stderr,
            )
        return int(bool(stale))
    for name in stale:
        path = PAGES / name
        path.write_text(filled(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
