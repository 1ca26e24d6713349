"""How verl lays out a sequence for context parallelism, rebuilt: padded with 0, then zigzag."""

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
