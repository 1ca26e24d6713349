"""Sequences of any length into one padded batch [b, s] or one packed row [1, total] (THD).

`pad_sequences` and `pack_sequences` lay out any per-token values; the trace rows themselves are
`pad_sequences(number_rows(lengths), fill=PADDING_ROW)`. `check_tokens` proves that they still match the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import lcm
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_router_replay.checks import as_integer
from megatron_router_replay.errors import LayoutError

PADDING_ROW = -1
"""The row of a position without a token."""

MOVED_APART = "tokens and rows were not moved by the same code."
"""The cause of a position with a different token than its row."""

Side = Literal["left", "right"]


class Packed(NamedTuple):
    """Sequences packed into one row.

    Args:
        values: [1, total, ...], each sequence after the padding of the previous one.
        cu_seqlens: [num_seqs + 1] int32, the sum of the lengths before each sequence, padding not counted.
        cu_seqlens_padded: [num_seqs + 1] int32, where each sequence starts; the last entry is total.
    """

    values: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor


def number_rows(sequence_lengths: Sequence[int]) -> list[Tensor]:
    """Number the trace rows of sequences, which follow one another from row 0.

    Returns:
        [length] int64 for each sequence.

    Raises:
        LayoutError: a length is negative or no integer.
    """
    lengths = [as_integer("a sequence length", length, least=0, error=LayoutError) for length in sequence_lengths]
    return [torch.arange(end - length, end) for end, length in zip(accumulate(lengths), lengths)]


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
            common multiple of both and of the multiple for FP8.

    Returns:
        [b, s, ...] of the sequences' dtype.

    Raises:
        LayoutError: no sequences, a sequence longer than seq_length, seq_length not a multiple of `multiple`.
    """
    if side not in ("left", "right"):
        raise LayoutError(f"MRR101: side={side!r} must be 'left' or 'right'.")
    first = _first(sequences)
    longest = max(sequence.shape[0] for sequence in sequences)
    length = _round_up(longest, multiple) if seq_length is None else seq_length
    if length < longest or length % multiple:
        raise LayoutError(
            f"MRR205: cannot pad sequences of up to {longest} tokens to seq_length={length}, multiple={multiple}: "
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
    """Return sequences packed into one row; each is padded at its end with `fill`.

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
            f"MRR205: cannot pack {sum(padded)} positions ({sum(lengths)} tokens) into total_length={total}: it must be a "
            f"multiple of {both} and at least {_round_up(sum(padded), both)}. Take fewer sequences or a larger bucket."
        )
    # Positions of no sequence would be a sequence of their own to attention, and fit no cu_seqlens of the tokens.
    padded[-1] += total - sum(padded)
    cu_seqlens_padded = _cumulative(padded)
    row = first.new_full((total, *first.shape[1:]), fill)
    for start, sequence in zip(cu_seqlens_padded.tolist(), sequences):
        row[start : start + sequence.shape[0]] = sequence
    return Packed(row.unsqueeze(0), _cumulative(lengths), cu_seqlens_padded)


def check_tokens(rows: Tensor, input_ids: Tensor, *, token_ids: Tensor) -> None:
    """Raise unless each position with a row has the token of that row.

    Args:
        rows: [b, s] integer, the trace row of each position, -1 on padding.
        input_ids: [b, s] integer.
        token_ids: [num_tokens] integer, `trace.token_ids`; -1 where the token is unknown (see `merge_traces`).

    Raises:
        LayoutError: shapes differ, a row lies outside the trace, or a token differs; names the first position.
    """
    if rows.shape != input_ids.shape:
        raise LayoutError(
            f"MRR201: rows are {list(rows.shape)}, input_ids {list(input_ids.shape)}: one row a position."
        )
    outside = (rows < -1) | (rows >= token_ids.shape[0])
    if bool(outside.any()):
        at = outside.nonzero()[0].tolist()
        raise LayoutError(
            f"MRR202: rows{at} is {int(rows[tuple(at)])}: the trace has rows 0..{token_ids.shape[0] - 1}, "
            "padding is -1."
        )
    if not bool((rows >= 0).any()):
        return  # nothing to compare, and a trace without rows could not be indexed
    expected = torch.where(rows >= 0, token_ids.to(rows.device)[rows.clamp(min=0).to(torch.int64)], -1)
    count, detail = count_differing_tokens(input_ids.to(rows.device), expected, rows)
    if bool(count):
        raise LayoutError(f"MRR203: {detail()}")


def count_differing_tokens(
    input_ids: Tensor,
    expected: Tensor,
    rows: Tensor | None = None,
    *,
    why: str = MOVED_APART,
    wrong: Tensor | None = None,
) -> tuple[Tensor, Callable[[], str]]:
    """Count the tokens that differ from the expected ones; on a GPU without a wait.

    Args:
        input_ids: [b, s] integers.
        expected: [b, s] integers, the token of each position; below 0: not known.
        rows: [b, s] integers, the trace rows that these are of; None: they were queued as such.
        why: the cause, for the message.
        wrong: [b, s] bool, which positions differ, where that is more than another token.

    Returns:
        The number of positions that differ, a scalar on the device; and a function that waits, and returns the first place.
    """
    known = expected >= 0
    wrong = (expected != input_ids) & known if wrong is None else wrong
    counts = torch.stack([wrong, known]).flatten(1).sum(1)
    if not wrong.numel() or (wrong.device.type == "cpu" and not counts[0]):
        return counts[0], lambda: ""  # nothing to detail
    first = wrong.flatten().to(torch.int8).argmax().view(1)
    columns = [input_ids, expected] if rows is None else [input_ids, expected, rows]
    values = torch.stack(columns).flatten(1).index_select(1, first)
    length = wrong.shape[-1]  # `detail` lives as long as the session, so it keeps these few numbers and no batch

    def detail() -> str:
        token, recorded, *row = values.flatten().tolist()
        num_wrong, num_known = counts.tolist()
        at = list(divmod(int(first), length))
        there = f"its routing row {row[0]} was recorded for" if row else "what was queued there is of"
        return f"input_ids{at} is {token}, but {there} token {recorded} ({num_wrong} of {num_known} positions differ): {why}"

    return counts[0], detail


def _first(sequences: Sequence[Tensor]) -> Tensor:
    if not sequences:
        raise LayoutError("MRR205: cannot lay out no sequences: at least one is needed.")
    for i, sequence in enumerate(sequences):
        if sequence.dim() < 1 or sequence.shape[1:] != sequences[0].shape[1:] or sequence.dtype != sequences[0].dtype:
            raise LayoutError(
                f"MRR205: sequence {i} is {list(sequence.shape)} {sequence.dtype}, sequence 0 is {list(sequences[0].shape)} "
                f"{sequences[0].dtype}: they may differ in length only."
            )
    return sequences[0]


def _round_up(length: int, multiple: int) -> int:
    if multiple < 1:
        raise LayoutError(f"MRR205: cannot pad to a multiple of {multiple}: it must be 1 or more.")
    return -(-length // multiple) * multiple


def _cumulative(lengths: Sequence[int]) -> Tensor:
    if sum(lengths) >= 2**31:  # attention kernels take int32, and a wrapped bound would be a negative address
        raise LayoutError(f"MRR205: {sum(lengths)} positions are more than cu_seqlens (int32) can count.")
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
