"""One sample's arrays as an engine lays them out -> checked rows of a RoutingTrace.

The convention of every inference engine: S tokens are prompt + output, row i is the routing of token i, and there are
S - 1 rows, because the last sampled token is never fed back. The trace has S rows; those without a route have replay_mask
False. Payloads are copied once, into the trace's own dtype, in blocks that stay in the cache while they are checked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from megatron_router_replay.checks import warn
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.options import DecodeOptions
from megatron_router_replay.engines.payload import Array, EncodedRows, Source
from megatron_router_replay.engines.row_check import copy_routes
from megatron_router_replay.engines.tokens import SampleTokens
from megatron_router_replay.errors import listed
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.ids import fill_unrouted, index_dtype
from megatron_router_replay.trace.stale import find_stale_rows

_MAX_COUNTED_TOKENS = 1 << 20
"""Tokens that a response without routes and ids may claim; everywhere else rows or ids bound the memory."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowLayout:
    """The arrays of a sample as an engine lays them out.

    Args:
        arrays: [rows, layers, topk] that follow one another; the first row is token `start`.
        layer_numbers: Megatron's number of each entry of the layer axis. Columns of dense layers must be filler, all 0 or
            all -1; those of `ids_in_dense_layers` may hold anything.
        last_row: a row of the last token, where there is one, is "padding" or a "route" (of a full forward); "none": an
            engine sends no such row.
        start: the token of the first row, where the reply or its format states it.
    """

    arrays: Sequence[Array | EncodedRows]
    layer_numbers: Sequence[int]
    ids_in_dense_layers: bool = False
    last_row: Literal["none", "padding", "route"] = "none"
    start: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleRows:
    """One sample: the arrays of its routes, its tokens and the caller's options.

    Args:
        may_be_empty: the request was aborted before its first token, so no rows at all are right.
        begin: rows of earlier tokens are neither checked nor kept.
        ids_field: the field of a request that brings token ids with its reply; "": there is none.
    """

    source: Source
    layout: RowLayout
    tokens: SampleTokens
    options: DecodeOptions
    may_be_empty: bool = False
    begin: int = 0
    ids_field: str = ""

    @property
    def num_rows(self) -> int:
        return sum(part.shape[0] for part in self.layout.arrays)

    @property
    def start(self) -> int:
        return self.options.start if self.layout.start is None else self.layout.start

    @property
    def last_row(self) -> str:
        # Where nothing was sampled after the prompt, an engine may have forwarded, and sent, its last token too.
        return "route" if self.tokens.nothing_generated else self.layout.last_row


def build_trace(samples: Sequence[SampleRows], *, model: ModelRoutingInfo) -> RoutingTrace:
    """Return one trace with the samples in order; the memory of its topk_indices is allocated once.

    Raises:
        PayloadError: another number of rows or columns; a row that is none, see `row_check`; or only some samples have token
            ids, sample ids or a weight version.
    """
    # All samples are checked before memory is allocated for any: a wrong config is seen in the first one.
    for sample in samples:
        _check_shape(sample, model)
        _check_row_count(sample)
    token_ids = _all_or_none("token ids", samples, [sample.tokens.token_ids for sample in samples])
    sample_ids = _all_or_none("sample id", samples, [sample.options.sample_id for sample in samples])
    # A sample without any row has no route that a version could belong to; it is no reason to refuse the rest.
    routed = [sample for sample in samples if sample.num_rows]
    has_versions = bool(_all_or_none("weight version", routed, [sample.tokens.weight_version for sample in routed]))
    lengths = tuple(sample.tokens.num_tokens for sample in samples)
    # Nothing is cleared: `_fill` writes every row, as a route or as filler.
    shape = (sum(lengths), len(model.moe_layer_numbers), model.topk)
    indices = torch.empty(shape, dtype=index_dtype(model.num_experts))
    mask = np.zeros(len(indices), np.bool_)
    versions = np.full(len(indices), -1, np.int32)
    first = 0
    for sample, length in zip(samples, lengths):
        rows = slice(first, first + length)
        _fill(sample, model, indices[rows].numpy(), mask[rows])
        # A sample without any route, such as an aborted one, has no version either.
        if sample.tokens.weight_version is not None and mask[rows].any():
            versions[rows] = sample.tokens.weight_version
        first += length
    # Every row was checked while it was copied, so the trace does not check it again.
    trace = RoutingTrace.from_checked(
        topk_indices=indices,
        layer_numbers=model.moe_layer_numbers,
        num_experts=model.num_experts,
        replay_mask=torch.from_numpy(mask),
        token_ids=torch.from_numpy(np.concatenate(token_ids)) if token_ids else None,
        sequence_lengths=lengths,
        sample_ids=tuple(map(str, sample_ids)) if sample_ids else None,
        weight_version=torch.from_numpy(versions) if has_versions else None,
    )
    _report(trace, samples)
    return trace


