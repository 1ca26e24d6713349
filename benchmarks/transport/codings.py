"""Ways to send routes in fewer bytes, for `python -m benchmarks.transport compression`; the transports use none of them."""

from __future__ import annotations

from collections.abc import Callable
from math import comb
from typing import Any

import numpy as np


def codings(topk: int, num_experts: int) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Name -> (encode, decode); one thread each. Sorted-set coding forgets the order of a row's experts.

    Codings of a route as one word are left out where it takes more than 64 bits.
    """
    import zstandard

    dtype = np.dtype(np.uint8 if num_experts <= 256 else np.int16)
    bits = max(1, (num_experts - 1).bit_length())
    width = -(-topk * bits // 8)
    num_sets = comb(num_experts, topk)
    set_width = -(-(num_sets - 1).bit_length() // 8)
    shifts = [np.uint64(bits * k) for k in range(topk)]
    ways = np.zeros((topk, num_experts), np.uint64)
    if num_sets < 1 << 64:
        ways[:] = [[comb(n, k + 1) for n in range(num_experts)] for k in range(topk)]

    def to_bytes(words: Any, width: int) -> Any:
        return np.ascontiguousarray(words.view(np.uint8).reshape(-1, 8)[:, :width])

    def to_words(coded: Any, width: int) -> Any:
        padded = np.zeros((len(coded), 8), np.uint8)
        padded[:, :width] = coded
        return padded.view(np.uint64)[:, 0]

    def pack(ids: Any) -> Any:
        flat = ids.reshape(-1, topk)
        words = np.zeros(len(flat), np.uint64)
        for k, shift in enumerate(shifts):
            words |= flat[:, k].astype(np.uint64) << shift
        return to_bytes(words, width)

    def unpack(coded: Any, shape: Any) -> Any:
        words, mask = to_words(coded, width), np.uint64((1 << bits) - 1)
        ids = np.empty((len(words), topk), dtype)
        for k, shift in enumerate(shifts):
            ids[:, k] = (words >> shift) & mask
        return ids.reshape(shape)

    def rank_sets(ids: Any) -> Any:
        flat = np.sort(ids.reshape(-1, topk), axis=1)
        words = np.zeros(len(flat), np.uint64)
        for k in range(topk):
            words += ways[k][flat[:, k]]
        return to_bytes(words, set_width)

    def unrank_sets(coded: Any, shape: Any) -> Any:
        words = to_words(coded, set_width)
        ids = np.empty((len(words), topk), dtype)
        for k in reversed(range(topk)):
            found = np.searchsorted(ways[k], words, side="right") - 1
            ids[:, k] = found
            words = words - ways[k][found]
        return ids.reshape(shape)

    def by_zstd(level: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def encode(ids: Any) -> bytes:
            coded: bytes = zstandard.ZstdCompressor(level=level).compress(np.ascontiguousarray(ids).data)
            return coded

        def decode(coded: bytes, shape: Any) -> Any:
            return np.frombuffer(zstandard.ZstdDecompressor().decompress(coded), dtype).reshape(shape)

        return encode, decode

    raw = (lambda ids: np.array(ids), lambda coded, shape: np.array(coded).reshape(shape))
    found: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        f"raw {dtype} (a copy)": raw,
        "zstd level 1": by_zstd(1),
        "zstd level 3": by_zstd(3),
    }
    if topk * bits <= 64:
        found[f"bit-packed, {bits} bits an id, {width} bytes a route"] = (pack, unpack)
    if num_sets < 1 << 64:
        found[f"sorted set, {set_width} bytes a route"] = (rank_sets, unrank_sets)
    return found
