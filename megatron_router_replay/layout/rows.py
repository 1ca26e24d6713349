"""Sequences of any length into one padded batch [b, s] or one packed row [1, total] (THD).

`pad_sequences` and `pack_sequences` lay out any per-token values; `pad_rows` and `pack_rows` lay out the trace rows
themselves, for pipelines that only know the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import lcm
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_router_replay.errors import LayoutError

PADDING_ROW = -1
"""The row of a position that holds no token."""

Side = Literal["left", "right"]


class Packed(NamedTuple):
    """Sequences packed into one row.

    Args:
        values: [1, total, ...], each sequence behind the padding of the one before.
        cu_seqlens: [num_seqs + 1] int32, the sum of the lengths before each sequence, padding not counted.
        cu_seqlens_padded: [num_seqs + 1] int32, where each sequence starts; the last entry is total.
    """

    values: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor


def pad_rows(
    sequence_lengths: Sequence[int],
    *,
    seq_length: int | None = None,
    side: Side = "right",
    multiple: int = 1,
    row_starts: Sequence[int] | None = None,
) -> Tensor:
    """Return the trace row of each position of a padded batch, -1 on padding.

    Args:
        sequence_lengths: tokens of each sequence.
        row_starts: the trace row of each sequence's first token; by default the sequences follow one another from 0.
        seq_length, side, multiple: as for `pad_sequences`.

    Returns:
        [b, s] int64.

    Raises:
        LayoutError: as `pad_sequences`; a length or start is negative.
    """
    sequences = number_rows(sequence_lengths, row_starts=row_starts)
    return pad_sequences(sequences, fill=PADDING_ROW, seq_length=seq_length, side=side, multiple=multiple)


def pack_rows(
    sequence_lengths: Sequence[int],
    *,
    sequence_multiple: int = 1,
    total_multiple: int = 1,
    total_length: int | None = None,
    row_starts: Sequence[int] | None = None,
) -> Packed:
    """Return the trace row of each position of a packed row, -1 on padding, with cu_seqlens.

    Args:
        sequence_lengths: tokens of each sequence.
        row_starts: the trace row of each sequence's first token; by default the sequences follow one another from 0.
        sequence_multiple, total_multiple, total_length: as for `pack_sequences`.

    Returns:
        values [1, total] int64, cu_seqlens and cu_seqlens_padded [num_seqs + 1] int32.

    Raises:
        LayoutError: as `pack_sequences`; a length or start is negative.
    """
    return pack_sequences(
        number_rows(sequence_lengths, row_starts=row_starts),
        fill=PADDING_ROW,
        sequence_multiple=sequence_multiple,
        total_multiple=total_multiple,
        total_length=total_length,
    )


def number_rows(sequence_lengths: Sequence[int], *, row_starts: Sequence[int] | None = None) -> list[Tensor]:
    """Return the trace rows of each sequence, [length] int64.

    Raises:
        LayoutError: a length or start is negative, or there is not one start a sequence.
    """
    lengths = [int(length) for length in sequence_lengths]
    if row_starts is None:
        row_starts = [end - length for end, length in zip(accumulate(lengths), lengths)]
    if len(row_starts) != len(lengths) or any(value < 0 for value in (*lengths, *row_starts)):
        raise LayoutError(
            f"cannot number the rows of sequences of lengths {lengths} from {list(row_starts)}: "
            "give one start a sequence, none negative."
        )
    return [torch.arange(start, start + length) for start, length in zip(row_starts, lengths)]


def pad_sequences(
    sequences: Sequence[Tensor],
    *,
    fill: float,
    seq_length: int | None = None,
    side: Side = "right",
    multiple: int = 1,
) -> Tensor:
    """Return sequences as one batch, padded with `fill`.

    Args:
        sequences: [length, ...] each, of one dtype.
        seq_length: s; by default the longest sequence, rounded up to `multiple`.
        side: where the padding goes.
        multiple: s is a multiple of it: tp_size under sequence parallelism, 2 * cp_size for the zigzag split, the least
            common multiple of both and of what FP8 asks for.

    Returns:
        [b, s, ...] of the sequences' dtype.

    Raises:
        LayoutError: no sequences, a sequence longer than seq_length, seq_length not a multiple of `multiple`.
    """
    if side not in ("left", "right"):
        raise LayoutError(f"side={side!r} must be 'left' or 'right'.")
    first = _first(sequences)
    longest = max(sequence.shape[0] for sequence in sequences)
    length = _round_up(longest, multiple) if seq_length is None else seq_length
    if length < longest or length % multiple:
        raise LayoutError(
            f"cannot pad sequences of up to {longest} tokens to seq_length={length}, multiple={multiple}: "
            f"use seq_length={_round_up(max(longest, length), multiple)}, or truncate tokens and routes together."
        )
    batch = first.new_full((len(sequences), length, *first.shape[1:]), fill)
    for values, sequence in zip(batch, sequences):
        start = length - sequence.shape[0] if side == "left" else 0
        values[start : start + sequence.shape[0]] = sequence
    return batch


def pack_sequences(
    sequences: Sequence[Tensor],
    *,
    fill: float,
    sequence_multiple: int = 1,
    total_multiple: int = 1,
    total_length: int | None = None,
) -> Packed:
    """Return sequences packed into one row; each is padded behind its end with `fill`.

    Args:
        sequences: [length, ...] each, of one dtype.
        sequence_multiple: every padded length is a multiple of it; 2 * cp_size for the zigzag split.
        total_multiple: total is a multiple of it, for FP8 or sequence parallelism; the last sequence takes the padding,
            so that every position belongs to a sequence.
        total_length: total itself, for buckets of fixed sizes.

    Raises:
        LayoutError: no sequences, they do not fit in total_length, total_length is not a multiple of both.
    """
    first = _first(sequences)
    lengths = [sequence.shape[0] for sequence in sequences]
    padded = [_round_up(length, sequence_multiple) for length in lengths]
    # The last padded length stays a multiple of sequence_multiple only if total is one too.
    both = lcm(sequence_multiple, _round_up(1, total_multiple))  # which refuses a multiple below 1
    total = _round_up(sum(padded), both) if total_length is None else total_length
    if total < sum(padded) or total % both:
        raise LayoutError(
            f"cannot pack {sum(padded)} positions ({sum(lengths)} tokens) into total_length={total}: it must be a "
            f"multiple of {both} and at least {_round_up(sum(padded), both)}. Take fewer sequences or a larger bucket."
        )
    # Positions of no sequence would be a sequence of their own to attention, and fit no cu_seqlens of the tokens.
    padded[-1] += total - sum(padded)
    cu_seqlens_padded = _cumulative(padded)
    row = first.new_full((total, *first.shape[1:]), fill)
    for start, sequence in zip(cu_seqlens_padded.tolist(), sequences):
        row[start : start + sequence.shape[0]] = sequence
    return Packed(row.unsqueeze(0), _cumulative(lengths), cu_seqlens_padded)


def pad_to_multiple(values: Tensor, *, multiple: int, fill: float) -> Tensor:
    """Return [b, s, ...] with `fill` behind each sequence so that s is a multiple; the same tensor if it is one.

    For a packed row whose cu_seqlens_padded is already fixed, this adds positions that belong to no sequence; give
    `total_multiple` when packing instead.

    Raises:
        LayoutError: multiple is below 1, or values has fewer than two dimensions.
    """
    if values.dim() < 2:
        raise LayoutError(f"cannot pad values of shape {list(values.shape)}: they must be [b, s, ...].")
    missing = _round_up(values.shape[1], multiple) - values.shape[1]
    if not missing:
        return values
    return torch.cat([values, values.new_full((values.shape[0], missing, *values.shape[2:]), fill)], dim=1)


def _first(sequences: Sequence[Tensor]) -> Tensor:
    if not sequences:
        raise LayoutError("cannot lay out no sequences: at least one is needed.")
    for i, sequence in enumerate(sequences):
        if sequence.dim() < 1 or sequence.shape[1:] != sequences[0].shape[1:] or sequence.dtype != sequences[0].dtype:
            raise LayoutError(
                f"sequence {i} is {list(sequence.shape)} {sequence.dtype}, sequence 0 is {list(sequences[0].shape)} "
                f"{sequences[0].dtype}: they may differ in length only."
            )
    return sequences[0]


def _round_up(length: int, multiple: int) -> int:
    if multiple < 1:
        raise LayoutError(f"cannot pad to a multiple of {multiple}: it must be 1 or more.")
    return -(-length // multiple) * multiple


def _cumulative(lengths: Sequence[int]) -> Tensor:
    if sum(lengths) >= 2**31:  # attention kernels take int32, and a wrapped bound would be a negative address
        raise LayoutError(f"{sum(lengths)} positions are more than cu_seqlens (int32) can count.")
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
