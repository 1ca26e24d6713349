"""Save a RoutingTrace as one file and load it, or a slice of its rows and layers; the format is in `format.py`."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.store.format import MAX_HEADER_BYTES, Header, TensorEntry, decode_header, encode_header
from megatron_router_replay.trace import RoutingTrace, check_topk_indices

Array = npt.NDArray[Any]


def save_trace(trace: RoutingTrace, path: str | os.PathLike[str]) -> Path:
    """Write the trace to one file, which appears complete or not at all, and return its path.

    The bytes go to a temporary file in the same folder, which then takes the name `path`; a file that was there before
    is replaced. Temporary memory is a few MiB, whatever the size of the trace.

    Raises:
        StoreError: the file cannot be written; nothing is left of it.
    """
    path = Path(path)
    with _named(path, "save"), _replacing(path) as file:
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
        rows: slice(start, stop), load these rows only; read in blocks of `block_rows`. Sample metadata is dropped.

    Raises:
        StoreError: the file is missing, truncated, altered or of another kind, or has no such layer or rows; it names
            the file.
    """
    path = Path(path)
    with _named(path, "load"), path.open("rb") as file:
        trace = read_trace(file, layer_numbers=layer_numbers, rows=rows)
    return trace if torch.device(device) == trace.device else trace.to(device)


def write_trace(trace: RoutingTrace, file: BinaryIO) -> None:
    """Write the trace from the start of an empty seekable binary file."""
    header = Header(
        num_tokens=trace.num_tokens,
        topk=trace.topk,
        num_experts=trace.num_experts,
        layer_numbers=trace.layer_numbers,
        has_token_ids=trace.token_ids is not None,
        has_weight_version=trace.weight_version is not None,
        sequence_lengths=trace.sequence_lengths,
        sample_ids=trace.sample_ids,
    )
    encoded = encode_header(header)
    checksums, *entries = header.entries()
    base = 8 + len(encoded)
    crc = np.zeros(checksums.shape, dtype="<u4")
    table = crc[1:].reshape(len(entries), header.num_blocks)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for block in range(header.num_blocks):
        rows = slice(block * header.block_rows, min((block + 1) * header.block_rows, header.num_tokens))
        # Whole blocks become layer-major while they are in the cache.
        routes = trace.topk_indices[rows].transpose(0, 1).contiguous().cpu()
        for t, entry in enumerate(entries):
            values = _rows_of(trace, routes, header, entry, rows)
            data = values.numpy().astype(entry.numpy_dtype, copy=False).tobytes()
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
    header, base, table = _read_header(file)
    start, stop = _row_bounds(rows, header.num_tokens)
    wanted = _wanted_layers(layer_numbers, header.layer_numbers)
    entries = dict(zip((entry.name for entry in header.entries()[1:]), enumerate(header.entries()[1:])))
    routes = [entries[f"topk_indices.{number}"] for number in wanted]
    others = [pair for name, pair in entries.items() if not name.startswith("topk_indices.")]

    index_dtype = np.dtype(np.uint8 if header.index_code == "U8" else np.int16)
    indices = torch.from_numpy(np.empty((stop - start, len(wanted), header.topk), dtype=index_dtype))
    per_token = {e.name: np.empty(stop - start, dtype=e.numpy_dtype.newbyteorder("=")) for _, e in others}
    for block in range(start // header.block_rows, -(-stop // header.block_rows) if stop > start else 0):
        at = block * header.block_rows
        low, high = max(start, at), min(stop, at + header.block_rows)
        taken, place = slice(low - at, high - at), slice(low - start, high - start)

        def read(pair: tuple[int, TensorEntry], block: int = block, taken: slice = taken) -> Array:
            t, entry = pair
            return _read_block(file, header, base, entry, block, int(table[t, block]))[taken]

        for _, entry in others:
            per_token[entry.name][place] = read(entries[entry.name])
        if routes:
            by_layer = np.stack([read(pair) for pair in routes]).astype(index_dtype, copy=False)
            indices[place] = torch.from_numpy(by_layer).transpose(0, 1)
    return _checked_trace(header, wanted, indices, per_token, whole=rows is None)


def _checked_trace(
    header: Header, layer_numbers: tuple[int, ...], topk_indices: Tensor, per_token: dict[str, Array], *, whole: bool
) -> RoutingTrace:
    tensors = {name: torch.from_numpy(values) for name, values in per_token.items()}
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
        **tensors,
    )


def _rows_of(trace: RoutingTrace, routes: Tensor, header: Header, entry: TensorEntry, rows: slice) -> Tensor:
    if entry.name.startswith("topk_indices."):
        return routes[header.layer_numbers.index(int(entry.name.removeprefix("topk_indices.")))]
    values: Tensor = getattr(trace, entry.name)[rows]
    return values.cpu()


def _read_header(file: BinaryIO) -> tuple[Header, int, Array]:
    """Return the proven header, where the tensors start, and the checksums [num_tensors, num_blocks]."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 16 or length > min(MAX_HEADER_BYTES, size - 8):
        raise StoreError(f"its {size} bytes are no trace file, or a truncated one.")
    encoded = file.read(length)
    header = decode_header(encoded)
    checksums, *entries = header.entries()
    base = 8 + length
    end = entries[-1].stop
    if size != base + end:
        raise StoreError(f"it has {size} bytes, its header asks for {base + end}: truncated or altered.")
    crc = np.frombuffer(_read_exactly(file, base, checksums.stop), dtype="<u4")
    if zlib.crc32(crc[1:].tobytes(), zlib.crc32(encoded)) != int(crc[0]):
        raise StoreError("the checksum of its header is wrong: it was altered.")
    return header, base, crc[1:].reshape(len(entries), header.num_blocks)


def _read_block(file: BinaryIO, header: Header, base: int, entry: TensorEntry, block: int, expected: int) -> Array:
    first = block * header.block_rows
    count = min(header.block_rows, header.num_tokens - first)
    data = _read_exactly(file, base + entry.start + first * entry.row_bytes, count * entry.row_bytes)
    if zlib.crc32(data) != expected:
        raise StoreError(f"the checksum of {entry.name}, rows {first}..{first + count - 1}, is wrong: it was altered.")
    # A byte that is neither 0 nor 1 would make a bool with two kinds of True.
    if entry.dtype == "BOOL" and max(data) > 1:
        raise StoreError(f"{entry.name} holds {max(data)} in rows {first}..{first + count - 1}, not 0 or 1.")
    return np.frombuffer(data, dtype=entry.numpy_dtype).reshape(count, *entry.shape[1:])


def _read_exactly(file: BinaryIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    data = file.read(count)
    if len(data) != count:
        raise StoreError(f"it ends {count - len(data)} bytes too early: truncated.")
    return data


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
        raise StoreError(f"it has {num_tokens} tokens, cannot load {rows}: 0 <= start <= stop, step 1.")
    return start, stop


@contextmanager
def _named(path: Path, verb: str) -> Iterator[None]:
    """Turn what goes wrong into a StoreError with the file's name."""
    try:
        yield
    except (OSError, StoreError) as error:
        raise StoreError(f"cannot {verb} {path}: {error}") from error


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file in the same folder that takes the name `path` at the end, or vanishes if the body raises."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    # os.open, not tempfile: the file keeps the permissions that the umask gives, so that other users may read it.
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename in this folder last through a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
