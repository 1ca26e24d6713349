"""Save a RoutingTrace as one file and load it, or a slice of its rows and layers; the format is in `format.py`."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.errors import StoreError
from megatron_router_replay.store.atomic import naming, replacing
from megatron_router_replay.store.format import Header, TensorEntry, encode_header
from megatron_router_replay.store.reader import Reader, checked_trace
from megatron_router_replay.trace import RoutingTrace


def save_trace(trace: RoutingTrace, path: str | os.PathLike[str]) -> Path:
    """Write the trace to one file, which appears complete or not at all, and return its path.

    The bytes go to a temporary file in the same folder, which then takes the name `path`; a file that was there before
    is replaced. Temporary memory is a few MiB, whatever the size of the trace.

    Raises:
        StoreError: the file cannot be written; nothing is left of it.
    """
    path = Path(path)
    with naming(path, "save"), replacing(path) as file:
        write_trace(trace, file)
    return path


def load_trace(
    path: str | os.PathLike[str],
    *,
    layer_numbers: Sequence[int] | None = None,
    rows: slice | None = None,
    device: torch.device | str = "cpu",
) -> RoutingTrace:
    """Return the trace in a file, or a slice of it that is read and proven without reading the rest.

    Args:
        layer_numbers: load these layers only; other layers are not read.
        rows: slice(start, stop), load these rows only, read in blocks of 4096. Sample metadata is then dropped.

    Raises:
        StoreError: the file is missing, truncated, altered or of another kind, or has no such layer or rows; it names
            the file.
    """
    path = Path(path)
    with naming(path, "load"), path.open("rb") as file:
        trace = read_trace(file, layer_numbers=layer_numbers, rows=rows)
    return trace if torch.device(device) == trace.device else trace.to(device)


def write_trace(trace: RoutingTrace, file: BinaryIO) -> None:
    """Write the trace from the start of an empty seekable binary file."""
    header = header_of(trace)
    encoded = encode_header(header)
    checksums, *entries = header.entries()
    base = 8 + len(encoded)
    crc = np.zeros(checksums.shape, dtype=checksums.numpy_dtype)
    table = crc[1:].reshape(len(entries), header.num_blocks)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for block in range(header.num_blocks):
        rows = slice(block * header.block_rows, min((block + 1) * header.block_rows, header.num_tokens))
        # Whole blocks become layer-major while they are in the cache.
        routes = trace.topk_indices[rows].transpose(0, 1).contiguous().cpu()
        for t, entry in enumerate(entries):
            data = _rows_of(trace, routes, entry, rows).numpy().astype(entry.numpy_dtype, copy=False).tobytes()
            table[t, block] = zlib.crc32(data)
            file.seek(base + entry.start + rows.start * entry.row_bytes)
            file.write(data)
    crc[0] = zlib.crc32(crc[1:].tobytes(), zlib.crc32(encoded))
    file.seek(base)
    file.write(crc.tobytes())


def read_trace(
    file: BinaryIO, *, layer_numbers: Sequence[int] | None = None, rows: slice | None = None
) -> RoutingTrace:
    """Return the trace in a seekable binary file, or a slice of it; see `load_trace`."""
    reader = Reader.open(file)
    start, stop = _row_bounds(rows, reader.header.num_tokens)
    wanted = _wanted_layers(layer_numbers, reader.header.layer_numbers)
    topk_indices, per_token = reader.read(wanted, start, stop)
    return checked_trace(reader.header, wanted, topk_indices, per_token, whole=rows is None)


def header_of(trace: RoutingTrace) -> Header:
    """Return the header of a file that holds this trace."""
    return Header(
        num_tokens=trace.num_tokens,
        topk=trace.topk,
        num_experts=trace.num_experts,
        layer_numbers=trace.layer_numbers,
        has_token_ids=trace.token_ids is not None,
        has_weight_version=trace.weight_version is not None,
        sequence_lengths=trace.sequence_lengths,
        sample_ids=trace.sample_ids,
    )


def _rows_of(trace: RoutingTrace, routes: Tensor, entry: TensorEntry, rows: slice) -> Tensor:
    if entry.name.startswith("topk_indices."):
        return routes[trace.layer_numbers.index(int(entry.name.removeprefix("topk_indices.")))]
    values: Tensor = getattr(trace, entry.name)[rows]
    return values.cpu()


def _wanted_layers(layer_numbers: Sequence[int] | None, present: tuple[int, ...]) -> tuple[int, ...]:
    wanted = present if layer_numbers is None else tuple(sorted(set(layer_numbers)))
    missing = [number for number in wanted if number not in present]
    if missing:
        raise StoreError(f"it has no layer {missing}; it has {list(present)}.")
    return wanted


def _row_bounds(rows: slice | None, num_tokens: int) -> tuple[int, int]:
    if rows is None:
        return 0, num_tokens
    start = 0 if rows.start is None else rows.start
    stop = num_tokens if rows.stop is None else rows.stop
    if rows.step not in (None, 1) or not 0 <= start <= stop <= num_tokens:
        raise StoreError(f"it has {num_tokens} tokens, not {rows}: give 0 <= start <= stop, step 1.")
    return start, stop
