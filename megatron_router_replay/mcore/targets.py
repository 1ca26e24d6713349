"""The trace rows of one micro-batch -> the routes that this rank's routers replay, in the compact dtype.

One gather of whole rows per micro-batch; each router widens its own layer to int64 when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.left_live import NOT_KEPT, STALE
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
        left_live: [3] int64 on the same device: of the live rows those not kept, those stale, and the trained ones of both;
            None: nothing was chosen in this trace.
    """

    layers: tuple[Tensor, ...]
    live: Tensor | None
    replayed: Tensor | None
    counts: Tensor
    left_live: Tensor | None = None


def build_targets(
    trace: RoutingTrace,
    rows: Tensor,
    *,
    padding: Tensor | None = None,
    padding_rank: Tensor | None = None,
    device: torch.device,
    any_live: bool = True,
    may_sync: bool | None = None,
    with_replayed: bool = False,
    trained: Tensor | None = None,
) -> Targets:
    """Gather one micro-batch's routes.

    Args:
        trace: the chunk's layers only.
        rows: [num_tokens] int64 on the trace's device, rows of the trace, -1 where there is none, as the router sees the
            tokens.
        padding: [num_tokens] bool, True: known to be padding, whose row is -1; None: nothing is known.
        padding_rank: [num_tokens] int64, how many paddings of the micro-batch come before each token, over all
            tensor-parallel ranks: it spreads paddings over all experts evenly. Given with `padding`.
        device: where the routers run.
        any_live: False: do not look for live rows; every row that is not padding has a route, or the caller finds them.
        may_sync: the host may read values of `rows`; None: if they are on the CPU, where that waits for nothing.
        with_replayed: fill `Targets.replayed`.
        trained: [num_tokens] bool, True: trained on; None: not said. Only counted here.

    Source: PITFALLS "Payloads": paddings that all take the same experts overload them.
    """
    if may_sync is None:
        may_sync = rows.device.type == "cpu"
    # -1 gathers row 0, as filler: what stands there is replaced by spread experts, or by the live router's.
    known = rows.clamp(min=0) if any_live or padding is not None else rows
    if trace.num_tokens:
        indices = trace.topk_indices.index_select(0, known)
    else:  # an empty trace, whose micro-batches have no row
        indices = trace.topk_indices.new_zeros(rows.numel(), *trace.topk_indices.shape[1:])
    if padding is not None and padding_rank is not None:
        slots = padding_rank.unsqueeze(1) * trace.topk + torch.arange(trace.topk, device=rows.device)
        filler = (slots % trace.num_experts).to(indices.dtype).unsqueeze(1)
        indices = torch.where(padding.view(-1, 1, 1), filler, indices)
    # Padding that has no route is not live: it would cost a top-k, and its experts mean nothing.
    live = None
    if any_live:
        live = rows < 0
        if trace.num_tokens:
            live = live | ~trace.replay_mask.index_select(0, known)
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
        # None spares every router of the micro-batch its live top-k.
        live=live.to(device, non_blocking=True) if live is not None and live.numel() else None,
        replayed=replayed,
        counts=counts,
        left_live=_count_left_live(trace, rows, trained),
    )


def choices_of(trace: RoutingTrace, rows: Tensor) -> Tensor:
    """Return which choice left each row to the live router, [num_tokens] uint8 as `RoutingTrace.left_live`, 0: none did."""
    if trace.left_live is None or not trace.num_tokens:
        return torch.zeros_like(rows, dtype=torch.uint8)
    return torch.where(rows >= 0, trace.left_live[rows.clamp(min=0)], 0)


def _count_left_live(trace: RoutingTrace, rows: Tensor, trained: Tensor | None) -> Tensor | None:
    if trace.left_live is None:
        return None
    choices = choices_of(trace, rows)
    num_trained = rows.new_zeros(()) if trained is None else (trained & (choices > 0)).sum()
    return torch.stack([(choices == NOT_KEPT).sum(), (choices == STALE).sum(), num_trained])


def _counts(rows: Tensor, live: Tensor | None, padding: Tensor | None) -> Tensor:
    """Return [3] int64: rows replayed, live, padding."""
    if live is None and padding is None:
        return torch.tensor([rows.numel(), 0, 0], device=rows.device)
    num_live, num_padding = (rows.new_zeros(()) if mask is None else mask.sum() for mask in (live, padding))
    return torch.stack([rows.numel() - num_padding - num_live, num_live, num_padding])


def padding_ranks(padding: Tensor) -> Tensor:
    """Return how many paddings come before each position in the router's order (s-major), [b, s] int64."""
    # Counted in the order of the whole batch, so that the ranks that share a sequence go on where the one before stopped.
    by_position = padding.t().reshape(-1)
    return (by_position.cumsum(0) - by_position.to(torch.int64)).view(padding.shape[::-1]).t()


def check_padding(rows: Tensor, padding: Tensor | None, check: Callable[[Tensor, str], None]) -> None:
    """Check that padding has no rows; `check(failed, message)` raises now or, on a GPU, later."""
    if padding is not None:
        check(
            (padding & (rows >= 0)).any(),
            "a position that padding= says is padding has a routing row: mask and rows moved apart, or the mask is inverted "
            "(True is padding).",
        )


def as_integers(values: Any, name: str) -> Tensor:
    """Return integers given as a tensor, a numpy array or a list.

    Raises:
        LayoutError: they are no integers.
    """
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LayoutError(
            f"{name} must be integers in a tensor or an array, got {type(values).__name__}: {error}"
        ) from error
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise LayoutError(f"{name} must be integers, got {list(tensor.shape)} {tensor.dtype}.")
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        raise LayoutError(
            f"{name} must be a plain tensor, got a {'nested' if tensor.is_nested else tensor.layout} one on {tensor.device}: "
            "give [b, s], or [1, total] of a packed batch (nested.values().unsqueeze(0))."
        )
    return tensor


def as_mask(values: Any, name: str) -> Tensor:
    """Return a mask given as a tensor, a numpy array or a list, True where it is not zero.

    Raises:
        LayoutError: it is none of these.
    """
    try:
        return torch.as_tensor(values) != 0
    except (TypeError, ValueError, RuntimeError) as error:
        raise LayoutError(
            f"{name} must be a mask in a tensor or an array, got {type(values).__name__}: {error}"
        ) from error


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
