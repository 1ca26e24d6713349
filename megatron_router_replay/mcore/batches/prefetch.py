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
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.errors import LayoutError, TraceError
from megatron_router_replay.mcore.batches.upload import take_layers, take_rows
from megatron_router_replay.trace.routing_trace import RoutingTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchRoutes:
    """The routes of one micro-batch; a replay session of `source` takes them for `routing_rows`.

    Args:
        routing_rows: of the shape that was given, int64 on the CPU, rows of `source`.
        topk_indices: [s, b, num_layers, topk] on the device, of each position; a position with row -1 has those of any row.
        layer_numbers: of `topk_indices`.
        source: the trace that they were taken from.
        copied: the event after which `topk_indices` is there; None: it is.
    """

    routing_rows: Tensor
    topk_indices: Tensor
    layer_numbers: tuple[int, ...]
    source: RoutingTrace
    copied: torch.cuda.Event | None

    def layers(self, layer_numbers: Sequence[int]) -> Tensor:
        """Return [b, s, these layers, topk], for work on the current stream.

        Raises:
            TraceError: a layer was not loaded.
        """
        missing = sorted(set(layer_numbers) - set(self.layer_numbers))
        if missing:
            raise TraceError(
                f"MRR423: these routes were prefetched without layer {missing[0]}: {list(self.layer_numbers)}."
            )
        if self.copied is not None:
            current = torch.cuda.current_stream(self.topk_indices.device)
            current.wait_event(self.copied)
            self.topk_indices.record_stream(current)  # its memory belongs to the side stream
        indices = [self.layer_numbers.index(number) for number in layer_numbers]
        return take_layers(self.topk_indices, indices, dim=2).transpose(0, 1)


def prefetch_batches(
    trace: RoutingTrace,
    batches: Iterable[Mapping[str, Any]],
    *,
    key: str = "routing_rows",
    layer_numbers: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[dict[str, Any]]:
    """Return a data iterator's batches with their rows replaced by their routes, loaded one batch ahead.

    Tensors and arrays of a batch, in mappings, lists and tuples, nested at will, are copied before the next one is asked for,
    so an iterator may write that into the same memory. A mapping comes back as a dict. What any other object holds is not
    copied.

    Args:
        batches: of this trace's step, one a micro-batch, with routing_rows under `key`. One batch more than was asked for
            is taken: give `itertools.islice(batches, num_microbatches)` of an iterator that goes on with the next step.
        others: as for `prefetch`.

    Raises:
        LayoutError: rows are outside the trace.
    """
    ahead: deque[dict[str, Any]] = deque()

    def rows() -> Iterator[Tensor]:
        for batch in batches:
            ahead.append({name: _copied(value) for name, value in batch.items() if name != key})
            yield batch[key]

    def with_routes(routes: MicrobatchRoutes) -> dict[str, Any]:
        return {**ahead.popleft(), key: routes}

    # Not a loop of our own: its variable would hold the last batch as long as the schedule holds this iterator.
    return map(with_routes, prefetch(trace, rows(), layer_numbers=layer_numbers, device=device))


def prefetch(
    trace: RoutingTrace,
    routing_rows: Iterable[Tensor],
    *,
    layer_numbers: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[MicrobatchRoutes]:
    """Yield every micro-batch's routes, the next one being gathered and copied while the caller works on this one.

    Nothing is retained: what was yielded is the caller's alone. On a GPU the stream that uses the routes waits for the copy;
    the host does not.

    Args:
        trace: this rank's, on the CPU.
        routing_rows: one int tensor a micro-batch, [b, s] or [n], rows of `trace`, -1 on padding; on the CPU.
        layer_numbers: the layers to load; None: all of the trace.
        device: where the routers run.

    Raises:
        TraceError: the trace has no such layer.
        LayoutError: rows are outside the trace.
    """
    layers = trace if layer_numbers is None else trace.select_layers(layer_numbers)
    target = torch.device(device)
    stream = torch.cuda.Stream(target) if target.type == "cuda" else None  # type: ignore[no-untyped-call]

    def load(rows: Tensor) -> MicrobatchRoutes:
        lowest, highest = map(int, rows.aminmax()) if rows.numel() else (0, -1)
        if lowest < -1 or highest >= trace.num_tokens:
            raise LayoutError(
                f"MRR202: routing_rows reach {lowest}..{highest}, the trace has 0..{trace.num_tokens - 1}; padding is -1."
            )
        by_position = rows.view(1, -1).t() if rows.dim() == 1 else rows.t()  # as routers see them
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            taken = take_rows(layers.topk_indices, by_position.reshape(-1).clamp(min=0), target)
            copied = None if stream is None else stream.record_event()
        return MicrobatchRoutes(
            routing_rows=rows,
            topk_indices=taken.view(*by_position.shape, *taken.shape[1:]),
            layer_numbers=layers.layer_numbers,
            source=trace,
            copied=copied,
        )

    with ThreadPoolExecutor(1, thread_name_prefix="routes-prefetch") as worker:
        pending: deque[Future[MicrobatchRoutes]] = deque()
        for rows in routing_rows:
            # This thread copies, because the caller may write the next rows into these while the worker reads.
            own_rows = rows.detach().to(device="cpu", dtype=torch.int64, copy=True)
            pending.append(worker.submit(load, own_rows))
            if len(pending) == 2:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _copied(value: Any) -> Any:
    """Return a value whose tensors and arrays have memory of their own."""
    if isinstance(value, Tensor):
        # Page-locked memory stays so, because the trainer's copy to the device does not wait then.
        return torch.empty_like(value, pin_memory=True).copy_(value) if value.is_pinned() else value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_copied(item) for item in value]
        return (
            type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        )  # a named tuple takes them apart
    return value
