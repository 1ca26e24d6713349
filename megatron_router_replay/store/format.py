"""Format of a trace file, version 1: a safetensors file, so any safetensors reader can open it.

    8 bytes         H, the header's length, little-endian uint64; at most 100,000,000
    H bytes         header: a JSON object in ASCII, padded with spaces so that 8 + H is a multiple of 8
    the rest        the tensors, little-endian, in the order below, nothing between or behind them

The header names each tensor as `"name": {"dtype": ..., "shape": [...], "data_offsets": [start, stop]}`; offsets count
from the end of the header. N tokens, L layers, K = topk, E = num_experts, B = ceil(N / block_rows):

    crc32                    U32  [1 + T * B]   checksums, see below; T counts the tensors that follow
    token_ids                I32  [N]           optional
    weight_version           I32  [N]           optional
    topk_indices.<number>    U8 if E <= 256, else I16, [N, K]; one for each layer, in the order of layer_numbers
    replay_mask              BOOL [N]           one byte a row, 0 or 1; 1: the row has a route

One tensor a layer: a pipeline rank reads its own layers and no other byte.

`"__metadata__"` maps strings to strings:

    format, version          "megatron_router_replay.trace", "1"
    num_tokens, topk, num_experts, block_rows    decimal numbers
    layer_numbers            JSON list, increasing, from 1 or more
    sequence_lengths         JSON list, optional; adds up to num_tokens
    sample_ids               JSON list of strings, optional; one for each entry of sequence_lengths

Checksums are CRC-32 (zlib's). crc32[1 + t * B + b] is of rows b * block_rows .. (b + 1) * block_rows - 1 of the t-th
tensor behind crc32. crc32[0] is of the header's H bytes followed by the bytes of crc32[1:]. So a slice is proven by
reading the blocks that it touches, and nothing in the file is unproven. CRC-32 finds accidents; against a forged file
every value is checked on reading.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.trace import index_dtype

FORMAT = "megatron_router_replay.trace"
VERSION = "1"
BLOCK_ROWS = 4096
MAX_HEADER_BYTES = 100_000_000
MAX_LAYERS = 1 << 16
MAX_JSON_VALUES = 1 << 22
MAX_BLOCK_ROWS = 1 << 20

_NUMPY = {"U8": "|u1", "BOOL": "|b1", "I16": "<i2", "I32": "<i4", "U32": "<u4"}
_COUNTS = ("num_tokens", "topk", "num_experts", "block_rows")
_LISTS = ("layer_numbers", "sequence_lengths", "sample_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `start` counts bytes from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(_NUMPY[self.dtype])

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.numpy_dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.shape[0] * self.row_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a trace file says of itself; everything else about its bytes follows from these values."""

    num_tokens: int
    topk: int
    num_experts: int
    layer_numbers: tuple[int, ...]
    has_token_ids: bool = False
    has_weight_version: bool = False
    sequence_lengths: tuple[int, ...] | None = None
    sample_ids: tuple[str, ...] | None = None
    block_rows: int = BLOCK_ROWS

    def __post_init__(self) -> None:
        if self.num_tokens < 0 or not 1 <= self.block_rows <= MAX_BLOCK_ROWS:
            raise StoreError(f"num_tokens={self.num_tokens} or block_rows={self.block_rows} is out of range.")
        try:
            index_dtype(self.num_experts)
        except TraceError as error:
            raise StoreError(str(error)) from None
        if not 1 <= self.topk <= self.num_experts:
            raise StoreError(f"topk={self.topk} must lie in 1..num_experts={self.num_experts}.")
        numbers = self.layer_numbers
        if (numbers and numbers[0] < 1) or any(a >= b for a, b in pairwise(numbers)):
            raise StoreError(f"layer_numbers must increase from 1 or more, got {list(numbers)[:100]}.")
        if len(numbers) > MAX_LAYERS:
            raise StoreError(f"{len(numbers)} layers are more than {MAX_LAYERS}.")
        lengths = self.sequence_lengths
        if lengths is not None and (sum(lengths) != self.num_tokens or any(length < 0 for length in lengths)):
            raise StoreError(f"sequence_lengths add up to {sum(lengths)}, the file has {self.num_tokens} tokens.")
        if self.sample_ids is not None and (lengths is None or len(lengths) != len(self.sample_ids)):
            raise StoreError("sample_ids do not name one sample for each of sequence_lengths.")

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_rows)

    @property
    def index_code(self) -> str:
        return "U8" if self.num_experts <= 256 else "I16"

    def entries(self) -> list[TensorEntry]:
        """Return the tensors in the file's order; the first is crc32."""
        rows = self.num_tokens
        data: list[tuple[str, str, tuple[int, ...]]] = []
        if self.has_token_ids:
            data.append(("token_ids", "I32", (rows,)))
        if self.has_weight_version:
            data.append(("weight_version", "I32", (rows,)))
        data += [(f"topk_indices.{number}", self.index_code, (rows, self.topk)) for number in self.layer_numbers]
        data.append(("replay_mask", "BOOL", (rows,)))
        entries: list[TensorEntry] = []
        start = 0
        for name, dtype, shape in [("crc32", "U32", (1 + len(data) * self.num_blocks,)), *data]:
            entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, start=start))
            start = entries[-1].stop
        return entries