def _all_or_none(noun: str, samples: Sequence[SampleRows], values: list[Any]) -> list[Any]:
    """Return the values if every sample has one, [] if none has; raise PayloadError if only some have."""
    missing = [sample for sample, value in zip(samples, values) if value is None]
    if missing and len(missing) < len(values):
        raise missing[0].source.error(f"MRR302: has no {noun} while others of the batch have.")
    return [] if missing else values


def _check_shape(sample: SampleRows, model: ModelRoutingInfo) -> None:
    """Raise unless the arrays have three axes, of the right width and with a known layer axis."""
    source, num_columns, num_moe = sample.source, len(sample.layout.layer_numbers), len(model.moe_layer_numbers)
    for part in sample.layout.arrays:
        if part.ndim != 3:
            raise source.error(
                f"MRR306: has shape {list(part.shape)}, expected [rows, layers, topk] = [rows, {num_columns}, {model.topk}]."
            )
        if part.shape[0] == 0:  # no row, so no width that could be wrong
            continue
        if part.shape[2] != model.topk:
            raise source.error(
                f"MRR306: has {part.shape[2]} experts a token, the model's topk is {model.topk}. Is this the config of the "
                "served model? Shared experts are not routed: have the engine send the routed experts only."
            )
        if part.shape[1] != num_columns:
            cause = "Is this the config of the served model, and are the layers of all pipeline stages there?"
            if num_columns == model.num_layers and part.shape[1] == num_moe:
                numbers = listed(model.moe_layer_numbers)
                cause = f"If it has the MoE layers alone, engines.array.decode names them: layer_numbers=[{numbers}]."
            raise source.error(
                f"MRR306: has {part.shape[1]} layers, expected {num_columns}: the model has {model.num_layers}, {num_moe} of "
                f"them MoE. {cause}"
            )


def _check_row_count(sample: SampleRows) -> None:
    """Raise unless there is one row for each token from `start` on that was fed back to the engine.

    The last token was sampled and not fed back, so S - 1 - start rows are right. One row more would also be the number for
    a stream that lost a token, ids without BOS or a `start` that is off by one, each of which shifts every row: it is
    legal only where an engine is known to send it.
    """
    rows, source, start, num_tokens = sample.num_rows, sample.source, sample.start, sample.tokens.num_tokens
    if sample.options.start not in (0, start):
        raise source.error(
            f"MRR305: its rows begin at token {start}, not at start={sample.options.start}: leave start out."
        )
    if start > num_tokens:
        raise source.error(f"MRR305: start={start} must lie in 0..{num_tokens}, the number of tokens.")
    # A row of the last token is legal for a prompt alone, and for vLLM 0.21 with multi-token prediction, which pads it.
    may_have_last = sample.last_row != "none"
    legal = {max(num_tokens - start - 1, 0)} | ({num_tokens - start} if may_have_last else set())
    if rows not in legal and (rows or not sample.may_be_empty):
        cause = "Are these the ids of this very sample, prompt with BOS and output, and is start right?"
        if start and rows in (num_tokens - 1, num_tokens):
            cause = "The server ignored start and sent every row: decode with start=0."
        elif rows > max(legal):
            cause += (
                " Speculative decoding of vLLM before 0.32 and SGLang before 0.5.13 ran past a stop: upgrade these."
            )
        expected = " or ".join(map(str, sorted(legal)))
        raise source.error(
            f"MRR305: has {rows} rows for tokens {start}..{num_tokens - 1}: expected {expected} (the last token has no "
            f"route). {cause}"
        )
    # Memory for these rows follows from a number that the response states alone.
    if not rows and sample.tokens.token_ids is None and num_tokens > _MAX_COUNTED_TOKENS:
        raise source.error(f"MRR309: claims {num_tokens} tokens without ids or routes: pass token_ids.")


