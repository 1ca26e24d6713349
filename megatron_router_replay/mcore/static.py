"""StaticTargets: routes at addresses that never change, for routers inside CUDA graphs that you capture yourself.

A CUDA graph runs no Python: a captured router reads what lay at the addresses of the capture. So each micro-batch in
flight gets a slot, a tensor for each layer, that `fill` writes before the graph runs and the graph reads. Sessions
choose in Python, hence refuse captured routers; what they check in each forward is checked here when a slot is filled.

    targets [num_slots, num_layers, num_tokens, topk]:  fill -> the captured forward reads it, and marks it as read
    used, of the same shape, only with recompute=True:  the captured forward writes it -> the captured recompute reads it,
                                                        and marks it as read

What keeps a graph from repeating another micro-batch's routes in silence is part of the graph: a router's read leaves its
part of the slot unfilled (an expert id that does not exist), and reading an unfilled slot fails: a RuntimeError on a CPU, a
device-side assertion on a GPU. So does filling a slot that still waits for its forward or its recompute. Rows without a
route are decided by the captured live top-k; what it chose is in `used`, and frozen for the recompute.

    static = StaticTargets(num_slots=2, num_tokens=4096, layer_numbers=[1, 2], num_experts=64, topk=6, device="cuda")
    with static.capturing(slot=0, model=layers):            # warm-up and capture; one graph for each slot
        graph_0 = torch.cuda.make_graphed_callables(...)
    static.fill(0, trace, rows)                             # each micro-batch: fill its slot, then run the slot's graph
    output = graph_0(hidden)

Captures are told by `torch.cuda.is_current_stream_capturing()`, and by make_fx, whose graphs on a CPU are like CUDA graphs
in this: no Python runs again, the same storages are read. Other runs inside `capturing` are warm-ups, which mark nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_router_replay.errors import LayoutError, ReplayStateError, RouterReplayError, TraceError
from megatron_router_replay.ids import index_dtype, spread_experts
from megatron_router_replay.mcore.compat import check_version
from megatron_router_replay.mcore.find import as_chunks, find_routers
from megatron_router_replay.mcore.targets import build_targets
from megatron_router_replay.topk import ComputeTopk, check_fits, gather_topk
from megatron_router_replay.torch_private import graph_task, is_captured, not_compiled
from megatron_router_replay.trace import RoutingTrace


class StaticTargets:
    """The routes of `num_slots` micro-batches at fixed addresses.

    Args:
        num_slots: micro-batches that may be in flight at once; each is captured into graphs of its own.
        num_tokens: rows that a router of this rank routes in one micro-batch.
        layer_numbers: Megatron's global layer numbers, increasing.
        num_experts, topk: of the model.
        live_rows: the captured routers also take the live top-k, for rows without a route; False: such rows are refused.
        recompute: every forward is followed by a recompute in its backward (activation checkpointing), captured too.
        device: where the routers run.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_tokens: int,
        layer_numbers: Sequence[int],
        num_experts: int,
        topk: int,
        live_rows: bool = False,
        recompute: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layer_numbers = tuple(layer_numbers)
        self.num_experts = num_experts
        self.unfilled = num_experts  # the first expert id that does not exist
        shape = (num_slots, len(self.layer_numbers), num_tokens, topk)
        if min(shape) < 1:
            raise LayoutError(
                f"cannot make static targets of [num_slots, num_layers, num_tokens, topk] = {list(shape)}."
            )
        dtype = index_dtype(num_experts + 1)  # which also holds the mark of what is not filled
        self.targets = torch.full(shape, self.unfilled, dtype=dtype, device=device)
        self.used = torch.full_like(self.targets, self.unfilled) if recompute else None
        # Of all layers: a row without a route is live in each of them.
        self.live = torch.zeros((num_slots, num_tokens), dtype=torch.bool, device=device) if live_rows else None

    @contextmanager
    def capturing(self, slot: int, model: nn.Module | Sequence[nn.Module]) -> Iterator[None]:
        """Let the model's routers read this slot while graphs are captured; its layers must be `layer_numbers` or some.

        The slot holds valid ids meanwhile, for warm-ups; then it is unfilled and the routers are as before.

        Args:
            slot: 0 <= slot < num_slots.
            model: the modules to capture, with Megatron-Core's TopKRouters in them.

        Raises:
            UnsupportedRouterError: a Megatron-Core whose routers ask nobody for their top-k (0.15 and before).
            ReplayStateError: there is no such slot, or it waits for a run of its graph; at the end: a router of the model
                was not captured.
            TraceError: a router is of a layer that is not in `layer_numbers`.
        """
        check_version()
        routers = [found for module in as_chunks(model) for found in find_routers(module)]
        readers = [self.router(slot, found.layer_number) for found in routers]
        self._check_unfilled(slot)
        before = [found.router.router_replay for found in routers]
        _, _, num_tokens, topk = self.targets.shape
        self.targets[slot] = spread_experts(0, num_tokens, topk=topk, num_experts=self.num_experts).to(
            self.targets.device, self.targets.dtype
        )
        if self.used is not None:
            self.used[slot] = self.targets[slot]  # a recompute may be captured before any forward has written it
        try:
            for found, reader in zip(routers, readers):
                found.router.router_replay = reader
            yield
            missing = [reader.name for reader in readers if not reader.captured]
            if missing:
                raise ReplayStateError(
                    f"{missing[0]}: its router was not captured, so later runs would route live. Capture CUDA graphs (or "
                    "make_fx graphs) here; torch.compile leaves routers out of its own."
                )
        finally:
            for found, replaced in zip(routers, before):
                found.router.router_replay = replaced
            self.clear(slot)

    def router(self, slot: int, layer_number: int) -> StaticRouter:
        """Return what goes to `router.router_replay` of one layer while it is captured for this slot.

        Raises:
            ReplayStateError: there is no such slot.
            TraceError: the layer is not in `layer_numbers`.
        """
        self._check_slot(slot)
        if layer_number not in self.layer_numbers:
            raise TraceError(f"static targets have no layer {layer_number}, only {list(self.layer_numbers)}.")
        place = (slot, self.layer_numbers.index(layer_number))
        return StaticRouter(
            name=f"slot {slot}, layer {layer_number}",
            targets=self.targets[place],
            used=None if self.used is None else self.used[place],
            live=None if self.live is None else self.live[slot],
            unfilled=self.unfilled,
        )

    def fill(self, slot: int, trace: RoutingTrace, rows: Tensor, *, padding: Tensor | None = None) -> None:
        """Write a micro-batch's routes where the slot's graphs read them; once before each forward.

        Runs on the current stream, without a host sync if trace and rows are either on the CPU or on the GPU. On a GPU,
        checks of values there are device-side assertions.

        Args:
            slot: 0 <= slot < num_slots.
            trace: with every layer of `layer_numbers`.
            rows: [num_tokens] integers in the order this rank's routers see the tokens (`layout.rows_for_router` of
                routing_rows): rows of the trace, -1 where there is none.
            padding: [num_tokens] bool, True: known to be padding, which gets experts spread over all; any other -1 is a live
                row.

        Raises:
            ReplayStateError: there is no such slot, or its forward or recompute has not run since it was filled.
            LayoutError: rows are of another shape or kind, outside the trace, or have no route without live_rows=True.
            TraceError: the trace is of another model.
        """
        self._check_slot(slot)
        _, _, num_tokens, topk = self.targets.shape
        attempt = f"cannot fill slot {slot}"
        if (trace.num_experts, trace.topk) != (self.num_experts, topk):
            raise TraceError(
                f"{attempt}: the trace has top-{trace.topk} of {trace.num_experts} experts, the static "
                f"targets top-{topk} of {self.num_experts}."
            )
        if rows.shape != (num_tokens,) or rows.is_floating_point() or rows.dtype is torch.bool:
            raise LayoutError(f"{attempt}: rows must be [{num_tokens}] integers, got {list(rows.shape)} {rows.dtype}.")
        trace = trace.select_layers(self.layer_numbers)
        rows = rows.to(trace.device, torch.int64, non_blocking=True)
        _require(((rows >= -1) & (rows < trace.num_tokens)).all(), f"{attempt}: rows reach outside the trace's rows.")
        if padding is None:
            padding = torch.zeros_like(rows, dtype=torch.bool)
        padding = padding.to(rows.device, torch.bool)
        _require(~(padding & (rows >= 0)).any(), f"{attempt}: a position that is padding has a routing row.")
        targets = build_targets(
            trace,
            rows,
            padding=padding,
            padding_rank=padding.cumsum(0) - padding.to(torch.int64),
            device=self.targets.device,
            may_sync=False,  # a mask of the live rows, whose number the graph need not know
        )
        if self.live is None:
            no_live = targets.counts[1] == 0
            _require(no_live, f"{attempt}: rows without a route; make the static targets with live_rows=True.")
        self._check_unfilled(slot)
        # Only now, when nothing can raise any more: a slot is never half filled.
        self.targets[slot].copy_(torch.stack(targets.layers), non_blocking=True)
        if self.live is not None:
            assert targets.live is not None, "any_live=True looks for them"
            self.live[slot].copy_(targets.live)

    def clear(self, slot: int) -> None:
        """Make a slot unfilled, whatever still waits for it; for a forward whose backward will not run.

        Raises:
            ReplayStateError: there is no such slot.
        """
        self._check_slot(slot)
        self.targets[slot].fill_(self.unfilled)
        if self.used is not None:
            self.used[slot].fill_(self.unfilled)
        if self.live is not None:
            self.live[slot].fill_(False)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.targets.shape[0]:  # a negative one would be another slot, counted from the end
            raise ReplayStateError(f"static targets have no slot {slot}, only 0..{self.targets.shape[0] - 1}.")

    def _check_unfilled(self, slot: int) -> None:
        self._check_slot(slot)
        waiting = [self.targets] if self.used is None else [self.targets, self.used]
        # A layer is read whole or not at all, so its first entry tells.
        _require(
            torch.stack([values[slot, :, 0, 0] == self.unfilled for values in waiting]).all(),
            f"slot {slot} is filled: its forward or its recompute has not run in every layer. Use a slot for each "
            "micro-batch in flight, or clear it.",
            ReplayStateError,
        )


