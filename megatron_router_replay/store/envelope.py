"""RoutingTrace <-> a JSON object that says what it holds, for HTTP, queues and log lines. Version 1:

    format, version          "megatron_router_replay.envelope", 1
    dtype, shape             "uint8" or "int16", [num_tokens, num_layers, topk]
    layer_numbers            list of int
    num_experts              int
    sequence_lengths         list of int, or null
    sample_ids               list of string, or null
    tensors                  what data holds, in this order: ["topk_indices", "replay_mask"], then "token_ids" and
                             "weight_version" if the trace has them
    metadata                 object of strings to strings: the caller's
    compression              null, "zlib" or "zstd"
    nbytes                   bytes of data, uncompressed
    crc32                    CRC-32 of the header (all entries but crc32 and data, as JSON in ASCII with sorted keys and no
                             spaces) followed by the uncompressed data
    data                     base64 of the tensors, one behind the other, token-major and little-endian: topk_indices
                             as dtype, replay_mask one byte a row (0 or 1), token_ids and weight_version int32

Reading never allocates more than a few times `max_bytes` and a few hundred MB, whatever the envelope claims.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import prod
from typing import Any, Literal

import numpy as np
import torch

from megatron_router_replay.errors import StoreError
from megatron_router_replay.header import TraceHeader, as_integers
from megatron_router_replay.store.codecs import compress, decode_base64, decompress, encode_base64
from megatron_router_replay.store.format import canonical_json, check_json_size, load_json
from megatron_router_replay.store.reader import check_bool, checked_trace
from megatron_router_replay.trace import RoutingTrace

FORMAT = "megatron_router_replay.envelope"
VERSION = 1
_HEADER_ALLOWANCE = 16 << 20
"""Characters of JSON text beside the data."""

_KEYS = {
    "format",
    "version",
    "dtype",
    "shape",
    "layer_numbers",
    "num_experts",
    "sequence_lengths",
    "sample_ids",
    "tensors",
    "metadata",
    "compression",
    "nbytes",
    "crc32",
    "data",
}


def encode_envelope(
    trace: RoutingTrace,
    *,
    metadata: Mapping[str, str] | None = None,
    compression: Literal["zlib", "zstd"] | None = None,
) -> dict[str, Any]:
    """Return the trace as values that `json.dumps` takes.

    Args:
        metadata: the caller's own strings, covered by the checksum; `envelope["metadata"]` on the other side.
        compression: "zlib", or "zstd", which needs the package zstandard.

    Raises:
        StoreError: metadata holds something else than strings, or the codec is unknown or not installed.
    """
    metadata = dict(metadata or {})
    if any(not isinstance(text, str) for pair in metadata.items() for text in pair):
        raise StoreError(f"cannot encode an envelope with metadata {metadata}: strings only, please.")
    header = TraceHeader.of(trace)
    raw = b"".join(
        getattr(trace, name).cpu().contiguous().numpy().astype(dtype, copy=False).tobytes()
        for name, dtype in _dtypes(header).items()
    )
    envelope: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": _dtype_name(header),
        "shape": list(trace.topk_indices.shape),
        "layer_numbers": list(trace.layer_numbers),
        "num_experts": trace.num_experts,
        "sequence_lengths": None if trace.sequence_lengths is None else list(trace.sequence_lengths),
        "sample_ids": None if trace.sample_ids is None else list(trace.sample_ids),
        "tensors": list(_dtypes(header)),
        "metadata": metadata,
        "compression": compression,
        "nbytes": len(raw),
    }
    # What is written can be read: a reader refuses more values than this before it parses them.
    check_json_size(canonical_json(envelope))
    envelope["crc32"] = zlib.crc32(raw, zlib.crc32(canonical_json(envelope)))
    envelope["data"] = encode_base64(compress(raw, compression))
    return envelope


def decode_envelope(envelope: Mapping[str, Any] | str | bytes, *, max_bytes: int = 1 << 30) -> RoutingTrace:
    """Return the trace in an envelope.

    Args:
        envelope: what `encode_envelope` returned, or its JSON text.
        max_bytes: refuse an envelope that holds more, uncompressed, before allocating it.

    Raises:
        StoreError: not an envelope, another version, truncated, altered, too large, or invalid ids.
    """
    try:
        content = _parse(envelope, max_bytes)
        header = _header(content)
        nbytes = header.num_bytes
        if content["tensors"] != list(_dtypes(header)) or content["nbytes"] != nbytes:
            raise StoreError(f"tensors {content['tensors']} of its shape take {nbytes} bytes, not {content['nbytes']}.")
        if nbytes > max_bytes:
            raise StoreError(f"it holds {nbytes} bytes, more than max_bytes={max_bytes}.")
        encoded = content.pop("data")
        crc32 = content.pop("crc32")
        raw = decompress(decode_base64(encoded, content["compression"], nbytes), content["compression"], nbytes)
        if type(crc32) is not int or zlib.crc32(raw, zlib.crc32(canonical_json(content))) != crc32:
            raise StoreError("its checksum is wrong: it was altered.")
        return _trace(header, raw)
    except StoreError as error:
        raise StoreError(f"cannot decode the envelope: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise StoreError(f"cannot decode the envelope: it is none, or damaged ({what}).") from error


def _parse(envelope: Mapping[str, Any] | str | bytes, max_bytes: int) -> dict[str, Any]:
    if isinstance(envelope, (str, bytes)):
        if len(envelope) > max_bytes // 3 * 4 + _HEADER_ALLOWANCE:
            raise StoreError(f"its {len(envelope)} characters cannot hold max_bytes={max_bytes} or less.")
        envelope = load_json(envelope)
    if not isinstance(envelope, Mapping) or envelope.get("format") != FORMAT:
        raise StoreError(f"it is not of format {FORMAT!r}.")
    if envelope.get("version") != VERSION or type(envelope["version"]) is not int:
        raise StoreError(f"it has version {str(envelope.get('version'))[:40]}; this package reads version {VERSION}.")
    if set(envelope) != _KEYS:
        raise StoreError(f"its entries are {sorted(map(str, envelope))[:40]}, not {sorted(_KEYS)}.")
    return dict(envelope)


def _header(content: dict[str, Any]) -> TraceHeader:
    """Return the checked sizes; what is not of the right type raises ValueError."""
    shape = as_integers("shape", content["shape"])
    metadata = content["metadata"]
    if len(shape) != 3 or not isinstance(metadata, dict) or not isinstance(content["tensors"], list):
        raise ValueError(f"shape {shape}, metadata or tensors")
    if any(not isinstance(text, str) for pair in metadata.items() for text in pair):
        raise ValueError("metadata holds something else than strings")
    header = TraceHeader.from_json(
        {
            **content,
            "num_tokens": shape[0],
            "topk": shape[2],
            "has_token_ids": "token_ids" in content["tensors"],
            "has_weight_version": "weight_version" in content["tensors"],
        }
    )
    if shape[1] != header.num_layers or content["dtype"] != _dtype_name(header):
        raise StoreError(f"dtype {content['dtype']!r}, shape {list(shape)}, layer_numbers and num_experts disagree.")
    return header


def _dtype_name(header: TraceHeader) -> str:
    return str(header.index_dtype).removeprefix("torch.")


def _dtypes(header: TraceHeader) -> dict[str, np.dtype[Any]]:
    """Return the tensors in the order of `data`, with the dtypes that they have there."""
    names = {"topk_indices": _dtype_name(header)}
    names |= {name: str(dtype).removeprefix("torch.") for name, dtype in header.per_token.items()}
    return {name: np.dtype(dtype).newbyteorder("<") for name, dtype in names.items()}


def _trace(header: TraceHeader, raw: bytes) -> RoutingTrace:
    tensors, start = {}, 0
    for name, dtype in _dtypes(header).items():
        columns = (header.num_layers, header.topk) if name == "topk_indices" else ()
        values = np.frombuffer(raw, dtype, header.num_tokens * prod(columns), start)
        start += values.nbytes
        # A copy in this machine's byte order: the bytes of the envelope are read-only.
        native = values.astype(dtype.newbyteorder("=")).reshape(header.num_tokens, *columns)
        tensors[name] = torch.from_numpy(native)
        check_bool(name, tensors[name])
    topk_indices = tensors.pop("topk_indices")
    return checked_trace(header, header.layer_numbers, topk_indices, tensors, whole=True)
