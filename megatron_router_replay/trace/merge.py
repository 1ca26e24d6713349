"""Parts that ranks recorded under any parallel layout -> one trace of all layers and rows.

Rows are global names of tokens, so the rows of a part's replay_mask, in its layers, are the ones that it covers.
Pipeline stages bring other layers, data-, context- and sequence-parallel ranks other rows; a row that two ranks saw is
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import TraceError, listed
from megatron_router_replay.trace.ids import index_dtype, spread_experts
from megatron_router_replay.trace.routing_trace import RoutingTrace, check_traces
from megatron_router_replay.trace.runs import as_slice

_BLOCK_BYTES = 16 << 20
"""Temporary memory of a step of a merge is a few times this, in bytes."""

UNKNOWN = -1
"""token_ids and weight_version of a row where no part has one."""


def merge_traces(
    parts: Sequence[RoutingTrace], *, allow_gaps: bool = False, names: Sequence[str] | None = None
) -> RoutingTrace:
    """Join the parts that ranks recorded of a batch: all layers, all rows.

    `concat_traces` joins different samples.

    A row without a route is left to the live router only if a part has it: by its token id, or because it
    is the last of a sample, which an engine never routes. Otherwise the part that has its route is missing.

    Args:
        parts: rows 0..N_i-1 of the same batch, replay_mask False where a part saw no route; each has some of the layers.
            A part with fewer rows than another saw nothing of the last ones.
        allow_gaps: a row that was recorded in only some layers, or that no part has, gets no route instead of
            raising.
        names: names of the parts in messages. Default: "part 0", "part 1", ...

    Returns:
        [max N_i, all layers, topk] on the first part's device. token_ids and weight_version are compared wherever a
        part has them (-1 is unknown); sequence_lengths and sample_ids are those of the longest parts.

    Raises:
        TraceError: no parts; parts of different models; two parts recorded different experts, different tokens or
            different weight versions for the same row; a row is missing in a layer or altogether; rows of a part were left
            out by choice (`keep`). Names parts, rows and layers.
    """
    names = [f"part {i}" for i in range(len(parts))] if names is None else names
    first = _check_same_model(parts, names)
    num_tokens = max(part.num_tokens for part in parts)
    layer_numbers = tuple(sorted({number for part in parts for number in part.layer_numbers}))
    num_layers, topk, device = len(layer_numbers), first.topk, parts[0].device
    indices = torch.empty((num_tokens, num_layers, topk), dtype=index_dtype(first.num_experts), device=device)
    mask = torch.zeros(num_tokens, dtype=torch.bool, device=device)
    in_some = torch.zeros_like(mask)
    missing = torch.zeros(num_layers, dtype=torch.int64, device=device)
    step = max(1, _BLOCK_BYTES // max(1, num_layers * topk * indices.element_size()))
    for start in range(0, num_tokens, step):
        rows = slice(start, min(start + step, num_tokens))
        seen = _merge_rows(parts, names, layer_numbers, start, indices[rows])
        # Of no layers at all (stages without MoE layers alone), all() would be True.
        mask[rows] = seen.all(dim=1) & seen.any(dim=1)
        in_some[rows] = seen.any(dim=1) & ~mask[rows]
        missing += (~seen & in_some[rows].unsqueeze(1)).sum(dim=0)
        filler = spread_experts(start, rows.stop - start, topk=topk, num_experts=first.num_experts).to(device)
        indices[rows] = torch.where(mask[rows, None, None], indices[rows], filler.unsqueeze(1))
    if not allow_gaps and num_layers:
        unknown = ~mask & ~in_some & ~_known_rows(parts, num_tokens)
        _check_no_gaps(parts, names, in_some, dict(zip(layer_numbers, missing.tolist())), unknown)
    return RoutingTrace.from_checked(
        topk_indices=indices,
        layer_numbers=layer_numbers,
        num_experts=first.num_experts,
        replay_mask=mask,
        token_ids=_merge_per_token("token_ids", parts, names, num_tokens),
        weight_version=_merge_per_token("weight_version", parts, names, num_tokens),
        sequence_lengths=_of_the_longest("sequence_lengths", parts, num_tokens),
        sample_ids=_of_the_longest("sample_ids", parts, num_tokens),
    )


def _check_same_model(parts: Sequence[RoutingTrace], names: Sequence[str]) -> RoutingTrace:
    """Return the first part with layers; a part without layers (a stage of dense layers) has no expert count."""
    check_traces(parts, "merge")
    with_layers = [i for i, part in enumerate(parts) if part.num_layers] or [0]
    first = parts[with_layers[0]]
    for i in with_layers:
        for name in ("num_experts", "topk"):
            if getattr(parts[i], name) != getattr(first, name):
                raise TraceError(
                    f"MRR107: cannot merge {names[i]} with {name}={getattr(parts[i], name)} and {names[with_layers[0]]} with "
                    f"{name}={getattr(first, name)}: they are of different models."
                )
    return first


def _known_rows(parts: Sequence[RoutingTrace], num_tokens: int) -> Tensor:
    """Return [num_tokens] bool, True: a part has this row, with a route or without."""
    known = torch.zeros(num_tokens, dtype=torch.bool, device=parts[0].device)
    for part in parts:
        if part.token_ids is not None:
            known[: part.num_tokens] |= (part.token_ids != UNKNOWN).to(known.device)
        if part.sequence_lengths:
            # An engine never forwards the last token it sampled. Other rows of a sample may be those of a lost rank.
            lengths = torch.tensor(part.sequence_lengths)
            known[(lengths.cumsum(0) - 1)[lengths > 0].to(known.device)] = True
    return known


def _merge_rows(
    parts: Sequence[RoutingTrace], names: Sequence[str], layer_numbers: tuple[int, ...], start: int, merged: Tensor
) -> Tensor:
    """Write the parts' rows from `start` on to `merged` [rows, layers, topk]; return the seen routes, [rows, layers]."""
    seen = torch.zeros(merged.shape[:2], dtype=torch.bool, device=merged.device)
    for i, part in enumerate(parts):
        rows = slice(start, min(start + len(merged), part.num_tokens))
        recorded = part.replay_mask[rows].to(merged.device).unsqueeze(1)
        routes = part.topk_indices[rows].to(merged.device)
        place = slice(0, len(recorded)), as_slice([layer_numbers.index(number) for number in part.layer_numbers])
        before, known = merged[place], seen[place]
        different = (known & recorded & (before != routes).any(dim=2)).nonzero()
        if len(different):
            _check_same_sets(parts[: i + 1], names, different, start, before, routes)
        # Where nothing was known before, what lies in `merged` may be overwritten: unused rows are filled afterwards.
        merged[place] = torch.where(known.unsqueeze(2), before, routes)
        seen[place] = known | recorded
    return seen


