"""From [b, s] as the data pipeline has it to [n] as one rank's router sees it: the splits over parallel ranks.

Context-parallel ranks keep some positions of each sequence. Megatron turns the rest, [b, s], into [s, b, h]; under sequence
parallelism each tensor-parallel rank keeps a run of consecutive s; the router flattens its input, so position s of every
sequence comes before position s + 1 of any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_router_replay.checks import as_integers
from megatron_router_replay.errors import LayoutError


def split_context_parallel(
    values: Tensor,
    *,
    cp_rank: int,
    cp_size: int,
    cu_seqlens_padded: Tensor | None = None,
) -> Tensor:
    """Return the positions that this context-parallel rank keeps, in zigzag.

    Each sequence is cut into 2 * cp_size chunks. A rank keeps the one at cp_rank and the one as far from the end, which
    balances causal attention.

    Args:
        values: [b, s, ...], any dtype; [1, total, ...] for packed sequences.
        cp_rank, cp_size: this rank's place in the context-parallel group, 0 <= cp_rank < cp_size.
        cu_seqlens_padded: [num_seqs + 1], where each packed sequence starts, on the CPU; None for a padded batch.

    Returns:
        [b, s // cp_size, ...], same dtype and device; a copy unless cp_size is 1.

    Raises:
        LayoutError: a length is not a multiple of 2 * cp_size; cu_seqlens_padded does not cover the row.

    Source: Megatron-Core 0.16.1, utils.get_batch_on_this_cp_rank and get_thd_batch_on_this_cp_rank, whose indices are
    those of transformer_engine's thd_get_partitioned_indices.
    """
    if values.dim() < 2:
        raise LayoutError(f"MRR201: cannot split values of shape {list(values.shape)}: they must be [b, s, ...].")
    positions = _positions(values.shape[1], cp_rank=cp_rank, cp_size=cp_size, cu_seqlens_padded=cu_seqlens_padded)
    return values if cp_size == 1 else values.index_select(1, positions.to(values.device))


def _positions(seq_length: int, *, cp_rank: int, cp_size: int, cu_seqlens_padded: Tensor | None) -> Tensor:
    """Return which positions `split_context_parallel` keeps, in order: [seq_length // cp_size] int64."""
    if not 0 <= cp_rank < cp_size:
        raise LayoutError(f"MRR204: cp_rank={cp_rank} must lie in 0..cp_size - 1, cp_size={cp_size}.")
    bounds = _bounds(seq_length, cu_seqlens_padded)
    if cp_size == 1:  # one rank keeps everything: nothing has to be a multiple of two
        return torch.arange(seq_length)
    lengths = bounds.diff()
    _check_lengths(lengths, cp_size)
    chunks = lengths // (2 * cp_size)
    starts = bounds[:-1]
    # Of each sequence two runs are kept, in this order: the cp_rank-th chunk and the cp_rank-th from the end.
    run_starts = torch.stack(
        [starts + cp_rank * chunks, starts + (2 * cp_size - 1 - cp_rank) * chunks], dim=1
    ).flatten()
    run_lengths = chunks.repeat_interleave(2)
    # A position is the start of its run plus the entry's distance from the run's first entry.
    before = run_lengths.cumsum(0) - run_lengths
    return torch.arange(seq_length // cp_size) + (run_starts - before).repeat_interleave(run_lengths)


def _bounds(seq_length: int, cu_seqlens_padded: Tensor | None) -> Tensor:
    if cu_seqlens_padded is None:
        return torch.tensor([0, seq_length])
    bounds = as_integers(cu_seqlens_padded, "cu_seqlens_padded").to(device="cpu", dtype=torch.int64)
    covers = bounds.dim() == 1 and bounds.numel() > 0 and int(bounds[0]) == 0 and int(bounds[-1]) == seq_length
    if not covers or bool((bounds.diff() < 0).any()):
        raise LayoutError(
            f"MRR204: cu_seqlens_padded {bounds.tolist()} does not cover a row of {seq_length} positions: it must be "
            "[num_seqs + 1], rise from 0 and end at the row's length."
        )
    return bounds


def _check_lengths(lengths: Tensor, cp_size: int) -> None:
    multiple = 2 * cp_size
    wrong = (lengths % multiple).nonzero()[:, 0].tolist()
    if wrong:
        raise LayoutError(
            f"MRR204: cannot split sequence {wrong[0]} of {int(lengths[wrong[0]])} positions over cp_size={cp_size} "
            f"in zigzag: not a multiple of {multiple}. Pad each sequence to a multiple of {multiple} first."
        )


def rows_for_router(rows: Tensor, *, tp_rank: int = 0, tp_size: int = 1, sequence_parallel: bool = False) -> Tensor:
    """Return rows in the order in which this rank's routers see the tokens.

    Args:
        rows: [b, s, ...], any dtype: one entry a token, as `input_ids` enters the model on this context-parallel rank;
            [1, total, ...] for packed sequences.
        tp_rank, tp_size: this rank's place in the tensor-parallel group; without sequence_parallel every rank sees all.

    Returns:
        [b * s, ...], or [b * s // tp_size, ...] under sequence_parallel.

    Raises:
        LayoutError: rows has no [b, s], or s is not a multiple of tp_size under sequence_parallel.

    Source: Megatron-Core 0.16.1, LanguageModelEmbedding.forward (transpose, then scatter) and TopKRouter.routing
    (`logits.view(-1, num_experts)`).
    """
    if rows.dim() < 2:
        raise LayoutError(
            f"MRR201: cannot order rows of shape {list(rows.shape)}: they must be [b, s, ...], with input_ids [b, s]."
        )
    # Before the split, as in Megatron: a rank gets a run of positions of every sequence, not a run of sequences.
    by_position = rows.transpose(0, 1)
    if sequence_parallel:
        by_position = split_sequence_parallel(by_position, tp_rank=tp_rank, tp_size=tp_size)
    return by_position.flatten(0, 1)


def split_sequence_parallel(values: Tensor, *, tp_rank: int, tp_size: int) -> Tensor:
    """Return the part that this tensor-parallel rank keeps under sequence parallelism.

    Args:
        values: [s, ...], any dtype; of a [b, s] batch, first transpose: b sequences are not split one after another.
        tp_rank, tp_size: this rank's place in the tensor-parallel group, 0 <= tp_rank < tp_size.

    Returns:
        [s // tp_size, ...], same dtype and device; a view.

    Raises:
        LayoutError: s is not a multiple of tp_size, or tp_rank lies outside the group.

    Source: Megatron-Core 0.16.1, tensor_parallel.mappings._split_along_first_dim.
    """
    if not 0 <= tp_rank < tp_size:
        raise LayoutError(f"MRR204: tp_rank={tp_rank} must lie in 0..tp_size - 1, tp_size={tp_size}.")
    length = values.shape[0]
    if length % tp_size != 0:
        raise LayoutError(
            f"MRR204: cannot split {length} positions over tp_size={tp_size}: not a multiple. "
            f"Pad the sequences, or the packed row, to a multiple of {tp_size} first."
        )
    kept = length // tp_size
    return values[tp_rank * kept : (tp_rank + 1) * kept]
