"""Megatron's distributed optimizer on a CPU: it asks a tensor for its type by a CUDA name and refuses all others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def cuda_type_names() -> Iterator[None]:
    """Let `tensor.type()` say "torch.cuda.FloatTensor" on the CPU too; conversions by `tensor.type(dtype)` stay.

    Source: Megatron-Core 0.16.1, DistributedOptimizer._build_model_and_main_param_groups, clip_grads.
    """
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = type_name  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]
