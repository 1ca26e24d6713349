"""The one check of rows: it copies routes and raises for rows that no router can have chosen.

| fault | rows | result |
| --- | --- | --- |
| narrow | the dtype does not reach the model's last expert: a cast has wrapped ids | raises |
| outside | an id is no expert's; a row is -1 in some places only | raises |
| absent | a row of -1 in every layer | raises, or is live |
| lost | a route names an expert twice, as zeros do | raises, or is live |

Nothing here rests on chance. `trace.stale` finds one row over many different tokens afterwards, and a session compares the
rest with the live router's choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.payload import Array, Source
from megatron_router_replay.trace.ids import find_invalid_routes, find_outside, has_repeats
from megatron_router_replay.trace.runs import as_slice

_BLOCK_BYTES = 1 << 20
"""Bytes that one step reads: they stay in a processor's cache while they are checked and copied."""


def copy_routes(
    part: Array,
    out: Array,
    *,
    columns: Sequence[int],
    model: ModelRoutingInfo,
    source: Source,
    missing: str,
    first_row: int,
) -> Array:
    """Copy and check the MoE layers of each row; return the mask of rows with a route.

    Args:
        part: [rows, columns of any layers, topk], one row at least, any integer dtype.
        out: [rows, MoE layers, topk] in the narrow dtype; rows without a route are undefined afterwards.
        columns: of the MoE layers, in order.
        missing: "raise", or "live": rows that are absent or lost have no route.
        first_row: the token of row 0, for messages.

    Returns:
        [rows] bool.

    Raises:
        PayloadError: see the module's table.
    """
    if np.iinfo(part.dtype).max < model.num_experts - 1:
        raise source.error(
            f"MRR307: ids are {part.dtype}, which cannot hold the ids of {model.num_experts} experts: a cast has wrapped "
            "them. Keep them in int16, uint16 or wider."
        )
    rows_of_layers = part[:, as_slice(columns)]
    step = max(1, _BLOCK_BYTES // part[0].nbytes)
    is_clean = True
    for begin in range(0, len(part), step):
        block, narrow = rows_of_layers[begin : begin + step], out[begin : begin + step]
        # Before the cast, which wraps 300 to 44.
        is_clean &= find_outside(block, num_experts=model.num_experts) is None
        narrow[:] = block
        is_clean = is_clean and not has_repeats(narrow)
    if is_clean:
        return np.ones(len(part), np.bool_)
    # The whole part is searched for a fault, not its block alone: the number of wrong rows names the cause.
    return _sort_out(rows_of_layers, model, source, missing, first_row)


def _sort_out(rows: Array, model: ModelRoutingInfo, source: Source, missing: str, first_row: int) -> Array:
    """Return the mask of rows with a route; raise for a fault that may not be.

    Args:
        rows: [rows, MoE layers, topk].
    """
    routed: Array = (rows != -1).any(axis=(1, 2)) if rows.dtype.kind == "i" else np.ones(len(rows), np.bool_)
    at = np.flatnonzero(~routed)
    if len(at) and missing != "live":
        raise source.error(
            f"MRR302: {len(at)} rows {first_row + at[0]}..{first_row + at[-1]} are -1 in every layer: they have no route. "
            "Did the engine or the way here drop them? missing='live' lets the live router decide such tokens, and counts "
            "them."
        )
    invalid = find_invalid_routes(rows[routed], num_experts=model.num_experts)
    if invalid is None:
        return routed
    places = np.flatnonzero(invalid.invalid.any(axis=1))
    at = np.flatnonzero(routed)[places]
    if invalid.cause == "repeated" and missing == "live":
        routed[at] = False
        return routed
    first, last = first_row + int(at[0]), first_row + int(at[-1])
    zeros = int((invalid.invalid & (invalid.rows == 0).all(axis=2)).sum())
    if invalid.cause == "outside":
        cause = (
            "Likely physical ids, sent by an engine under expert load balancing (vLLM 0.21, SGLang 0.5.7 to 0.5.9, "
            "sglang-jax): turn it off or upgrade. Or they are of another model than the config."
            if int(invalid.rows.max()) >= model.num_experts
            else "Negative ids mark layers without data: the engine lost these, or the served model is dense there."
        )
    elif zeros:
        cause = (
            f"{zeros} routes are all zero, in rows {first}..{last}. The engine lost them: a fused kernel that bypasses the "
            "capture (vLLM 0.22 to 0.26 with FlashInfer, SGLang), or a prefix-cache hit (vLLM 0.21). Use another MoE backend "
            "or a fixed version; missing='live' lets the live router decide such tokens, and counts them. Zeros in a whole "
            "layer also mean that it is dense in the served model: give that model's config."
        )
    else:
        cause = "No router chooses one twice: the payload is damaged, or the model's topk or layers are others."
    # Rows without a route are not counted in `invalid`.
    where = invalid.describe(model.moe_layer_numbers, first_row=first - int(places[0]))
    raise source.error(f"MRR307: {where} {cause}")
