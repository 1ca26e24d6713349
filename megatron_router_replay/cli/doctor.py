"""`router-replay doctor`."""

from __future__ import annotations

import platform
import warnings
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

import megatron_router_replay
from megatron_router_replay.cli.output import Json, Out, bad_input, check_out, emit, numbers, printable
from megatron_router_replay.errors import RouterReplayError, StoreError

_PACKAGES = {
    "torch": "torch",
    "megatron-core": "megatron.core",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "typer": "typer",
    "rich": "rich",
    "matplotlib": "matplotlib",
    "jinja2": "jinja2",
    "zstandard": "zstandard",
    "pybase64": "pybase64",
    "ray": "ray",
    "transformers": "transformers",
    "triton": "triton",
    "transformer-engine": "transformer_engine",
}
"""Name of a distribution -> the module that it brings."""

_NEEDED = ("torch", "megatron-core", "numpy", "safetensors")


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(help="A model's config as JSON: Hugging Face's config.json, or Megatron's.", metavar="PATH"),
    ] = None,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Check what is installed, and whether a model could be replayed.

    With a Hugging Face config: which layers route, and what a trace of them takes. With a Megatron config (fields of
    TransformerConfig, or the arguments of a checkpoint): which layers would be replayed, which refused, and why.

    Exit code 0: fine; 1: something is missing or refused; 2: the config cannot be read.
    """
    with bad_input():
        check_out(out)
        environment = _environment()
        model = None if config is None else _model(config)
    problems = list(environment["problems"]) + ([] if model is None else list(model["refused"]))
    values = {"environment": environment, "model": model, "problems": problems}
    text = _environment_text(environment) + ([] if model is None else _model_text(model))
    text.append("something stands in the way, see above" if problems else "nothing stands in the way of replay")
    emit("\n".join(text), values, as_json=as_json, out=out)
    raise typer.Exit(1 if problems else 0)


def _environment() -> dict[str, Any]:
    packages = {name: _package(name, module) for name, module in _PACKAGES.items()}
    problems = [f"{name} is not installed" for name in _NEEDED if packages[name] is None]
    notes: list[str] = []
    if packages["megatron-core"] is not None:
        notes, found = _megatron()
        problems += found
    return {
        "megatron_router_replay": megatron_router_replay.__version__,
        "python": platform.python_version(),
        "packages": packages,
        "gpus": [] if packages["torch"] is None else _gpus(),
        "notes": notes,
        "problems": problems,
    }


def _megatron() -> tuple[list[str], list[str]]:
    """Return (notes, problems) of the Megatron-Core that is installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of optional packages, on import
            from megatron_router_replay.mcore import compat
    except ImportError as error:  # without torch, or from 0.18 on without triton
        return [], [f"megatron-core cannot be imported: {error}"]
    notes = [f"sessions were run with Megatron-Core {', '.join(compat.TESTED)}"]
    if compat.is_newer_than_tested(compat.megatron_version()):
        notes.append("this one is newer: sessions verify every routing map, and refuse moe_* settings unknown here")
    try:
        compat.check_version()
    except RouterReplayError as error:
        return notes, [str(error)]
    return notes, []


def _gpus() -> list[str]:
    import torch

    return (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )


def _package(name: str, module: str) -> dict[str, str] | None:
    """Return version and path of an installed package, without importing it; None if there is none."""
    try:
        # Of a submodule this imports the packages around it, which may fail.
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    # A namespace package such as megatron has folders and no file of its own.
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    path = str(Path(places[0] or "").parent if spec.origin else places[0]) if places else ""
    try:
        found = version(name)
    except PackageNotFoundError:
        found = ""
    if name == "megatron-core":
        # A checkout on the path has no metadata of its own, or that of an older installation beside it.
        with warnings.catch_warnings(), suppress(ImportError):  # `_megatron` says why it cannot be imported
            warnings.simplefilter("ignore")
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


def _model(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    from megatron_router_replay.cli.files import check_model
    from megatron_router_replay.cli.json_files import load_json

    check_model(path)
    values = load_json(file)
    if not isinstance(values, dict):
        raise StoreError(f"the config {file} holds {type(values).__name__}, expected an object.")
    if "model_type" in values or "text_config" in values:
        return _hugging_face(values, file)
    from megatron_router_replay.cli.megatron_config import read_megatron_config

    return read_megatron_config(values, file)


def _hugging_face(values: dict[str, Any], file: Path) -> dict[str, Any]:
    from megatron_router_replay.engines import ModelRoutingInfo
    from megatron_router_replay.ids import index_dtype

    try:
        info = ModelRoutingInfo.from_hf_config(values)
    except (TypeError, AttributeError, KeyError, OverflowError) as error:
        raise StoreError(f"the config {file} has a field of another kind than Hugging Face writes: {error}.") from None
    return {
        "kind": "hugging_face",
        "path": str(file),
        "model_type": info.model_type,
        "num_layers": info.num_layers,
        "moe_layers": list(info.moe_layer_numbers),
        "replayed_layers": list(info.moe_layer_numbers),
        "num_experts": info.num_experts,
        "topk": info.topk,
        "num_shared_experts": info.num_shared_experts,
        "bytes_per_token": len(info.moe_layer_numbers) * info.topk * index_dtype(info.num_experts).itemsize,
        "refused": [],
        "notes": ["what a trainer's own settings refuse is seen with its Megatron config, or mrr.explain(model)"],
    }


def _model_text(model: dict[str, Any]) -> list[str]:
    layers = model["moe_layers"]
    lines = [
        f"{printable(model['path'])}: {printable(model['model_type'] or 'a Megatron-Core model')}",
        f"  layers           {model['num_layers']}, {len(layers)} with routed experts: {numbers(layers) or 'none'}",
        f"  experts          top-{model['topk']} of {model['num_experts']}; shared, never routed: "
        f"{model['num_shared_experts']}",
        f"  a trace takes    {model['bytes_per_token']:,} bytes a token",
    ]
    lines += [f"  refused: {reason}" for reason in model["refused"]]
    return lines + [f"  note: {note}" for note in model["notes"]]
