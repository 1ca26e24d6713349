"""Join traces: those of different samples, or the parts that ranks recorded of a batch.

The rows of a part's replay_mask, in its layers, are the ones that it covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import TraceError, listed
from megatron_router_replay.trace.join import UNKNOWN, PartJoiner
from megatron_router_replay.trace.routing_trace import RoutingTrace

_VALUES = ("topk_indices", "replay_mask", "token_ids", "weight_version")
"""The fields of a part that have a value for each row."""


def concat_traces(traces: Sequence[RoutingTrace]) -> RoutingTrace:
    """Join traces of different samples, in order.

    Row 0 of the second trace comes after the last row of the first. `merge_traces` joins the parts that different ranks
    recorded of a batch.

    The result has the metadata that every trace has. A trace without sequence_lengths counts as one sample; a trace with
    lengths () has no samples and changes nothing.

    Raises:
        TraceError: no traces; layers, num_experts or topk differ; only some have token_ids, sample_ids or
            weight_version.
    """
    _check_list(traces, "concatenate")
    names = [f"trace {i}" for i in range(len(traces))]
    _check_same(traces, "concatenate", ("layer_numbers", "num_experts", "topk"), names)
    if any(trace.weight_version is not None for trace in traces):
        traces = [_with_unknown_version(trace) for trace in traces]
    # A trace without rows has as many token ids as it has rows: none.
    have_rows = [trace.num_tokens > 0 for trace in traces]
    values = {
        "topk_indices": [trace.topk_indices for trace in traces],
        "replay_mask": [trace.replay_mask for trace in traces],
        "token_ids": _all_or_none("token_ids", traces, needed=have_rows),
        "weight_version": _all_or_none("weight_version", traces, needed=have_rows),
    }
    lengths = sample_ids = None
    if any(trace.sequence_lengths is not None for trace in traces):
        # Not "or": the lengths () of a batch of no samples are no missing lengths.
        per_trace = [(t.num_tokens,) if t.sequence_lengths is None else t.sequence_lengths for t in traces]
        lengths = tuple(length for part in per_trace for length in part)
        parts = _all_or_none("sample_ids", traces, needed=[len(part) > 0 for part in per_trace])
        sample_ids = tuple(name for part in parts for name in part) if parts else None
    tensors = {name: torch.cat(parts) if parts else None for name, parts in values.items()}
    return traces[0]._with(**tensors, sequence_lengths=lengths, sample_ids=sample_ids)


def _with_unknown_version(trace: RoutingTrace) -> RoutingTrace:
    """Return the trace with a weight version: of a trace without routes, such as an aborted request's, it is unknown."""
    if trace.weight_version is not None or bool(trace.replay_mask.any()):
        return trace
    return trace._with(weight_version=torch.full_like(trace.replay_mask, UNKNOWN, dtype=torch.int32))


def _all_or_none(name: str, traces: Sequence[RoutingTrace], *, needed: Sequence[bool]) -> list[Any]:
    """Return this value of every trace that has it; of those that are `needed`, all have it or none."""
    having = [i for i, trace in enumerate(traces) if getattr(trace, name) is not None]
    missing = [i for i, trace in enumerate(traces) if getattr(trace, name) is None and needed[i]]
    if missing and (with_value := [i for i in having if needed[i]]):
        raise TraceError(f"MRR107: cannot concatenate: trace {with_value[0]} has {name}, trace {missing[0]} has none.")
    return [] if missing else [getattr(traces[i], name) for i in having]


def merge_traces(
    parts: Sequence[RoutingTrace], *, allow_gaps: bool = False, names: Sequence[str] | None = None
) -> RoutingTrace:
    """Join the parts that ranks recorded of a batch: all layers, all rows.

    `concat_traces` joins different samples.

    A row without a route is left to the live router only if a part has it: by its token id, or because it
    is the last of a sample, which an engine never routes. Otherwise the part that has its route is missing.

    Args:
        parts: rows 0..N_i-1 of the same batch, replay_mask False where a part saw no route; each has some of the layers.
            A part with fewer rows than another did not see the last ones.
        allow_gaps: a row that was recorded in only some layers, or that no part has, gets no route instead of
            raising.
        names: names of the parts in messages. Default: "part 0", "part 1", ...

    Returns:
        [max N_i, all layers, topk] on the first part's device. token_ids and weight_version are compared wherever a
        part has them (-1 is unknown); sequence_lengths and sample_ids are those of the longest parts.

    Raises:
        TraceError: no parts, or not one name for each; parts of different models; two parts recorded different experts,
            different tokens or different weight versions for the same row; a row is missing in a layer or altogether. Names
            parts, rows and layers.
    """
    _check_list(parts, "merge")
    names = [f"part {i}" for i in range(len(parts))] if names is None else names
    if len(names) != len(parts):  # parts without a name would be left out
        raise TraceError(f"MRR107: cannot merge {len(parts)} parts with {len(names)} names: give one name for each.")
    # A part without layers (a stage of dense layers) has no expert count.
    with_layers = _check_same(parts, "merge", ("num_experts", "topk"), names)
    num_tokens = max(part.num_tokens for part in parts)
    layer_numbers = tuple(sorted({number for part in parts for number in part.layer_numbers}))

    def earlier(row: int, layer_number: int) -> str:
        return next(
            name
            for part, name in zip(parts, names)
            if layer_number in part.layer_numbers and row < part.num_tokens and part.replay_mask[row]
        )

    joiner = PartJoiner(
        num_tokens,
        layer_numbers,
        num_experts=with_layers.num_experts,
        topk=with_layers.topk,
        device=parts[0].device,
        earlier=earlier,
    )
    for part, name in zip(parts, names):
        for start in range(0, part.num_tokens, joiner.block_rows):
            rows = slice(start, min(start + joiner.block_rows, part.num_tokens))
            values = {each: getattr(part, each) for each in _VALUES}
            joiner.add(
                name,
                part.layer_numbers,
                rows,
                {each: None if value is None else value[rows] for each, value in values.items()},
            )
    if not allow_gaps and layer_numbers and not bool((mask := joiner.replay_mask).all()):
        _check_no_gaps(parts, names, layer_numbers, joiner.has_route, mask)
    return joiner.trace(
        sequence_lengths=of_the_longest("sequence_lengths", parts, num_tokens),
        sample_ids=of_the_longest("sample_ids", parts, num_tokens),
    )