@dataclass(kw_only=True, eq=False)  # without slots: Megatron-Core sets layer_number on what a router holds
class StaticRouter:
    """One layer's part of a slot, in place of `router.router_replay`; Megatron-Core calls `get_replay_topk` for its top-k.

    Args:
        name: slot and layer, for messages.
        targets, used: [num_tokens, topk] views of the slot; `used` is None without recompute.
        live: [num_tokens] bool view, True: the live router decides; None: no such rows.
        unfilled: the expert id that marks a part that is not filled.
        captured: a graph has it; set by the capture.
    """

    name: str
    targets: Tensor
    used: Tensor | None
    live: Tensor | None
    unfilled: int
    captured: bool = False

    @not_compiled
    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: ComputeTopk | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `RouterReplay.get_replay_topk`; every operation, the check and the mark too, becomes part of the graph.

        Raises:
            ReplayStateError: the forward routes other shapes than the slot's, or a recompute without recompute=True.
            RuntimeError: in a run on a CPU, the slot is not filled; on a GPU a device-side assertion.
        """
        recompute = graph_task() != -1
        source = self.used if recompute else self.targets
        if source is None:
            raise ReplayStateError(f"{self.name}: recomputed; make the static targets with recompute=True.")
        check_fits(source, scores, topk)
        if scores.shape[1] != self.unfilled:
            raise ReplayStateError(f"{self.name}: the router has {scores.shape[1]} experts, not {self.unfilled}.")
        with torch.no_grad():
            # An operation, not an `if`: it must run again in every run of the graph.
            torch._assert_async(source[0, 0] != self.unfilled, f"{self.name}: not filled since its last run")
            indices = source.to(torch.int64)
            if self.live is not None and not recompute:
                assert default_compute_topk is not None, "Megatron-Core passes its own top-k"
                chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
                indices = torch.where(self.live.unsqueeze(1), chosen, indices)
            if self.used is not None and not recompute:
                self.used.copy_(indices)
            if is_captured(scores):  # a warm-up leaves the slot filled, for the next one and for the capture
                self.captured = True
                source.fill_(self.unfilled)
        return gather_topk(scores, indices)


def _require(holds: Tensor, message: str, error: type[RouterReplayError] = LayoutError) -> None:
    if holds.is_cuda:
        torch._assert_async(holds, message)  # a host sync for each micro-batch would cost more than the graph saves
    elif not bool(holds):
        raise error(message)