def _check_same_sets(
    parts: Sequence[RoutingTrace], names: Sequence[str], different: Tensor, start: int, before: Tensor, routes: Tensor
) -> None:
    """Raise unless the last part's `routes` and those `before` only differ in the order of their experts.

    Args:
        different: [n, 2], row and layer where they are not the same.
        before, routes: [rows, the part's layers, topk].
    """
    row, layer = different[:, 0], different[:, 1]
    sets_differ = (before[row, layer].sort(dim=1).values != routes[row, layer].sort(dim=1).values).any(dim=1)
    if not bool(sets_differ.any()):
        return
    numbers = parts[-1].layer_numbers
    r, k = (int(i) for i in different[sets_differ][0])
    earlier = next(
        name
        for part, name in zip(parts, names)
        if numbers[k] in part.layer_numbers and start + r < part.num_tokens and part.replay_mask[start + r]
    )
    layers = sorted({numbers[i] for i in layer[sets_differ].tolist()})
    raise TraceError(
        f"MRR109: {earlier} and {names[len(parts) - 1]} disagree on row {start + r}, layer {numbers[k]}: "
        f"{before[r, k].tolist()} and {routes[r, k].tolist()} ({int(sets_differ.sum())} such rows in layers {layers}). "
        "Were they recorded in the same step, with the same rows? Different samples are joined by concat_traces."
    )


def _check_no_gaps(
    parts: Sequence[RoutingTrace],
    names: Sequence[str],
    in_some: Tensor,
    missing_by_layer: dict[int, int],
    unknown: Tensor,
) -> None:
    """Raise if a row has routes in some layers only, or is known to no part.

    Args:
        in_some, unknown: [num_tokens] bool, True: such a row.
        missing_by_layer: by layer number, how many rows of `in_some` have no route in this layer.
    """
    if bool(in_some.any()):
        layers = {number: count for number, count in missing_by_layer.items() if count}
        having = [name for name, part in zip(names, parts) if not layers.keys().isdisjoint(part.layer_numbers)]
        raise TraceError(
            f"MRR108: {int(in_some.sum())} rows were recorded in some layers and not in others; rows missing by layer: "
            f"{layers}; the first such rows are {in_some.nonzero()[:8, 0].tolist()}. Parts with these layers: "
            f"{listed(having)}; is one of them incomplete, or another missing? allow_gaps=True drops their routes."
        )
    if bool(unknown.any()):
        raise TraceError(
            f"MRR108: {int(unknown.sum())} of {len(unknown)} rows are in no part, neither with a route nor with a "
            f"token id; the first are {unknown.nonzero()[:8, 0].tolist()}. There are {listed(names)}; is another missing? "
            "allow_gaps=True leaves these rows to the live router."
        )


def _merge_per_token(name: str, parts: Sequence[RoutingTrace], names: Sequence[str], num_tokens: int) -> Tensor | None:
    if all(getattr(part, name) is None for part in parts):
        return None
    merged = torch.full((num_tokens,), UNKNOWN, dtype=torch.int32, device=parts[0].device)
    for i, part in enumerate(parts):
        if getattr(part, name) is None:
            continue
        values = getattr(part, name).to(merged.device)
        before = merged[: part.num_tokens]
        wrong = ((before != UNKNOWN) & (values != UNKNOWN) & (before != values)).nonzero()[:, 0]
        if wrong.numel():
            row = int(wrong[0])
            raise TraceError(
                f"MRR109: {names[i]} has {name}={int(values[row])} in row {row}, an earlier part {int(before[row])} "
                f"({wrong.numel()} such rows): they number their rows differently, or are of different steps."
            )
        before.copy_(torch.where(values != UNKNOWN, values, before))
    return merged


def _of_the_longest(name: str, parts: Sequence[RoutingTrace], num_tokens: int) -> Any:
    """Return sequence_lengths or sample_ids of the longest parts, which must agree where they have them."""
    values = {getattr(part, name) for part in parts if part.num_tokens == num_tokens} - {None}
    if len(values) > 1:
        raise TraceError(f"MRR107: cannot merge parts with different {name}: not of the same batch.")
    return next(iter(values), None)
