"""Save a RoutingTrace as one file and load it, or a slice of its rows and layers; the format is in `format.py`."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch

from megatron_router_replay.errors import StoreError
from megatron_router_replay.store.atomic import as_path, naming, replacing
from megatron_router_replay.store.format import FileHeader, SavedBy, as_words, encode_container, run_blocks
from megatron_router_replay.store.reader import Reader
from megatron_router_replay.trace.header import TraceHeader
from megatron_router_replay.trace.routing_trace import RoutingTrace

_OTHER_FORMATS = set(".bin .ckpt .csv .gz .h5 .hdf5 .json .jsonl .npy .npz .parquet .pickle .pkl .pt .pth .zip".split())
"""Suffixes that somebody would read by something else."""


def save_trace(trace: RoutingTrace, path: str | os.PathLike[str]) -> Path:
    """Write the trace to one file, complete or not at all; return its path.

    The bytes go to a temporary file in the same folder, which then takes the name `path`. A file that was there before is
    replaced; a link stays, and the file that it leads to is replaced. Takes the memory of one block of 16,384 rows a thread.

    Args:
        path: with the suffix `.safetensors`, or any that promises no different format, as `.pt` does.

    Raises:
        StoreError: the file cannot be written, and nothing is left of it; `path` is a folder, a device or a pipe.
    """
    path = as_path(path)
    with naming(path, "save"):
        if path.suffix.lower() in _OTHER_FORMATS:
            raise StoreError(
                f"MRR501: a trace is saved as safetensors, and {path.suffix} promises a different format: name it "
                f"{path.stem}.safetensors."
            )
        content = TraceBytes.of(trace)
        with replacing(path) as temporary:
            content.write_file(temporary)
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
        rows: slice(start, stop), load these rows only, read in blocks of 16,384. Sample metadata is then dropped.

    Raises:
        StoreError: the file is missing, truncated, altered or of another kind, or has no such layer or rows; it names
            the file.
    """
    path = as_path(path)
    with naming(path, "load"):
        trace = Reader.open(path).load(layer_numbers=layer_numbers, rows=rows)
    return trace.to(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceBytes:
    """The bytes of a trace file, made while they are written: a block of rows is copied at a time."""

    trace: RoutingTrace
    header: FileHeader
    start: bytes
    places: dict[str, slice]

    @classmethod
    def of(cls, trace: RoutingTrace, *, saved_by: SavedBy | None = None) -> Self:
        """Return what will be written.

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
        start, places = encode_container(header.encode(), header.all_tensors())
        return cls(trace=trace, header=header, start=start, places=places)

    def write_file(self, path: Path) -> None:
        """Write over a new file, without the care that `save_trace` takes; in several threads, blocks in no order."""
        header, trace = self.header, self.trace
        names = header.tensors()
        crc = np.zeros(1 + len(names) * header.num_blocks, dtype="<u4")
        table = crc[1:].reshape(len(names), header.num_blocks)

        def write(at: int, data: memoryview) -> None:
            while data:  # a disk that is nearly full takes a part, and refuses the next one
                count = os.pwrite(file.fileno(), data, at)
                data, at = data[count:], at + count

        def write_block(block: int) -> None:
            first = block * header.block_rows
            rows = slice(first, first + header.block_rows)
            # Each layer's routes become contiguous while the block is in the cache.
            routes = as_words(trace.topk_indices[rows].cpu())
            values = [np.ascontiguousarray(routes[:, i]) for i in range(header.num_layers)]
            values += [getattr(trace, name)[rows].cpu().contiguous().numpy() for name in header.per_token]
            for i, (name, value) in enumerate(zip(names, values)):
                data = value.view(np.uint8).data
                table[i, block] = zlib.crc32(data)
                write(self.places[name].start + first * value.itemsize, data)

        with path.open("r+b", buffering=0) as file:
            run_blocks(write_block, range(header.num_blocks))
            # The first checksum proves the others and the metadata, so that a slice needs no byte of what it leaves out.
            crc[0] = zlib.crc32(crc[1:].data, zlib.crc32(header.encode().encode("ascii")))
            write(0, memoryview(self.start))
            write(self.places["crc32"].start, crc.view(np.uint8).data)
