"""Save a RoutingTrace as one file and load it, or a slice of its rows and layers; the format is in `format.py`."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_router_replay.errors import StoreError
from megatron_router_replay.header import TraceHeader
from megatron_router_replay.store.atomic import naming, replacing
from megatron_router_replay.store.format import FORMAT, FileHeader, encode_header
from megatron_router_replay.store.part import SavedBy
from megatron_router_replay.store.reader import Reader, checked_trace
from megatron_router_replay.trace import RoutingTrace


def save_trace(trace: RoutingTrace, path: str | os.PathLike[str]) -> Path:
    """Write the trace to one file, which appears complete or not at all, and return its path.

    The bytes go to a temporary file in the same folder, which then takes the name `path`; a file that was there before
    is replaced. Takes the memory of one more copy of the routes, layer by layer as the file has them.

    Raises:
        StoreError: the file cannot be written; nothing is left of it.
    """
    path = Path(path)
    with naming(path, "save"), replacing(path) as temporary:
        write_trace(trace, temporary)
    return path


def write_trace(trace: RoutingTrace, path: Path, *, saved_by: SavedBy | None = None) -> None:
    """Write over a new file, without the care that `save_trace` takes."""
    header = FileHeader(**TraceHeader.of(trace).to_json(), saved_by=saved_by)
    text = encode_header(header)
    mode = path.stat().st_mode
    save_file(_tensors(trace, header, text), path, metadata={FORMAT: text})
    # safetensors puts a file in its place that only the owner may read; give it what the umask gives any new file.
    path.chmod(mode)


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
    with naming(path, "load"):
        trace = read_trace(Reader.open(path), layer_numbers=layer_numbers, rows=rows)
    return trace.to(device)


def read_trace(reader: Reader, *, layer_numbers: Sequence[int] | None, rows: slice | None) -> RoutingTrace:
    """Return the trace in an open file, or a slice of it; see `load_trace`."""
    start, stop = _row_bounds(rows, reader.header.num_tokens)
    wanted = reader.header.layer_numbers
    if layer_numbers is not None:
        wanted = reader.header.select_layers(sorted(set(layer_numbers))).layer_numbers
    topk_indices, per_token = reader.read(wanted, start, stop)
    return checked_trace(reader.header, wanted, topk_indices, per_token, whole=rows is None)


def _tensors(trace: RoutingTrace, header: FileHeader, text: str) -> dict[str, Tensor]:
    routes = trace.topk_indices.cpu().transpose(0, 1).contiguous()
    values = {f"topk_indices.{number}": routes[i] for i, number in enumerate(trace.layer_numbers)}
    values |= {name: getattr(trace, name).cpu().contiguous() for name in header.per_token}
    blocks = range(0, header.num_tokens, header.block_rows)
    table = [
        zlib.crc32(values[name][at : at + header.block_rows].numpy().data) for name in header.tensors() for at in blocks
    ]
    # The first checksum proves the others and the metadata, so that a slice needs no byte of what it leaves out.
    crc = np.array([0, *table], dtype=np.uint32)
    crc[0] = zlib.crc32(crc[1:].data, zlib.crc32(text.encode("ascii")))
    return values | {"crc32": torch.from_numpy(crc)}


def _row_bounds(rows: slice | None, num_tokens: int) -> tuple[int, int]:
    if rows is None:
        return 0, num_tokens
    start = 0 if rows.start is None else rows.start
    stop = num_tokens if rows.stop is None else rows.stop
    if rows.step not in (None, 1) or not 0 <= start <= stop <= num_tokens:
        raise StoreError(f"it has {num_tokens} tokens, not {rows}: give 0 <= start <= stop, step 1.")
    return start, stop
