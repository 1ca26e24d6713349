"""Split the positions of a batch over context-parallel ranks, and merge them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron_router_replay.errors import LayoutError

Style = Literal["zigzag", "contiguous"]


def split_context_parallel(
    values: Tensor,
    *,
    cp_rank: int,
    cp_size: int,
    cu_seqlens_padded: Tensor | None = None,
    style: Style = "zigzag",
) -> Tensor:
    """Return the positions that this context-parallel rank keeps.

    Args:
        values: [b, s, ...], any dtype; [1, total, ...] for packed sequences.
        cp_rank, cp_size: this rank's place in the context-parallel group, 0 <= cp_rank < cp_size.
        cu_seqlens_padded: [num_seqs + 1], where each packed sequence starts, on the CPU; None for a padded batch.
        style: "zigzag" cuts each sequence into 2 * cp_size chunks and keeps the one at cp_rank and the one as far from
            the end, which balances causal attention; "contiguous" cuts the whole row into cp_size runs, across packed
            sequences.

    Returns:
        [b, s // cp_size, ...], same dtype and device; a copy unless cp_size is 1.

    Raises:
        LayoutError: a length is not a multiple of 2 * cp_size (zigzag) or of cp_size (contiguous); cu_seqlens_padded
            does not cover the row.

    Source: Megatron-Core 0.16.1, utils.get_batch_on_this_cp_rank and get_thd_batch_on_this_cp_rank, whose indices are
    those of transformer_engine's thd_get_partitioned_indices.
    """
    positions = context_parallel_positions(
        _seq_length(values), cp_rank=cp_rank, cp_size=cp_size, cu_seqlens_padded=cu_seqlens_padded, style=style
    )
    return values if cp_size == 1 else values.index_select(1, positions.to(values.device))


def merge_context_parallel(
    parts: Sequence[Tensor], *, cu_seqlens_padded: Tensor | None = None, style: Style = "zigzag"
) -> Tensor:
    """Undo `split_context_parallel`: return [b, s, ...] from the parts of cp_rank 0, 1, ...

    Raises:
        LayoutError: no parts, their shapes differ, or they do not fit cu_seqlens_padded.
    """
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) != 1:
        raise LayoutError(f"cannot merge parts of shapes {sorted(shapes)}: give one part a rank, all of one shape.")
    together = torch.cat(list(parts), dim=1)
    positions = [
        context_parallel_positions(
            _seq_length(together), cp_rank=r, cp_size=len(parts), cu_seqlens_padded=cu_seqlens_padded, style=style
        )
        for r in range(len(parts))
    ]
    # The positions of all ranks together are a permutation, so every place is written.
    return torch.empty_like(together).index_copy_(1, torch.cat(positions).to(together.device), together)


def context_parallel_positions(
    seq_length: int,
    *,
    cp_rank: int,
    cp_size: int,
    cu_seqlens_padded: Tensor | None = None,
    style: Style = "zigzag",
) -> Tensor:
    """Return which positions `split_context_parallel` keeps, in order: [seq_length // cp_size] int64.

    Raises:
        LayoutError: as `split_context_parallel`.
    """
    if not 0 <= cp_rank < cp_size:
        raise LayoutError(f"cp_rank={cp_rank} must lie in 0..cp_size - 1, cp_size={cp_size}.")
    bounds = _bounds(seq_length, cu_seqlens_padded)
    if style == "contiguous":
        _check_lengths(torch.tensor([seq_length]), cp_size, style, cp_size)
        kept = seq_length // cp_size
        return torch.arange(cp_rank * kept, (cp_rank + 1) * kept)
    if style != "zigzag":
        raise LayoutError(f"style={style!r} must be 'zigzag' or 'contiguous'.")
    if cp_size == 1:  # one rank keeps everything: nothing has to be a multiple of two
        return torch.arange(seq_length)
    lengths = bounds.diff()
    _check_lengths(lengths, 2 * cp_size, style, cp_size)
    chunks = lengths // (2 * cp_size)
    starts = bounds[:-1]
    # Of each sequence two runs are kept, in this order: the cp_rank-th chunk and the cp_rank-th from the end.
    run_starts = torch.stack(
        [starts + cp_rank * chunks, starts + (2 * cp_size - 1 - cp_rank) * chunks], dim=1
    ).flatten()
    run_lengths = chunks.repeat_interleave(2)
    # A position is the start of its run and how far the entry stands behind the run's first entry.
    before = run_lengths.cumsum(0) - run_lengths
    return torch.arange(seq_length // cp_size) + (run_starts - before).repeat_interleave(run_lengths)


def _seq_length(values: Tensor) -> int:
    if values.dim() < 2:
        raise LayoutError(f"cannot split values of shape {list(values.shape)}: they must be [b, s, ...].")
    return values.shape[1]


def _bounds(seq_length: int, cu_seqlens_padded: Tensor | None) -> Tensor:
    if cu_seqlens_padded is None:
        return torch.tensor([0, seq_length])
    bounds = cu_seqlens_padded.to(device="cpu", dtype=torch.int64)
    covers = bounds.dim() == 1 and bounds.numel() > 0 and int(bounds[0]) == 0 and int(bounds[-1]) == seq_length
    if not covers or bool((bounds.diff() < 0).any()):
        raise LayoutError(
            f"cu_seqlens_padded {bounds.tolist()} does not cover a row of {seq_length} positions: it must be "
            "[num_seqs + 1], rise from 0 and end at the row's length."
        )
    return bounds


def _check_lengths(lengths: Tensor, multiple: int, style: str, cp_size: int) -> None:
    wrong = (lengths % multiple).nonzero()[:, 0].tolist()
    if wrong:
        raise LayoutError(
            f"cannot split sequence {wrong[0]} of {int(lengths[wrong[0]])} positions over cp_size={cp_size} ({style}): "
            f"not a multiple of {multiple}. Pad each sequence to a multiple of {multiple} first."
        )
