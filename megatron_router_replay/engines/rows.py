"""One sample's arrays as an engine lays them out -> checked rows of a RoutingTrace.

The convention of every inference engine: S tokens are prompt + output, row i is the routing of token i, and there are
S - 1 rows, for the last sampled token is never fed back. The trace has S rows; those without a route have replay_mask False.
Payloads are copied once, into the trace's own dtype, in blocks that stay in the cache while they are checked.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.options import Allocate, DecodeOptions
from megatron_router_replay.engines.payload import Array, Source, as_array
from megatron_router_replay.engines.reply import Reply
from megatron_router_replay.engines.row_check import RowCheck
from megatron_router_replay.engines.tokens import SampleTokens
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.ids import index_dtype, spread_experts
from megatron_router_replay.trace.runs import neighbour_runs

MAX_SURPLUS_ROWS = 8
"""Speculative decoding runs past a stop by no more rows than it drafts; more are rows of other tokens."""

_MAX_COUNTED_TOKENS = 1 << 20
"""Tokens that a response without routes and ids may claim; everywhere else rows or ids bound what is allocated."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """The arrays of one sample as an engine lays them out.

    Args:
        parts: arrays [rows, layers, topk] that follow one another; the first row is token `start`.
        columns: the column of each MoE layer, in the order of the layers; None: all hidden layers have a column.
        filler: columns that must be filler (all 0 or all -1) and carry no route; None: the dense layers if all
            hidden layers have a column, else none.
        last_row: what a row of the last token is, where there is one: "none": an engine sends none, "padding", or "route" (of
            a full forward).
        may_end_early: with missing="live" rows of the last tokens may be missing, for the first are known to be the prompt's.
        explain_layers: what another number of columns means.
        explain_surplus: what more rows than are legal mean; they are then refused, whatever is allowed.
        explain_lost: what fewer rows may mean.
        start: the token of the first row, where the reply says it.
    """

    parts: tuple[Array, ...]
    columns: tuple[int, ...] | None = None
    filler: tuple[int, ...] | None = None
    last_row: Literal["none", "padding", "route"] = "none"
    may_end_early: bool = False
    explain_layers: str = "Is this the config of the served model?"
    explain_surplus: str = ""
    explain_lost: str = ""
    start: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRows:
    """One sample: the arrays of its routes, whose tokens they are, and what the caller says.

    Args:
        may_be_empty: the request was aborted before its first token, so no rows at all are right.
        weight_version: [S] int32, or None where unknown.
    """

    source: Source
    layout: RowLayout
    tokens: SampleTokens
    options: DecodeOptions
    may_be_empty: bool = False
    weight_version: Array | None = None

    @property
    def num_rows(self) -> int:
        return sum(part.shape[0] for part in self.layout.parts)

    @property
    def last_row(self) -> str:
        # Where nothing was sampled after the prompt, an engine may have forwarded, and sent, its last token too.
        return "route" if self.tokens.nothing_generated else self.layout.last_row


def build_trace(
    samples: Sequence[SampleRows], *, model: ModelRoutingInfo, allocate: Allocate | None = None
) -> RoutingTrace:
    """Return one trace with the samples in order; the memory of its topk_indices is allocated once.

    Args:
        allocate: where that memory comes from; None: new memory.

    Raises:
        PayloadError: another number of rows or columns; a row that is none, see `row_check`; or only some samples have token
            ids, sample ids or a weight version.
    """
    lengths = tuple(sample.tokens.num_tokens for sample in samples)
    num_tokens, dtype = sum(lengths), np.dtype(np.uint8 if index_dtype(model.num_experts) is torch.uint8 else np.int16)
    for sample in samples:
        _check_shape(sample, model)
        _check_row_count(sample)
    shape = (num_tokens, len(model.moe_layer_numbers), model.topk)
    # Nothing is cleared: `_fill` writes every row, as a route or as filler.
    indices = (
        np.empty(shape, dtype)
        if allocate is None
        else allocate(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
    )
    mask = np.zeros(num_tokens, np.bool_)
    token_ids = _all_or_none("token ids", samples, [sample.tokens.token_ids for sample in samples])
    sample_ids = _all_or_none("sample id", samples, [sample.options.sample_id for sample in samples])
    # A sample without any row has no route that a version could belong to; it is no reason to refuse the others.
    routed = [sample for sample in samples if sample.num_rows]
    has_versions = bool(_all_or_none("weight version", routed, [sample.weight_version for sample in routed]))
    versions = np.full(num_tokens if has_versions else 0, -1, np.int32)
    begin = 0
    for sample, length in zip(samples, lengths):
        rows = slice(begin, begin + length)
        _fill(sample, model, indices[rows], mask[rows])
        if has_versions and sample.weight_version is not None:
            versions[rows] = sample.weight_version
        begin += length
    return RoutingTrace.from_checked(
        topk_indices=torch.from_numpy(indices),
        layer_numbers=model.moe_layer_numbers,
        num_experts=model.num_experts,
        replay_mask=torch.from_numpy(mask),
        token_ids=torch.from_numpy(np.concatenate(token_ids)) if token_ids else None,
        sequence_lengths=lengths,
        sample_ids=tuple(map(str, sample_ids)) if sample_ids else None,
        weight_version=torch.from_numpy(versions) if has_versions else None,
    )


def _all_or_none(what: str, samples: Sequence[SampleRows], values: list[Any]) -> list[Any]:
    """Return the values if every sample has one, [] if none has; raise PayloadError if only some have."""
    missing = [sample for sample, value in zip(samples, values) if value is None]
    if missing and len(missing) < len(values):
        raise missing[0].source.error(f"MRR302: has no {what} while others of the batch have.")
    return [] if missing else values


def _fill(sample: SampleRows, model: ModelRoutingInfo, out: Array, mask: Array) -> None:
    """Copy and check one sample's rows into out [num_tokens, moe layers, topk] and mask [num_tokens]."""
    start, num_tokens, border = sample.options.start, sample.tokens.num_tokens, sample.tokens.num_prompt_tokens
    check = RowCheck(
        layer_numbers=model.moe_layer_numbers,
        num_experts=model.num_experts,
        topk=model.topk,
        missing=sample.options.missing,
    )
    ignored = sample.options.ignore_before
    # The last sampled token is never fed back to the engine, so it has no route, whatever a row of its says.
    end = num_tokens if sample.last_row == "route" else max(num_tokens - 1, 0)
    row = start
    for part in sample.layout.parts:
        rows = part[: max(end - row, 0)]
        if not len(rows):
            continue
        columns, filler = find_columns(sample, part.shape[1], model)
        _check_filler(sample, rows, filler, row)
        place = slice(row, row + len(rows))
        mask[place] = check.copy(
            rows,
            out[place],
            columns=columns,
            kept=slice(0, len(columns)),
            source=sample.source,
            first_row=row,
            border=border,
            has_route=None if row >= ignored else np.arange(row, place.stop) >= ignored,
        )
        row = place.stop
    # Rows without a route hold legal ids as well: uint8 has no -1, and they must never all go to one expert.
    if start or row < num_tokens or not mask[:row].all():
        for _, first, length in neighbour_runs(np.flatnonzero(~mask)).tolist():
            filler_ids = spread_experts(first, length, topk=model.topk, num_experts=model.num_experts)
            out[first : first + length] = filler_ids.numpy()[:, None, :]
    if check.num_absent or check.num_lost:
        _LOG.warning(
            "%s: %d rows hold no route and %d were lost; the live router decides them (missing='live')",
            sample.source, check.num_absent, check.num_lost,
        )  # fmt: skip


