"""npz files that someone else wrote -> arrays; what is decoded is bounded by what is on disk, and nothing is unpickled."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_router_replay.errors import StoreError
from megatron_router_replay.trace import RoutingTrace

Array = npt.NDArray[Any]

_TENSORS = ("topk_indices", "replay_mask", "token_ids", "weight_version")
_NEEDED = ("topk_indices", "layer_numbers", "num_experts")
_FREE_BYTES = 64 << 20
_MAX_RATIO = 256
"""Bytes that one byte on disk may become, beyond the first 64 MB: zeros pack a thousand to one, routes about three."""
_MAX_ARRAYS = 1000


def decoded_limit(path: Path) -> int:
    """Return how many bytes a file's content may take once it is decoded."""
    return max(_FREE_BYTES, _MAX_RATIO * path.stat().st_size)


def load_npz(path: Path) -> dict[str, Array]:
    """Return the arrays of an npz file.

    Raises:
        StoreError: it is none, holds objects, or claims more than its size on disk allows.
    """
    try:
        with zipfile.ZipFile(path) as content:
            members = content.infolist()
            total, limit = sum(member.file_size for member in members), decoded_limit(path)
            if len(members) > _MAX_ARRAYS or total > limit:
                raise StoreError(
                    f"cannot read {path}: its {len(members)} arrays take {total:,} bytes, more than the {limit:,} of a file "
                    f"of {path.stat().st_size:,} bytes."
                )
            return {member.filename.removesuffix(".npy"): _array(content.read(member)) for member in members}
    except StoreError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, SyntaxError, KeyError) as error:
        raise StoreError(f"cannot read {path}: it is no npz file of plain arrays ({error}).") from None
    except (NotImplementedError, RuntimeError, OverflowError, TypeError, RecursionError) as error:
        raise StoreError(
            f"cannot read {path}: it is damaged or packed in a way that numpy never does ({error})."
        ) from None


def _array(raw: bytes) -> Array:
    """Return a .npy file as an array; its header is checked before anything of its size is made."""
    stream = io.BytesIO(raw)
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"array format {version}")
    try:
        shape, fortran_order, dtype = readers[version](stream)
    except Exception as error:  # numpy evaluates the header as a literal: its parser's errors are of many kinds
        raise ValueError(f"a header that numpy cannot read ({type(error).__name__})") from None
    if dtype.hasobject or dtype.names is not None or not dtype.itemsize or dtype.kind not in "biufUS":
        raise ValueError(f"an array of {dtype}: objects and records are not read")
    if any(size < 0 for size in shape) or prod(shape) * dtype.itemsize != len(raw) - stream.tell():
        raise ValueError(f"an array of shape {list(shape)[:8]} and {dtype} in {len(raw)} bytes")
    flat = np.frombuffer(raw, dtype=dtype, offset=stream.tell(), count=prod(shape))
    return flat.reshape(shape, order="F" if fortran_order else "C")


def save_npz(trace: RoutingTrace, path: Path) -> None:
    """Write a trace as plain arrays; sample ids as JSON in bytes, for numpy's texts lose trailing zero characters."""
    values: dict[str, Any] = {name: value.numpy() for name in _TENSORS if (value := getattr(trace, name)) is not None}
    values["layer_numbers"] = np.array(trace.layer_numbers, dtype=np.int64)
    values["num_experts"] = np.array(trace.num_experts)
    if trace.sequence_lengths is not None:
        values["sequence_lengths"] = np.array(trace.sequence_lengths, dtype=np.int64)
    if trace.sample_ids is not None:
        values["sample_ids"] = np.frombuffer(json.dumps(list(trace.sample_ids)).encode("ascii"), dtype=np.uint8)
    np.savez(path, **values)


def trace_of(arrays: dict[str, Array], path: Path) -> RoutingTrace:
    """Return the trace that `save_npz` wrote.

    Raises:
        StoreError: an array is missing or of another kind.
        TraceError: the values are no trace.
    """
    missing = [name for name in _NEEDED if name not in arrays]
    if missing:
        raise StoreError(
            f"{path} has no {', '.join(missing)}, so it is no trace; it has: {', '.join(sorted(arrays)) or 'nothing'}. An "
            "array of routes needs --engine, --model and --key."
        )
    values: dict[str, Any] = {name: arrays[name] for name in _TENSORS if name in arrays}
    for name in ("layer_numbers", "sequence_lengths"):
        if name in arrays:
            values[name] = _integers(arrays[name], name, path)
    if arrays["num_experts"].shape != () or arrays["num_experts"].dtype.kind not in "iu":
        raise StoreError(f"num_experts in {path} is no single integer, but {_kind(arrays['num_experts'])}.")
    if "sample_ids" in arrays:
        values["sample_ids"] = _texts(arrays["sample_ids"], path)
    mask = values.get("replay_mask")
    if mask is not None and mask.dtype.kind != "b":
        raise StoreError(f"replay_mask in {path} must be bool, it is {_kind(mask)}.")
    return RoutingTrace(num_experts=int(arrays["num_experts"]), **values)


def _integers(array: Array, name: str, path: Path) -> list[int]:
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise StoreError(f"{name} in {path} must be a list of integers, it is {_kind(array)}.")
    return [int(value) for value in array]


def _texts(array: Array, path: Path) -> list[str]:
    if array.ndim == 1 and array.dtype.kind == "U":
        return [str(text) for text in array]
    if array.ndim == 1 and array.dtype == np.uint8:
        try:
            names = json.loads(array.tobytes())
        except (ValueError, RecursionError):
            names = None
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
    raise StoreError(f"sample_ids in {path} are no list of texts, but {_kind(array)}.")


def _kind(array: Array) -> str:
    return f"{array.dtype} of shape {list(array.shape)}"
