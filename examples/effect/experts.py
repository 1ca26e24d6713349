"""All experts of a layer at once, for Megatron-Core's SequentialMLP: its loop over 64 tiny ones takes most of a step."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor


def use_batched_experts(chunks: Sequence[Any]) -> None:
    """Let every SequentialMLP of the chunks compute its SwiGLU experts in batched products, with the same parameters."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, SequentialMLP):
                module.forward = MethodType(_forward, module)


def _forward(experts: Any, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
    """Return [num_rows, hidden] for rows sorted by expert, as SequentialMLP.forward does, and no bias."""
    counts = tokens_per_expert.long()
    expert = torch.repeat_interleave(torch.arange(len(counts)), counts)
    place = torch.arange(len(expert)) - (counts.cumsum(0) - counts)[expert]
    rows = hidden.new_zeros(len(counts), int(counts.max()), hidden.shape[1]).index_put((expert, place), hidden)
    fc1 = torch.stack([each.linear_fc1.weight for each in experts.local_experts])
    fc2 = torch.stack([each.linear_fc2.weight for each in experts.local_experts])
    gate, up = torch.bmm(rows, fc1.transpose(1, 2)).chunk(2, dim=2)
    output = torch.bmm(torch.nn.functional.silu(gate) * up, fc2.transpose(1, 2))[expert, place]
    return output * probs.unsqueeze(1), None
