"""Choices of indexers for tests: positions as an indexer returns them, in no order."""

from __future__ import annotations

import torch
from torch import Tensor


def choose(own: list[int], *, num_layers: int, topk: int, seed: int = 0) -> Tensor:
    """Return [num_tokens, num_layers, topk] int32: a random choice of the candidates of each token, -1 behind few."""
    random = torch.Generator().manual_seed(seed)
    chosen = torch.full((len(own), num_layers, topk), -1, dtype=torch.int32)
    for row, position in enumerate(own):
        for layer in range(num_layers):
            keys = torch.randperm(position + 1, generator=random)[:topk]
            chosen[row, layer, : len(keys)] = keys.int()
    return chosen


def ascending(chosen: Tensor) -> Tensor:
    """Return each choice in ascending order, -1 behind: what a trace returns of it."""
    return (
        chosen.where(chosen >= 0, 2**30)
        .sort(dim=2)
        .values.masked_fill_(chosen.sort(dim=2, descending=True).values < 0, -1)
    )
