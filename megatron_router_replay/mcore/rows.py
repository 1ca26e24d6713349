"""Give pipeline stages that load no data the rows of their micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.errors import LayoutError


def broadcast_routing_rows(
    rows: Sequence[Tensor] | None, *, src: int, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Give every rank of a group the rows of all micro-batches; for pipeline stages that load no data.

    Call it before the schedule, with all micro-batches of the step at once: a broadcast inside a forward step would
    wait for stages that wait for this stage's activations.

    Args:
        rows: on `src`, one int tensor a micro-batch, of any shapes; elsewhere ignored, may be None.
        src: the sending rank, a global rank of the group (`parallel_state.get_pipeline_model_parallel_first_rank()`).
        group: the pipeline-parallel group; None: the default group.

    Returns:
        The tensors on the CPU, int64, on every rank.

    Raises:
        LayoutError: the sending rank was given none; on every rank.
    """
    payload: list[list[Tensor] | None] = [None]
    if dist.get_rank() == src and rows is not None:
        payload = [[part.detach().to(device="cpu", dtype=torch.int64).clone() for part in rows]]
    dist.broadcast_object_list(payload, src=src, group=group)
    if payload[0] is None:  # told to all, so that all raise and none waits
        raise LayoutError(f"rank {src} broadcasts routing_rows but was given none.")
    return payload[0]
