"""Base64 text -> bytes, strictly: with pybase64 where it is installed, which is several times faster."""

from __future__ import annotations

import binascii
from importlib import import_module
from typing import Any

try:
    _fast: Any = import_module("pybase64")
except ImportError:
    _fast = None


def decode_base64(text: str | bytes) -> bytes:
    """Return the bytes of a base64 text; nothing in it is skipped.

    Raises:
        ValueError: a character is foreign, the padding is wrong, or text follows it.
    """
    data: bytes = binascii.a2b_base64(text, strict_mode=True) if _fast is None else _fast.b64decode(text, validate=True)
    # Some versions of binascii accept padding that is not needed.
    if len(text) != -(-len(data) // 3) * 4:
        raise ValueError(f"{len(text)} characters gave {len(data)} bytes")
    return data
