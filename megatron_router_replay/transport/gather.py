"""Traces -> rows in the memory of a message: the only code that copies routes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate, chain
from typing import Protocol

from torch import Tensor

from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.header import TraceFormat
from megatron_router_replay.trace.ids import check_topk_indices, fill_unrouted
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
        TraceError: a trace was changed in place.
    """

    def __init__(self, traces: Iterable[RoutingTrace]) -> None:
        traces = list(traces)
        if not traces:
            raise TransportError("MRR606: cannot send no traces: at least one is needed.")
        for i, trace in enumerate(traces):
            if not isinstance(trace, RoutingTrace):
                raise TransportError(f"MRR606: cannot send {type(trace).__name__} (number {i}): decode it first.")
            trace.check_unchanged()  # its routes are not checked again where they arrive
        self.format = TraceFormat.of(traces[0])
        for i, trace in enumerate(traces):
            if (format := TraceFormat.of(trace)) != self.format:
                raise TransportError(f"MRR606: trace {i} is {format}, trace 0 {self.format}: they must agree.")
        self._traces = tuple(traces)
        lengths = [(t.num_tokens,) if t.sequence_lengths is None else t.sequence_lengths for t in traces]
        self.sequence_lengths = tuple(chain.from_iterable(lengths))
        names = ("topk_indices", *self.format.per_token)
        self._tensors = {name: [getattr(trace, name).cpu() for trace in traces] for name in names}
        self._ends = list(accumulate(trace.num_tokens for trace in traces))

    def fill(self, runs: Runs, layer_numbers: tuple[int, ...], memory: Memory) -> None:
        """Write these runs of rows, in order, into `memory`."""
        columns = neighbour_runs([self.format.layer_numbers.index(number) for number in layer_numbers]).tolist()
        at = 0
        for start, stop in runs:
            while start < stop:
                trace = bisect_right(self._ends, start)
                first_row = self._ends[trace - 1] if trace else 0
                length = min(stop, self._ends[trace]) - start
                # Rows of a single trace at a time: a run of the batch may end in another trace.
                rows, target = slice(start - first_row, start - first_row + length), slice(at, at + length)
                for name, tensors in self._tensors.items():
                    if name != "topk_indices":
                        memory[name][target] = tensors[trace][rows]
                        continue
                    for to_layer, layer, layers in columns:
                        memory[name][target, to_layer : to_layer + layers] = tensors[trace][
                            rows, layer : layer + layers
                        ]
                start, at = start + length, at + length
        assert at == len(memory["topk_indices"]), "the plan's runs cover the memory"
        for each in self._traces:  # a trainer may go on with them before they are sent
            each.check_unchanged()


def check_rows(memory: Memory, format: TraceFormat) -> None:
    """Raise unless the rows that a source wrote are routes, and fill those without a route with legal ids.

    Raises:
        TraceError: a route has an id that is no expert's, or an expert twice.
    """
    indices, mask = memory["topk_indices"], memory["replay_mask"]
    check_topk_indices(indices, num_experts=format.num_experts, layer_numbers=format.layer_numbers, replay_mask=mask)
    fill_unrouted(indices, mask, num_experts=format.num_experts)


def trace_of_memory(
    memory: Memory, format: TraceFormat, sequence_lengths: tuple[int, ...] | None = None
) -> RoutingTrace:
    """Return rows as a trace; they were checked where they were decoded."""
    numbers, num_experts = format.layer_numbers, format.num_experts
    return RoutingTrace.from_checked(
        **memory, layer_numbers=numbers, num_experts=num_experts, sequence_lengths=sequence_lengths
    )
