"""A PositionTrace <-> one safetensors file: its two tensors, and JSON with layer_numbers, topk and a checksum of it all."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_router_replay.errors import StoreError
from megatron_router_replay.indexer.positions import PositionTrace
from megatron_router_replay.store.atomic import as_path, naming, replacing

_FORMAT = "megatron_router_replay.positions.1"
_TENSORS = ("codes", "positions_in_sample")


def save_positions(trace: PositionTrace, path: str | os.PathLike[str]) -> Path:
    """Write the trace to one file, complete or not at all; return its path.

    Raises:
        StoreError: the file cannot be written; what was there stays.
        TraceError: the trace was changed in place.
    """
    trace.check_unchanged()
    path = as_path(path)
    with naming(path, "save"), replacing(path) as temporary:
        save_file({name: getattr(trace, name) for name in _TENSORS}, temporary, metadata={_FORMAT: _header(trace)})
    return path


def load_positions(path: str | os.PathLike[str]) -> PositionTrace:
    """Return the trace in a file.

    Raises:
        StoreError: the file is missing, truncated, altered or of another kind.
    """
    path = as_path(path)
    with naming(path, "load"):
        try:
            with safe_open(path, "pt") as file:
                text = (file.metadata() or {})[_FORMAT]
                values = json.loads(text)
                # Copies: what is proven below may not be the file's own memory, which others can write.
                tensors = {name: file.get_tensor(name).clone() for name in _TENSORS}
            trace = PositionTrace(layer_numbers=values["layer_numbers"], topk=values["topk"], **tensors)
        except (SafetensorError, KeyError, TypeError) as error:
            raise StoreError(f"MRR502: it is no file of positions, or truncated ({error}).") from None
        if _header(trace) != text:
            raise StoreError("MRR503: its checksum is wrong: it was altered.")
    return trace


def _header(trace: PositionTrace) -> str:
    values = {"layer_numbers": trace.layer_numbers, "topk": trace.topk}
    checksum = zlib.crc32(json.dumps(values).encode())
    for name in _TENSORS:
        checksum = zlib.crc32(np.ascontiguousarray(getattr(trace, name).numpy()).data, checksum)
    return json.dumps(values | {"crc32": checksum})
