"""How one sample's arrays are laid out, and the rule that says how many rows they must have.

The convention of every inference engine: S tokens are prompt + output, row i is the routing of token i, and there are
S - 1 rows, for the last sampled token is never fed back.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.options import DecodeOptions
from megatron_router_replay.engines.payload import Array, Source
from megatron_router_replay.engines.tokens import SampleTokens

_MAX_COUNTED_TOKENS = 1 << 20
"""Tokens that a response without routes and ids may claim; everywhere else rows or ids bound what is allocated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """The arrays of one sample as an engine lays them out.

    Args:
        parts: arrays [rows, layers, topk] that follow one another; the first row is token `start`.
        moe_columns: the column of each MoE layer, in the order of the layers; None: all hidden layers have a column.
        filler_columns: columns that must be filler (all 0 or all -1) and carry no route; None: the dense layers if all
            hidden layers have a column, else none.
        may_have_last_row: S - start rows are legal too, so the engine may send one of the last token.
        last_row_is_route: such a row is a real route (a full forward), not padding.
        explain_layers: what another number of columns means.
        explain_surplus: what more rows than are legal mean; they are then refused, whatever is allowed.
    """

    parts: tuple[Array, ...]
    moe_columns: tuple[int, ...] | None = None
    filler_columns: tuple[int, ...] | None = None
    may_have_last_row: bool = False
    last_row_is_route: bool = False
    explain_layers: str = "Is this the config of the served model?"
    explain_surplus: str = ""


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

    # Where nothing was sampled after the prompt, an engine may have forwarded, and sent, its last token too.
    @property
    def may_have_last_row(self) -> bool:
        return self.layout.may_have_last_row or self.tokens.nothing_generated

    @property
    def last_row_is_route(self) -> bool:
        return self.layout.last_row_is_route or self.tokens.nothing_generated


def check_rows(sample: SampleRows, model: ModelRoutingInfo) -> None:
    """Raise unless the arrays have the right width, a known layer axis and exactly the rows of these tokens."""
    source, start, num_tokens = sample.source, sample.options.start, sample.tokens.num_tokens
    if start > num_tokens:
        raise source.error(f"start={start} must lie in 0..{num_tokens}, the number of tokens.")
    for part in sample.layout.parts:
        if part.ndim != 3:
            raise source.error(
                f"has shape {list(part.shape)}, expected [rows, layers, topk] = [rows, {model.num_layers}, {model.topk}]."
            )
        if part.shape[0] == 0:  # no row, so no width that could be wrong
            continue
        if part.shape[2] != model.topk:
            shared = part.shape[2] - model.topk
            cause = (
                f"The {shared} more are the shared experts, which are not routed: have the engine send the routed "
                "experts only."
                if shared == model.num_shared_experts
                else "Is this the config of the served model? Are shared experts appended?"
            )
            raise source.error(f"has {part.shape[2]} experts a token, the model's topk is {model.topk}. {cause}")
        find_columns(sample, part.shape[1], model)
    _check_num_rows(sample)


def _check_num_rows(sample: SampleRows) -> None:
    """Raise unless there is one row for each token from `start` on that was fed back to the engine.

    The last token was sampled and not fed back, so S - 1 - start rows are right. One row more would also be the number for
    a stream that lost a token, ids without BOS or a `start` that is off by one, each of which shifts every row: it is
    legal only where an engine is known to send it.
    """
    rows, source = sample.num_rows, sample.source
    start, num_tokens = sample.options.start, sample.tokens.num_tokens
    with_last = num_tokens - start
    expected = max(with_last - 1, 0)
    if rows == expected or (rows == with_last and sample.may_have_last_row):
        return
    if rows == 0 and sample.may_be_empty:
        # Memory for these rows follows from a number that the response states alone.
        if sample.tokens.token_ids is None and num_tokens > _MAX_COUNTED_TOKENS:
            raise source.error(f"claims {num_tokens} prompt tokens without ids or routes: pass token_ids.")
        return
    if rows > expected and sample.layout.explain_surplus:
        cause = sample.layout.explain_surplus
    elif rows > expected and sample.options.allow_surplus_rows:
        return
    elif start and rows in (num_tokens - 1, num_tokens):
        cause = "The server ignored start and sent every row: decode with start=0."
    elif rows == with_last:
        cause = (
            "One more is what a lost token of a stream, ids without their BOS token or a start that is off by one look "
            "like. Are these the ids (prompt and output) of this very sample? If speculative decoding ran past a stop by "
            "one token, allow_surplus_rows=True drops its row."
        )
    elif rows > with_last:
        cause = (
            "Surplus rows come from speculative decoding that ran past a stop; allow_surplus_rows=True drops them. "
            "Do the token ids lack some of the output?"
        )
    else:
        cause = "Are these the token ids (prompt and output) of this very sample? Was start passed on?"
    legal = f"{expected} (the last token has no route)" + (f" or {with_last}" if sample.may_have_last_row else "")
    raise source.error(f"has {rows} rows for tokens {start}..{num_tokens - 1}: expected {legal}. {cause}")


def find_columns(
    sample: SampleRows, num_columns: int, model: ModelRoutingInfo
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the column of each MoE layer, and the columns that must be filler."""
    layout, numbers = sample.layout, model.moe_layer_numbers
    if layout.moe_columns is not None:
        columns, filler = layout.moe_columns, layout.filler_columns or ()
        expected = len(columns) + len(filler)
    else:
        columns = tuple(number - 1 for number in numbers)  # layer_number counts from 1
        dense = set(range(model.num_layers)).difference(columns)
        filler = tuple(sorted(dense)) if layout.filler_columns is None else layout.filler_columns
        expected = model.num_layers
    if num_columns != expected:
        raise sample.source.error(
            f"has {num_columns} layers, the model has {model.num_layers} ({len(numbers)} of them MoE). "
            f"{layout.explain_layers}"
        )
    return columns, filler


def most_ids(model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> int:
    """Return how many expert ids a text may hold for these tokens; a longer one is refused before it is decoded.

    More than are right: the check of rows can then say what is wrong with a few too many, or with shared experts.
    """
    surplus = 65536 if options.allow_surplus_rows else 4096
    return (tokens.num_tokens + surplus) * model.num_layers * (model.topk + model.num_shared_experts)
