"""Parts that ranks recorded under any parallel layout -> one trace of all layers and rows.

Rows are global names of tokens, so a part says by itself what it covers: the rows of its replay_mask, in its layers.
Pipeline stages bring other layers, data-, context- and sequence-parallel ranks other rows; whatever two ranks both saw
is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_router_replay.errors import TraceError
from megatron_router_replay.ids import index_dtype, spread_experts
from megatron_router_replay.runs import as_slice
from megatron_router_replay.trace import RoutingTrace

_BLOCK_BYTES = 16 << 20
"""Temporary memory of one step of a merge is a few times this, in bytes."""

UNKNOWN = -1
"""token_ids and weight_version of a row that no part knows."""


def merge_traces(parts: Sequence[RoutingTrace], *, allow_gaps: bool = False) -> RoutingTrace:
    """Return one trace of all layers of all parts, with a route in every row that any part recorded.

    Args:
        parts: rows 0..N_i-1 of the same batch, replay_mask False where a part saw no route; each has some of the layers.
            A part with fewer rows than another saw nothing of the last ones.
        allow_gaps: a row that was recorded in some layers and not in others gets no route, instead of an error.

    Returns:
        [max N_i, all layers, topk] on the first part's device. token_ids and weight_version are compared wherever a
        part knows them (-1 is unknown); sequence_lengths and sample_ids are those of the longest parts.

    Raises:
        TraceError: no parts; parts of different models; two parts recorded another set of experts, another token or
            another weight version for the same row; a gap. Names parts, rows and layers.
    """
    first = _check_same_model(parts)
    num_tokens = max(part.num_tokens for part in parts)
    layer_numbers = tuple(sorted({number for part in parts for number in part.layer_numbers}))
    num_layers, topk, device = len(layer_numbers), first.topk, parts[0].device
    indices = torch.empty((num_tokens, num_layers, topk), dtype=index_dtype(first.num_experts), device=device)
    mask = torch.zeros(num_tokens, dtype=torch.bool, device=device)
    gaps = _Gaps(layer_numbers)
    step = max(1, _BLOCK_BYTES // max(1, num_layers * topk * indices.element_size()))
    for start in range(0, num_tokens, step):
        rows = slice(start, min(start + step, num_tokens))
        seen = _merge_rows(parts, layer_numbers, rows, indices[rows])
        mask[rows] = seen.all(dim=1) & seen.any(dim=1)
        gaps.add(seen, start)
        unused = (~mask[rows]).nonzero()[:, 0]
        filler = spread_experts(start, rows.stop - start, topk=topk, num_experts=first.num_experts).to(device)
        indices[rows][unused] = filler[unused].unsqueeze(1)
    if gaps.num_rows and not allow_gaps:
        raise TraceError(gaps.message())
    lengths, sample_ids = _merge_samples(parts, num_tokens)
    return RoutingTrace.from_checked(
        topk_indices=indices,
        layer_numbers=layer_numbers,
        num_experts=first.num_experts,
        replay_mask=mask,
        token_ids=_merge_per_token("token_ids", parts, num_tokens),
        weight_version=_merge_per_token("weight_version", parts, num_tokens),
        sequence_lengths=lengths,
        sample_ids=sample_ids,
    )


def _check_same_model(parts: Sequence[RoutingTrace]) -> RoutingTrace:
    """Return the first part with layers; one without (a stage of dense layers) says nothing of experts."""
    if not parts:
        raise TraceError("cannot merge no parts: at least one is needed.")
    with_layers = [i for i, part in enumerate(parts) if part.num_layers]
    if not with_layers:
        return parts[0]
    first = parts[with_layers[0]]
    for i in with_layers:
        for name in ("num_experts", "topk"):
            if getattr(parts[i], name) != getattr(first, name):
                raise TraceError(
                    f"cannot merge part {i} with {name}={getattr(parts[i], name)} and part {with_layers[0]} with "
                    f"{name}={getattr(first, name)}: they are of different models."
                )
    return first


def _merge_rows(parts: Sequence[RoutingTrace], layer_numbers: tuple[int, ...], rows: slice, merged: Tensor) -> Tensor:
    """Write these rows of all parts to `merged` [rows, num_layers, topk]; return what was seen, [rows, num_layers]."""
    # Which part wrote a row and layer first, -1 for none: int32, for the message.
    owner = torch.full(merged.shape[:2], -1, dtype=torch.int32, device=merged.device)
    for i, part in enumerate(parts):
        count = min(rows.stop, part.num_tokens) - rows.start
        if count <= 0 or not part.num_layers:
            continue
        taken = slice(rows.start, rows.start + count)
        recorded = part.replay_mask[taken].to(merged.device).unsqueeze(1)
        routes = part.topk_indices[taken].to(merged.device)
        columns = as_slice([layer_numbers.index(number) for number in part.layer_numbers])
        known = owner[:count, columns] >= 0
        if bool((known & recorded).any()):
            _check_equal(i, part, rows.start, merged[:count, columns], routes, owner[:count, columns], known & recorded)
        elif bool(recorded.all()) and not bool(known.any()):
            merged[:count, columns], owner[:count, columns] = routes, i
            continue
        new = recorded & ~known
        # Where nothing was known before, what lies in `merged` may be overwritten: unused rows are filled afterwards.
        merged[:count, columns] = torch.where(known.unsqueeze(2), merged[:count, columns], routes)
        owner[:count, columns] = torch.where(new, i, owner[:count, columns])
    return owner >= 0


def _check_equal(
    index: int, part: RoutingTrace, start: int, before: Tensor, routes: Tensor, owner: Tensor, both: Tensor
) -> None:
    """Raise unless `routes` name the same experts as `before` wherever `both` is set; their order may differ."""
    different = (both & (before != routes).any(dim=2)).nonzero()
    row, layer = different[:, 0], different[:, 1]
    sets_differ = (before[row, layer].sort(dim=1).values != routes[row, layer].sort(dim=1).values).any(dim=1)
    if bool(sets_differ.any()):
        r, k = (int(i) for i in different[sets_differ][0])
        layers = sorted({part.layer_numbers[i] for i in layer[sets_differ].tolist()})
        raise TraceError(
            f"parts {int(owner[r, k])} and {index} disagree on row {start + r}, layer {part.layer_numbers[k]}: "
            f"{before[r, k].tolist()} and {routes[r, k].tolist()} ({int(sets_differ.sum())} such rows in layers {layers}). "
            "Were they recorded in the same step, with the same rows?"
        )


class _Gaps:
    """Counts rows that some layers have and others lack."""

    def __init__(self, layer_numbers: tuple[int, ...]) -> None:
        self.layer_numbers = layer_numbers
        self.num_rows = 0
        self.missing = [0] * len(layer_numbers)
        self.first_rows: list[int] = []

    def add(self, seen: Tensor, start: int) -> None:
        gap = seen.any(dim=1) & ~seen.all(dim=1)
        count = int(gap.sum())
        if not count:
            return
        self.num_rows += count
        missing = (~seen & gap.unsqueeze(1)).sum(dim=0).tolist()
        self.missing = [a + b for a, b in zip(self.missing, missing)]
        self.first_rows += (gap.nonzero()[: 8 - len(self.first_rows), 0] + start).tolist()

    def message(self) -> str:
        layers = {number: count for number, count in zip(self.layer_numbers, self.missing) if count}
        return (
            f"{self.num_rows} rows were recorded in some layers and not in others; rows missing by layer: {layers}; the "
            f"first such rows are {self.first_rows}. Is the part of a rank missing? allow_gaps=True drops their routes."
        )


def _merge_per_token(name: str, parts: Sequence[RoutingTrace], num_tokens: int) -> Tensor | None:
    if all(getattr(part, name) is None for part in parts):
        return None
    merged = torch.full((num_tokens,), UNKNOWN, dtype=torch.int32, device=parts[0].device)
    for i, part in enumerate(parts):
        if getattr(part, name) is None:
            continue
        values = getattr(part, name).to(merged.device)
        recorded = values != UNKNOWN
        before = merged[: part.num_tokens]
        wrong = ((before != UNKNOWN) & recorded & (before != values)).nonzero()[:, 0]
        if wrong.numel():
            row = int(wrong[0])
            raise TraceError(
                f"part {i} has {name}={int(values[row])} in row {row}, an earlier part {int(before[row])} "
                f"({wrong.numel()} such rows): they number their rows differently, or are of different steps."
            )
        before.copy_(torch.where(recorded, values, before))
    return merged


def _merge_samples(
    parts: Sequence[RoutingTrace], num_tokens: int
) -> tuple[tuple[int, ...] | None, tuple[str, ...] | None]:
    """Return sequence_lengths and sample_ids of the longest parts, which must agree where they have them."""
    lengths = {part.sequence_lengths for part in parts if part.num_tokens == num_tokens} - {None}
    names = {part.sample_ids for part in parts if part.num_tokens == num_tokens} - {None}
    if len(lengths) > 1 or len(names) > 1:
        raise TraceError("cannot merge parts with different sequence_lengths or sample_ids: not of the same batch.")
    return next(iter(lengths), None), next(iter(names), None)
