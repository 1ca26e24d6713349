"""The wire formats of routed experts -> numpy arrays, without trusting a byte of them.

Arrays are returned as sent, in their own narrow dtype and without a copy where the format allows; `rows` checks them.

- base64 of a `.npy` file, version 1.0, one integer array [rows, layers, topk] (vLLM 0.22 and later);
- base64 of raw little-endian int32 in C order, without a shape (SGLang, sglang-jax);
- a dict of base64 or bytes with "shape", "dtype" (absent: uint8) and "start" (prime-rl, verifiers);
- nested lists [rows][layers][topk] (JSON of vLLM 0.21 and Megatron-Core);
- numpy arrays, torch tensors, anything with `__array__` (Python objects of every engine).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_router_replay.base64_text import decode_base64 as decode_strictly
from megatron_router_replay.checks import shown
from megatron_router_replay.errors import PayloadError

Array = npt.NDArray[Any]

NPY_MAGIC = b"\x93NUMPY"
MAX_NPY_HEADER = 1024

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
"""The dtypes of ids that a reply may state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The engine, field and sample of a payload; every message starts with them."""

    engine: str
    field: str
    sample: str = ""

    def __str__(self) -> str:
        return f"{self.engine}: {self.field}" + (f" of {self.sample}" if self.sample else "")

    def error(self, text: str) -> PayloadError:
        """Return the error to raise for this payload."""
        return PayloadError(f"{self}: {text}")


def decode_base64(text: str | bytes, *, source: Source) -> bytes:
    """Return the bytes of a base64 text.

    Raises:
        PayloadError: not base64.
    """
    try:
        return decode_strictly(text)
    except ValueError as error:
        raise source.error(
            f"MRR310: not base64: {error}. Was the string cut on its way, or does it have foreign characters?"
        ) from error


def parse_npy(raw: bytes, *, source: Source) -> Array:
    """Return the array of a `.npy` file as a read-only view of its bytes.

    numpy reads the header, which is all that is evaluated: a literal of at most `MAX_NPY_HEADER` bytes.

    Raises:
        PayloadError: another format, dtype or number of axes, or the data do not fill the shape exactly.

    Source: numpy.lib.format, version 1.0.
    """
    if raw[:8] != NPY_MAGIC + b"\x01\x00":
        raise source.error(
            f"MRR310: starts with {raw[:8]!r}, not with the magic of a version 1.0 .npy file. Raw ids without a header are "
            "of SGLang: engines.sglang reads them."
        )
    file = io.BytesIO(raw)
    file.seek(8)
    try:
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=MAX_NPY_HEADER)
    # Of damaged bytes, numpy's reader raises whatever its parser of literals, its tokenizer and its dtypes raise.
    except Exception as error:
        raise source.error(
            f"MRR310: the .npy header {raw[10:130]!r} cannot be read ({type(error).__name__}): it is damaged, or no array of "
            "integers. Was the payload changed on its way?"
        ) from None
    if dtype.kind not in "iu" or len(shape) != 3 or not all(type(size) is int and size >= 0 for size in shape):
        raise source.error(
            f"MRR310: the .npy header promises {list(shape)} {dtype}, expected an integer array [rows, layers, topk]."
        )
    _check_size("the .npy header", shape, dtype, len(raw) - file.tell(), source)
    return np.frombuffer(raw, dtype, offset=file.tell()).reshape(shape, order="F" if is_fortran else "C")


def _check_size(promise: str, shape: Sequence[int], dtype: np.dtype[Any], num_bytes: int, source: Source) -> None:
    # Python's integers do not wrap: sizes of twelve digits never give the right number of bytes by overflow.
    expected = shape[0] * shape[1] * shape[2] * dtype.itemsize
    # With one size of 0, the rest could be numbers that no array may have.
    if num_bytes != expected or max(shape) > num_bytes + MAX_NPY_HEADER:
        raise source.error(
            f"MRR310: {promise} promises {list(shape)} {dtype} = {expected} bytes, {num_bytes} follow. Was the payload cut?"
        )


def is_tensor(value: Any) -> bool:
    """Return whether a value is a dict of bytes and their shape."""
    return isinstance(value, Mapping) and {"data", "shape"} <= set(value)


def parse_tensor(value: Mapping[str, Any], *, source: Source) -> tuple[Array, int | None]:
    """Return the array [rows, layers, topk] of a dict of bytes, and the token of its first row or None.

    Raises:
        PayloadError: another dtype, shape or start than integers have, or the data do not fill the shape exactly.

    Source: prime-rl, inference.vllm.routed_experts; verifiers, types.RoutedExpertsPayload.
    """
    data, shape = value["data"], value["shape"]
    name = "uint8" if value.get("dtype") is None else value["dtype"]
    if not isinstance(name, str) or name not in INTEGERS:
        raise source.error(f"MRR310: dtype is {shown(name)}, expected one of {', '.join(INTEGERS)}.")
    sizes = list(shape) if isinstance(shape, (list, tuple)) else []
    if len(sizes) != 3 or not all(type(size) is int and 0 <= size < 10**12 for size in sizes):
        raise source.error(f"MRR310: has the shape {shown(shape)}, expected [rows, layers, topk].")
    if isinstance(data, str):
        data = decode_base64(data, source=source)
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise source.error(f"MRR310: data is {type(data).__name__}, expected base64 or bytes.")
    raw, dtype = bytes(data), np.dtype(name).newbyteorder("<")
    _check_size("the reply", sizes, dtype, len(raw), source)
    return np.frombuffer(raw, dtype).reshape(sizes), read_start(value.get("start"), "start", source)


def read_start(value: Any, name: str, source: Source) -> int | None:
    """Return the token of the first row as a reply states it; None where it does not."""
    if value is not None and not (type(value) is int and 0 <= value < 10**12):
        raise source.error(f"MRR305: {name} is {shown(value)}, it must be an integer of 0 or more.")
    start: int | None = value
    return start


class EncodedRows:
    """Rows [rows, columns, topk] of little-endian int32 in base64, which a slice decodes.

    They take four times the memory of a trace's ids, so a reader takes some at a time. It must take all rows once: a slice
    checks its own characters alone.

    Args:
        text: base64 of whole rows.
        row_shape: (columns, topk).
    """

    ndim, dtype = 3, np.dtype("<i4")

    def __init__(self, text: str, row_shape: tuple[int, int], source: Source) -> None:
        self._text, self._source, self._row_bytes = text, source, 4 * row_shape[0] * row_shape[1]
        self.shape = (_num_decoded(text) // self._row_bytes, *row_shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Array:
        """Return neighbouring rows; raise PayloadError if their characters are not base64."""
        start, stop, _ = rows.indices(len(self))
        begin, end = start * self._row_bytes, max(start, stop) * self._row_bytes
        # Four characters are three bytes.
        text = self._text[begin // 3 * 4 : -(-end // 3) * 4]
        raw, is_end = decode_base64(text, source=self._source), -(-end // 3) * 4 >= len(self._text)
        if len(raw) < (end - begin // 3 * 3 if is_end else len(text) // 4 * 3):
            raise self._source.error("MRR310: not base64: it has padding before its end. Was it put together of parts?")
        raw = raw[begin % 3 :] if begin % 3 else raw
        ids = np.frombuffer(raw, self.dtype, count=(end - begin) // self.dtype.itemsize)
        return ids.reshape(-1, *self.shape[1:])


def _num_decoded(text: str) -> int:
    """Return how many bytes a base64 text has, if it is one."""
    return len(text) // 4 * 3 - text[-2:].count("=")


def parse_routes(raw: bytes | str, *, source: Source, num_columns: int, topk: int) -> Array | EncodedRows:
    """Return raw little-endian int32 as [rows, num_columns, topk]; of bytes a read-only view, of base64 its `EncodedRows`.

    Raises:
        PayloadError: they are a `.npy` file, or not a whole number of rows.
    """
    start = decode_base64(raw[:8], source=source) if isinstance(raw, str) else raw
    if start.startswith(NPY_MAGIC):
        raise source.error("MRR310: is a .npy file, as vLLM sends it: engines.vllm reads it.")
    row_bytes = 4 * num_columns * topk
    size = _num_decoded(raw) if isinstance(raw, str) else len(raw)
    if isinstance(raw, str) and (len(raw) % 4 or size % row_bytes):
        decode_base64(raw, source=source)  # a text that is no base64 has no size
    if size % row_bytes:
        raise source.error(
            f"MRR306: {size} bytes are {size / row_bytes:.3f} rows of {num_columns} layers x top-{topk} int32. "
            "Is the model's config the served one?"
        )
    if isinstance(raw, str):
        return EncodedRows(raw, (num_columns, topk), source)
    return np.frombuffer(raw, "<i4").reshape(-1, num_columns, topk)


def as_array(value: Any, *, source: Source) -> Array:
    """Return an array-like of integers as numpy, without a copy where it is one already.

    Args:
        value: numpy (also read-only), torch (any device), nested lists or tuples, anything with `__array__`.

    Raises:
        PayloadError: not integers, or ragged.
    """
    if isinstance(value, torch.Tensor):
        # numpy has no bfloat16 and no quantized dtypes, so torch's are checked before the conversion.
        if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool or value.is_quantized:
            raise source.error(f"MRR310: must hold integers, got {value.dtype}.")
        value = value.detach().cpu().numpy()
    is_list = isinstance(value, (list, tuple))
    if not is_list and not hasattr(value, "__array__"):
        raise source.error(
            f"MRR310: cannot read routes from {type(value).__name__}: expected an array, base64 or nested lists."
        )
    try:
        converted: Array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise source.error(f"MRR310: lists must be [rows][layers][topk] of integers: {error}.") from None
    if is_list and not converted.size:  # numpy would call these floats
        return np.zeros((len(value), 0, 0), np.int32)
    if converted.ndim == 0:
        raise source.error("MRR310: is a single number, expected an array.")
    if converted.dtype.kind not in "iu":
        raise source.error(f"MRR310: must hold integers, got {converted.dtype}.")
    if is_list and _has_bools(value, converted):  # numpy reads a bool among integers as 0 or 1
        raise source.error("MRR310: must hold integers, got bool.")
    return converted


def _has_bools(value: Any, converted: Array) -> bool:
    """Return whether there is a bool in nested lists, which numpy has read as 0 or 1."""
    suspects = ((converted == 0) | (converted == 1)).any(axis=-1)  # an innermost list is seldom one
    innermost = (reduce(getitem, index, value) for index in np.argwhere(suspects).tolist())
    return any(not {bool, np.bool_}.isdisjoint(map(type, each)) for each in innermost)


def as_token_ids(value: Any, *, source: Source) -> Array:
    """Return token ids as [num_tokens] int32, a copy.

    Raises:
        PayloadError: not one-dimensional integers of int32.
    """
    if not hasattr(value, "__array__"):
        if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
            raise source.error(f"MRR309: token ids must be integers, got {type(value).__name__}.")
        value = list(value)
    ids = as_array(value, source=replace(source, field="token ids"))
    if ids.size and ids.ndim != 1:
        raise source.error(f"MRR309: token ids must be one-dimensional, got shape {list(ids.shape)}.")
    if ids.size and not (-(2**31) <= int(ids.min()) and int(ids.max()) < 2**31):
        raise source.error(f"MRR309: token ids reach {int(ids.max())}, which int32 cannot hold.")
    return ids.reshape(-1).astype(np.int32)
