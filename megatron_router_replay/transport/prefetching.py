"""This rank's trace -> the rows of one micro-batch after another, on the device when its forward begins.

A thread gathers the next micro-batch's rows into page-locked memory and a side stream copies them while the present one
runs. On a CPU the same code runs without streams. A training loop changes one line:

    with mrr.replay(model_chunks, trace) as session:                        # trace stays on the CPU
        batches = prefetch_batches(trace, data_iterator, device="cuda")     # instead of data_iterator
        forward_backward_func(forward_step_func=forward_step, data_iterator=batches, ...)

whose forward_step calls `session.microbatch(batch["routing_rows"], model)` as ever. With virtual pipeline stages each
chunk's data_iterator is wrapped, best with that chunk's `layer_numbers`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_router_replay.routes import MicrobatchRoutes
from megatron_router_replay.trace import TENSOR_FIELDS, RoutingTrace
from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.snapshot import Snapshot
from megatron_router_replay.transport.timing import LegTimes


def prefetch_batches(
    trace: RoutingTrace,
    batches: Iterable[Mapping[str, Any]],
    *,
    key: str = "routing_rows",
    layer_numbers: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    times: LegTimes | None = None,
) -> Iterator[dict[str, Any]]:
    """Return a data iterator's batches with their rows replaced by their routes, loaded one batch ahead.

    A batch is held while the next one is asked for. An iterator that writes the next batch into the same memory would change
    it under the forward that is about to use it: that raises.

    Args:
        batches: of this trace's step, one a micro-batch, with routing_rows under `key`. One batch more than was asked for
            is taken: give `itertools.islice(batches, num_microbatches)` of an iterator that goes on with the next step.
        others: as for `prefetch`.

    Raises:
        TransportError: rows are outside the trace; or a batch changed while the next one was made.
    """
    ahead: deque[tuple[Mapping[str, Any], Snapshot]] = deque()

    def rows() -> Iterator[Tensor]:
        for batch in batches:
            ahead.append((batch, Snapshot(batch)))
            yield batch[key]

    def with_routes(routes: MicrobatchRoutes) -> dict[str, Any]:
        batch, snapshot = ahead.popleft()
        changed = snapshot.changed()
        if changed is not None:
            raise TransportError(
                f"{changed} of a batch changed while the next batch was made: the data iterator uses its memory again. "
                "Batches are taken one ahead, so give each memory of its own, such as tensor.clone()."
            )
        return {**batch, key: routes}

    loaded = prefetch(trace, rows(), layer_numbers=layer_numbers, device=device, times=times)
    # Not a loop of our own: its variable would hold the last batch as long as the schedule holds this iterator.
    return map(with_routes, loaded)


def prefetch(
    trace: RoutingTrace,
    routing_rows: Iterable[Tensor],
    *,
    layer_numbers: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    times: LegTimes | None = None,
) -> Iterator[MicrobatchRoutes]:
    """Yield every micro-batch's routes, the next one being gathered and copied while the caller works on this one.

    Nothing is retained: what was yielded is the caller's alone, and the memory in between is reused from one micro-batch
    to the next and gone at the end. With CUDA the caller's stream waits for the copy; the host does not.

    Args:
        trace: this rank's, on the CPU.
        routing_rows: one int tensor a micro-batch, any shape, rows of `trace`, -1 on padding; on the CPU.
        layer_numbers: the layers to load; None: all of the trace.
        device: where the routers run.
        times: "wait" counts how long the caller had to wait for rows.

    Raises:
        TraceError: the trace has no such layer.
        TransportError: rows are outside the trace.
    """
    layers = trace if layer_numbers is None else trace.select_layers(layer_numbers)
    target = torch.device(device)
    slots = [_Slot(target), _Slot(target)]
    stream = torch.cuda.Stream(target) if target.type == "cuda" else None  # type: ignore[no-untyped-call]
    times = LegTimes("training") if times is None else times
    with ThreadPoolExecutor(1, thread_name_prefix="routes-prefetch") as worker:
        pending: deque[Future[_Loaded]] = deque()
        for number, rows in enumerate(routing_rows):
            # A copy, made by this thread: whoever gave the rows may write the next ones into them while the worker reads.
            own_rows = rows.detach().to(device="cpu", dtype=torch.int64, copy=True)
            pending.append(worker.submit(_load, trace, layers, own_rows, slots[number % 2], stream))
            if len(pending) == 2:
                yield _hand_over(pending.popleft(), times)
        while pending:
            yield _hand_over(pending.popleft(), times)


class _Loaded(NamedTuple):
    routes: MicrobatchRoutes
    copied: torch.cuda.Event | None


class _Slot:
    """Page-locked memory of one micro-batch, and the event after which it may be overwritten."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._memory: dict[str, Tensor] = {}
        self.copied: torch.cuda.Event | None = None

    def memory(self, name: str, like: Tensor, rows: int) -> Tensor:
        """Return [rows, ...] to gather into, of the dtype and trailing shape of `like`."""
        if not self._pinned:
            return like.new_empty((rows, *like.shape[1:]))  # the caller gets this very memory: nothing to copy to
        if self.copied is not None:
            self.copied.synchronize()  # of the micro-batch before the last; only the worker thread waits here
            self.copied = None
        memory = self._memory.get(name)
        if memory is None or len(memory) < rows or memory.shape[1:] != like.shape[1:]:
            memory = self._memory[name] = torch.empty((rows, *like.shape[1:]), dtype=like.dtype, pin_memory=True)
        return memory[:rows]


def _load(
    source: RoutingTrace, trace: RoutingTrace, rows: Tensor, slot: _Slot, stream: torch.cuda.Stream | None
) -> _Loaded:
    used, local = torch.unique(rows, return_inverse=True)
    padding = int(used.numel() > 0 and int(used[0]) == -1)
    used, local = used[padding:], local - padding
    if used.numel() and not (0 <= int(used[0]) and int(used[-1]) < trace.num_tokens):
        raise TransportError(
            f"routing_rows reach {int(used[0])}..{int(used[-1])}, the trace has 0..{trace.num_tokens - 1}; padding is -1."
        )
    given = {name: value for name in TENSOR_FIELDS if (value := getattr(trace, name)) is not None}
    memory = {name: slot.memory(name, value, used.numel()) for name, value in given.items()}
    for name, value in given.items():
        torch.index_select(value, 0, used, out=memory[name])
    if stream is not None:
        memory["rows"] = slot.memory("rows", local.view(-1), local.numel())
        memory["rows"].copy_(local.view(-1))
        with torch.cuda.stream(stream):
            memory = {name: value.to(stream.device, non_blocking=True) for name, value in memory.items()}
            slot.copied = stream.record_event()
        local = memory.pop("rows").view(local.shape)
    micro = RoutingTrace.from_checked(**memory, layer_numbers=trace.layer_numbers, num_experts=trace.num_experts)
    return _Loaded(MicrobatchRoutes(trace=micro, routing_rows=local, source=source), slot.copied)


def _hand_over(following: Future[_Loaded], times: LegTimes) -> MicrobatchRoutes:
    with times.measure("wait"):
        loaded = following.result()
    if loaded.copied is not None:
        trace, rows = loaded.routes.trace, loaded.routes.routing_rows
        current = torch.cuda.current_stream(trace.device)
        current.wait_event(loaded.copied)
        for value in (rows, *(getattr(trace, name) for name in TENSOR_FIELDS)):
            if value is not None:
                value.record_stream(current)  # its memory belongs to the side stream
    return loaded.routes
