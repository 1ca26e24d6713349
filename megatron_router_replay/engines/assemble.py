"""One sample's rows as an engine sent them -> checked rows of a RoutingTrace.

The trace has S rows; those without a route have replay_mask False. Payloads are copied once, into the trace's own dtype, in
blocks that stay in the cache while they are checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from megatron_router_replay.engines.checks import (
    check_constant_layers,
    check_lost_rows,
    check_range,
    explain_repeats,
)
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.payload import Array
from megatron_router_replay.engines.rows import SampleRows, check_rows, find_columns
from megatron_router_replay.ids import has_repeats, index_dtype, spread_experts
from megatron_router_replay.runs import neighbour_runs
from megatron_router_replay.trace import RoutingTrace

Allocate = Callable[[int], Array]
"""Number of bytes -> that much uninitialised memory, [nbytes] uint8, aligned for any integer."""

_BLOCK_BYTES = 1 << 20


def build_trace(
    samples: Sequence[SampleRows], *, model: ModelRoutingInfo, allocate: Allocate | None = None
) -> RoutingTrace:
    """Return one trace with the samples behind one another; the memory of its topk_indices is allocated once.

    Args:
        allocate: where that memory comes from; None: new memory.

    Raises:
        PayloadError: see `checks`; or only some samples have token ids, sample ids or a weight version.
    """
    lengths = tuple(sample.tokens.num_tokens for sample in samples)
    dtype = np.dtype(np.uint8 if index_dtype(model.num_experts) is torch.uint8 else np.int16)
    for sample in samples:
        check_rows(sample, model)
    shape = (sum(lengths), len(model.moe_layer_numbers), model.topk)
    # Nothing is cleared: `_fill` writes every row, as a route or as filler.
    indices = (
        np.empty(shape, dtype)
        if allocate is None
        else allocate(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
    )
    mask = np.zeros(sum(lengths), np.bool_)
    token_ids = _of_all("token ids", [sample.tokens.token_ids for sample in samples], samples)
    sample_ids = _of_all("sample id", [sample.options.sample_id for sample in samples], samples)
    begin = 0
    for sample, length in zip(samples, lengths):
        rows = slice(begin, begin + length)
        _fill(sample, model, indices[rows], mask[rows])
        begin += length
    return RoutingTrace.from_checked(
        topk_indices=torch.from_numpy(indices),
        layer_numbers=model.moe_layer_numbers,
        num_experts=model.num_experts,
        replay_mask=torch.from_numpy(mask),
        token_ids=torch.from_numpy(np.concatenate(token_ids)) if token_ids else None,
        sequence_lengths=lengths,
        sample_ids=tuple(map(str, sample_ids)) if sample_ids else None,
        weight_version=_join_weight_versions(samples),
    )


def _fill(sample: SampleRows, model: ModelRoutingInfo, out: Array, mask: Array) -> None:
    """Copy and check one sample's rows into out [num_tokens, moe layers, topk] and mask [num_tokens]."""
    start, num_tokens = sample.options.start, sample.tokens.num_tokens
    # The last sampled token is never fed back to the engine, so it has no route, whatever a row of its says.
    routed_end = num_tokens if sample.last_row_is_route else max(num_tokens - 1, 0)
    row = start
    for part in sample.layout.parts:
        count = min(part.shape[0], routed_end - row)
        if count > 0:
            _copy_part(sample, part[:count], row, out, model)
            row += count
    mask[start:row] = True
    # Rows without a route hold legal ids as well: uint8 has no -1, and they must never all go to one expert.
    for begin, end in ((0, start), (row, num_tokens)):
        if begin < end:
            spread = spread_experts(begin, end - begin, topk=model.topk, num_experts=model.num_experts)
            out[begin:end] = spread.numpy()[:, None, :]
    # Prompt and generation apart: engines have lost the rows of one of them only.
    for name, begin, end in _segments(sample, row):
        ids = None if sample.tokens.token_ids is None else sample.tokens.token_ids[begin:end]
        if model.topk == 1:  # with more experts a lost row names expert 0 twice, and is refused where it is copied
            check_lost_rows(out[begin:end], name=name, first_row=begin, model=model, source=sample.source)
        if not sample.options.allow_constant_layers:
            check_constant_layers(
                out[begin:end], name=name, first_row=begin, token_ids=ids, model=model, source=sample.source
            )


