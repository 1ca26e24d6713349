"""`router-replay doctor`."""

from __future__ import annotations

import platform
import re
import textwrap
import warnings
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

import megatron_router_replay
from megatron_router_replay.cli.output import Json, emit, reporting_errors
from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.tables import printable

TORCH_OLDEST, TORCH_TESTED = "2.6", "2.13.0"
"""The floor of pyproject.toml, and the version of `make test`; a test compares both."""

_NEEDED = ("torch", "megatron-core", "numpy", "safetensors", "xxhash")
_OPTIONAL = ("typer", "rich", "triton", "pybase64", "ray", "transformers", "transformer-engine")
_MODULES = {"megatron-core": "megatron.core", "transformer-engine": "transformer_engine"}
"""Distribution -> its module, where the names differ."""


def doctor(as_json: Json = False) -> None:
    """Show the installed packages, and check torch and Megatron-Core.

    To check a model, call mrr.explain(model).

    Exit code 0: fine; 1: something is missing.
    """
    with reporting_errors():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron-Core warns on import about each optional package
            environment = _environment()
        problems = environment["problems"]
        text = _environment_text(environment)
        text.append("replay cannot run here, see the problems above" if problems else "ready for replay")
        emit("\n".join(text), {"environment": environment, "problems": problems}, as_json=as_json)
    raise typer.Exit(1 if problems else 0)


def _environment() -> dict[str, Any]:
    packages = {name: _package(name) for name in (*_NEEDED, *_OPTIONAL)}
    problems = [f"{name} is not installed" for name in _NEEDED if packages[name] is None]
    notes: list[str] = []
    gpus: list[str] = []
    if packages["torch"] is not None:
        notes, found, gpus = _torch()
        problems += found
    if packages["megatron-core"] is not None:
        more, found = _megatron()
        notes, problems = notes + more, problems + found
    return {
        "megatron_router_replay": megatron_router_replay.__version__,
        "python": platform.python_version(),
        "packages": packages,
        "gpus": gpus,
        "notes": notes,
        "problems": problems,
    }


def _torch() -> tuple[list[str], list[str], list[str]]:
    """Return (notes, problems, names of the GPUs) of the torch that is installed."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries cannot be loaded
        return [], [f"torch cannot be imported: {error}"], []
    notes, problems = [], []
    if _numbers(torch.__version__) < _numbers(TORCH_OLDEST):
        problems.append(f"torch {torch.__version__} is older than {TORCH_OLDEST}")
    if not torch.distributed.is_available():
        problems.append("this torch was built without torch.distributed, which Megatron-Core needs")
    if _numbers(torch.__version__) > _numbers(TORCH_TESTED):
        notes.append(f"torch {torch.__version__} is newer than {TORCH_TESTED}, the newest tested one")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() * torch.cuda.is_available())]
    if not gpus and Path("/proc/driver/nvidia/version").exists():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        notes.append(f"there is an NVIDIA driver, but this torch sees no GPU: it is {build}")
    return notes, problems, gpus


def _megatron() -> tuple[list[str], list[str]]:
    """Return (notes, problems) of the Megatron-Core that is installed."""
    try:
        from megatron_router_replay.mcore.model import upstream
    except ImportError as error:  # without torch, or from 0.18 on without triton
        return [], [f"megatron-core cannot be imported: {error}"]
    notes = [f"sessions were run with Megatron-Core {', '.join(upstream.TESTED)}"]
    if upstream.is_newer_than_tested(upstream.megatron_version()):
        notes.append("this one is newer: sessions verify every routing map, and warn")
    problems = []
    # The second checks private names of torch, too: a torch that is too new fails there.
    for check in (upstream.check_version, lambda: upstream.check_names(upstream.REQUIRED_SYMBOLS)):
        try:
            check()
        except RouterReplayError as error:
            problems.append(str(error))
    return notes, problems


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, "2.13.0+cpu" -> (2, 13, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _package(name: str) -> dict[str, str] | None:
    """Return version and path of an installed package; None if there is none."""
    module = _MODULES.get(name, name)
    try:
        spec = find_spec(module)  # of a submodule, this imports the package around it
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    # A namespace package has folders and no file of its own.
    path = str(Path(spec.origin).parent) if spec.origin else next(iter(spec.submodule_search_locations or ()), "")
    try:
        number = version(name)
    except PackageNotFoundError:
        number = "unknown version"
    if name == "megatron-core":
        # A checkout on the path has no metadata of its own, or that of another installation.
        with suppress(ImportError):  # `_megatron` reports the reason
            number = str(getattr(import_module(module), "__version__", number))
    return {"version": number, "path": path}


def _environment_text(environment: dict[str, Any]) -> list[str]:
    """Return lines of at most 80 columns, but for the folders of packages, which stand alone to be copied."""
    lines = [f"megatron_router_replay {environment['megatron_router_replay']}, Python {environment['python']}"]
    by_folder: dict[str, list[str]] = {}
    for name, package in environment["packages"].items():
        if package is None:
            folder, text = "", f"not installed{'' if name in _NEEDED else ' (optional)'}"
        else:
            depth = _MODULES.get(name, name).count(".") + 1
            folders = [str(folder) for folder in Path(package["path"]).parents]
            folder, text = "".join(folders[depth - 1 : depth]), package["version"]  # a built-in module has no folder
        by_folder.setdefault(folder, []).append(f"  {name:<18} {text}")
    for folder, packages in by_folder.items():
        lines += [f"in {printable(folder)}:"] * bool(folder) + packages
    lines.append(f"  {'GPUs':<18} {', '.join(environment['gpus']) or 'none; everything here works on a CPU'}")
    lines += [_wrapped(f"  note: {note}") for note in environment["notes"]]
    return lines + [_wrapped(f"  problem: {problem}") for problem in environment["problems"]]


def _wrapped(line: str) -> str:
    """Return the line in rows of at most 80 columns; words and file names stay whole."""
    return textwrap.fill(line, 80, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
