"""RoutingTrace <-> an npz file of plain arrays, for numpy users and other tools. Nothing is unpickled.

    topk_indices, layer_numbers, num_experts, replay_mask           as in `RoutingTrace`
    token_ids, weight_version, sequence_lengths                     if the trace has them
    sample_ids                                                      uint8, the names as a JSON list in UTF-8

Names are not kept as numpy's text: it drops zeros at their ends and takes four bytes a character of the longest for each.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_router_replay.errors import StoreError
from megatron_router_replay.header import as_strings
from megatron_router_replay.left_live import check_nothing_left_out
from megatron_router_replay.store.atomic import naming, replacing
from megatron_router_replay.store.format import canonical_json, load_json
from megatron_router_replay.trace import RoutingTrace

Arrays = dict[str, npt.NDArray[Any]]

_TENSORS = ("topk_indices", "replay_mask", "token_ids", "weight_version")
_NUMBERS = ("layer_numbers", "sequence_lengths")
_MAX_RATIO = 1100
"""Deflate makes at most 1032 bytes of one."""
_MAX_ARRAYS = 4096
_END_BYTES = 22
"""Of the record at the end of a zip file without a comment: numpy writes none."""
_KINDS = "iubfUS"
"""Integers, bools, floats and text: what has no objects in it."""
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    EOFError,
    KeyError,
    RuntimeError,  # encrypted members, and packings that zipfile does not know (NotImplementedError)
    OverflowError,
)


def save_npz(trace: RoutingTrace, path: str | os.PathLike[str]) -> Path:
    """Write the trace as arrays to one npz file, which appears complete or not at all, and return its path.

    Raises:
        StoreError: the file cannot be written, or rows were left live by choice, which no file holds.
    """
    path = Path(path)
    with naming(path, "save"):
        check_nothing_left_out(trace.left_live, "save a trace", "the trace where it is replayed")
    arrays: dict[str, Any] = {n: value.cpu().numpy() for n in _TENSORS if (value := getattr(trace, n)) is not None}
    arrays |= {n: np.array(value, np.int64) for n in _NUMBERS if (value := getattr(trace, n)) is not None}
    if trace.sample_ids is not None:
        arrays["sample_ids"] = np.frombuffer(canonical_json(list(trace.sample_ids)), np.uint8)
    with naming(path, "save"), replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays, num_experts=np.array(trace.num_experts))
    return path


def load_arrays(path: str | os.PathLike[str]) -> Arrays:
    """Return the arrays of any npz file by name; takes no more memory than the size of the file can stand for.

    Raises:
        StoreError: not a zip file of plain arrays, truncated, altered, or it promises more than it can hold.
    """
    path = Path(path)
    with naming(path, "read"):
        try:
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
                _check_sizes(members, path.stat().st_size)
                _check_complete(members, path)
                return {info.filename.removesuffix(".npy"): _read_array(archive, info) for info in members}
        except _DAMAGED as error:
            raise StoreError(f"it is no npz file of plain arrays ({str(error)[:200]}).") from None


def trace_of_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> RoutingTrace:
    """Return the trace that `save_npz` wrote as arrays, after checking every value.

    Raises:
        StoreError: an array that a trace needs is missing, or the names are not as they are written.
        TraceError: the values are no trace.
    """
    missing = sorted({"topk_indices", "layer_numbers", "num_experts"} - arrays.keys())
    if missing:
        raise StoreError(
            f"there is no array {', '.join(missing)}, so this is no trace; there is: "
            f"{', '.join(sorted(arrays)) or 'nothing'}."
        )
    values: dict[str, Any] = {name: arrays[name] for name in _TENSORS if name in arrays}
    values |= {name: _integers(name, arrays[name]) for name in _NUMBERS if name in arrays}
    if "replay_mask" in values and values["replay_mask"].dtype.kind != "b":
        raise StoreError(f"replay_mask must be bool, it is {_kind(values['replay_mask'])}.")
    if "sample_ids" in arrays:
        values["sample_ids"] = _sample_ids(arrays["sample_ids"])
    num_experts = arrays["num_experts"]
    if num_experts.size != 1 or num_experts.dtype.kind not in "iu":
        raise StoreError(f"num_experts is no single integer, but {_kind(num_experts)}.")
    return RoutingTrace(num_experts=int(num_experts.item()), **values)


def _integers(name: str, array: npt.NDArray[Any]) -> list[int]:
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise StoreError(f"{name} must be a list of integers, it is {_kind(array)}.")
    return [int(value) for value in array]


def _kind(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype} of shape {list(array.shape)}"


def _sample_ids(names: npt.NDArray[Any]) -> tuple[str, ...]:
    if names.dtype.kind in "US" or not names.size:  # as version 0.1 and other tools write them
        return tuple(str(name) for name in names.reshape(-1).tolist())
    try:
        return as_strings("sample_ids", load_json(names.astype(np.uint8, casting="safe").tobytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"sample_ids is no JSON list of names ({str(error)[:100]}).") from None


def _check_sizes(members: list[zipfile.ZipInfo], file_bytes: int) -> None:
    promised = sum(info.file_size for info in members)
    # Of all together, since the entries of a zip file may share the same bytes.
    if len(members) > _MAX_ARRAYS or promised > _MAX_RATIO * file_bytes:
        raise StoreError(f"its {file_bytes} bytes cannot hold {len(members)} arrays of {promised} bytes in all.")


def _check_complete(members: list[zipfile.ZipInfo], path: Path) -> None:
    """Raise StoreError unless these are all members: the length of a comment is covered by no checksum, and can skip one."""
    with path.open("rb") as file:
        file.seek(-_END_BYTES, os.SEEK_END)
        signature, _, _, _, count, *_ = struct.unpack("<4s4H2LH", file.read())
    names = [info.filename for info in members]
    if signature != b"PK\5\6" or count != len(members) or len(set(names)) != len(names):
        raise StoreError(f"its directory names {sorted(names)}, and it ends otherwise than with the number of these.")


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> npt.NDArray[Any]:
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        if version not in readers:
            raise ValueError(f"{info.filename} has npy version {version}")
        try:
            shape, fortran, dtype = readers[version](member)
        except Exception as error:  # numpy evaluates the header as a literal: its parser's errors are of many kinds
            raise ValueError(f"{info.filename} has a header that numpy cannot read ({type(error).__name__})") from None
        if dtype.kind not in _KINDS or not dtype.itemsize:
            raise ValueError(f"{info.filename} holds {dtype}")
        nbytes = math.prod(shape) * dtype.itemsize
        # Before anything is allocated: a header of a few bytes can promise any shape.
        if min(shape, default=0) < 0 or nbytes > info.file_size:
            raise ValueError(f"{info.filename} promises {list(shape)} {dtype}, it holds {info.file_size} bytes")
        data = member.read(nbytes)
        if len(data) != nbytes or member.read(1):
            raise ValueError(f"{info.filename} does not hold the {nbytes} bytes of its shape")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