def _copy_part(sample: SampleRows, part: Array, first_row: int, out: Array, model: ModelRoutingInfo) -> None:
    columns, filler = find_columns(sample, part.shape[1], model)
    for column in filler:
        values = part[:, column]
        if values.size and not ((values == 0).all() or (values == -1).all()):
            row = int((values != 0).any(axis=1).argmax())
            where = f"layer_number {column + 1}" if sample.layout.moe_columns is None else f"column {column}"
            raise sample.source.error(
                f"{where} is dense by the model's config, but row {first_row + row} holds "
                f"{values[row].tolist()} there, not filler (0 or -1). Is this the config of the served model, and does "
                "the payload have one column for each hidden layer?"
            )
    runs = _column_runs(columns)
    narrow = part.dtype == out.dtype
    step = max(1, _BLOCK_BYTES // max(1, part.shape[1] * part.shape[2] * part.itemsize))
    for begin in range(0, part.shape[0], step):
        block = part[begin : begin + step]
        target = out[first_row + begin : first_row + begin + len(block)]
        for layer_index, column, length in runs:
            values = block[:, column : column + length]
            # One check of all layers is faster than one of each run, but needs the ids as they came.
            if not narrow:
                # Checked before narrowing: a cast would wrap 300 to 44.
                check_range(values, first_row + begin, model.moe_layer_numbers[layer_index:], sample.source, model)
            target[:, layer_index : layer_index + length] = values
        if narrow:
            check_range(target, first_row + begin, model.moe_layer_numbers, sample.source, model)
        if has_repeats(target):
            # Of the whole part, not of this block: whether all rows are wrong, or a run of them, tells the cause.
            raise explain_repeats(
                part[:, list(columns)],
                first_row=first_row,
                num_prompt_tokens=sample.tokens.num_prompt_tokens,
                model=model,
                source=sample.source,
            )


@lru_cache(maxsize=64)
def _column_runs(columns: tuple[int, ...]) -> list[list[int]]:
    """Return (layer index, first column, number of columns) of each run of neighbouring columns, copied as one slice.

    Cached, for it is the same for every reply of a model and costs more than copying a short one.
    """
    runs: list[list[int]] = neighbour_runs(columns).tolist()
    return runs


def _segments(sample: SampleRows, end: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first row, end) of the prompt and of the generation; of all rows where the border is unknown."""
    start, border = sample.options.start, sample.tokens.num_prompt_tokens
    if border is None:
        yield "all", start, end
        return
    if start < min(border, end):
        yield "prompt", start, min(border, end)
    if max(border, start) < end:
        yield "generation", max(border, start), end


def _join_weight_versions(samples: Sequence[SampleRows]) -> torch.Tensor | None:
    # A sample without any row has no route that a version could belong to; it is no reason to refuse the others.
    routed = [sample for sample in samples if sample.num_rows]
    if not _of_all("weight version", [sample.weight_version for sample in routed], routed):
        return None
    unknown = [np.full(sample.tokens.num_tokens, -1, np.int32) for sample in samples]
    versions = [none if s.weight_version is None else s.weight_version for s, none in zip(samples, unknown)]
    return torch.from_numpy(np.concatenate(versions))


def _of_all(what: str, values: list[Any], samples: Sequence[SampleRows]) -> list[Any]:
    """Return the values if every sample has one, [] if none has; raise PayloadError if only some have."""
    missing = [sample for sample, value in zip(samples, values) if value is None]
    if missing and len(missing) < len(values):
        raise missing[0].source.error(f"has no {what} while others of the batch have.")
    return [] if missing else values
