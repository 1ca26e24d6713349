"""One sample's rows as an engine sent them -> checked rows of a RoutingTrace.

The row convention of every inference engine: S tokens are prompt + output, row i is the routing of token i, and there are
S - 1 rows, for the last sampled token is never fed back. The trace has S rows; those without a route have replay_mask
False. Payloads are copied once, into the trace's own dtype, in blocks that stay in the cache while they are checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_router_replay.engines.checks import (
    check_constant_layers,
    check_lost_rows,
    check_range,
    explain_repeats,
    has_repeats,
)
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.payload import Array, Source
from megatron_router_replay.ids import index_dtype, spread_experts
from megatron_router_replay.trace import RoutingTrace

Allocate = Callable[[int], Array]
"""Number of bytes -> that much uninitialised memory, [nbytes] uint8, aligned for any integer."""

_BLOCK_BYTES = 1 << 20
_MAX_COUNTED_TOKENS = 1 << 20
"""Tokens that a response without routes and ids may claim; everywhere else rows or ids bound what is allocated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRows:
    """One sample: the arrays of its routes and what is known of its tokens.

    Args:
        parts: arrays [rows, layers, topk] that follow one another; the first row is token `start`.
        num_tokens: S, prompt and output.
        num_prompt_tokens: where the generation begins; None where unknown.
        start: rows that the engine was asked to leave out.
        last_token_routed: a row of the last token, where there is one, is a real route (a full forward), not padding.
        layer_columns: (layer_number, column) of each MoE layer; None: by the number of columns, all hidden layers or
            the MoE layers only.
        filler_columns: columns that must be filler (all 0 or all -1) and carry no route; None: the dense layers.
        allow_surplus_rows: rows behind the last token are dropped instead of refused.
        allow_constant_layers: a layer that sends all tokens to the same experts is believed.
        may_be_empty: the request was aborted before its first token, so no rows at all are right.
    """

    source: Source
    parts: tuple[Array, ...]
    num_tokens: int
    num_prompt_tokens: int | None = None
    token_ids: Array | None = None
    start: int = 0
    last_token_routed: bool = False
    layer_columns: tuple[tuple[int, int], ...] | None = None
    filler_columns: tuple[int, ...] | None = None
    allow_surplus_rows: bool = False
    allow_constant_layers: bool = False
    may_be_empty: bool = False
    weight_version: int | None = None
    sample_id: str | None = None


