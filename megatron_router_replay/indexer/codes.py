"""Sorted positions <-> words: the code of one choice, in an eighth to a third of the bytes of int32.

A token at position p of its sample has p + 1 candidates. Its choice of k of them is coded in Elias-Fano form. Its number of
low bits and its size follow from p and k, so nothing but the code is kept:

    low bits l   floor(log2((p + 1) / k)), or 0 below 4 k candidates
    planes       l times ceil(k / 8) bytes: bit b of each position, for b = 0 .. l - 1
    high bits    ceil(((p >> l) + k) / 8) bytes: bit number (position >> l) + i is set for the i-th position, i from 0;
                 without low bits ceil((p + 1) / 8) bytes: bit number `position` is set

Bits and bytes count from the lowest; zeros fill the last word, 8 bytes, little-endian. A choice is read at random: its place
follows from the sizes of those before it. Rows with the same number of low bits are coded together, a block at a time.

Source: S. Vigna, Quasi-succinct indices, 2013, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_BLOCK = 1 << 17
"""Positions that are coded at a time: what is made of them fits into a processor's cache."""


def low_bits(queries: Array, topk: int) -> Array:
    """Return how many low bits the code of each token has, [n] int64.

    Args:
        queries: [n] int64, the position of each token in its sample.
        topk: positions in a choice.
    """
    ratio = (queries + 1) // topk
    # frexp is exact: positions are below 2**31.
    return np.where(ratio < 4, 0, np.frexp(ratio.astype(np.float64))[1] - 1).astype(np.int64)


def code_words(queries: Array, topk: int) -> Array:
    """Return how many words the choice of each token takes, [n] int64: 0 where every candidate is chosen, or none known."""
    low = low_bits(queries, topk)
    size = low * (-(-topk // 8)) + (((queries >> low) + np.where(low > 0, topk, 1) + 7) >> 3)
    return np.where(queries >= topk, (size + 7) >> 3, 0)


def encode_choices(chosen: Array, queries: Array, starts: Array, codes: Array) -> None:
    """Write the code of each choice.

    Args:
        chosen: [n, topk] int32, each row ascending, distinct and in 0..query.
        queries: [n] int64, the position of each token, topk or more.
        starts: [n] int64, where the code of each begins.
        codes: [num_words] int64, changed in place.
    """
    topk = chosen.shape[1]
    for low, block in _blocks(queries, topk):
        positions, words = chosen[block], code_words(queries[block], topk)
        # Bytes are compared and packed several times faster than int32.
        narrow = [(positions >> shift).astype(np.uint8) for shift in range(0, low, 8)]
        planes = [np.packbits(narrow[bit // 8] & (1 << bit % 8), axis=1, bitorder="little") for bit in range(low)]
        size = int(words.max()) * 8
        bits = np.zeros((len(block), (size - sum(plane.shape[1] for plane in planes)) * 8), np.bool_)
        ones = (positions >> low) + np.arange(len(block), dtype=np.int64)[:, None] * bits.shape[1]
        if low:
            ones += np.arange(topk)
        bits.reshape(-1)[ones] = True
        data = np.concatenate([*planes, np.packbits(bits, axis=1, bitorder="little")], axis=1)
        places, inside = _places(starts[block], words)
        codes[places[inside]] = data.view("<i8")[inside]


def decode_choices(codes: Array, queries: Array, starts: Array, topk: int) -> Array:
    """Return the positions of each choice, [n, topk] int32 ascending; args as `encode_choices` takes them.

    Raises:
        ValueError: a code holds something else than topk distinct positions in 0..query.
    """
    chosen = np.empty((len(queries), topk), np.int32)
    for low, block in _blocks(queries, topk):
        words = code_words(queries[block], topk)
        places, inside = _places(starts[block], words)
        data = np.where(inside, codes[np.where(inside, places, 0)], 0).view(np.uint8)
        edge = low * -(-topk // 8)
        bits = np.unpackbits(data[:, edge:], axis=1, bitorder="little").view(np.bool_)
        ones = np.flatnonzero(bits)
        if len(ones) != len(block) * topk:
            raise ValueError(f"{len(ones)} positions stand where {len(block) * topk} are expected")
        first = np.arange(len(block), dtype=np.int64) * bits.shape[1]
        positions = (ones.reshape(-1, topk) - first[:, None]).astype(np.int32)
        if low:
            positions = (positions - np.arange(topk, dtype=np.int32)) << low
            planes = data[:, :edge].reshape(len(block), low, -1)
            for shift in range(0, low, 8):
                narrow = np.zeros((len(block), topk), np.uint8)
                for bit in range(min(8, low - shift)):
                    plane = np.unpackbits(planes[:, shift + bit], axis=1, count=topk, bitorder="little")
                    narrow |= plane << bit
                positions |= narrow.astype(np.int32) << shift
        if (
            (positions[:, 0] < 0).any()
            or (positions[:, -1] > queries[block]).any()
            or (positions[:, 1:] <= positions[:, :-1]).any()
        ):
            raise ValueError("positions repeat, or lie outside their sample")
        chosen[block] = positions
    return chosen


def _blocks(queries: Array, topk: int) -> Iterator[tuple[int, Array]]:
    """Yield (low bits, indices of choices that have as many), a block at a time."""
    low, step = low_bits(queries, topk), max(1, _BLOCK // topk)
    for bits in np.unique(low).tolist():
        members = np.flatnonzero(low == bits)
        yield from ((bits, members[at : at + step]) for at in range(0, len(members), step))


def _places(starts: Array, words: Array) -> tuple[Array, Array]:
    """Return (place of each word [n, most], which of them belong to a code [n, most] bool)."""
    column = np.arange(int(words.max()), dtype=np.int64)
    return starts[:, None] + column, column < words[:, None]
