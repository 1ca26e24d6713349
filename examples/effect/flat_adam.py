"""Adam over Megatron's flat buffers: its optimizer's loop over 800 small parameters takes a third of a step on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class FlatAdam:
    """Adam with clipping by the global norm, with the two methods of Megatron's optimizer that the trainer calls.

    Args:
        chunks: wrapped in Megatron's DistributedDataParallel with a distributed optimizer, on one process: parameters and
            gradients of a chunk lie in a few flat tensors.
        lr, clip_grad: as of the settings.
    """

    def __init__(self, chunks: Sequence[Any], *, lr: float, clip_grad: float) -> None:
        buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        held = sum(buffer.param_data.numel() for buffer in buffers)
        needed = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        assert held >= needed, "each parameter is a view of a buffer"
        self.parameters = [buffer.param_data for buffer in buffers]
        self.gradients = [buffer.grad_data for buffer in buffers]
        self.clip_grad = clip_grad
        self.adam = torch.optim.Adam(self.parameters, lr=lr)

    def zero_grad(self) -> None:
        """Nothing to do: the trainer sets the buffers to zero."""

    def step(self) -> tuple[bool, float, None]:
        """Take a step; return that it was taken, the norm of the gradient before clipping, and nothing."""
        norm = float(sum(gradient.square().sum() for gradient in self.gradients) ** 0.5)
        for parameter, gradient in zip(self.parameters, self.gradients):
            parameter.grad = gradient * min(1.0, self.clip_grad / (norm + 1e-6))
        self.adam.step()
        return True, norm, None
