"""Megatron's process groups over which one batch of one model replica is spread."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state


def model_parallel_groups() -> tuple[dist.ProcessGroup, ...]:
    """Return the tensor-, context- and pipeline-parallel groups of this rank; none without torch.distributed.

    Together they hold every rank that routes tokens of this rank's batch, and no rank of another data-parallel batch.
    """
    if not dist.is_initialized():
        return ()
    return (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