def _check_list(traces: Sequence[RoutingTrace], attempt: str) -> None:
    if isinstance(traces, RoutingTrace) or not traces:
        given = "a single trace" if isinstance(traces, RoutingTrace) else "no traces"
        raise TraceError(f"MRR107: cannot {attempt} {given}: give a list, at least one is needed.")


def _check_same(
    traces: Sequence[RoutingTrace], attempt: str, same: Sequence[str], names: Sequence[str]
) -> RoutingTrace:
    """Return the first trace that has layers; raise unless all traces with layers agree in the attributes `same`."""
    for i, trace in enumerate(traces):
        if not isinstance(trace, RoutingTrace):
            raise TraceError(
                f"MRR101: cannot {attempt} {type(trace).__name__} (number {i}): each must be a RoutingTrace."
            )
        trace.check_unchanged()
    compared = [i for i, trace in enumerate(traces) if trace.num_layers or "layer_numbers" in same] or [0]
    first = traces[compared[0]]
    for i in compared:
        for name in same:
            if getattr(traces[i], name) != getattr(first, name):
                raise TraceError(
                    f"MRR107: cannot {attempt} {names[i]} with {name}={getattr(traces[i], name)} and {names[compared[0]]} "
                    f"with {name}={getattr(first, name)}: they are of different models."
                )
    return first


def _check_no_gaps(
    parts: Sequence[RoutingTrace], names: Sequence[str], layer_numbers: tuple[int, ...], seen: Tensor, mask: Tensor
) -> None:
    """Raise if a row has routes in some layers only (`seen` [layers, num_tokens] uint8), or is known to no part."""
    in_some = seen.amax(dim=0).bool() & ~mask
    if bool(in_some.any()):
        missing = (seen[:, in_some] == 0).sum(dim=1).tolist()
        layers = {number: count for number, count in zip(layer_numbers, missing) if count}
        having = [name for name, part in zip(names, parts) if not layers.keys().isdisjoint(part.layer_numbers)]
        raise TraceError(
            f"MRR108: {int(in_some.sum())} rows were recorded in some layers and not in others; rows missing by layer: "
            f"{layers}; the first such rows are {in_some.nonzero()[:8, 0].tolist()}. Parts with these layers: "
            f"{listed(having)}; is one of them incomplete, or another missing? allow_gaps=True drops their routes."
        )
    unknown = ~mask
    for part in parts:
        if part.token_ids is not None:
            unknown[: part.num_tokens] &= (part.token_ids == UNKNOWN).to(mask.device)
        if part.sequence_lengths:
            # An engine never forwards the last token it sampled. Other rows of a sample may be those of a lost rank.
            lengths = torch.tensor(part.sequence_lengths)
            unknown[(lengths.cumsum(0) - 1)[lengths > 0].to(mask.device)] = False
    if bool(unknown.any()):
        raise TraceError(
            f"MRR108: {int(unknown.sum())} of {len(unknown)} rows are in no part, neither with a route nor with a "
            f"token id; the first are {unknown.nonzero()[:8, 0].tolist()}. There are {listed(names)}; is another missing? "
            "allow_gaps=True leaves them without a route; a session that finds rows by tokens still raises for them."
        )


def of_the_longest(name: str, parts: Sequence[RoutingTrace], num_tokens: int) -> Any:
    """Return sequence_lengths or sample_ids of the longest parts, which must agree where they have them.

    Raises:
        TraceError: they differ.
    """
    values = {getattr(part, name) for part in parts if part.num_tokens == num_tokens} - {None}
    if len(values) > 1:
        raise TraceError(f"MRR107: cannot merge parts with different {name}: not of the same batch.")
    return next(iter(values), None)
