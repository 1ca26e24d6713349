"""Files of every kind that holds routes <-> RoutingTrace, by content and ending. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_router_replay import engines
from megatron_router_replay.cli.json_files import at_key, check_payload, load_json, load_token_ids, shown
from megatron_router_replay.diagnostics import open_source
from megatron_router_replay.errors import StoreError
from megatron_router_replay.store import decode_envelope, encode_envelope, load_trace, save_trace
from megatron_router_replay.store.envelope import FORMAT as ENVELOPE
from megatron_router_replay.store.npz import load_arrays, save_npz, trace_of_arrays
from megatron_router_replay.trace import RoutingTrace

_FREE_BYTES = 64 << 20
_MAX_RATIO = 256
"""Bytes that one byte of an envelope may become, beyond the first 64 MB: routes pack about three to one."""

KINDS = (".safetensors", ".npz", ".json")


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadOptions:
    """How a file's payload is read.

    Args:
        engine, model: whose payload it is, and the model's config.json or its folder; None: the file holds a trace.
        key: dotted path of the payload in a JSON file, or the name of the array in an npz.
        token_ids: JSON file with one list of ids a sample.
        axes: of an array.
        layer_numbers: of the rank of a Megatron trace; None: all of the model's.
    """

    engine: str | None = None
    model: Path | None = None
    key: str = ""
    token_ids: Path | None = None
    axes: Sequence[str] = ()
    layer_numbers: Sequence[int] | None = None


def read_any(path: Path, options: PayloadOptions, *, step: int | None = None) -> RoutingTrace:
    """Return the trace in a file or folder.

    Args:
        step: of a folder with several.

    Raises:
        StoreError: the file cannot be read, holds a payload whose engine and model were not given, or a trace although they
            were.
        PayloadError: the payload does not fit the model.
    """
    if not path.exists():
        raise StoreError(f"cannot read {path}: there is no such file or folder.")
    if options.engine == "megatron_trace":
        return _from_megatron_trace(path, options, step)
    if options.layer_numbers is not None:
        raise StoreError("--layers is for --engine megatron_trace; other files say which layers they hold.")
    if path.is_dir():
        _refuse_payload_options(path, options, key=options.key)
        with open_source(path, step=step) as source:
            whole = source.read(0, source.num_tokens)
            # A block of rows has no samples; these are all rows.
            return whole._with(sequence_lengths=source.sequence_lengths, sample_ids=source.sample_ids)
    if path.suffix == ".npz":
        return _from_npz(path, options)
    if path.suffix == ".json":
        return _from_json(path, options)
    _refuse_payload_options(path, options, key=options.key)
    return load_trace(path)


def _refuse_payload_options(path: Path, options: PayloadOptions, *, key: str) -> None:
    """Raise StoreError if a trace is to be read as a payload: it would be read as what it is, whatever the options say."""
    given = {"--engine": options.engine, "--model": options.model, "--key": key, "--token-ids": options.token_ids}
    unused = [name for name, value in given.items() if value]
    if unused:
        raise StoreError(
            f"{path} is read as a trace, which holds its model and tokens itself: leave {', '.join(unused)} out. They are "
            "for an engine's payload, in a .json or .npz file."
        )


def write_any(trace: RoutingTrace, path: Path) -> None:
    """Write a trace as the kind of file that the ending names."""
    if path.suffix == ".npz":
        save_npz(trace, path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(encode_envelope(trace)) + "\n", encoding="utf-8")
    else:
        save_trace(trace, path)


def _from_npz(path: Path, options: PayloadOptions) -> RoutingTrace:
    arrays = load_arrays(path)
    if options.engine is None:
        try:
            trace = trace_of_arrays(arrays)
        except StoreError as error:
            raise StoreError(f"{path}: {error} An array of routes needs --engine, --model and --key.") from None
        _refuse_payload_options(path, options, key=options.key)
        return trace
    name = options.key or (next(iter(arrays)) if len(arrays) == 1 else "")
    if name not in arrays:
        raise StoreError(f"{path} has no array {name!r}: --key names one of {shown(sorted(arrays))}.")
    return _decode([arrays[name]], path, options)


def _from_megatron_trace(path: Path, options: PayloadOptions, step: int | None) -> RoutingTrace:
    """Return what a folder or file of Megatron-Core's routing trace holds; it names its steps, and no tokens."""
    if options.model is None:
        raise StoreError(f"{path}: a Megatron trace needs --model, the model's config.json.")
    if options.token_ids is not None or options.key:
        raise StoreError(
            f"{path}: a Megatron trace has no keys and does not say whose tokens it routed: leave --token-ids and --key out."
        )
    check_model(options.model)
    return engines.megatron_trace.decode(path, model=options.model, step=step, layer_numbers=options.layer_numbers)