def build_trace(
    samples: Sequence[SampleRows], *, model: ModelRoutingInfo, allocate: Allocate | None = None
) -> RoutingTrace:
    """Return one trace with the samples behind one another; the memory of its topk_indices is allocated once.

    Args:
        allocate: where that memory comes from; None: new memory.

    Raises:
        PayloadError: see `checks`; or only some samples have token ids, sample ids or a weight version.
    """
    num_rows = sum(sample.num_tokens for sample in samples)
    dtype = np.dtype(np.uint8 if index_dtype(model.num_experts) is torch.uint8 else np.int16)
    for sample in samples:
        _check_shape(sample, model)
    shape = (num_rows, len(model.moe_layer_numbers), model.topk)
    indices = (
        np.empty(shape, dtype)
        if allocate is None
        else allocate(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
    )
    mask = np.zeros(num_rows, np.bool_)
    begin = 0
    for sample in samples:
        rows = slice(begin, begin + sample.num_tokens)
        _fill(sample, model, indices[rows], mask[rows])
        begin += sample.num_tokens
    return RoutingTrace.from_checked(
        topk_indices=torch.from_numpy(indices),
        layer_numbers=model.moe_layer_numbers,
        num_experts=model.num_experts,
        replay_mask=torch.from_numpy(mask),
        token_ids=_join_token_ids(samples),
        sequence_lengths=tuple(sample.num_tokens for sample in samples),
        sample_ids=_join_sample_ids(samples),
        weight_version=_join_weight_versions(samples),
    )


def _check_shape(sample: SampleRows, model: ModelRoutingInfo) -> None:
    """Raise unless the arrays have the right width, a known layer axis and exactly the rows of these tokens."""
    source = sample.source
    if not 0 <= sample.start <= sample.num_tokens:
        raise source.error(f"start={sample.start} must lie in 0..{sample.num_tokens}, the number of tokens.")
    for part in sample.parts:
        if part.ndim != 3:
            raise source.error(
                f"has shape {list(part.shape)}, expected [rows, layers, topk] = [rows, {model.num_layers}, {model.topk}]."
            )
        if part.shape[0] == 0:
            continue
        if part.shape[2] != model.topk:
            shared = part.shape[2] - model.topk
            cause = (
                f"The {shared} more are the shared experts, which are not routed: have the engine send the routed "
                "experts only."
                if shared > 0 and shared == model.num_shared_experts
                else "Is this the config of the served model? Are shared experts appended?"
            )
            raise source.error(f"has {part.shape[2]} experts a token, the model's topk is {model.topk}. {cause}")
        _columns(sample, part.shape[1], model)
    _check_num_rows(sample)


def _check_num_rows(sample: SampleRows) -> None:
    rows = sum(part.shape[0] for part in sample.parts)
    with_last = sample.num_tokens - sample.start
    expected = max(with_last - 1, 0)
    if rows in (expected, with_last):
        return
    if rows == 0 and sample.may_be_empty:
        if sample.token_ids is None and sample.num_tokens > _MAX_COUNTED_TOKENS:
            raise sample.source.error(
                f"claims {sample.num_tokens} prompt tokens without ids or routes: pass token_ids."
            )
        return
    if rows > with_last and sample.allow_surplus_rows:
        return
    if sample.start and rows in (sample.num_tokens - 1, sample.num_tokens):
        cause = "The server ignored start and sent every row: decode with start=0."
    elif rows > with_last:
        cause = (
            "Surplus rows come from speculative decoding that ran past a stop; allow_surplus_rows=True drops them. "
            "Do the token ids lack some of the output?"
        )
    else:
        cause = "Are these the token ids (prompt and output) of this very sample? Was start passed on?"
    raise sample.source.error(
        f"has {rows} rows for tokens {sample.start}..{sample.num_tokens - 1}: expected {expected} "
        f"(the last token has no route) or {with_last}. {cause}"
    )


def _columns(
    sample: SampleRows, num_columns: int, model: ModelRoutingInfo
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Return (layer_number, column) of each MoE layer, and the columns that must be filler."""
    numbers = model.moe_layer_numbers
    if sample.layer_columns is not None:
        pairs, filler = sample.layer_columns, sample.filler_columns or ()
        if max((column for _, column in pairs), default=0) < num_columns:
            return pairs, filler
    elif num_columns == model.num_layers:
        pairs = tuple((number, number - 1) for number in numbers)
        routed = set(numbers)
        dense = tuple(i for i in range(model.num_layers) if i + 1 not in routed)
        return pairs, dense if sample.filler_columns is None else sample.filler_columns
    raise sample.source.error(
        f"has {num_columns} layers, the model has {model.num_layers} ({len(numbers)} of them MoE). "
        "Is this the config of the served model?"
    )


def _fill(sample: SampleRows, model: ModelRoutingInfo, out: Array, mask: Array) -> None:
    """Copy and check one sample's rows into out [num_tokens, moe layers, topk] and mask [num_tokens]."""
    routed_end = sample.num_tokens if sample.last_token_routed else max(sample.num_tokens - 1, 0)
    row = sample.start
    for part in sample.parts:
        count = min(part.shape[0], routed_end - row)
        if count > 0:
            _copy_part(sample, part[:count], row, out, model)
            row += count
    mask[sample.start : row] = True
    for gap in (slice(0, sample.start), slice(row, sample.num_tokens)):
        if gap.start < gap.stop:
            spread = spread_experts(gap.start, gap.stop - gap.start, topk=model.topk, num_experts=model.num_experts)
            out[gap] = spread.numpy()[:, None, :]
    for name, begin, end in _segments(sample, row):
        ids = None if sample.token_ids is None else sample.token_ids[begin:end]
        if model.topk == 1:
            check_lost_rows(out[begin:end], name=name, first_row=begin, model=model, source=sample.source)
        if not sample.allow_constant_layers:
            check_constant_layers(
                out[begin:end], name=name, first_row=begin, token_ids=ids, model=model, source=sample.source
            )


def _copy_part(sample: SampleRows, part: Array, first_row: int, out: Array, model: ModelRoutingInfo) -> None:
    pairs, filler = _columns(sample, part.shape[1], model)
    for column in filler:
        values = part[:, column]
        if values.size and not ((values == 0).all() or (values == -1).all()):
            row = int((values.reshape(len(values), -1) != 0).any(axis=1).argmax())
            raise sample.source.error(
                f"layer_number {column + 1} is dense by the model's config, but row {first_row + row} holds "
                f"{values[row].tolist()} there, not filler (0 or -1). Is this the config of the served model, and does "
                "the payload have one column for each hidden layer?"
            )
    runs = tuple(_runs(pairs))
    narrow = part.dtype == out.dtype
    step = max(1, _BLOCK_BYTES // max(1, part.shape[1] * part.shape[2] * part.itemsize))
    for begin in range(0, part.shape[0], step):
        block = part[begin : begin + step]
        target = out[first_row + begin : first_row + begin + len(block)]
        for layer_index, column, length in runs:
            values = block[:, column : column + length]
            if not narrow:
                # Checked before narrowing: a cast would wrap 300 to 44.
                check_range(values, first_row + begin, model.moe_layer_numbers[layer_index:], sample.source, model)
            target[:, layer_index : layer_index + length] = values
        if narrow:
            check_range(target, first_row + begin, model.moe_layer_numbers, sample.source, model)
        if has_repeats(target):
            rows = out[first_row : first_row + len(part)]
            _copy_rest(part, runs, rows)
            raise explain_repeats(
                rows,
                first_row=first_row,
                num_prompt_tokens=sample.num_prompt_tokens,
                model=model,
                source=sample.source,
            )


def _copy_rest(part: Array, runs: Sequence[tuple[int, int, int]], out: Array) -> None:
    for layer_index, column, length in runs:
        out[:, layer_index : layer_index + length] = part[:, column : column + length]


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (layer index, column, length) of each run of neighbouring columns, so that each is copied as one slice."""
    begin = 0
    for i in range(1, len(pairs) + 1):
        if i == len(pairs) or pairs[i][1] != pairs[i - 1][1] + 1:
            yield begin, pairs[begin][1], i - begin
            begin = i


def _segments(sample: SampleRows, end: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first row, end) of the prompt and of the generation; of all rows where the border is unknown."""
    border = sample.num_prompt_tokens
    if border is None:
        yield "all", sample.start, end
        return
    if sample.start < min(border, end):
        yield "prompt", sample.start, min(border, end)
    if max(border, sample.start) < end:
        yield "generation", max(border, sample.start), end


def _join_token_ids(samples: Sequence[SampleRows]) -> torch.Tensor | None:
    known = [sample.token_ids for sample in samples if sample.token_ids is not None]
    if not _all_or_none("token ids", [sample.token_ids is not None for sample in samples], samples):
        return None
    return torch.from_numpy(np.concatenate(known).astype(np.int32, copy=False))


def _join_sample_ids(samples: Sequence[SampleRows]) -> tuple[str, ...] | None:
    if not _all_or_none("a sample id", [sample.sample_id is not None for sample in samples], samples):
        return None
    return tuple(str(sample.sample_id) for sample in samples)


def _join_weight_versions(samples: Sequence[SampleRows]) -> torch.Tensor | None:
    if not _all_or_none("a weight version", [sample.weight_version is not None for sample in samples], samples):
        return None
    return torch.cat(
        [torch.full((sample.num_tokens,), sample.weight_version or 0, dtype=torch.int32) for sample in samples]
    )


def _all_or_none(what: str, having: Sequence[bool], samples: Sequence[SampleRows]) -> bool:
    if any(having) and not all(having):
        raise samples[having.index(False)].source.error(f"has no {what} while others of the batch have.")
    return any(having)
