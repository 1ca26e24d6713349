"""Hooks on a trainer's functions, by name: a function that is gone raises SeamError, so no hook is idle.

Source: PEP 451 for modules that are hooked as soon as they have been imported.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_router_replay.errors import SeamError


@dataclass(frozen=True, kw_only=True, slots=True)
class Seam:
    """Name a function of a trainer that a hook replaces, or that only shows a switch.

    Args:
        module: that defines the function.
        name: in the module, as "MegatronTrainRayActor.fill_routing_replay".
        parameters: that the hook reads, separated by spaces. A function may have more.
        words: fields and switches that the hook shares with the function's code, separated by spaces.
    """

    module: str
    name: str
    parameters: str = ""
    words: str = ""

    def check(self, source: str | None) -> None:
        """Check the function's source, None: there is no such function.

        Raises:
            SeamError: the function, a parameter or a word is gone.
        """
        where = f"{self.module}.{self.name}"
        if source is None:
            raise self.moved(f"{where} is gone")
        (node,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        arguments = node.args
        found = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        missing = [each for each in self.parameters.split() if each not in found]
        if missing:
            raise self.moved(f"{where} has the parameters {found}, without {missing}")
        missing = [each for each in self.words.split() if not re.search(rf"\b{each}\b", source)]
        if missing:
            raise self.moved(f"{where} no longer names {missing}")

    def moved(self, what: str) -> SeamError:
        """Return the error of a seam that moved."""
        trainer = self.module.partition(".")[0]
        return SeamError(
            f"MRR808: {what}: this {trainer} is newer or older than the eight weeks of commits that this release supports. "
            f"Take a release of megatron_router_replay that supports it, or turn {trainer}'s routing replay off."
        )


def take(seam: Seam, data: Any, *fields: str) -> tuple[Any, ...]:
    """Return fields of a batch that a seam's function got.

    Raises:
        SeamError: the batch has no such field.
    """
    missing = [name for name in fields if name not in data]
    if missing:
        raise seam.moved(f"{seam.module}.{seam.name} gets a batch without {missing}: it has {sorted(map(str, data))}")
    return tuple(data[name] for name in fields)


def hook(seam: Seam, make: Callable[[Any], Any] | None) -> None:
    """Replace a seam's function by make(function), as soon as its module is imported; None: only check the seam.

    A module that had imported the function by name gets the replacement too.

    Raises:
        SeamError: the seam moved; where the module is not imported yet, from the statement that imports it.
    """
    when_imported(seam.module, functools.partial(_replace, seam=seam, make=make), key=seam.name)


def _replace(module: ModuleType, *, seam: Seam, make: Callable[[Any], Any] | None) -> None:
    *path, name = seam.name.split(".")
    owner: Any = module
    for each in path:
        owner = getattr(owner, each, None)
    original = inspect.getattr_static(owner, name, None) if owner is not None else None
    if hasattr(original, "mrr_original"):
        return  # a second installation in one process
    function: Any = original
    seam.check(None if function is None else inspect.getsource(inspect.unwrap(function)))
    if make is None:
        return
    replacement: Any = functools.wraps(function)(make(function))
    replacement.mrr_original = function
    setattr(owner, name, replacement)
    if not path:
        replace_in_modules(original, replacement)


def replace_in_modules(original: Any, replacement: Any) -> None:
    """Put `replacement` in every imported module that has `original`, under whatever name."""
    for module in list(sys.modules.values()):
        # Not getattr: some modules make their attributes lazily.
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                setattr(module, name, replacement)


def when_imported(name: str, then: Callable[[ModuleType], None], *, key: str = "") -> None:
    """Call `then` with the module of this name, now or as soon as it has been imported.

    Args:
        name: of the module.
        then: takes it.
        key: a later call with this module and key replaces an earlier one that still waits.
    """
    if name in sys.modules:
        then(sys.modules[name])
        return
    _finder.waiting.setdefault(name, {})[key] = then
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _WhenImported(MetaPathFinder):
    """First of the finders: passes a module that is waited for to the other finders and to its own loader."""

    def __init__(self) -> None:
        self.waiting: dict[str, dict[str, Callable[[ModuleType], None]]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = _Loader(spec.loader, self.waiting)
                return spec
        return None


class _Loader(Loader):
    """Loads a module with its own loader, then makes the calls that wait for it."""

    def __init__(self, loader: Any, waiting: dict[str, dict[str, Callable[[ModuleType], None]]]) -> None:
        self._loader, self._waiting = loader, waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module is its own loader's again, for inspect.getsource.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for then in self._waiting.pop(module.__name__, {}).values():
            then(module)


_finder = _WhenImported()


def source_of(text: str, name: str) -> str | None:
    """Return the source of a function in a module's text, None: there is none."""
    body: Sequence[ast.stmt] = ast.parse(text).body
    node: Any = None
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = next((each for each in body if isinstance(each, kinds) and each.name == part), None)
        if node is None:
            return None
        body = node.body
    # From the first decorator on, as inspect.getsource.
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def main(arguments: Sequence[str]) -> int:
    """Print the seams of a trainer's checkout; return the number of those that moved.

    Args:
        arguments: the trainer's module here, as "slime", and the folder of the checkout.
    """
    trainer, folder = arguments
    moved = 0
    for seam in importlib.import_module(f"megatron_router_replay.trainers.{trainer}").SEAMS:
        path = Path(folder, *seam.module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        try:
            seam.check(source_of(file.read_text(), seam.name) if file.is_file() else None)
            print(f"as known  {seam.module}.{seam.name}")
        except SeamError as error:
            moved += 1
            print(f"MOVED     {error}")
    return moved


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
