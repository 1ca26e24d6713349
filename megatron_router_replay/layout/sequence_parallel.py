"""From [b, s] as the data pipeline has it to [n] as one rank's router sees it, and back.

Megatron turns [b, s] into [s, b, h]; under sequence parallelism each tensor-parallel rank keeps a run of consecutive s;
the router flattens what it gets, so position s of every sequence comes before position s + 1 of any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_router_replay.errors import LayoutError


def rows_for_router(rows: Tensor, *, tp_rank: int = 0, tp_size: int = 1, sequence_parallel: bool = False) -> Tensor:
    """Return `rows` in the order in which this tensor-parallel rank's routers see the tokens.

    Args:
        rows: [b, s], any dtype: one value a token, as `input_ids` enters the model on this context-parallel rank;
            [1, total] for packed sequences.
        tp_rank, tp_size: this rank's place in the tensor-parallel group; without sequence_parallel every rank sees all.

    Returns:
        [b * s], or [b * s // tp_size] under sequence_parallel.

    Raises:
        LayoutError: rows is not [b, s], or s is not a multiple of tp_size under sequence_parallel.

    Source: Megatron-Core 0.16.1, LanguageModelEmbedding.forward (transpose, then scatter) and TopKRouter.routing
    (`logits.view(-1, num_experts)`).
    """
    if rows.dim() != 2:
        raise LayoutError(f"cannot order rows of shape {list(rows.shape)}: they must be [b, s], shaped as input_ids.")
    # Before the split, as in Megatron: a rank gets a run of positions of every sequence, not a run of sequences.
    by_position = rows.transpose(0, 1)
    if sequence_parallel:
        by_position = split_sequence_parallel(by_position, tp_rank=tp_rank, tp_size=tp_size)
    return by_position.reshape(-1)


def merge_router_rows(parts: Sequence[Tensor], *, batch_size: int) -> Tensor:
    """Undo `rows_for_router`: return [b, s, ...] from what the routers of all tensor-parallel ranks saw.

    Args:
        parts: [n, ...] of tp_rank 0, 1, ...; without sequence_parallel, one rank's alone.
        batch_size: b.

    Raises:
        LayoutError: no parts, their shapes differ, or n is not a multiple of batch_size.
    """
    for part in parts:
        if batch_size < 1 or part.shape[0] % batch_size:
            raise LayoutError(
                f"cannot merge {part.shape[0]} rows of a rank: not a multiple of batch_size={batch_size}."
            )
    return merge_sequence_parallel(
        [part.view(part.shape[0] // batch_size, batch_size, *part.shape[1:]) for part in parts]
    ).transpose(0, 1)


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
        raise LayoutError(f"tp_rank={tp_rank} must lie in 0..tp_size - 1, tp_size={tp_size}.")
    length = values.shape[0]
    if length % tp_size != 0:
        raise LayoutError(
            f"cannot split {length} positions over tp_size={tp_size}: not a multiple. "
            f"Pad the sequences, or the packed row, to a multiple of {tp_size} first."
        )
    kept = length // tp_size
    return values[tp_rank * kept : (tp_rank + 1) * kept]


def merge_sequence_parallel(parts: Sequence[Tensor]) -> Tensor:
    """Undo `split_sequence_parallel`: return [s, ...] from the parts of tp_rank 0, 1, ...

    Raises:
        LayoutError: no parts, or their shapes differ.
    """
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) != 1:
        raise LayoutError(f"cannot merge parts of shapes {sorted(shapes)}: give one part a rank, all of one shape.")
    return torch.cat(list(parts))
