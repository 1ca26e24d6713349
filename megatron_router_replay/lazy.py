"""Public names that are loaded when they are first used, so that importing a package costs nothing but its own file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str,
    modules: Mapping[str, str],
    *,
    also: tuple[str, ...] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    Args:
        package: `__name__` of the package.
        modules: public name -> the module of the package that has it, or that it is.
        also: names that the package has itself and that dir() shows.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{modules[name]}")
        return module if name == modules[name] else getattr(module, name)

    def names() -> list[str]:
        # Submodules that are imported already, and names that the package needs itself, are not public.
        return sorted([*modules, *also])

    return load, names
