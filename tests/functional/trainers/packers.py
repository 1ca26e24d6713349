"""How trainers lay out a micro-batch's tokens, each rebuilt from its description; every one fills with 0.

nemo_rl     NVIDIA-NeMo/RL 7ea279ab, megatron/data.py: padded on the right with lengths; packed one behind the other,
            each to a multiple, the last one to the end of a row of fixed size; each by itself zigzag
skyrl       NovaSky-AI/SkyRL a9564572, megatron_utils.py: padded on the left with a mask; packed, each to a multiple, or
            moved to the left of a shorter batch
slime       THUDM/slime 624b824a, megatron_utils/data.py: a list; each split zigzag, padded for that alone; then one row,
            padded behind as a sequence of its own
miles       radixark/miles 31f1ca96, training_utils/data.py: as slime, or "bshd": stacked, padded on the right
"""

from __future__ import annotations

import torch
from torch import Tensor


def zigzag(sequence: Tensor, cp_rank: int, cp_size: int) -> Tensor:
    """The chunks cp_rank and 2 * cp_size - 1 - cp_rank of a sequence whose length 2 * cp_size divides."""
    if cp_size == 1:
        return sequence
    chunks = sequence.chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def pad(values: Tensor, missing: int) -> Tensor:
    """Fill with 0 behind the last position."""
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])])


def up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def nemo_rl(
    values: Tensor, *, lengths: list[int], multiple: int, total: int, cp_rank: int, cp_size: int
) -> tuple[Tensor, list[int]]:
    """[B, S] -> ([1, total / cp_size], cu_seqlens_padded of the whole row)."""
    row, bounds = [], [0]
    for i, length in enumerate(lengths):
        size = total - bounds[-1] if i == len(lengths) - 1 else up(length, multiple)
        row.append(zigzag(pad(values[i, :length], size - length), cp_rank, cp_size))
        bounds.append(bounds[-1] + size)
    return torch.cat(row).unsqueeze(0), bounds


def skyrl_packed(
    values: Tensor, *, mask: Tensor, multiple: int, cp_rank: int, cp_size: int
) -> tuple[Tensor, list[int]]:
    """[B, S] -> ([1, total / cp_size], cu_seqlens_padded)."""
    row, bounds = [], [0]
    for of_sample, is_token in zip(values, mask.bool()):
        tokens = of_sample[is_token]
        size = up(len(tokens), multiple)
        row.append(zigzag(pad(tokens, size - len(tokens)), cp_rank, cp_size))
        bounds.append(bounds[-1] + size)
    return torch.cat(row).unsqueeze(0), bounds


def skyrl_unpacked(values: Tensor, *, mask: Tensor, multiple: int) -> Tensor:
    """[B, S] padded on the left -> [B, s] padded on the right, s the longest of the micro-batch."""
    size = up(int(mask.sum(dim=1).max()), multiple)
    return torch.stack([pad(row[is_token], size - int(is_token.sum())) for row, is_token in zip(values, mask.bool())])


def slime(values: list[Tensor], *, multiple: int, cp_rank: int, cp_size: int) -> tuple[Tensor, list[int]]:
    """Lists of [T] -> ([1, total / cp_size], cu_seqlens of the whole row)."""
    row, bounds = [], [0]
    for tokens in values:
        size = up(len(tokens), 2 * cp_size) if cp_size > 1 else len(tokens)
        row.append(zigzag(pad(tokens, size - len(tokens)), cp_rank, cp_size))
        bounds.append(bounds[-1] + size)
    packed = torch.cat(row)
    missing = up(len(packed), multiple) - len(packed)
    if missing:
        packed = pad(packed, missing)
        bounds.append(bounds[-1] + missing * cp_size)
    return packed.unsqueeze(0), bounds


def miles_bshd(values: list[Tensor], *, max_length: int, cp_rank: int, cp_size: int) -> Tensor:
    """Lists of [T] -> [B, max_length / cp_size]."""
    size = up(max_length, 2 * cp_size)
    return torch.stack([zigzag(pad(tokens, size - len(tokens)), cp_rank, cp_size) for tokens in values])
