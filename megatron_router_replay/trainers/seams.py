"""Hooks on a trainer's functions, by name: a function that is gone raises SeamError, so no hook is idle.

`python -m megatron_router_replay.trainers.seams slime FOLDER` checks a checkout in seconds, and the Megatron-Core of the
environment that it runs in.

Source: PEP 451 for modules that are hooked as soon as they have been imported.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_router_replay.errors import RouterReplayError, SeamError


@dataclass(frozen=True, slots=True)
class Seam:
    """Name a function of a trainer that a hook replaces, or that only shows a switch.

    Args:
        module: that defines the function.
        name: of the function in the module, as "MegatronTrainRayActor.fill_routing_replay".
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
        if source is None:
            raise self.moved("is gone")
        # A method comes with its indentation, which its strings may not have.
        (node,) = ast.parse(f"if True:\n{source}" if source[0].isspace() else source).body
        node = node.body[0] if isinstance(node, ast.If) else node
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        arguments = node.args
        found = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        missing = [each for each in self.parameters.split() if each not in found]
        if missing:
            raise self.moved(f"has the parameters {found}, without {missing}")
        missing = [each for each in self.words.split() if not re.search(rf"\b{each}\b", source)]
        if missing:
            raise self.moved(f"no longer names {missing}")

    def moved(self, change: str) -> SeamError:
        """Return the error of a seam that moved; `change` continues the function's name."""
        trainer = self.module.partition(".")[0]
        return SeamError(
            f"MRR808: {self.module}.{self.name} {change}: this {trainer} is newer or older than the commits that this "
            "release supports, which its page in docs/trainers names. Take a release of megatron_router_replay that "
            f"supports it, or turn {trainer}'s routing replay off."
        )


def take(seam: Seam, data: Any, *fields: str) -> tuple[Any, ...]:
    """Return fields of a batch that a seam's function got.

    Raises:
        SeamError: the batch has no such field.
    """
    missing = [name for name in fields if name not in data]
    if missing:
        raise seam.moved(f"gets a batch without {missing}: it has {sorted(map(str, data))}")
    return tuple(data[name] for name in fields)


def bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """Return a call's arguments by name, with the function's defaults, so that a hook may have any signature."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return call


def hook(seam: Seam, around: Callable[..., Any] | None = None) -> None:
    """Make calls of a seam's function calls of around(function, ...), as soon as its module is imported.

    A module that had imported the function by name gets the hook too. A function that has a hook keeps it.

    Args:
        around: takes the original function and its arguments; None: the seam is only checked.

    Raises:
        SeamError: the seam moved; where the module is not imported yet, from the statement that imports it.
    """
    when_imported(seam.module, functools.partial(_replace, seam=seam, around=around))


def _replace(module: ModuleType, *, seam: Seam, around: Callable[..., Any] | None) -> None:
    *path, name = seam.name.split(".")
    owner: Any = module
    for each in path:
        owner = getattr(owner, each, None)
    function: Any = inspect.getattr_static(owner, name, None)
    if hasattr(function, "mrr_original"):
        return
    written = inspect.unwrap(function)
    seam.check(inspect.getsource(written) if inspect.isfunction(written) else None)
    if around is None:
        return

    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    replacement.mrr_original = function  # type: ignore[attr-defined]
    setattr(owner, name, replacement)
    for holder in [] if path else list(sys.modules.values()):
        # Not getattr: some modules make their attributes lazily.
        for key, value in list(getattr(holder, "__dict__", {}).items()):
            if value is function:
                setattr(holder, key, replacement)


# ---- modules that are not imported yet, or only in part
class _WhenImported(MetaPathFinder):
    """First of the finders: it adds calls to the loading of a module that a later finder finds."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], Any]]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((each for each in specs if each is not None), None)
        if spec is not None:
            self._add_calls(spec.loader)
        return spec

    def _add_calls(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # A loader of several modules, such as that of a zip file, loads the next one as before.
            vars(loader).pop("exec_module", None)
            execute(module)
            self.call(module)

        loader.exec_module = exec_module

    def call(self, module: ModuleType) -> None:
        """Call what waits for a module."""
        for then in self.waiting.get(module.__name__, []):
            then(module)
        # Not before: of a module whose hook raised, the next import must raise too, and not run without hooks.
        self.waiting.pop(module.__name__, None)


_finder = _WhenImported()


class _RunningSpec(ModuleSpec):
    """The spec of a module that runs: importlib clears `_initializing` when the module has ended, or failed."""

    @property
    def _initializing(self) -> bool:
        return bool(vars(self)["_initializing"])

    @_initializing.setter
    def _initializing(self, is_running: bool) -> None:
        vars(self)["_initializing"] = is_running
        module = sys.modules.get(self.name)
        if is_running or module is None:  # it failed, and its next import is like any other
            return
        self.__class__ = ModuleSpec  # type: ignore[assignment]
        try:
            _finder.call(module)
        except BaseException:
            del sys.modules[self.name]  # as of any module that fails, so that its next import raises too
            raise


def when_imported(name: str, then: Callable[[ModuleType], Any]) -> None:
    """Call `then` with the module of this name, now or as soon as it has been imported.

    A module that imports this package in its first lines is imported only in part; `then` waits for its end.
    """
    spec = getattr(sys.modules.get(name), "__spec__", None)
    is_running = getattr(spec, "_initializing", False)
    if name in sys.modules and not is_running:
        then(sys.modules[name])
        return
    if is_running and name not in _finder.waiting:
        spec.__class__ = _RunningSpec
    _finder.waiting.setdefault(name, []).append(then)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


# ---- a checkout
_TRAINERS = ("megatron_rl", "miles", "ms_swift", "nemo_rl", "roll", "skyrl", "slime", "verl")


def source_of(text: str, name: str) -> str | None:
    """Return the source of a function in a module's text, None: there is none."""
    node: Any = ast.parse(text)
    for part in name.split("."):
        node = next((each for each in getattr(node, "body", []) if getattr(each, "name", None) == part), None)
    return None if node is None else ast.get_source_segment(text, node)


def main(arguments: Sequence[str]) -> int:
    """Print the seams of a trainer's checkout, and whether this Megatron-Core can be replayed; return the number of faults.

    Args:
        arguments: the trainer's module here, as "slime", and the folder of the checkout.
    """
    trainer, folder = arguments if len(arguments) == 2 else ("", "")
    if trainer not in _TRAINERS:
        raise SystemExit(
            f"usage: python -m megatron_router_replay.trainers.seams TRAINER FOLDER, one of {', '.join(_TRAINERS)} and the "
            "folder of its checkout"
        )
    module_seams: Sequence[Seam] = importlib.import_module(f"megatron_router_replay.trainers.{trainer}").SEAMS
    texts = {seam.module: _text_of(folder, seam.module) for seam in module_seams}
    if not any(texts.values()):
        first = module_seams[0].module.replace(".", "/")
        raise SystemExit(f"no {trainer} in {folder}: it has neither {first}.py nor another file that is hooked.")
    moved = 0
    for seam in module_seams:
        text = texts[seam.module]
        try:
            seam.check(None if text is None else source_of(text, seam.name))
            print(f"as known  {seam.module}.{seam.name}")
        except SeamError as error:
            moved += 1
            print(f"MOVED     {error}")
    can_replay = _check_megatron(trainer)
    print(f"{len(module_seams) - moved} of {len(module_seams)} as known")
    return moved + (not can_replay)


def _check_megatron(trainer: str) -> bool:
    """Print whether the Megatron-Core that is imported here can be replayed; True where there is none."""
    try:
        core: Any = importlib.import_module("megatron.core")
    except ModuleNotFoundError as error:
        print(f"not here  Megatron-Core ({error}): run this in the environment of {trainer}'s workers")
        return True
    from megatron_router_replay.mcore.model import upstream

    megatron = f"Megatron-Core {upstream.megatron_version()} in {core.__path__[0]}"
    try:
        upstream.check_version()
        upstream.check_names(upstream.REQUIRED_SYMBOLS)
    except RouterReplayError as error:
        print(f"UNKNOWN   {megatron}: {error}")
        return False
    print(f"as known  {megatron}")
    return True


def _text_of(folder: str, module: str) -> str | None:
    """Return a module's text in a checkout, None: there is none."""
    path = Path(folder, *module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text() if file.is_file() else None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
