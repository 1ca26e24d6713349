"""Parts of a recording of positions, joined: rows of several micro-batches and ranks, layers of several stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.errors import TraceError, listed
from megatron_router_replay.indexer.codes import Array, code_words
from megatron_router_replay.indexer.positions import PositionTrace


def place_positions(trace: PositionTrace, rows: Tensor, num_tokens: int) -> PositionTrace:
    """Return a trace of num_tokens rows that has these rows of this one; of the others nothing is known.

    Args:
        rows: [trace.num_tokens] int64, where each of its rows goes.

    Raises:
        TraceError: a row is num_tokens or more, or named twice with other positions.
    """
    if len(rows) and int(rows.max()) >= num_tokens:
        raise TraceError(
            f"MRR422: cannot place row {int(rows.max())} in {num_tokens} rows. Give num_tokens of the whole batch."
        )
    at, queries = rows.numpy(), np.full(num_tokens, -1, np.int32)
    begins = np.full((num_tokens, len(trace.layer_numbers)), -1, np.int64)
    part_queries, new = trace.positions_in_sample.numpy(), _begins(trace)
    queries[at], begins[at] = part_queries, new
    _check_same(trace.codes.numpy(), trace.topk, at, queries[at], part_queries, begins[at], new)
    return _of_codes(trace, queries, trace.layer_numbers, trace.codes.numpy(), begins)


def merge_positions(parts: Sequence[PositionTrace]) -> PositionTrace:
    """Return the rows and layers of all parts; each has all rows of the batch, and knows some.

    Raises:
        TraceError: parts are of different batches or models, they differ in a row that both know, or a row lacks a layer.
    """
    parts = list(parts)
    if not parts or any((part.num_tokens, part.topk) != (parts[0].num_tokens, parts[0].topk) for part in parts):
        shapes = [(part.num_tokens, part.topk) for part in parts]
        raise TraceError(
            f"MRR107: parts of one recording have the same rows and topk, got (num_tokens, topk) {shapes}."
        )
    numbers = tuple(sorted({number for part in parts for number in part.layer_numbers}))
    codes = np.concatenate([part.codes.numpy() for part in parts])
    queries = np.full(parts[0].num_tokens, -1, np.int32)
    begins = np.full((len(queries), len(numbers)), -1, np.int64)
    offset = 0
    for part in parts:
        at = np.flatnonzero(part.positions_in_sample.numpy() >= 0)
        places = np.ix_(at, np.array([numbers.index(number) for number in part.layer_numbers]))
        part_queries, new = part.positions_in_sample.numpy()[at], (_begins(part) + offset)[at]
        _check_same(codes, part.topk, at, queries[at], part_queries, begins[places], new)
        queries[at], begins[places] = part_queries, new
        offset += part.codes.numel()
    if (lacking := (begins[queries >= 0] < 0).any(axis=0)).any():
        raise TraceError(
            f"MRR422: some rows were recorded without layers [{listed([numbers[i] for i in np.flatnonzero(lacking)])}]: join "
            "the parts of all pipeline stages, of the same micro-batches."
        )
    return _of_codes(parts[0], queries, numbers, codes, begins)


def _begins(trace: PositionTrace) -> Array:
    """Return where each choice's code begins, [num_tokens, num_layers]; of a row without codes where they would."""
    words = code_words(trace.positions_in_sample.numpy().astype(np.int64), trace.topk)
    num_layers = len(trace.layer_numbers)
    of_rows = np.cumsum(words * num_layers) - words * num_layers
    begins: Array = of_rows[:, None] + np.arange(num_layers) * words[:, None]
    return begins


def _check_same(
    codes: Array, topk: int, rows: Array, queries: Array, part_queries: Array, known: Array, new: Array
) -> None:
    """Raise unless what is known of some rows is what another part says.

    Args:
        rows: [n] for the message.
        queries, part_queries: [n] their positions in their samples, -1: not known; and as the part has them.
        known, new: [n, num_layers] where in `codes` their choices begin, -1: not known; and those of the part.
    """
    twice = (known >= 0) & (known != new)
    words = np.repeat(code_words(part_queries.astype(np.int64), topk)[:, None], known.shape[1], axis=1)
    differ = ((queries >= 0) & (queries != part_queries))[:, None] & np.ones_like(twice)
    if not differ.any() and twice.any():
        size, of_code = words[twice], np.flatnonzero(twice).repeat(words[twice])
        wrong = _segments(codes, known[twice], size) != _segments(codes, new[twice], size)
        differ.ravel()[of_code[wrong]] = True
    if differ.any():
        row = int(rows[differ.any(axis=1)][0])
        raise TraceError(f"MRR422: row {row} was recorded twice, with different positions: record each row once.")


def _segments(codes: Array, begins: Array, words: Array) -> Array:
    """Return the codes that begin at [n] places and have [n] words, one behind the other."""
    ends = np.cumsum(words)
    taken: Array = codes[np.repeat(begins - (ends - words), words) + np.arange(ends[-1] if len(ends) else 0)]
    return taken


def _of_codes(
    like: PositionTrace, queries: Array, layer_numbers: tuple[int, ...], codes: Array, begins: Array
) -> PositionTrace:
    words = np.repeat(code_words(queries.astype(np.int64), like.topk)[:, None], begins.shape[1], axis=1)
    stored = words > 0
    taken = torch.from_numpy(_segments(codes, begins[stored], words[stored]))
    return PositionTrace(
        positions_in_sample=torch.from_numpy(queries), layer_numbers=layer_numbers, topk=like.topk, codes=taken
    )
