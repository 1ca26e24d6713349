"""Stand-ins of packages that a trainer imports and that are not installed: any attribute can be called or subclassed."""

from __future__ import annotations

import builtins
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import megatron
import torch


class Config(Namespace):
    """A trainer's arguments or configuration; what a case does not set is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _AnyClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Anything(metaclass=_AnyClass):
    """Replaces a class, a function or a value of a missing module; used as a decorator it changes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, key: Any) -> Any:
        return Anything()

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


class _Module(ModuleType):
    __version__ = "5.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # A class, so that it can be a base, and called, and asked for attributes.
        value = _AnyClass(name, (Anything,), {}) if name[:1].isupper() else Anything()
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    """Finds, after all other finders, any module that a file in `folder` imports."""

    def __init__(self, folder: str, packages: Sequence[str]) -> None:
        self._folder, self._packages = folder, packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        inside_one = isinstance(sys.modules.get(name.rpartition(".")[0]), _Module)
        asked = inside_one or (name.split(".")[0] not in self._packages and self._asks())
        return ModuleSpec(name, self, is_package=True) if asked else None

    def _asks(self) -> bool:
        frame: Any = sys._getframe(2)
        while frame is not None and ("importlib" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename.startswith(self._folder)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def trainer_imports(folder: str, packages: Sequence[str], *, services: Sequence[str] = ()) -> Iterator[None]:
    """Import `packages` from `folder` inside the block, with stand-ins of their imports that are not installed.

    After the block all these modules are removed again, so that the next case can use a different folder, and torch's grad
    mode is restored, because a trainer that raised may have changed it.

    Args:
        folder: the trainer's code.
        packages: its top-level packages.
        services: packages that get a stand-in even if they are installed.
    """
    added = []

    def importing(name: str, names: Any = None, local: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        module = import_(name, names, local, fromlist, level)
        if name.startswith("megatron.core") and str((names or {}).get("__file__", "")).startswith(folder):
            # This Megatron-Core may be older than the trainer's.
            for each in fromlist or ():
                if not hasattr(module, each):
                    setattr(module, each, _AnyClass(each, (Anything,), {}))
                    added.append((module, each))
        return module

    import_, grad, path = builtins.__import__, torch.is_grad_enabled(), megatron.__path__
    finder = _Finder(folder, packages)
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in services}
    for name in before:
        del sys.modules[name]
    # Megatron's training loop gets a stand-in, too: a wheel that has it may need a newer Python.
    sys.modules.update({name: _Module(name) for name in (*services, "megatron.training")})
    sys.meta_path.append(finder)
    sys.path.insert(0, folder)
    builtins.__import__ = importing
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        builtins.__import__, megatron.__path__ = import_, path
        sys.meta_path.remove(finder)
        sys.path.remove(folder)
        for name, module in list(sys.modules.items()):
            is_bridge = f"{name}.".startswith(
                "megatron.bridge."
            )  # which a multimodal case imports and a trainer patches
            if isinstance(module, _Module) or is_bridge or name.split(".")[0] in (*packages, *services):
                del sys.modules[name]
        sys.modules.update(before)
        for owner, name in added:
            delattr(owner, name)


def remove_stand_ins(package: str) -> None:
    """Let the modules of a package be imported from now on; what was imported from its stand-ins stays."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, _Module) and f"{name}.".startswith(f"{package}."):
            del sys.modules[name]


@contextmanager
def missing_modules(names: Sequence[str]) -> Iterator[None]:
    """Let these packages be imported inside the block, those that are not installed as stand-ins."""
    finder = _Finder("/", ())
    finder._asks = lambda: False  # type: ignore[method-assign]
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    sys.modules.update({name: _Module(name) for name in missing})
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if isinstance(module, _Module) and name.split(".")[0] in missing:
                del sys.modules[name]
