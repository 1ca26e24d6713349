"""Traces -> rows in the memory of a message: the only code that copies routes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.header import TraceFormat
from megatron_router_replay.trace.runs import neighbour_runs
from megatron_router_replay.transport.plan import Runs, TransportError

Memory = Mapping[str, Tensor]
"""Rows of a trace: topk_indices [rows, layers, topk] and the format's values per token [rows]."""


class RowSource(Protocol):
    """Write rows of routes into given memory, so no process needs all of them at once."""

    @property
    def format(self) -> TraceFormat: ...

    @property
    def sequence_lengths(self) -> tuple[int, ...]: ...

    def fill(self, runs: Runs, layer_numbers: tuple[int, ...], memory: Memory) -> None:
        """Write these runs of rows, in order, into `memory`. It has just that many rows and layers."""


class TraceRows:
    """The rows of several traces in order, as a source: nothing is joined or copied before it is sent.

    Args:
        traces: at least one, of the same layers, num_experts, topk and optional values. Do not change them until they
            are sent.

    Raises:
        TransportError: no traces, or they differ in kind.
    """

    def __init__(self, traces: Sequence[RoutingTrace]) -> None:
        if not traces:
            raise TransportError("MRR606: cannot send no traces: at least one is needed.")
        self.format = TraceFormat.of(traces[0])
        for i, trace in enumerate(traces):
            if (format := TraceFormat.of(trace)) != self.format:
                raise TransportError(f"MRR606: trace {i} is {format}, trace 0 {self.format}: they must agree.")
        self.sequence_lengths = tuple(
            length
            for trace in traces
            for length in (trace.sequence_lengths if trace.sequence_lengths is not None else (trace.num_tokens,))
        )
        self._ids = [trace.topk_indices.cpu() for trace in traces]
        self._per_token = {name: [getattr(trace, name).cpu() for trace in traces] for name in self.format.per_token}
        self._ends = list(accumulate(trace.num_tokens for trace in traces))

    def fill(self, runs: Runs, layer_numbers: tuple[int, ...], memory: Memory) -> None:
        """Write these runs of rows, in order, into `memory`."""
        columns = neighbour_runs([self.format.layer_numbers.index(number) for number in layer_numbers]).tolist()
        ids = memory["topk_indices"]
        at = 0
        for start, stop in runs:
            while start < stop:
                trace = bisect_right(self._ends, start)
                first_row = self._ends[trace - 1] if trace else 0
                length = min(stop, self._ends[trace]) - start
                rows, target = slice(start - first_row, start - first_row + length), slice(at, at + length)
                for to_layer, from_layer, layers in columns:
                    ids[target, to_layer : to_layer + layers] = self._ids[trace][rows, from_layer : from_layer + layers]
                for name, tensors in self._per_token.items():
                    memory[name][target] = tensors[trace][rows]
                start, at = start + length, at + length
        assert at == len(ids), "the plan's runs cover the memory"


def views_of_bytes(flat: Tensor, format: TraceFormat, rows: int) -> dict[str, Tensor]:
    """Return the format's tensors for some rows as views of the first bytes of flat uint8 memory.

    The widest dtype comes first, so each begins at a multiple of its width.
    """
    if not rows:
        return format.empty(0)  # nothing to point to, and empty memory has strides that no view takes
    memory: dict[str, Tensor] = {}
    at = 0
    for name, like in sorted(format.empty(0).items(), key=lambda item: -item[1].dtype.itemsize):
        shape = (rows, *like.shape[1:])
        nbytes = math.prod(shape) * like.dtype.itemsize
        memory[name] = flat[at : at + nbytes].view(like.dtype).view(shape)
        at += nbytes
    return memory


def trace_of_memory(
    memory: Memory, format: TraceFormat, sequence_lengths: tuple[int, ...] | None = None
) -> RoutingTrace:
    """Return rows as a trace; they were checked where they were decoded."""
    numbers, num_experts = format.layer_numbers, format.num_experts
    return RoutingTrace.from_checked(
        **memory, layer_numbers=numbers, num_experts=num_experts, sequence_lengths=sequence_lengths
    )
