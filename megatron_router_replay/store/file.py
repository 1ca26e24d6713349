"""Save a RoutingTrace as a safetensors file, and load it or a slice of it.

The safetensors library writes and reads the file. Its tensors, for N tokens, L layers and K experts a token:

    topk_indices      U8 if num_experts <= 256, else I16, [N, L, K]
    replay_mask       BOOL [N]; False: the row has no route
    token_ids         I32 [N], if the trace has token ids
    weight_version    I32 [N], if the trace has weight versions
    rows              I32 [n], in a rank's part of which most rows are not known: the numbers of those that are, in order. The
                      tensors above have these n rows alone. The rest has no route, token_ids -1 and weight_version -1

The metadata has one entry, "megatron_router_replay.trace", a JSON object with three values:

    version           4
    header            the fields of a `TraceHeader`
    checksums         XXH3 (64 bits, hexadecimal) of each tensor's bytes, and of the header as JSON with sorted keys

A checksum finds accidents. It does not stop a forger.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_router_replay.checks import shown, with_checked_options
from megatron_router_replay.errors import StoreError
from megatron_router_replay.store.atomic import as_path, check_regular, naming, replacing
from megatron_router_replay.trace.header import TraceHeader
from megatron_router_replay.trace.ids import fill_unrouted
from megatron_router_replay.trace.join import UNKNOWN, known_rows
from megatron_router_replay.trace.routing_trace import RoutingTrace
from megatron_router_replay.trace.rows import joined_rows, put_rows

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
    return _save(trace, as_path(path), lambda trace: None)


def save_part(trace: RoutingTrace, path: Path) -> Path:
    """Write a rank's part of a batch, as `save_trace`; if that is smaller, the rows that it knows with their numbers."""
    return _save(trace, path, _rows_to_save)


def _rows_to_save(trace: RoutingTrace) -> Tensor | None:
    """Return the rows that a trace knows, [n] int32, if they take less memory with their numbers than all without."""
    rows, row_bytes = known_rows(trace), TraceHeader.of(trace).row_bytes()
    return rows.int() if len(rows) * (row_bytes + 4) < trace.num_tokens * row_bytes else None


def _save(trace: RoutingTrace, path: Path, choose_rows: Callable[[RoutingTrace], Tensor | None]) -> Path:
    with naming(path, "save"):
        if not isinstance(trace, RoutingTrace):
            kind = type(trace).__name__
            raise StoreError(
                f"MRR501: {kind} is no RoutingTrace: the trace comes first, as in save_trace(trace, path)."
            )
        trace.check_unchanged()
        header, rows = TraceHeader.of(trace), choose_rows(trace)
        trace = trace if rows is None else trace.gather_rows(rows)
        tensors = {name: getattr(trace, name).cpu().contiguous() for name in ("topk_indices", *header.per_token)}
        tensors |= {} if rows is None else {"rows": rows.cpu()}
        checksums = {"header": _header_checksum(header)} | {name: _checksum(each) for name, each in tensors.items()}
        text = json.dumps({"version": VERSION, "header": header.to_json(), "checksums": checksums}, sort_keys=True)
        if len(json.dumps(text)) > _MAX_METADATA_BYTES:
            raise StoreError(
                f"MRR506: the names of samples take more than {_MAX_METADATA_BYTES:,} bytes: save fewer samples."
            )
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={FORMAT: text})
    return path


@with_checked_options
def load_trace(
    path: str | os.PathLike[str],
    *,
    layer_numbers: Sequence[int] | None = None,
    samples: slice | None = None,
    device: torch.device | str = "cpu",
) -> RoutingTrace:
    """Return the trace in a file, or a slice of it.

    Checksums are of whole tensors, so the file is read once, whatever the slice; only the slice takes memory.

    Args:
        layer_numbers: load these layers only.
        samples: slice(start, stop), load these samples only, as `trace[start:stop]` has them.

    Raises:
        StoreError: the file is missing, truncated, altered or no trace file, or has no such layer or samples.
    """
    path = as_path(path)
    with naming(path, "load"):
        if layer_numbers is None and samples is None:
            return _read(path, copy=True).to(device)
        trace = map_trace(path)
        if layer_numbers is not None:
            trace = trace.select_layers(layer_numbers)
        if samples is not None:
            if not isinstance(samples, slice):
                raise StoreError(f"MRR106: samples={shown(samples)} is no slice: give slice(start, stop).")
            start, stop = samples.start or 0, len(trace) if samples.stop is None else samples.stop
            if samples.step not in (None, 1) or not 0 <= start <= stop <= len(trace):
                raise StoreError(
                    f"MRR106: it has {len(trace)} samples, not {samples}: give 0 <= start <= stop, step 1."
                )
            trace = trace[start:stop]
        return trace.clone().to(device)