def _from_json(path: Path, options: PayloadOptions) -> RoutingTrace:
    content = at_key(load_json(path), options.key, path)
    if isinstance(content, dict) and content.get("format") == ENVELOPE:
        _refuse_payload_options(path, options, key="")  # a key led to it
        return decode_envelope(content, max_bytes=max(_FREE_BYTES, _MAX_RATIO * path.stat().st_size))
    check_payload(content, path)
    if isinstance(content, dict) and isinstance(content.get("response"), (dict, list)) and options.key == "":
        raise StoreError(
            f"{path} holds its payload below a key: --key response reads it. It has {shown(list(content))}."
        )
    return _decode(content, path, options)


def _decode(content: Any, path: Path, options: PayloadOptions) -> RoutingTrace:
    engine, model = options.engine, options.model
    if engine is None or model is None:
        raise StoreError(
            f"{path} is no trace, so it may be an engine's payload: give --engine and --model (the model's config.json)."
        )
    check_model(model)
    ids = None if options.token_ids is None else load_token_ids(options.token_ids)
    if engine == "array":
        return _decode_array(content, path, model, ids, options.axes)
    if engine == "megatron" and not isinstance(content, list):
        content = [content]
    decoded: RoutingTrace = getattr(engines, engine).decode_batch(content, model=model, token_ids=ids)
    return decoded


def _decode_array(
    content: Any, path: Path, model: Path, ids: list[list[int]] | None, axes: Sequence[str]
) -> RoutingTrace:
    if isinstance(content, list) and content and isinstance(content[0], np.ndarray):
        array = content[0]
    else:
        try:
            array = np.array(content)
        except (ValueError, TypeError, OverflowError) as error:
            raise StoreError(f"{path} holds no array: its lists have uneven lengths ({error}).") from None
    if array.dtype.kind not in "iu":
        raise StoreError(f"{path} holds no array of integers, but {array.dtype} of shape {list(array.shape)}.")
    if ids is not None and len(ids) != 1 and "batch" not in axes:
        raise StoreError(f"the token ids hold {len(ids)} samples, an array without a batch axis is one sample.")
    return engines.array.decode(
        array,
        model=model,
        axes=axes,
        token_ids=None if ids is None else ids[0],
        num_tokens=_rows(array, axes) if ids is None else None,
    )


def _rows(array: Any, axes: Sequence[str]) -> int | None:
    # Axes that do not fit are refused by the decoder, which says what does.
    shape = np.shape(array)
    return int(shape[list(axes).index("token")]) if "token" in axes and len(shape) == len(axes) else None


def check_model(path: Path) -> None:
    """Say what a model's path must be.

    Raises:
        StoreError: nothing is there; a hub id is named as one.
    """
    if path.exists():
        return
    hub = not path.is_absolute() and len(path.parts) == 2 and path.suffix != ".json" and not path.parent.exists()
    advice = (
        f" It looks like an id of the Hugging Face hub: nothing is downloaded here, so fetch the config first (hf download "
        f"{path} config.json) and give its path."
        if hub
        else " Give the model's config.json or the folder that holds it."
    )
    raise StoreError(f"cannot read the model's config {path}: there is no such file or folder.{advice}")