def _check_shape(sample: SampleRows, model: ModelRoutingInfo) -> None:
    """Raise unless the arrays have three axes, of the right width and with a known layer axis."""
    source, num_tokens = sample.source, sample.tokens.num_tokens
    if sample.options.start > num_tokens:
        raise source.error(f"MRR305: start={sample.options.start} must lie in 0..{num_tokens}, the number of tokens.")
    for part in sample.layout.parts:
        if part.ndim != 3:
            raise source.error(
                f"MRR306: has shape {list(part.shape)}, expected [rows, layers, topk] = [rows, {model.num_layers}, "
                f"{model.topk}]."
            )
        if part.shape[0] == 0:  # no row, so no width that could be wrong
            continue
        shared = part.shape[2] - model.topk
        if shared:
            cause = (
                f"The {shared} more are the shared experts, which are not routed: have the engine send the routed "
                "experts only."
                if shared == model.num_shared_experts
                else "Is this the config of the served model? Are shared experts appended?"
            )
            raise source.error(
                f"MRR306: has {part.shape[2]} experts a token, the model's topk is {model.topk}. {cause}"
            )
        find_columns(sample, part.shape[1], model)


def _check_row_count(sample: SampleRows) -> None:
    """Raise unless there is one row for each token from `start` on that was fed back to the engine.

    The last token was sampled and not fed back, so S - 1 - start rows are right. One row more would also be the number for
    a stream that lost a token, ids without BOS or a `start` that is off by one, each of which shifts every row: it is
    legal only where an engine is known to send it.
    """
    rows, source, layout, options = sample.num_rows, sample.source, sample.layout, sample.options
    start, num_tokens = options.start, sample.tokens.num_tokens
    with_last = num_tokens - start
    expected = max(with_last - 1, 0)
    may_have_last = sample.last_row != "none"
    if rows == expected or (rows == with_last and may_have_last):
        return
    if rows == 0 and sample.may_be_empty:
        # Memory for these rows follows from a number that the response states alone.
        if sample.tokens.token_ids is None and num_tokens > _MAX_COUNTED_TOKENS:
            raise source.error(f"MRR309: claims {num_tokens} prompt tokens without ids or routes: pass token_ids.")
        return
    surplus = rows - expected
    if 0 < surplus <= MAX_SURPLUS_ROWS and options.allow_surplus_rows and not layout.explain_surplus:
        return
    if surplus < 0 and layout.may_end_early and options.missing == "live":
        return
    drop = "If they are, allow_surplus_rows=True drops rows of speculative decoding that ran past a stop."
    if surplus > 0 and layout.explain_surplus:
        cause = layout.explain_surplus
    elif start and rows in (num_tokens - 1, num_tokens):
        cause = "The server ignored start and sent every row: decode with start=0."
    elif surplus < 0:
        cause = f"Are these the token ids (prompt and output) of this very sample? Was start passed on? {layout.explain_lost}"
    elif surplus == 1:
        cause = (
            "One more is what a lost token of a stream, ids without their BOS token or a start that is off by one look "
            f"like. Are these the ids (prompt and output) of this very sample? {drop}"
        )
    else:
        cause = "Are these the ids of prompt and output? Ids of the output alone are as many too few as the prompt has."
        cause = f"{cause} {drop}" if surplus <= MAX_SURPLUS_ROWS else cause
    legal = f"{expected} (the last token has no route)" + (f" or {with_last}" if may_have_last else "")
    raise source.error(
        f"MRR305: has {rows} rows for tokens {start}..{num_tokens - 1}: expected {legal}. {cause.rstrip()}"
    )