def map_trace(path: Path) -> RoutingTrace:
    """Return the trace in a file without a copy: its tensors are the file, mapped into memory, with compared checksums.

    A file that takes the place of this one does not change the trace.

    Raises:
        StoreError: no trace file, one of another version, or an altered one.
        OSError, SafetensorError: no such file, or no safetensors file.
    """
    return _read(path, copy=False)


def read_header(path: Path) -> TraceHeader:
    """Return the header of a trace file, whose checksum was compared; errors as of `map_trace`."""
    with _open(path) as file:
        return _header(file)[0]


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a safetensors file, which a save may replace at any time."""
    check_regular(path)
    with path.open("rb") as file:
        head = file.read(9)  # a length of 8 bytes, and the brace of a JSON object
        if len(head) == 9 and head[8:] != b"{":
            raise StoreError("MRR501: it is no safetensors file, and so no trace file.")
        # safetensors opens a file twice, by its name: both times it is the file of this descriptor.
        descriptor = Path(f"/proc/self/fd/{file.fileno()}")
        with safe_open(descriptor if descriptor.exists() else path, "pt") as opened:
            yield opened


def _read(path: Path, *, copy: bool) -> RoutingTrace:
    with _open(path) as file:
        header, checksums = _header(file)
        values, expected, count = {}, header.empty(0), header.num_tokens
        if "rows" in checksums:  # a copy is made where they are put in their places
            expected, copy = {"rows": torch.empty(0, dtype=torch.int32), **expected}, False
        for name, like in expected.items():
            mapped = file.get_slice(name)[:]  # not read yet
            if name == "rows":
                count = len(mapped)
            if mapped.dtype != like.dtype or mapped.shape != (count, *like.shape[1:]):
                raise StoreError(f"MRR503: {name} is {list(mapped.shape)} {mapped.dtype}: its header was altered.")
            values[name] = torch.empty_like(mapped) if copy else mapped
            if _checksum(mapped, values[name] if copy else None) != checksums[name]:
                raise StoreError(f"MRR503: the checksum of {name} is wrong: the file was altered.")
        if "rows" in values:
            values = _in_their_places(header, values.pop("rows").long(), values)
    return RoutingTrace.from_checked(
        **values,
        layer_numbers=header.layer_numbers,
        num_experts=header.num_experts,
        sequence_lengths=header.sequence_lengths,
        sample_ids=header.sample_ids,
    )


def _in_their_places(header: TraceHeader, rows: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a trace of which a file has some rows; the rest has no route and is not known."""
    if len(rows) and not (0 <= int(rows[0]) and int(rows[-1]) < header.num_tokens and bool((rows.diff() > 0).all())):
        raise StoreError(f"MRR503: rows are no increasing numbers below {header.num_tokens}: the file was altered.")
    whole = header.empty(header.num_tokens)
    for name, values_of_rows in values.items():
        if name == "topk_indices":
            put_rows(whole[name], joined_rows(rows), values_of_rows)
        else:
            whole[name].fill_(False if name == "replay_mask" else UNKNOWN)
            whole[name][rows] = values_of_rows
    fill_unrouted(whole["topk_indices"], whole["replay_mask"], num_experts=header.num_experts)
    return whole


def _header(file: Any) -> tuple[TraceHeader, dict[str, str]]:
    """Return the header of an open file, and the checksums of its tensors."""
    metadata = (file.metadata() or {}).get(FORMAT)
    if metadata is None:
        raise StoreError(f"MRR502: it is a safetensors file without the metadata {FORMAT!r}: it is no trace file.")
    try:
        values = json.loads(metadata)
        if values["version"] != VERSION:
            raise StoreError(
                f"MRR502: it has version {shown(values['version'])}; this package reads version {VERSION}."
            )
        header, checksums = TraceHeader.from_json(values["header"]), dict(values["checksums"])
        is_intact = checksums["header"] == _header_checksum(header) and {*header.empty(0)} <= {*checksums}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError("MRR503: its header cannot be read: the file was altered.") from error
    if not is_intact:
        raise StoreError("MRR503: the checksum of its header is wrong: the file was altered.")
    return header, checksums


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
