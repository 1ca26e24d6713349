"""Any array of routes with named axes -> RoutingTrace, for engines and files that have no decoder here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.model_info import ModelLike, ModelRoutingInfo
from megatron_router_replay.engines.options import Allocate, DecodeOptions, SampleOptions
from megatron_router_replay.engines.payload import Array, Source, as_array
from megatron_router_replay.engines.reply import Reply, StatedCount
from megatron_router_replay.engines.rows import RowLayout
from megatron_router_replay.engines.tokens import SampleTokens
from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trace import RoutingTrace

_SOURCE = Source(engine="array", field="the array")


def decode(
    result: Any,
    *,
    model: ModelLike,
    axes: Sequence[str],
    layer_numbers: Sequence[int] | None = None,
    num_prompt_tokens: int | None = None,
    last_token_routed: bool | None = None,
    allocate: Allocate | None = None,
    **options: Unpack[SampleOptions],
) -> RoutingTrace:
    """Return the routes of one sample from an array whose axes are named, nothing about it being guessed.

    Args:
        result: numpy, torch or nested lists, any integer dtype.
        axes: "token", "layer" and "expert" in the array's order, such as ("layer", "token", "expert"); axes of length
            1 may be named "batch" or "".
        layer_numbers: Megatron's layer_number of each entry of the layer axis, entries of other than MoE layers must be
            filler (0 or -1). None: all hidden layers.
        num_prompt_tokens: where the generation begins, for the checks of each part.
        last_token_routed: whether a row of the last token, S - start rows in all, is a route (True, of a full forward) or
            padding (False). None: an engine's array has no such row, and one too many is refused.
        model, allocate, options: as for every engine, see `engines.DecodeOptions`.

    Returns:
        [S, MoE layers, topk] with sequence_lengths (S,).

    Raises:
        PayloadError: the axes do not fit the array, or the routes do not fit the tokens or the model.
    """
    names = [name for name in axes if name not in ("batch", "")]
    if sorted(names) != ["expert", "layer", "token"]:
        raise PayloadError(f"MRR101: axes {list(axes)} must name one token, one layer and one expert axis.")

    def read(result: Any, *, batch: bool) -> list[Reply]:
        # The caller's border is compared with his token ids as if a reply had stated it.
        border = () if num_prompt_tokens is None else (StatedCount("num_prompt_tokens", "prompt", num_prompt_tokens),)
        return [Reply(source=_SOURCE, fields={"routed_experts": result}, counts=border)]

    def rows(reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
        array = _token_major(as_array(reply["routed_experts"], source=_SOURCE), axes, names)
        columns, filler = (None, None) if layer_numbers is None else _columns(array.shape[1], layer_numbers, model)
        return RowLayout(
            parts=(array,),
            columns=columns,
            filler=filler,
            last_row="none" if last_token_routed is None else "route" if last_token_routed else "padding",
        )

    decoder = Decoder(name="array", title="array", read=read, rows=rows, start="Pass the array.")
    return decoder.decode(result, model=model, allocate=allocate, **options)


def _token_major(array: Array, axes: Sequence[str], names: list[str]) -> Array:
    """Return the array as [tokens, layers, topk]."""
    if array.ndim != len(axes):
        raise _SOURCE.error(f"MRR101: axes {list(axes)} do not name shape {list(array.shape)}: one name an axis.")
    extra = tuple(i for i, name in enumerate(axes) if name not in names)
    if any(array.shape[i] != 1 for i in extra):
        raise _SOURCE.error(
            f"MRR101: has shape {list(array.shape)}, but only axes of length 1 may be named batch or ''."
        )
    return array.squeeze(extra).transpose([names.index(name) for name in ("token", "layer", "expert")])


def _columns(
    num_columns: int, numbers: Sequence[int], model: ModelRoutingInfo
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the column of each MoE layer, and those of other layers."""
    numbers = list(numbers)
    if len(numbers) != num_columns or len(set(numbers)) != len(numbers):
        raise _SOURCE.error(
            f"MRR306: layer_numbers names {len(numbers)} layers, the array has {num_columns}: one each, no repeats."
        )
    missing = [number for number in model.moe_layer_numbers if number not in numbers]
    if missing:
        raise _SOURCE.error(f"MRR302: has no routes of the MoE layers {missing}.")
    return (
        tuple(numbers.index(number) for number in model.moe_layer_numbers),
        tuple(i for i, number in enumerate(numbers) if number not in model.moe_layer_numbers),
    )
