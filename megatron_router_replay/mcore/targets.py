"""The trace rows of one micro-batch -> the routes that this rank's routers replay, in the compact dtype.

One gather of whole rows per micro-batch; each router widens its own layer to int64 when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.trace import RoutingTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """What one model chunk replays in one micro-batch.

    Args:
        layers: [num_tokens, topk] uint8 or int16 for each layer, on the routers' device; live rows hold filler. Views of one
            tensor, one layer behind another, so that each router reads its own in one piece, twice under recompute.
        live: the rows that the live router decides, on the same device: [num_live] int64 positions where the host
            knows them, else [num_tokens] bool; None: there are none.
        replayed: [num_tokens] bool on the same device, True: the row has a route that is replayed; None: not asked for.
        counts: [3] int64 on the device where rows and trace met: rows replayed, live, padding.
    """

    layers: tuple[Tensor, ...]
    live: Tensor | None
    replayed: Tensor | None
    counts: Tensor


def build_targets(
    trace: RoutingTrace,
    rows: Tensor,
    padding_rank: Tensor | None,
    *,
    device: torch.device,
    any_live: bool = True,
    may_sync: bool | None = None,
    with_replayed: bool = False,
) -> Targets:
    """Gather one micro-batch's routes.

    Args:
        trace: the chunk's layers only.
        rows: [num_tokens] int64 on the trace's device, rows of the trace, -1 on padding, as the router sees the tokens.
        padding_rank: [num_tokens] int64, how many paddings of the micro-batch come before each token, over all
            tensor-parallel ranks: it spreads paddings over all experts evenly. None: there is none.
        device: where the routers run.
        any_live: False: do not look for live rows; the trace has a route for every row, or the caller finds them.
        with_replayed: fill `Targets.replayed`.
        may_sync: the host may read values of `rows`; None: if they are on the CPU, where that waits for nothing.

    Source: PITFALLS "Payloads": paddings that all take the same experts overload them.
    """
    if may_sync is None:
        may_sync = rows.device.type == "cpu"
    padding = live = None
    known = rows
    if padding_rank is not None:
        padding = rows < 0
        known = rows.clamp(min=0)
    indices = trace.topk_indices.index_select(0, known)
    if padding is not None and padding_rank is not None:
        slots = padding_rank.unsqueeze(1) * trace.topk + torch.arange(trace.topk, device=rows.device)
        filler = (slots % trace.num_experts).to(indices.dtype).unsqueeze(1)
        indices = torch.where(padding.view(-1, 1, 1), filler, indices)
    if any_live:
        live = ~trace.replay_mask.index_select(0, known)
        live = live if padding is None else live & ~padding
    replayed = None
    if with_replayed:
        replayed = torch.ones_like(rows, dtype=torch.bool)
        for other in (live, padding):
            replayed = replayed if other is None else replayed & ~other
        replayed = replayed.to(device, non_blocking=True)
    counts = _counts(rows, live, padding)
    # On a GPU, asking which rows are live would wait for it; there every micro-batch of such a trace pays a full top-k.
    if live is not None and may_sync:
        live = live.nonzero().squeeze(1)
    return Targets(
        layers=indices.transpose(0, 1).contiguous().to(device, non_blocking=True).unbind(),
        live=live.to(device, non_blocking=True) if live is not None and live.numel() else None,
        replayed=replayed,
        counts=counts,
    )


def _counts(rows: Tensor, live: Tensor | None, padding: Tensor | None) -> Tensor:
    """Return [3] int64: rows replayed, live, padding."""
    if live is None and padding is None:
        return torch.tensor([rows.numel(), 0, 0], device=rows.device)
    num_live, num_padding = (rows.new_zeros(()) if some is None else some.sum() for some in (live, padding))
    return torch.stack([rows.numel() - num_padding - num_live, num_live, num_padding])


def padding_ranks(rows: Tensor) -> Tensor:
    """Return how many paddings come before each position in the router's order (s-major), [b, s] int64."""
    padding = (rows < 0).t()
    return (padding.reshape(-1).cumsum(0) - padding.reshape(-1).to(torch.int64)).view(padding.shape).t()


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
    """
    payload: list[list[Tensor] | None] = [None]
    if dist.get_rank() == src:
        if rows is None:
            raise LayoutError(f"rank {src} broadcasts routing_rows but was given none.")
        payload = [[part.detach().to(device="cpu", dtype=torch.int64).clone() for part in rows]]
    dist.broadcast_object_list(payload, src=src, group=group)
    assert payload[0] is not None, "the source sent its rows"
    return payload[0]
