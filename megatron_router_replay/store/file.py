"""Save a RoutingTrace as a safetensors file, and load it or a slice of it.

The safetensors library writes and reads the file. Its tensors, for N tokens, L layers and K experts a token:

    topk_indices      U8 if num_experts <= 256, else I16, [N, L, K]
    replay_mask       BOOL [N]; False: the row has no route
    token_ids         I32 [N], if the trace has token ids
    weight_version    I32 [N], if the trace has weight versions

The metadata has one entry, "megatron_router_replay.trace", a JSON object with three values:

    version           4
    header            the fields of a `TraceHeader`
    checksums         XXH3 (64 bits, hexadecimal) of each tensor's bytes, and of the header as JSON with sorted keys

A checksum finds accidents. It does not stop a forger.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_router_replay.checks import shown
from megatron_router_replay.errors import StoreError
from megatron_router_replay.store.atomic import as_path, check_regular, naming, replacing
from megatron_router_replay.trace.header import TraceHeader
from megatron_router_replay.trace.routing_trace import RoutingTrace
from megatron_router_replay.trace.runs import as_slice

FORMAT, VERSION = "megatron_router_replay.trace", 4
_CHUNK_BYTES = 4 << 20  # a processor's cache has it still when it is copied
_MAX_METADATA_BYTES = 90_000_000  # safetensors reads no header above 100 MB, and writes larger ones


def save_trace(trace: RoutingTrace, path: str | os.PathLike[str]) -> Path:
    """Write the trace to a file and return its path.

    The bytes go to a temporary file in the same folder, which then takes the name `path`. So a process that is killed leaves
    the old file or the new one.

    Args:
        path: the suffix is `.safetensors` by custom; it may be any.

    Raises:
        StoreError: the file cannot be written, and an old one is unchanged; `path` is a folder, a device or a pipe.
    """
    path = as_path(path)
    with naming(path, "save"):
        if not isinstance(trace, RoutingTrace):
            kind = type(trace).__name__
            raise StoreError(
                f"MRR501: {kind} is no RoutingTrace: the trace comes first, as in save_trace(trace, path)."
            )
        trace.check_unchanged()
        header = TraceHeader.of(trace)
        tensors = {name: getattr(trace, name).cpu().contiguous() for name in ("topk_indices", *header.per_token)}
        checksums = {"header": _header_checksum(header)} | {name: _checksum(each) for name, each in tensors.items()}
        text = json.dumps({"version": VERSION, "header": header.to_json(), "checksums": checksums}, sort_keys=True)
        if len(json.dumps(text)) > _MAX_METADATA_BYTES:
            raise StoreError(
                f"MRR506: the names of samples take more than {_MAX_METADATA_BYTES:,} bytes: save fewer samples."
            )
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={FORMAT: text})
    return path


def load_trace(
    path: str | os.PathLike[str],
    *,
    layer_numbers: Sequence[int] | None = None,
    rows: slice | None = None,
    device: torch.device | str = "cpu",
) -> RoutingTrace:
    """Return the trace in a file, or a slice of it.

    Checksums are of whole tensors, so the file is read once, whatever the slice; only the slice takes memory.

    Args:
        layer_numbers: load these layers only.
        rows: slice(start, stop), load these rows only. Sample metadata is then dropped.

    Raises:
        StoreError: the file is missing, truncated, altered or no trace file, or has no such layer or rows.
    """
    path = as_path(path)
    with naming(path, "load"):
        return Reader(path).load(layer_numbers=layer_numbers, rows=rows).to(device)


class Reader:
    """A trace file with a checked header. Each tensor is checked once, before a slice of it is returned first.

    Attributes:
        header: sizes and samples of the trace.

    Raises:
        StoreError: no trace file, one of another version, or an altered header.
        OSError, SafetensorError: no such file, or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        check_regular(path)
        self._path, self._checked = path, set[str]()
        with safe_open(path, "pt") as file:
            self._metadata = (file.metadata() or {}).get(FORMAT)
        if self._metadata is None:
            raise StoreError(f"MRR502: it is a safetensors file without the metadata {FORMAT!r}: it is no trace file.")
        try:
            values = json.loads(self._metadata)
            if values["version"] != VERSION:
                raise StoreError(
                    f"MRR502: it has version {shown(values['version'])}; this package reads version {VERSION}."
                )
            self.header, self._checksums = TraceHeader.from_json(values["header"]), dict(values["checksums"])
            names = {*self.header.empty(0)}
            is_intact = self._checksums["header"] == _header_checksum(self.header) and names <= {*self._checksums}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError("MRR503: its header cannot be read: the file was altered.") from error
        if not is_intact:
            raise StoreError("MRR503: the checksum of its header is wrong: the file was altered.")

    def load(self, *, layer_numbers: Sequence[int] | None = None, rows: slice | None = None) -> RoutingTrace:
        """Return the trace, or a slice of it, in memory of its own; see `load_trace`.

        Raises:
            StoreError: a checksum is wrong; there are no such layers or rows; the file was replaced since it was opened.
            SafetensorError: the file is truncated.
        """
        header = self.header
        place = _row_slice(rows, header.num_tokens)
        numbers = header.layer_numbers
        if layer_numbers is not None:
            numbers = header.select_layers(sorted(set(layer_numbers))).layer_numbers
        columns = as_slice([header.layer_numbers.index(number) for number in numbers])
        with safe_open(self._path, "pt") as file:
            if (file.metadata() or {}).get(FORMAT) != self._metadata:
                raise StoreError("MRR503: it was replaced by another file while it was read.")
            values = {name: self._read(file, name, place) for name in header.per_token}
            values["topk_indices"] = self._read(file, "topk_indices", place, columns)
        return RoutingTrace.from_checked(
            **values,
            layer_numbers=numbers,
            num_experts=header.num_experts,
            sequence_lengths=header.sequence_lengths if rows is None else None,
            sample_ids=header.sample_ids if rows is None else None,
        )

    def _read(self, file: Any, name: str, rows: slice, columns: slice | list[int] | None = None) -> Tensor:
        """Return a copy of some rows and columns of a tensor, after its checksum was compared."""
        tensor, like = file.get_slice(name)[:], self.header.empty(0)[name]  # a view of the file, which is not read yet
        if tensor.dtype != like.dtype or tensor.shape != (self.header.num_tokens, *like.shape[1:]):
            raise StoreError(f"MRR503: {name} is {list(tensor.shape)} {tensor.dtype}: its header was altered.")
        part = tensor[rows] if columns is None else tensor[rows][:, columns]
        copy = torch.empty(part.shape, dtype=part.dtype)
        is_copied = name not in self._checked and part.shape == tensor.shape
        if name not in self._checked and _checksum(tensor, copy if is_copied else None) != self._checksums[name]:
            raise StoreError(f"MRR503: the checksum of {name} is wrong: the file was altered.")
        self._checked.add(name)
        return copy if is_copied else copy.copy_(part)


def _checksum(tensor: Tensor, copy: Tensor | None = None) -> str:
    """Return the checksum of a tensor's bytes.

    Args:
        tensor: contiguous, on the CPU.
        copy: contiguous memory for a copy of it, which is made in the same pass.
    """
    digest, data = xxhash.xxh3_64(), tensor.view(-1).numpy()
    target = None if copy is None else copy.view(-1).numpy()
    step = _CHUNK_BYTES // tensor.itemsize
    for start in range(0, data.size, step):
        chunk = data[start : start + step]
        digest.update(chunk.data)
        if target is not None:
            target[start : start + step] = chunk
    return digest.hexdigest()


def _header_checksum(header: TraceHeader) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(header.to_json(), sort_keys=True).encode())


def _row_slice(rows: slice | None, num_tokens: int) -> slice:
    rows = slice(None) if rows is None else rows
    start, stop = rows.start or 0, num_tokens if rows.stop is None else rows.stop
    if rows.step not in (None, 1) or not 0 <= start <= stop <= num_tokens:
        raise StoreError(f"MRR106: it has {num_tokens} tokens, not {rows}: give 0 <= start <= stop, step 1.")
    return slice(start, stop)
