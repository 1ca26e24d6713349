"""Read rows and layers of an open trace file; nothing is returned that a checksum has not proven."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.store.format import MAX_HEADER_BYTES, Header, TensorEntry, decode_header
from megatron_router_replay.trace import RoutingTrace, check_topk_indices

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """An open trace file whose header is proven.

    Args:
        base: where the tensors start, in bytes.
        checksums: [num_tensors, num_blocks] uint32, in the order of `header.entries()[1:]`.
    """

    file: BinaryIO
    header: Header
    base: int
    checksums: Array

    @classmethod
    def open(cls, file: BinaryIO) -> Reader:
        """Read and prove the header.

        Raises:
            StoreError: not a trace file, truncated, or its header was altered.
        """
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 16 or length > min(MAX_HEADER_BYTES, size - 8):
            raise StoreError(f"its {size} bytes are no trace file, or a truncated one.")
        encoded = file.read(length)
        header = decode_header(encoded)
        crc, *entries = header.entries()
        base = 8 + length
        if size != base + entries[-1].stop:
            raise StoreError(
                f"it has {size} bytes, its header asks for {base + entries[-1].stop}: truncated or altered."
            )
        values = np.frombuffer(_read_exactly(file, base, crc.stop), dtype=crc.numpy_dtype)
        if zlib.crc32(values[1:].tobytes(), zlib.crc32(encoded)) != int(values[0]):
            raise StoreError("the checksum of its header is wrong: it was altered.")
        return cls(file=file, header=header, base=base, checksums=values[1:].reshape(len(entries), header.num_blocks))

    def read(self, layer_numbers: tuple[int, ...], start: int, stop: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return rows start..stop-1: topk_indices [rows, layers, topk] and the other tensors by name, [rows] each."""
        header = self.header
        numbered = list(enumerate(header.entries()[1:]))
        by_name = {entry.name: (t, entry) for t, entry in numbered}
        routes = [by_name[f"topk_indices.{number}"] for number in layer_numbers]
        others = [(t, entry) for t, entry in numbered if not entry.name.startswith("topk_indices.")]
        dtype = np.dtype(np.uint8 if header.index_code == "U8" else np.int16)
        indices = torch.from_numpy(np.empty((stop - start, len(routes), header.topk), dtype=dtype))
        per_token = {e.name: np.empty(stop - start, dtype=e.numpy_dtype.newbyteorder("=")) for _, e in others}
        for block in range(start // header.block_rows, -(-stop // header.block_rows) if stop > start else 0):
            at = block * header.block_rows
            low, high = max(start, at), min(stop, at + header.block_rows)
            taken, place = slice(low - at, high - at), slice(low - start, high - start)
            for t, entry in others:
                per_token[entry.name][place] = self._block(t, entry, block)[taken]
            if routes:
                by_layer = np.stack([self._block(t, entry, block)[taken] for t, entry in routes])
                indices[place] = torch.from_numpy(by_layer.astype(dtype, copy=False)).transpose(0, 1)
        return indices, {name: torch.from_numpy(values) for name, values in per_token.items()}

    def _block(self, t: int, entry: TensorEntry, block: int) -> Array:
        first = block * self.header.block_rows
        count = min(self.header.block_rows, self.header.num_tokens - first)
        data = _read_exactly(self.file, self.base + entry.start + first * entry.row_bytes, count * entry.row_bytes)
        if zlib.crc32(data) != int(self.checksums[t, block]):
            rows = f"rows {first}..{first + count - 1}"
            raise StoreError(f"the checksum of {entry.name}, {rows}, is wrong: it was altered.")
        return as_array(data, entry).reshape(count, *entry.shape[1:])


def as_array(data: bytes | memoryview, entry: TensorEntry) -> Array:
    """Return the bytes of a tensor's rows as a flat read-only array.

    Raises:
        StoreError: a bool is neither 0 nor 1.
    """
    # A byte that is neither would make a bool with two kinds of True.
    if entry.dtype == "BOOL" and len(data) and max(data) > 1:
        raise StoreError(f"{entry.name} holds {max(data)}, not 0 or 1.")
    return np.frombuffer(data, dtype=entry.numpy_dtype)


def checked_trace(
    header: Header, layer_numbers: tuple[int, ...], topk_indices: Tensor, per_token: dict[str, Tensor], *, whole: bool
) -> RoutingTrace:
    """Return the trace of values whose shapes and dtypes follow from a checked header, after checking the ids.

    Raises:
        StoreError: an id is no expert's, or a row names an expert twice.
    """
    try:
        check_topk_indices(topk_indices, num_experts=header.num_experts, layer_numbers=layer_numbers)
    except TraceError as error:
        raise StoreError(str(error)) from None
    return RoutingTrace.from_checked(
        topk_indices=topk_indices,
        layer_numbers=layer_numbers,
        num_experts=header.num_experts,
        sequence_lengths=header.sequence_lengths if whole else None,
        sample_ids=header.sample_ids if whole else None,
        **per_token,
    )


def _read_exactly(file: BinaryIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    data = file.read(count)
    if len(data) != count:
        raise StoreError(f"it ends {count - len(data)} bytes too early: truncated.")
    return data
