"""`router-replay doctor`."""

from __future__ import annotations

import json
import platform
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

import megatron_router_replay
from megatron_router_replay.cli.output import Json, bad_input, emit, numbers
from megatron_router_replay.engines import ModelRoutingInfo
from megatron_router_replay.errors import RouterReplayError, StoreError

_PACKAGES = ("torch", "megatron-core", "numpy", "safetensors", "matplotlib", "zstandard", "pybase64", "ray")
_NEEDED = ("torch", "megatron-core", "numpy", "safetensors")


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(help="A model's config as JSON: Hugging Face's config.json, or Megatron's.", metavar="PATH"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check what is installed, and whether a model could be replayed.

    With a Hugging Face config: which layers route, and what a trace of them takes. With a Megatron config (fields of
    TransformerConfig, or the arguments of a checkpoint): which layers would be replayed, which refused, and why.

    Exit code 0: fine; 1: something is missing or refused; 2: the config cannot be read.
    """
    with bad_input():
        environment = _environment()
        model = None if config is None else _model(config)
    problems = list(environment["problems"]) + ([] if model is None else list(model["refused"]))
    values = {"environment": environment, "model": model, "problems": problems}
    text = _environment_text(environment) + ([] if model is None else _model_text(model))
    text.append("something would be refused, see above" if problems else "nothing stands in the way of replay")
    emit("\n".join(text), values, as_json=as_json)
    raise typer.Exit(1 if problems else 0)


def _environment() -> dict[str, Any]:
    import torch

    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    problems = [f"{name} is not installed" for name in _NEEDED if versions[name] is None]
    if versions["megatron-core"] is not None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of optional packages, on import
                from megatron_router_replay.mcore.compat import check_version
            check_version()
        except RouterReplayError as error:
            problems.append(str(error))
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "megatron_router_replay": megatron_router_replay.__version__,
        "python": platform.python_version(),
        "packages": versions,
        "gpus": gpus,
        "problems": problems,
    }


def _environment_text(environment: dict[str, Any]) -> list[str]:
    lines = [
        f"megatron_router_replay {environment['megatron_router_replay']}, Python {environment['python']}",
        *(
            f"  {name:<16} {installed or 'not installed' + ('' if name in _NEEDED else ' (optional)')}"
            for name, installed in environment["packages"].items()
        ),
        f"  {'GPUs':<16} {', '.join(environment['gpus']) or 'none; everything here works on a CPU'}",
    ]
    return lines + [f"  problem: {problem}" for problem in environment["problems"]]


def _model(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"cannot read the config {file}: {error}.") from None
    if not isinstance(values, dict):
        raise StoreError(f"the config {file} holds {type(values).__name__}, expected an object.")
    if "model_type" in values or "text_config" in values:
        return _hugging_face(values, file)
    from megatron_router_replay.cli.megatron_config import read_megatron_config

    return read_megatron_config(values, file)


def _hugging_face(values: dict[str, Any], file: Path) -> dict[str, Any]:
    info = ModelRoutingInfo.from_hf_config(values)
    width = 1 if info.num_experts <= 256 else 2
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
        "bytes_per_token": len(info.moe_layer_numbers) * info.topk * width,
        "refused": [],
        "notes": ["what a trainer's own settings refuse is seen with its Megatron config, or mrr.explain(model)"],
    }


def _model_text(model: dict[str, Any]) -> list[str]:
    layers = model["moe_layers"]
    lines = [
        f"{model['path']}: {model['model_type'] or 'a Megatron-Core model'}",
        f"  layers           {model['num_layers']}, {len(layers)} with routed experts: {numbers(layers) or 'none'}",
        f"  experts          top-{model['topk']} of {model['num_experts']}; shared, never routed: "
        f"{model['num_shared_experts']}",
        f"  a trace takes    {model['bytes_per_token']:,} bytes a token",
    ]
    lines += [f"  refused: {reason}" for reason in model["refused"]]
    return lines + [f"  note: {note}" for note in model["notes"]]
