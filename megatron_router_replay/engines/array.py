"""Any array of routes with named axes -> RoutingTrace, for engines and files that have no decoder here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from megatron_router_replay.checks import check_options
from megatron_router_replay.engines.model_info import ModelLike, as_model_info
from megatron_router_replay.engines.options import DecodeOptions, SampleOptions
from megatron_router_replay.engines.payload import Array, Source, as_array
from megatron_router_replay.engines.reader import Reply, refuse_non_reply
from megatron_router_replay.engines.sample_rows import RowLayout, SampleRows, all_layers, build_trace
from megatron_router_replay.engines.tokens import resolve_tokens
from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trace import RoutingTrace

_SOURCE = Source(engine="array", field="the array")


def decode(
    result: Any,
    *,
    model: ModelLike,
    axes: Sequence[str],
    layer_numbers: Sequence[int] | None = None,
    last_token_routed: bool = False,
    **options: Unpack[SampleOptions],
) -> RoutingTrace:
    """Return the routes of a sample from an array with named axes.

    Args:
        result: numpy, torch or nested lists, any integer dtype.
        axes: "token", "layer" and "expert" in the array's order, such as ("layer", "token", "expert"); axes of length
            1 may be named "batch" or "".
        layer_numbers: Megatron's layer_number of each entry of the layer axis; entries of dense layers must be filler
            (0 or -1). None: all hidden layers.
        last_token_routed: whether the array may have a row of the last token, S - start rows in all, as a full forward has.
            An engine's array has none, and one too many is refused.
        model, options: as for every engine, see `engines.DecodeOptions`.

    Returns:
        [S, MoE layers, topk] with sequence_lengths (S,).

    Raises:
        PayloadError: the axes do not fit the array, or the routes do not fit the tokens or the model.
    """
    check_options("decode", options, SampleOptions.__annotations__)
    refuse_non_reply(result, "array")
    info, sample = as_model_info(model), DecodeOptions(**options)
    tokens = resolve_tokens(Reply(source=_SOURCE), sample)
    array = _token_major(as_array(result, source=_SOURCE), axes)
    numbers = all_layers(info) if layer_numbers is None else list(layer_numbers)
    if layer_numbers is not None and (len(numbers) != array.shape[1] or len(set(numbers)) != len(numbers)):
        raise _SOURCE.error(
            f"MRR306: layer_numbers names {len(numbers)} layers, the array has {array.shape[1]}: one each, no repeats."
        )
    if missing := [number for number in info.moe_layer_numbers if number not in numbers]:
        raise _SOURCE.error(f"MRR302: has no routes of the MoE layers {missing}.")
    layout = RowLayout(arrays=(array,), layer_numbers=numbers, last_row="route" if last_token_routed else "none")
    return build_trace([SampleRows(source=_SOURCE, layout=layout, tokens=tokens, options=sample)], model=info)


def _token_major(array: Array, axes: Sequence[str]) -> Array:
    """Return the array as [tokens, layers, topk]."""
    names = [name for name in axes if name not in ("batch", "")]
    if sorted(names) != ["expert", "layer", "token"]:
        raise PayloadError(
            f"MRR101: axes {list(axes)} must name one 'token', one 'layer' and one 'expert' axis, in the array's order."
        )
    unit_axes = tuple(i for i, name in enumerate(axes) if name not in names)
    if array.ndim != len(axes) or any(array.shape[i] != 1 for i in unit_axes):
        raise _SOURCE.error(
            f"MRR101: axes {list(axes)} do not name shape {list(array.shape)}: one name an axis, and only axes of length 1 "
            "may be named batch or ''."
        )
    return array.squeeze(unit_axes).transpose([names.index(name) for name in ("token", "layer", "expert")])