def _fill(sample: SampleRows, model: ModelRoutingInfo, out: Array, mask: Array) -> None:
    """Copy and check one sample's rows into out [num_tokens, moe layers, topk] and mask [num_tokens]."""
    numbers, num_tokens = list(sample.layout.layer_numbers), sample.tokens.num_tokens
    columns = [numbers.index(number) for number in model.moe_layer_numbers]
    dense = sorted(set(range(len(numbers))).difference(columns))
    # The last sampled token is never fed back to the engine, so it has no route, whatever its row contains.
    end = num_tokens if sample.last_row == "route" else num_tokens - 1
    row, num_lost = sample.start, 0
    for part in sample.layout.arrays:
        first = max(row, sample.begin)  # of a decode server, the rows of the prompt are rubbish
        begin, count = first - row, max(min(end - row, len(part)) - (first - row), 0)
        row += len(part)
        if count:
            place = slice(first, first + count)
            mask[place] = copy_routes(
                part,
                out[place],
                columns=columns,
                model=model,
                source=sample.source,
                missing=sample.options.missing,
                first_row=first,
                begin=begin,
                dense=() if sample.layout.ids_in_dense_layers else dense,
            )
            num_lost += int((~mask[place]).sum())
        if isinstance(part, EncodedRows):  # rows that are not kept are base64, too, or the text is damaged
            part[:begin], part[begin + count :]
    if sample.tokens.token_ids is not None:
        num_lost += _drop_stale(sample, out, mask)
    if num_lost:
        _LOG.warning(
            "%s: %d rows have no route; the live router decides them (missing='live')", sample.source, num_lost
        )
    # Rows without a route have legal ids as well: uint8 has no -1, and they must never all go to one expert.
    fill_unrouted(torch.from_numpy(out), torch.from_numpy(mask), num_experts=model.num_experts)


def _drop_stale(sample: SampleRows, rows: Array, mask: Array) -> int:
    """Raise for one row over many different tokens, or take it out of the mask; return the number of such rows."""
    assert sample.tokens.token_ids is not None
    runs = find_stale_rows(rows, sample.tokens.token_ids, mask)
    if runs and sample.options.missing != "live":
        raise sample.source.error(
            f"MRR307: {runs[0].describe()} Upgrade the engine; missing='live' lets the live router decide such tokens, and "
            "counts them."
        )
    for run in runs:
        mask[run.start : run.stop] = False
    return sum(run.stop - run.start for run in runs)


def _report(trace: RoutingTrace, samples: Sequence[SampleRows]) -> None:
    if trace.token_ids is None and samples:
        send = f"Send {samples[0].ids_field} with the request, or pass" if samples[0].ids_field else "Pass"
        warn(
            "no token ids",
            "a trace without token ids: nothing proves that its rows are those of the tokens that a model runs, and replay "
            f"cannot find its rows by tokens. {send} the ids that the engine got and returned: token_ids=, or "
            "prompt_token_ids= where the reply has those of its output.",
            once=True,  # a trainer may decode sample by sample
        )
    if samples and _LOG.isEnabledFor(logging.INFO):
        rows = [len(samples), trace.num_tokens, int(trace.replay_mask.sum()), trace.num_layers]
        engine = samples[0].source.engine
        _LOG.info("%s: decoded %d samples: %d tokens, %d with a route, %d MoE layers", engine, *rows)


def all_layers(model: ModelRoutingInfo) -> range:
    """Return the layer_numbers of an array that has a column for each hidden layer, as most engines send it."""
    return range(1, model.num_layers + 1)
