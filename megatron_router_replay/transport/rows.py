"""Rows of traces -> memory for a message, and back: the only code that copies routes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.header import TraceFormat, TraceHeader
from megatron_router_replay.runs import neighbour_runs
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.memory import TraceMemory
from megatron_router_replay.transport.plan import ParallelLayout, Part, TransportPlan

_ARENA_BYTES = 1 << 20

Memory = Mapping[str, Tensor]
"""Rows of a part: topk_indices [rows, layers, topk] and the format's values per token [rows]."""


class RowSource(Protocol):
    """Anything that can write rows of a part; several threads ask at once."""

    @property
    def format(self) -> TraceFormat: ...

    @property
    def sequence_lengths(self) -> tuple[int, ...]: ...

    def fill(self, part: Part, start: int, stop: int, memory: Memory) -> None:
        """Write rows start..stop-1 of the part into `memory`, which has just that many."""


class RowSink(Protocol):
    """Where a receiver's rows go; one thread asks, bucket after bucket."""

    def memory(self, start: int, stop: int, *, block: bool) -> Memory | None:
        """Return contiguous memory for rows start..stop-1; None if there is none yet and the caller does not want to wait."""

    def done(self, start: int, stop: int) -> None:
        """Take note that these rows have arrived; the transport does not use their memory any more."""


class TraceRows:
    """The rows of traces behind one another, as a source: no trace is joined or copied before its rows are sent.

    Args:
        traces: at least one, of the same layers, num_experts, topk and optional values; one from each rollout worker,
            or one for the batch. Not to be changed until they are sent.

    Raises:
        TransportError: no traces, or they differ in kind.
    """

    def __init__(self, traces: Sequence[RoutingTrace]) -> None:
        if not traces:
            raise TransportError("cannot send no traces: at least one is needed.")
        self.format = TraceFormat.of(traces[0])
        for i, trace in enumerate(traces):
            if (format := TraceFormat.of(trace)) != self.format:
                raise TransportError(f"trace {i} is {format}, trace 0 {self.format}: they must agree.")
        self.sequence_lengths = tuple(
            length
            for trace in traces
            for length in (trace.sequence_lengths if trace.sequence_lengths is not None else (trace.num_tokens,))
        )
        self._ids = [trace.topk_indices.cpu() for trace in traces]
        self._per_token = {name: [getattr(trace, name).cpu() for trace in traces] for name in self.format.per_token}
        self._ends = np.array(list(accumulate(trace.num_tokens for trace in traces)), dtype=np.int64)

    def fill(self, part: Part, start: int, stop: int, memory: Memory) -> None:
        """Write rows start..stop-1 of the part into `memory`, which has just that many."""
        index = [self.format.layer_numbers.index(number) for number in part.layer_numbers]
        columns = neighbour_runs(index).tolist()
        ids = memory["topk_indices"]
        at = 0
        for trace, rows in self._runs(part, start, stop):
            target = slice(at, at + rows.stop - rows.start)
            for to_layer, from_layer, layers in columns:
                ids[target, to_layer : to_layer + layers] = self._ids[trace][rows, from_layer : from_layer + layers]
            for name, tensors in self._per_token.items():
                memory[name][target] = tensors[trace][rows]
            at = target.stop
        assert at == stop - start, "the plan's runs cover the part's rows"

    def _runs(self, part: Part, start: int, stop: int) -> Iterator[tuple[int, slice]]:
        """Yield (trace, its rows) that together are rows start..stop-1 of the part."""
        ends = np.cumsum(part.runs[:, 1] - part.runs[:, 0])
        run = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            row = int(part.runs[run, 1] - (ends[run] - start))
            trace = int(np.searchsorted(self._ends, row, side="right"))
            first_row = int(self._ends[trace - 1]) if trace else 0
            length = min(stop - start, int(ends[run]) - start, int(self._ends[trace]) - row)
            yield trace, slice(row - first_row, row - first_row + length)
            start += length
            run += start == ends[run]


class Arena:
    """Memory that traces are received into: new for every trace, or that of earlier ones.

    Args:
        device: where the traces shall be.
        pinned: page-locked memory, from which copies to a GPU run beside its work; only with CUDA.
        reuse: take the memory of traces that are gone (see `memory`). On a GPU torch's allocator does so anyway.
    """

    def __init__(self, *, device: torch.device, pinned: bool, reuse: bool) -> None:
        self._device, self._pinned = device, pinned
        self._memory = TraceMemory(_ARENA_BYTES, pinned=pinned) if reuse and device.type == "cpu" else None

    def take(self, nbytes: int) -> Tensor:
        """Return flat uint8 memory of this size."""
        if self._memory is not None:
            return torch.from_numpy(self._memory.take(nbytes))
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)


