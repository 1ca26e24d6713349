"""Save a RoutingTrace as one file and load it, or a slice of its rows and layers; the format is in `format.py`."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from megatron_router_replay.errors import StoreError
from megatron_router_replay.store.atomic import as_path, naming, replacing
from megatron_router_replay.store.format import FileHeader, SavedBy, encode_container
from megatron_router_replay.store.reader import Reader
from megatron_router_replay.trace.header import TraceHeader
from megatron_router_replay.trace.routing_trace import RoutingTrace


def save_trace(trace: RoutingTrace, path: str | os.PathLike[str]) -> Path:
    """Write the trace to one file, complete or not at all; return its path.

    The bytes go to a temporary file in the same folder, which then takes the name `path`; a file that was there before
    is replaced. Takes the memory of one more copy of the routes, layer by layer as the file has them.

    Raises:
        StoreError: the file cannot be written; nothing is left of it.
    """
    path = as_path(path)
    with naming(path, "save"):
        pieces = file_pieces(trace)
        with replacing(path) as temporary:
            write_pieces(pieces, temporary)
    return path


def load_trace(
    path: str | os.PathLike[str],
    *,
    layer_numbers: Sequence[int] | None = None,
    rows: slice | None = None,
    device: torch.device | str = "cpu",
) -> RoutingTrace:
    """Return the trace in a file, or a slice of it. A slice is read and proven without reading the rest.

    Args:
        layer_numbers: load these layers only; other layers are not read.
        rows: slice(start, stop), load these rows only, read in blocks of 4096. Sample metadata is then dropped.

    Raises:
        StoreError: the file is missing, truncated, altered or of another kind, or has no such layer or rows; it names
            the file.
    """
    path = as_path(path)
    with naming(path, "load"):
        trace = Reader.open(path).load(layer_numbers=layer_numbers, rows=rows)
    return trace.to(device)


def write_pieces(pieces: Sequence[bytes | memoryview], path: Path) -> None:
    """Write over a new file, without the care that `save_trace` takes."""
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)


def file_pieces(trace: RoutingTrace, *, saved_by: SavedBy | None = None) -> list[bytes | memoryview]:
    """Return the bytes of a trace file, in order.

    Raises:
        StoreError: what was given is no trace; its header is too long.
        TraceError: rows were left out by choice, or the trace was changed in place.
    """
    if not isinstance(trace, RoutingTrace):
        raise StoreError(
            f"MRR501: {type(trace).__name__} is no RoutingTrace: the trace comes first, as in save_trace(trace, path)."
        )
    trace.check_unchanged()
    header = FileHeader(**TraceHeader.of(trace).to_json(), saved_by=saved_by)
    metadata = header.encode()
    routes = trace.topk_indices.cpu().transpose(0, 1).contiguous()
    values = {f"topk_indices.{number}": routes[i] for i, number in enumerate(trace.layer_numbers)}
    values |= {name: getattr(trace, name).cpu().contiguous() for name in header.per_token}
    content = {name: tensor.numpy().reshape(-1).view(np.uint8).data for name, tensor in values.items()}
    table = [zlib.crc32(block) for name in header.tensors() for block in _blocks(content[name], header)]
    # The first checksum proves the others and the metadata, so that a slice needs no byte of what it leaves out.
    crc = np.array([0, *table], dtype="<u4")
    crc[0] = zlib.crc32(crc[1:].data, zlib.crc32(metadata.encode("ascii")))
    content["crc32"] = crc.view(np.uint8).data
    tensors = header.all_tensors()
    return [encode_container(metadata, tensors), *(content[name] for name in tensors)]


def _blocks(content: memoryview, header: FileHeader) -> Iterator[memoryview]:
    if header.num_tokens:
        step = len(content) // header.num_tokens * header.block_rows
        yield from (content[at : at + step] for at in range(0, len(content), step))