def encode_header(header: Header) -> bytes:
    """Return the JSON header, padded, without the 8 bytes of its length.

    Raises:
        StoreError: the header is longer than a safetensors header may be; too many samples for one file.
    """
    metadata = {"format": FORMAT, "version": VERSION}
    metadata |= {name: str(getattr(header, name)) for name in _COUNTS}
    for name in _LISTS:
        value = getattr(header, name)
        if value is not None:
            metadata[name] = json.dumps(list(value), separators=(",", ":"))
    fields: dict[str, Any] = {"__metadata__": metadata}
    for entry in header.entries():
        offsets = [entry.start, entry.stop]
        fields[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    encoded = json.dumps(fields, separators=(",", ":")).encode("ascii")
    encoded += b" " * (-len(encoded) % 8)
    check_json_size(encoded)
    if len(encoded) > MAX_HEADER_BYTES:
        raise StoreError(f"the header takes {len(encoded)} bytes, more than {MAX_HEADER_BYTES}: save fewer samples.")
    return encoded


def decode_header(encoded: bytes) -> Header:
    """Return the header that these bytes encode.

    Raises:
        StoreError: not JSON, another format or version, values out of range, tensors that do not follow from them.
    """
    try:
        fields = load_json(encoded.decode("ascii"))
        metadata = fields["__metadata__"]
        if metadata["format"] != FORMAT:
            raise StoreError(f"its format is {metadata['format']!r}, not {FORMAT!r}.")
        if metadata["version"] != VERSION:
            raise StoreError(f"it has version {metadata['version']!r}; this package reads version {VERSION}.")
        counts = {name: _decode_count(metadata[name]) for name in _COUNTS}
        header = Header(
            **counts,
            layer_numbers=_decode_list(metadata["layer_numbers"], int) or (),
            sequence_lengths=_decode_list(metadata.get("sequence_lengths"), int),
            sample_ids=_decode_list(metadata.get("sample_ids"), str),
            has_token_ids="token_ids" in fields,
            has_weight_version="weight_version" in fields,
        )
        same = encode_header(header) == encoded
    except StoreError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"it has no header of a trace file ({type(error).__name__}: {str(error)[:200]}).") from None
    # Everything follows from a few values, so the only header they can have is the one that we would write.
    if not same:
        raise StoreError("the tensors in its header are not those that its metadata asks for.")
    return header


def load_json(text: str | bytes) -> Any:
    """Return what a JSON text holds, unless it is made of more values than any of ours.

    Raises:
        StoreError: more than MAX_JSON_VALUES; a text of brackets alone would take thirty times its own size.
        ValueError, RecursionError: as json.loads.
    """
    check_json_size(text)
    return json.loads(text)


def check_json_size(text: str | bytes) -> None:
    """Raise StoreError if a JSON text may hold more than MAX_JSON_VALUES; what is written passes this too."""
    marks: tuple[Any, ...] = (",", "[", "{", ":") if isinstance(text, str) else (b",", b"[", b"{", b":")
    if sum(text.count(mark) for mark in marks) > MAX_JSON_VALUES:
        raise StoreError(f"its JSON holds more than {MAX_JSON_VALUES} values: save fewer samples.")


def _decode_count(text: Any) -> int:
    if not isinstance(text, str) or not text.isdecimal() or len(text) > 15:
        raise ValueError(f"a number is {str(text)[:40]!r}")
    return int(text)


def _decode_list(text: Any, kind: type) -> tuple[Any, ...] | None:
    if text is None:
        return None
    values = load_json(text)
    if not isinstance(values, list) or any(type(value) is not kind for value in values):
        raise ValueError(f"a list does not hold {kind.__name__} only")
    return tuple(values)
