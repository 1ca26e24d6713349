"""Base64 and compression of an envelope's data, bounded by the size that is expected to come out."""

from __future__ import annotations

import base64
import zlib
from importlib import import_module
from typing import Any

from megatron_router_replay.errors import StoreError

try:
    _base64: Any = import_module("pybase64")
except ImportError:
    _base64 = base64
"""pybase64 where it is installed: the same functions, several times faster."""


_MAX_RATIO = {"zlib": 1100, "zstd": 40_000}
"""What a codec makes of one byte at the most, rounded up: 1032 and 32768 for runs of one value."""


def encode_base64(data: bytes) -> str:
    """Return `data` in base64, in ASCII."""
    encoded: bytes = _base64.b64encode(data)
    return encoded.decode("ascii")


def decode_base64(text: Any, compression: str | None, nbytes: int) -> bytes:
    """Return the bytes of a base64 text, which hold `nbytes` or, compressed, no more than a little over that.

    Raises:
        StoreError: not a text, another length than `nbytes` asks for, or not base64.
    """
    if not isinstance(text, str):
        raise StoreError(f"its data is {type(text).__name__}, not a base64 text.")
    # Compressed data that is longer than this was not made by a compressor.
    most = nbytes if compression is None else nbytes + nbytes // 100 + 1024
    if len(text) > -(-most // 3) * 4 or (compression is None and len(text) != -(-most // 3) * 4):
        raise StoreError(f"its data has {len(text)} characters, not what {nbytes} bytes take: truncated or altered.")
    try:
        data: bytes = _base64.b64decode(text, validate=True)
    except ValueError as error:
        raise StoreError(f"its data is not base64: {error}.") from None
    return data


def compress(data: bytes, compression: str | None) -> bytes:
    """Return `data` compressed.

    Raises:
        StoreError: the codec is unknown or not installed.
    """
    if compression is None:
        return data
    if compression == "zlib":
        return zlib.compress(data, 1)
    if compression == "zstd":
        compressed: bytes = _zstandard().ZstdCompressor().compress(data)
        return compressed
    raise StoreError(f"compression={str(compression)[:40]!r} is unknown: None, 'zlib' or 'zstd'.")


def decompress(data: bytes, compression: str | None, nbytes: int) -> bytes:
    """Return exactly `nbytes` bytes; never holds more than one byte above that.

    Raises:
        StoreError: more or fewer bytes come out, the data is damaged, or the codec is unknown or not installed.
    """
    most = _MAX_RATIO.get(compression) if isinstance(compression, str) else None
    if most is not None and nbytes > most * len(data):
        raise StoreError(f"its {len(data)} compressed bytes cannot hold {nbytes}: truncated or altered.")
    if compression is None:
        raw, complete = data, True
    elif compression == "zlib":
        raw, complete = _inflate(data, nbytes + 1)
    elif compression == "zstd":
        zstandard = _zstandard()
        try:
            # 128 MiB is what zstd's own command line accepts without being asked.
            decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
            with decompressor.stream_reader(data, read_across_frames=False) as reader:
                raw = _read_at_most(reader, nbytes + 1)
            complete = True
        except zstandard.ZstdError as error:
            raise StoreError(f"its data does not decompress: {error}.") from None
    else:
        raise StoreError(f"compression={str(compression)[:40]!r} is unknown: None, 'zlib' or 'zstd'.")
    if len(raw) != nbytes or not complete:
        raise StoreError(f"its data does not hold {nbytes} bytes: truncated or altered.")
    return raw


def _inflate(data: bytes, most: int) -> tuple[bytes, bool]:
    decompressor = zlib.decompressobj()
    try:
        raw = decompressor.decompress(data, most)
    except zlib.error as error:
        raise StoreError(f"its data does not decompress: {error}.") from None
    # Bytes behind the end would be covered by no checksum: that of the envelope is of what comes out.
    return raw, decompressor.eof and not decompressor.unused_data


def _read_at_most(reader: Any, most: int) -> bytes:
    """Read in pieces, so that memory grows with what comes out and not with what is claimed."""
    raw = bytearray()
    while len(raw) < most and (piece := reader.read(min(most - len(raw), 1 << 24))):
        raw += piece
    return bytes(raw)


def _zstandard() -> Any:
    try:
        return import_module("zstandard")
    except ImportError:
        raise StoreError(
            "compression='zstd' needs the package zstandard, which is not installed: pip install zstandard, or use 'zlib'."
        ) from None
