"""Files of every kind that holds routes -> RoutingTrace, by content and ending. Nothing is unpickled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_router_replay import engines
from megatron_router_replay.cli.json_files import load_payload, load_token_ids
from megatron_router_replay.diagnostics.source import open_source
from megatron_router_replay.engines.registry import registered
from megatron_router_replay.errors import StoreError
from megatron_router_replay.store import load_trace
from megatron_router_replay.trace import RoutingTrace


def engine_names() -> list[str]:
    """Return whose payload a file may hold."""
    return [*(decoder.name for decoder in registered() if decoder.reads_files), "array"]


def read_any(
    path: Path,
    *,
    engine: str = "",
    model: Path | None = None,
    key: str = "",
    token_ids: Path | None = None,
    axes: Sequence[str] = (),
    step: int | None = None,
) -> RoutingTrace:
    """Return the trace in a file or folder.

    Args:
        engine, model: whose payload it is, and the model's config.json or its folder; not given: it holds a trace.
        key: dotted path of the payload in a JSON file.
        token_ids: JSON file with one list of ids a sample.
        axes: of an array.
        step: of a folder with several.

    Raises:
        StoreError: the file cannot be read, holds a payload whose engine and model were not given, or a trace although they
            were.
        PayloadError: the payload does not fit the model.
    """
    if not path.exists():
        raise StoreError(f"MRR902: cannot read {path}: there is no such file or folder.")
    if engine and engine not in engine_names():
        raise StoreError(f"MRR901: --engine {engine} is none of {', '.join(engine_names())}.")
    if path.suffix in (".npy", ".json") and path.is_file():
        return _from_payload(path, engine, model, key, token_ids, axes)
    given = {"--engine": engine, "--model": model, "--key": key, "--token-ids": token_ids}
    # It would be read as the trace that it is, whatever the options say.
    if unused := [name for name, value in given.items() if value]:
        raise StoreError(
            f"MRR901: {path} is read as a trace, which holds its model and tokens itself: leave {', '.join(unused)} "
            "out. They are for an engine's payload, in a .json or .npy file."
        )
    if path.is_file():
        return load_trace(path)
    source = open_source(path, step=step)
    whole = source.read(0, source.num_tokens)
    # A block of rows has no samples; these are all rows.
    return whole._with(sequence_lengths=source.sequence_lengths, sample_ids=source.sample_ids)


def _from_payload(
    path: Path, engine: str, model: Path | None, key: str, token_ids: Path | None, axes: Sequence[str]
) -> RoutingTrace:
    is_array = path.suffix == ".npy"
    if is_array and key:
        raise StoreError(f"MRR901: {path} holds one array, which has no keys: leave --key out.")
    content = _load_array(path) if is_array else load_payload(path, key)
    missing = (
        f"{path} is no trace, so it may be an engine's payload: give --engine and --model (the model's config.json)."
    )
    found = _checked(model if engine else None, missing)
    ids = None if token_ids is None else load_token_ids(token_ids)
    if engine == "array":
        return _decode_array(content, path, found, ids, axes)
    if is_array:
        content = [content]
    decoded: RoutingTrace = getattr(engines, engine).decode_batch(content, model=found, token_ids=ids)
    return decoded


def _load_array(path: Path) -> Any:
    """Return the array of a .npy file, mapped: no more of it than the file holds comes into memory."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a header is parsed as Python, and raises whatever that does
        raise StoreError(f"MRR902: cannot read {path}: it is no .npy file of a plain array ({error}).") from None


def _decode_array(
    content: Any, path: Path, model: Path, ids: list[list[int]] | None, axes: Sequence[str]
) -> RoutingTrace:
    try:
        array = np.asarray(content)
    except (ValueError, TypeError, OverflowError) as error:
        raise StoreError(f"MRR902: {path} holds no array: its lists have uneven lengths ({error}).") from None
    if array.dtype.kind not in "iu":
        raise StoreError(f"MRR902: {path} holds no array of integers, but {array.dtype} of shape {list(array.shape)}.")
    if ids is not None and len(ids) != 1 and "batch" not in axes:
        raise StoreError(f"MRR902: the token ids hold {len(ids)} samples, an array without a batch axis is one sample.")
    # Axes that do not fit are refused by the decoder, which says what does.
    has_rows = ids is None and "token" in axes and array.ndim == len(axes)
    return engines.array.decode(
        array,
        model=model,
        axes=axes,
        token_ids=None if ids is None else ids[0],
        num_tokens=array.shape[list(axes).index("token")] if has_rows else None,
        # Without ids, the file's rows are all that is known of its tokens; an engine's have one row less than ids.
        last_token_routed=True if ids is None else None,
    )


def _checked(model: Path | None, missing: str) -> Path:
    """Return a model's path, or say what it must be; an id of the hub is named as one."""
    if model is None:
        raise StoreError(f"MRR901: {missing}")
    if model.exists():
        return model
    hub = not model.is_absolute() and len(model.parts) == 2 and model.suffix != ".json" and not model.parent.exists()
    advice = (
        f"It looks like an id of the Hugging Face hub: nothing is downloaded here, so fetch the config first (hf download "
        f"{model} config.json) and give its path."
        if hub
        else "Give the model's config.json or the folder that holds it."
    )
    raise StoreError(f"MRR902: cannot read the model's config {model}: there is no such file or folder. {advice}")
