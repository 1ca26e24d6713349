"""Files of every kind that holds routes <-> RoutingTrace, by content and ending. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_router_replay import engines
from megatron_router_replay.diagnostics import open_source
from megatron_router_replay.errors import StoreError
from megatron_router_replay.store import decode_envelope, encode_envelope, load_trace, save_trace
from megatron_router_replay.store.envelope import FORMAT as ENVELOPE
from megatron_router_replay.store.npz import load_arrays, save_npz, trace_of_arrays
from megatron_router_replay.trace import RoutingTrace

KINDS = (".safetensors", ".npz", ".json")


def read_any(
    path: Path,
    *,
    engine: str | None = None,
    model: Path | None = None,
    key: str = "",
    token_ids: Path | None = None,
    axes: Sequence[str] = (),
    step: int | None = None,
) -> RoutingTrace:
    """Return the trace in a file or folder.

    Args:
        engine, model: of a payload.
        key: dotted path of the payload in a JSON file, or the name of the array in an npz.
        token_ids: JSON file with one list of ids a sample.
        axes: of an array.
        step: of a folder with several.

    Raises:
        StoreError: the file cannot be read, or holds a payload whose engine and model were not given.
        PayloadError: the payload does not fit the model.
    """
    if not path.exists():
        raise StoreError(f"cannot read {path}: there is no such file or folder.")
    if path.is_dir():
        with open_source(path, step=step) as source:
            whole = source.read(0, source.num_tokens)
            return whole._with(sequence_lengths=source.sequence_lengths, sample_ids=source.sample_ids)
    if path.suffix == ".npz":
        return _from_npz(path, engine, model, key, token_ids, axes)
    if path.suffix == ".json":
        return _from_json(path, engine, model, key, token_ids, axes)
    return load_trace(path)


def write_any(trace: RoutingTrace, path: Path) -> None:
    """Write a trace as the kind of file that the ending names."""
    if path.suffix == ".npz":
        save_npz(trace, path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(encode_envelope(trace)) + "\n")
    else:
        save_trace(trace, path)


def _from_npz(
    path: Path, engine: str | None, model: Path | None, key: str, token_ids: Path | None, axes: Sequence[str]
) -> RoutingTrace:
    arrays = load_arrays(path)
    if engine is None:
        needed = {"topk_indices", "layer_numbers", "num_experts"}
        if not needed <= arrays.keys():
            raise StoreError(
                f"{path} has no {', '.join(sorted(needed - arrays.keys()))}, so it is no trace; it has: "
                f"{', '.join(sorted(arrays)) or 'nothing'}. An array of routes needs --engine, --model and --key."
            )
        return trace_of_arrays(arrays)
    name = key or (next(iter(arrays)) if len(arrays) == 1 else "")
    if name not in arrays:
        raise StoreError(f"{path} has no array {name!r}: --key names one of {', '.join(sorted(arrays))}.")
    return _decode([arrays[name]], path, engine, model, token_ids, axes)


def _from_json(
    path: Path, engine: str | None, model: Path | None, key: str, token_ids: Path | None, axes: Sequence[str]
) -> RoutingTrace:
    content = _load_json(path)
    for part in key.split(".") if key else []:
        try:
            content = content[int(part)] if isinstance(content, list) else content[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise StoreError(f"{path} has nothing at {key!r}: {part!r} is not there.") from None
    if isinstance(content, dict) and content.get("format") == ENVELOPE:
        return decode_envelope(content)
    return _decode(content, path, engine, model, token_ids, axes)


def _decode(
    content: Any, path: Path, engine: str | None, model: Path | None, token_ids: Path | None, axes: Sequence[str]
) -> RoutingTrace:
    if engine is None or model is None:
        raise StoreError(
            f"{path} is no trace, so it may be an engine's payload: give --engine and --model (the model's config.json)."
        )
    ids = None if token_ids is None else _load_json(token_ids)
    if engine == "array":
        single = content[0] if isinstance(content, list) and isinstance(content[0], np.ndarray) else content
        return engines.array.decode(
            single,
            model=model,
            axes=axes,
            token_ids=None if ids is None else ids[0],
            num_tokens=_rows(single, axes, ids),
        )
    decoder = getattr(engines, engine)
    if engine == "megatron" and not isinstance(content, list):
        content = [content]
    decoded: RoutingTrace = decoder.decode_batch(content, model=model, token_ids=ids)
    return decoded


def _rows(array: Any, axes: Sequence[str], ids: Any) -> int | None:
    if ids is not None or "token" not in axes:
        return None
    shape = np.shape(array)
    return int(shape[list(axes).index("token")]) if len(shape) == len(axes) else None


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"cannot read {path}: {error}.") from None
