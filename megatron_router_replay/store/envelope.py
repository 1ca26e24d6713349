"""RoutingTrace <-> a JSON object, for HTTP, queues and log lines: a trace file's own bytes as text. Version 2:

    format, version          "megatron_router_replay.envelope", 2
    nbytes                   bytes of the trace file
    data                     base64 of these bytes; see `format.py`, whose checksums prove them

Reading never allocates more than a few times `max_bytes` and a few hundred MB, whatever the envelope claims.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_router_replay.base64_text import decode_base64, encode_base64
from megatron_router_replay.checks import as_integer, shown
from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.store.file import TraceBytes
from megatron_router_replay.store.reader import Reader
from megatron_router_replay.trace.routing_trace import RoutingTrace

FORMAT = "megatron_router_replay.envelope"
VERSION = 2
_KEYS = {"format", "version", "nbytes", "data"}
_TEXT_BESIDE_DATA = 4096
"""Characters of JSON, for whoever indents it."""
_MAX_VALUES = 64


def encode_envelope(trace: RoutingTrace) -> dict[str, Any]:
    """Return the trace as values that `json.dumps` takes.

    Raises:
        StoreError: it is no trace; rows were left out by choice.
    """
    try:
        content = TraceBytes.of(trace)
    except (StoreError, TraceError) as error:
        raise StoreError(f"MRR501: cannot encode an envelope: {error}") from error
    data = content.to_memory().data
    return {"format": FORMAT, "version": VERSION, "nbytes": len(data), "data": encode_base64(data)}


def decode_envelope(envelope: Mapping[str, Any] | str | bytes, *, max_bytes: int = 1 << 30) -> RoutingTrace:
    """Return the trace in an envelope.

    Args:
        envelope: what `encode_envelope` returned, or its JSON text.
        max_bytes: refuse an envelope that holds more, before allocating it.

    Raises:
        StoreError: not an envelope, another version, truncated, altered, too large, or invalid ids.
    """
    try:
        content = _parse(envelope, max_bytes)
        nbytes, text = as_integer("nbytes", content["nbytes"], least=0, error=StoreError), content["data"]
        if nbytes > max_bytes:
            raise StoreError(f"MRR506: it holds {nbytes} bytes, more than max_bytes={max_bytes}.")
        if not isinstance(text, str) or len(text) != -(-nbytes // 3) * 4:
            raise StoreError(f"MRR503: its data is not a base64 text of {nbytes} bytes: truncated or altered.")
        try:
            data = decode_base64(text)
        except ValueError as error:
            raise StoreError(f"MRR503: its data is not base64: {error}.") from None
        if len(data) != nbytes:
            raise StoreError(f"MRR503: its data does not hold {nbytes} bytes: truncated or altered.")
        return Reader.of_bytes(data).load()
    except (StoreError, ValueError, RecursionError) as error:
        raise StoreError(f"MRR501: cannot decode the envelope: {str(error)[:1000]}") from error


def _parse(envelope: Mapping[str, Any] | str | bytes, max_bytes: int) -> Mapping[str, Any]:
    if isinstance(envelope, str | bytes):
        most = -(-max_bytes // 3) * 4 + _TEXT_BESIDE_DATA
        if len(envelope) > most:
            raise StoreError(f"MRR506: its {len(envelope)} characters cannot hold max_bytes={max_bytes} or less.")
        text = envelope.decode() if isinstance(envelope, bytes) else envelope
        # Before it is parsed: a text of brackets alone would take thirty times its own size.
        if sum(text.count(mark) for mark in ",[{:") > _MAX_VALUES:
            raise StoreError(f"MRR506: its JSON holds more than {_MAX_VALUES} values.")
        envelope = json.loads(text)
    if not isinstance(envelope, Mapping) or envelope.get("format") != FORMAT:
        raise StoreError(f"MRR502: it is not of format {FORMAT!r}.")
    version = envelope.get("version")
    if type(version) is not int or version != VERSION:
        raise StoreError(f"MRR502: it has version {shown(version)}; this package reads version {VERSION}.")
    if set(envelope) != _KEYS:
        raise StoreError(f"MRR503: its entries are {shown(sorted(map(str, envelope)))}, not {sorted(_KEYS)}.")
    return envelope