def _check_filler(sample: SampleRows, part: Array, filler: tuple[int, ...], first_row: int) -> None:
    """Raise if a dense layer's column holds routes: the columns are then those of another model or release."""
    for column in filler:
        values = part[:, column]
        if not values.size or (values == 0).all() or (values == -1).all():
            continue
        # A row that was not captured is -1 in dense layers, too.
        mixed = sample.options.missing == "live"
        if not mixed or not ((values == 0).all(axis=1) | (values == -1).all(axis=1)).all():
            row = int((values != 0).any(axis=1).argmax())
            where = f"layer_number {column + 1}" if sample.layout.columns is None else f"column {column}"
            raise sample.source.error(
                f"MRR306: {where} is dense by the model's config, but row {first_row + row} holds "
                f"{values[row].tolist()} there, not filler (0 or -1). Is this the config of the served model, and does "
                "the payload have one column for each hidden layer?"
            )


def find_columns(
    sample: SampleRows, num_columns: int, model: ModelRoutingInfo
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the column of each MoE layer, and the columns that must be filler; raise if there are more or fewer."""
    layout, numbers = sample.layout, model.moe_layer_numbers
    if layout.columns is not None:
        columns, filler = layout.columns, layout.filler or ()
        expected = len(columns) + len(filler)
    else:
        columns = tuple(number - 1 for number in numbers)  # layer_number counts from 1
        dense = tuple(sorted(set(range(model.num_layers)).difference(columns)))
        filler = dense if layout.filler is None else layout.filler
        expected = model.num_layers
    if num_columns != expected:
        raise sample.source.error(
            f"MRR306: has {num_columns} layers, the model has {model.num_layers} ({len(numbers)} of them MoE). "
            f"{layout.explain_layers}"
        )
    return columns, filler


def all_layers(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    """Return an array with a column for each hidden layer."""
    return RowLayout(parts=(as_array(reply["routed_experts"], source=reply.source),))


def moe_layers(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
    """Return an array with a column for each MoE layer."""
    return replace(all_layers(reply, model, tokens, options), columns=tuple(range(len(model.moe_layer_numbers))))


def most_ids(model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> int:
    """Return how many expert ids a text may hold for these tokens; a longer one is refused before it is decoded.

    More than are right: the check of rows can then say what is wrong with a few too many, or with shared experts.
    """
    surplus = 65536 if options.allow_surplus_rows else 4096
    return (tokens.num_tokens + surplus) * model.num_layers * (model.topk + model.num_shared_experts)
