"""`router-replay doctor`."""

from __future__ import annotations

import platform
import warnings
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

import megatron_router_replay
from megatron_router_replay.cli.output import Json, Out, check_out, emit, reporting_errors
from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.tables import printable

_NEEDED = ("torch", "megatron-core", "numpy", "safetensors", "xxhash")
_OPTIONAL = ("typer", "rich", "triton", "pybase64", "ray", "transformers", "transformer-engine")
_MODULES = {"megatron-core": "megatron.core", "transformer-engine": "transformer_engine"}
"""Distribution -> the module that it brings, where that has another name."""


def doctor(as_json: Json = False, out: Out = None) -> None:
    """Show what is installed, and which versions of Megatron-Core are tested.

    To check a model, call mrr.explain(model).

    Exit code 0: fine; 1: something is missing.
    """
    with reporting_errors():
        check_out(out)
        environment = _environment()
    problems = environment["problems"]
    text = _environment_text(environment)
    text.append("something stands in the way, see above" if problems else "nothing stands in the way of replay")
    emit("\n".join(text), {"environment": environment, "problems": problems}, as_json=as_json, out=out)
    raise typer.Exit(1 if problems else 0)


def _environment() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is imported to be asked, about packages that it would like
        packages = {name: _package(name) for name in (*_NEEDED, *_OPTIONAL)}
        notes, problems = _megatron() if packages["megatron-core"] is not None else ([], [])
    missing = [f"{name} is not installed" for name in _NEEDED if packages[name] is None]
    return {
        "megatron_router_replay": megatron_router_replay.__version__,
        "python": platform.python_version(),
        "packages": packages,
        "gpus": [] if packages["torch"] is None else _gpus(),
        "notes": notes,
        "problems": missing + problems,
    }


def _megatron() -> tuple[list[str], list[str]]:
    """Return (notes, problems) of the Megatron-Core that is installed."""
    try:
        from megatron_router_replay.mcore.model import upstream
    except ImportError as error:  # without torch, or from 0.18 on without triton
        return [], [f"megatron-core cannot be imported: {error}"]
    notes = [f"sessions were run with Megatron-Core {', '.join(upstream.TESTED)}"]
    if upstream.is_newer_than_tested(upstream.megatron_version()):
        notes.append("this one is newer: sessions verify every routing map, and refuse moe_* settings unknown here")
    try:
        upstream.check_version()
    except RouterReplayError as error:
        return notes, [str(error)]
    return notes, []


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() * torch.cuda.is_available())]


def _package(name: str) -> dict[str, str] | None:
    """Return version and path of an installed package; None if there is none. Only megatron.core is imported."""
    module = _MODULES.get(name, name)
    try:
        # Of a submodule this imports the packages around it, which may fail.
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    # A namespace package has folders and no file of its own.
    path = str(Path(spec.origin).parent) if spec.origin else next(iter(spec.submodule_search_locations or ()), "")
    try:
        found = version(name)
    except PackageNotFoundError:
        found = ""
    if name == "megatron-core":
        # A checkout on the path has no metadata of its own, or that of an older installation beside it.
        with suppress(ImportError):  # `_megatron` says why
            found = str(getattr(import_module(module), "__version__", found))
    return {"version": found or "unknown version", "path": path}


def _environment_text(environment: dict[str, Any]) -> list[str]:
    lines = [f"megatron_router_replay {environment['megatron_router_replay']}, Python {environment['python']}"]
    for name, found in environment["packages"].items():
        if found is None:
            lines.append(f"  {name:<18} not installed{'' if name in _NEEDED else ' (optional)'}")
        else:
            lines.append(f"  {name:<18} {found['version']:<14} {printable(found['path'])}")
    lines.append(f"  {'GPUs':<18} {', '.join(environment['gpus']) or 'none; everything here works on a CPU'}")
    lines += [f"  note: {note}" for note in environment["notes"]]
    return lines + [f"  problem: {problem}" for problem in environment["problems"]]
