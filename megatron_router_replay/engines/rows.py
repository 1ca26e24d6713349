"""How one sample's arrays are laid out, and the rule that says how many rows they must have.

The convention of every inference engine: S tokens are prompt + output, row i is the routing of token i, and there are
S - 1 rows, for the last sampled token is never fed back.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.payload import Array, Source

_MAX_COUNTED_TOKENS = 1 << 20
"""Tokens that a response without routes and ids may claim; everywhere else rows or ids bound what is allocated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """The arrays of one sample as an engine lays them out.

    Args:
        parts: arrays [rows, layers, topk] that follow one another; the first row is token `start`.
        layer_columns: (layer_number, column) of each MoE layer; None: all hidden layers, in order.
        filler_columns: columns that must be filler (all 0 or all -1) and carry no route; None: the dense layers.
        may_have_last_row: S - start rows are legal too, so the engine may send one of the last token.
        last_row_is_route: such a row is a real route (a full forward), not padding.
        explain_surplus: what more rows than that mean; they are then refused, whatever is allowed.
    """

    parts: tuple[Array, ...]
    layer_columns: tuple[tuple[int, int], ...] | None = None
    filler_columns: tuple[int, ...] | None = None
    may_have_last_row: bool = False
    last_row_is_route: bool = False
    explain_surplus: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRows:
    """One sample: the arrays of its routes and what is known of its tokens.

    Args:
        num_tokens: S, prompt and output.
        num_prompt_tokens: where the generation begins; None where unknown.
        start: rows that the engine was asked to leave out.
        may_be_empty: the request was aborted before its first token, so no rows at all are right.
        may_have_last_row, last_row_is_route: as in RowLayout, or because nothing was generated.
        allow_surplus_rows: rows behind the last token are dropped instead of refused.
        allow_constant_layers: a layer that sends all tokens to the same experts is believed.
        weight_version: [S] int32, or None where unknown.
    """

    source: Source
    layout: RowLayout
    num_tokens: int
    num_prompt_tokens: int | None = None
    token_ids: Array | None = None
    start: int = 0
    may_be_empty: bool = False
    may_have_last_row: bool = False
    last_row_is_route: bool = False
    allow_surplus_rows: bool = False
    allow_constant_layers: bool = False
    weight_version: Array | None = None
    sample_id: str | None = None

    @property
    def num_rows(self) -> int:
        return sum(part.shape[0] for part in self.layout.parts)


def check_rows(sample: SampleRows, model: ModelRoutingInfo) -> None:
    """Raise unless the arrays have the right width, a known layer axis and exactly the rows of these tokens."""
    source = sample.source
    if not 0 <= sample.start <= sample.num_tokens:
        raise source.error(f"start={sample.start} must lie in 0..{sample.num_tokens}, the number of tokens.")
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
                if shared > 0 and shared == model.num_shared_experts
                else "Is this the config of the served model? Are shared experts appended?"
            )
            raise source.error(f"has {part.shape[2]} experts a token, the model's topk is {model.topk}. {cause}")
        moe_columns(sample, part.shape[1], model)
    _check_num_rows(sample)


def _check_num_rows(sample: SampleRows) -> None:
    """Raise unless there is one row for each token from `start` on that was fed back to the engine.

    The last token was sampled and not fed back, so S - 1 - start rows are right. One row more would also be the number for
    a stream that lost a token, ids without BOS or a `start` that is off by one, each of which shifts every row: it is
    legal only where an engine is known to send it.
    """
    rows, source = sample.num_rows, sample.source
    with_last = sample.num_tokens - sample.start
    expected = max(with_last - 1, 0)
    if rows == expected or (rows == with_last and sample.may_have_last_row):
        return
    if rows == 0 and sample.may_be_empty:
        if sample.token_ids is None and sample.num_tokens > _MAX_COUNTED_TOKENS:
            raise source.error(f"claims {sample.num_tokens} prompt tokens without ids or routes: pass token_ids.")
        return
    if rows > expected and sample.layout.explain_surplus:
        cause = sample.layout.explain_surplus
    elif rows > expected and sample.allow_surplus_rows:
        return
    elif sample.start and rows in (sample.num_tokens - 1, sample.num_tokens):
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
    raise source.error(f"has {rows} rows for tokens {sample.start}..{sample.num_tokens - 1}: expected {legal}. {cause}")


def moe_columns(
    sample: SampleRows, num_columns: int, model: ModelRoutingInfo
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Return (layer_number, column) of each MoE layer, and the columns that must be filler."""
    numbers = model.moe_layer_numbers
    if sample.layout.layer_columns is not None:
        pairs, filler = sample.layout.layer_columns, sample.layout.filler_columns or ()
        if max((column for _, column in pairs), default=0) < num_columns:
            return pairs, filler
    elif num_columns == model.num_layers:
        pairs = tuple((number, number - 1) for number in numbers)
        routed = set(numbers)
        dense = tuple(i for i in range(model.num_layers) if i + 1 not in routed)
        return pairs, dense if sample.layout.filler_columns is None else sample.layout.filler_columns
    raise sample.source.error(
        f"has {num_columns} layers, the model has {model.num_layers} ({len(numbers)} of them MoE). "
        "Is this the config of the served model?"
    )
