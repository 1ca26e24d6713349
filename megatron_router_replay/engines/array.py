"""Any array of routes with named axes -> RoutingTrace, for engines and files that have no module here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_router_replay.engines.assemble import SampleRows, build_trace
from megatron_router_replay.engines.model_info import ModelLike, as_model_info
from megatron_router_replay.engines.payload import Source, as_array
from megatron_router_replay.engines.tokens import resolve_tokens
from megatron_router_replay.trace import RoutingTrace

_ENGINE = "array"


def decode(
    result: Any,
    *,
    model: ModelLike,
    axes: Sequence[str],
    layer_numbers: Sequence[int] | None = None,
    token_ids: Any = None,
    start: int = 0,
    num_tokens: int | None = None,
    num_prompt_tokens: int | None = None,
    last_token_routed: bool = True,
    allow_surplus_rows: bool = False,
    allow_constant_layers: bool = False,
    weight_version: int | None = None,
    sample_id: str | None = None,
) -> RoutingTrace:
    """Return the routes of one sample from an array whose axes are named, nothing about it being guessed.

    Args:
        result: numpy, torch or nested lists, any integer dtype.
        model: ModelRoutingInfo, or the Hugging Face config as a dict or path.
        axes: "token", "layer" and "expert" in the array's order, such as ("layer", "token", "expert"); axes of length
            1 may be named "batch" or "".
        layer_numbers: Megatron's layer_number of each entry of the layer axis, entries of other than MoE layers must be
            filler (0 or -1). None: all hidden layers.
        token_ids: [S] of the sample.
        start: the token that the first row belongs to.
        num_tokens: S, where ids are not known.
        num_prompt_tokens: where the generation begins, for the checks of each part.
        last_token_routed: False: a row of the last token, where there is one, is padding.
        others: as for the engines.

    Returns:
        [S, MoE layers, topk] with sequence_lengths (S,).

    Raises:
        PayloadError: the axes do not fit the array, or the routes do not fit the tokens or the model.
    """
    info = as_model_info(model)
    source = Source(engine=_ENGINE, field="the array", sample=sample_id or "")
    names = tuple(axes)
    array = as_array(result, source=source)
    if array.ndim != len(names) or sorted(n for n in names if n not in ("batch", "")) != ["expert", "layer", "token"]:
        raise source.error(
            f"axes {list(names)} do not name shape {list(array.shape)}: one token, layer and expert each."
        )
    extra = [i for i, name in enumerate(names) if name in ("batch", "")]
    if any(array.shape[i] != 1 for i in extra):
        raise source.error(f"has shape {list(array.shape)}, but only axes of length 1 may be named batch or ''.")
    array = array.reshape([size for i, size in enumerate(array.shape) if i not in extra])
    kept = [name for name in names if name not in ("batch", "")]
    array = np.moveaxis(array, [kept.index("token"), kept.index("layer"), kept.index("expert")], [0, 1, 2])
    tokens = resolve_tokens(source=source, token_ids=token_ids, num_tokens=num_tokens)
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise source.error(f"start={start!r} must be an integer of 0 or more.")
    columns, filler = _columns(layer_numbers, info.moe_layer_numbers, array.shape[1], source)
    sample = SampleRows(
        source=source,
        parts=(array,),
        num_tokens=tokens.num_tokens,
        num_prompt_tokens=num_prompt_tokens,
        token_ids=tokens.token_ids,
        start=start,
        last_token_routed=last_token_routed,
        layer_columns=columns,
        filler_columns=filler,
        allow_surplus_rows=allow_surplus_rows,
        allow_constant_layers=allow_constant_layers,
        weight_version=weight_version,
        sample_id=sample_id,
    )
    return build_trace([sample], model=info)


def _columns(
    layer_numbers: Sequence[int] | None, moe_layer_numbers: tuple[int, ...], num_columns: int, source: Source
) -> tuple[tuple[tuple[int, int], ...] | None, tuple[int, ...] | None]:
    if layer_numbers is None:
        return None, None
    numbers = list(layer_numbers)
    if len(numbers) != num_columns or len(set(numbers)) != len(numbers):
        raise source.error(
            f"layer_numbers names {len(numbers)} layers, the array has {num_columns}: one each, no repeats."
        )
    missing = [number for number in moe_layer_numbers if number not in numbers]
    if missing:
        raise source.error(f"has no routes of the MoE layers {missing}.")
    pairs = tuple((number, numbers.index(number)) for number in moe_layer_numbers)
    return pairs, tuple(i for i, number in enumerate(numbers) if number not in moe_layer_numbers)