class WholeTrace:
    """A sink that becomes this place's trace; rows are received straight into it."""

    def __init__(self, header: TraceHeader, arena: Arena) -> None:
        self._header = header
        self._memory = views_of_bytes(arena.take(header.num_bytes), header, header.num_tokens, header.num_layers)

    def memory(self, start: int, stop: int, *, block: bool) -> Memory:
        """Return these rows of the trace."""
        return {name: tensor[start:stop] for name, tensor in self._memory.items()}

    def done(self, start: int, stop: int) -> None:
        """Nothing to do: the rows are where they belong."""

    def trace(self) -> RoutingTrace:
        """Return the trace; its rows were checked where they were decoded."""
        return RoutingTrace.from_checked(
            **self._memory,
            layer_numbers=self._header.layer_numbers,
            num_experts=self._header.num_experts,
            sequence_lengths=self._header.sequence_lengths,
        )


class BucketSink:
    """A sink with memory for a few buckets: one thread receives into it while another works on what has come.

    Args:
        buckets: for how many there is memory.
    """

    def __init__(self, header: TraceHeader, *, device: torch.device, buckets: int) -> None:
        self._header, self._device = header, device
        self._receiving: deque[dict[str, Tensor]] = deque()
        self._received: SimpleQueue[tuple[int, int, dict[str, Tensor]] | None] = SimpleQueue()
        self._free: SimpleQueue[dict[str, Tensor] | None] = SimpleQueue()
        for _ in range(buckets):
            self._free.put({})  # allocated when a bucket's size is known

    def memory(self, start: int, stop: int, *, block: bool) -> Memory | None:
        """Return memory for these rows; waits for `consume` if it shall.

        Raises:
            TransportError: `stop` was called.
        """
        try:
            memory = self._free.get(block=block)
        except Empty:
            return None
        if memory is None:
            raise TransportError("nobody takes the rows any more")
        rows = stop - start
        if not memory or len(memory["topk_indices"]) < rows:
            memory = self._header.empty(rows, device=self._device)
        self._receiving.append(memory)
        return {name: tensor[:rows] for name, tensor in memory.items()}

    def done(self, start: int, stop: int) -> None:
        """Hand the oldest bucket to `consume`."""
        self._received.put((start, stop, self._receiving.popleft()))

    def end(self) -> None:
        """Let `consume` return when it has had what came until now."""
        self._received.put(None)

    def stop(self) -> None:
        """Let whoever waits for memory raise: `consume` has failed."""
        self._free.put(None)

    def consume(self, consume: Callable[[int, RoutingTrace], None]) -> None:
        """Hand every bucket on until the end, in order; its memory is used again afterwards."""
        while (bucket := self._received.get()) is not None:
            start, stop, memory = bucket
            rows = {name: tensor[: stop - start] for name, tensor in memory.items()}
            numbers, num_experts = self._header.layer_numbers, self._header.num_experts
            consume(start, RoutingTrace.from_checked(**rows, layer_numbers=numbers, num_experts=num_experts))
            self._free.put(memory)


def check_plan(plan: TransportPlan, source: RowSource, layout: ParallelLayout) -> None:
    """Raise unless a plan is of this batch and layout.

    Raises:
        TransportError: names what differs.
    """
    for name, of_plan, actual in (
        ("sequence_lengths", plan.sequence_lengths, source.sequence_lengths),
        ("format", plan.format, source.format),
        ("layout", plan.layout, layout),
    ):
        if of_plan != actual:
            raise TransportError(f"the plan has {name}={str(of_plan)[:200]}, the batch {str(actual)[:200]}.")


def views_of_bytes(flat: Tensor, format: TraceFormat, rows: int, layers: int) -> Memory:
    """Return the format's tensors for some rows as views of the first bytes of flat uint8 memory.

    The widest dtype comes first, so each begins at a multiple of its width.
    """
    if not rows:
        return format.empty(0, layers)  # nothing to point to, and empty memory has strides that no view takes
    memory: dict[str, Tensor] = {}
    at = 0
    for name, like in sorted(format.empty(0, layers).items(), key=lambda item: -item[1].dtype.itemsize):
        shape = (rows, *like.shape[1:])
        nbytes = math.prod(shape) * like.dtype.itemsize
        memory[name] = flat[at : at + nbytes].view(like.dtype).view(shape)
        at += nbytes
    return memory


def as_bytes(tensor: Tensor) -> Tensor:
    """Return contiguous memory as flat uint8, the one dtype that every backend carries (NCCL has no int16)."""
    return tensor.view(-1).view(torch.uint8)
