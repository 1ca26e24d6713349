"""The one check of rows: it copies routes and raises for rows that no router can have chosen.

| fault | rows | result |
| --- | --- | --- |
| narrow | the dtype does not reach the model's last expert: a cast has wrapped ids | raises |
| outside | an id is no expert's; a row is -1 in some places only | raises |
| absent | a row of -1 in every layer | raises, or is live |
| lost | a route names an expert twice, as zeros do | raises, or is live |

Nothing here rests on chance: all routes that a router can have chosen pass, however they repeat. A session compares them
with the live router's.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.payload import Array, Source
from megatron_router_replay.errors import listed
from megatron_router_replay.trace.ids import find_invalid_routes, find_outside, has_repeats
from megatron_router_replay.trace.runs import neighbour_runs

_BLOCK_BYTES = 1 << 20
"""Bytes that one step reads: they stay in a processor's cache while they are checked and copied."""


def copy_routes(
    part: Array,
    out: Array,
    *,
    columns: tuple[int, ...],
    model: ModelRoutingInfo,
    source: Source,
    missing: str = "raise",
    first_row: int = 0,
) -> Array:
    """Copy and check the MoE layers of each row; return the mask of rows with a route.

    Args:
        part: [rows, columns of any layers, topk], any integer dtype.
        out: [rows, MoE layers, topk] in the narrow dtype; rows without a route are undefined afterwards.
        columns: of the MoE layers, in order.
        missing: "raise", or "live": rows that are absent or lost have no route.
        first_row: the token of row 0, for messages.

    Returns:
        [rows] bool.

    Raises:
        PayloadError: see the module's table.
    """
    if len(part) and np.iinfo(part.dtype).max < model.num_experts - 1:
        raise source.error(
            f"MRR307: ids are {part.dtype}, which cannot hold the ids of {model.num_experts} experts: a cast has wrapped "
            "them. Keep them in int16, uint16 or wider."
        )
    runs = column_runs(columns)
    step = max(1, _BLOCK_BYTES // max(1, part.shape[1] * part.shape[2] * part.itemsize))
    is_clean = True
    for begin in range(0, len(part), step):
        is_clean &= _copy_block(part[begin : begin + step], out[begin : begin + step], runs, model.num_experts)
    if is_clean:
        return np.ones(len(part), np.bool_)
    # The whole part is searched for a fault, not its block alone: the number of wrong rows names the cause.
    return _sort_out(part[:, list(columns)], model, source, missing, first_row)


def _copy_block(block: Array, narrow: Array, runs: list[list[int]], num_experts: int) -> bool:
    """Copy the MoE layers of a block; return whether every row is a route."""
    is_same, is_clean = block.dtype == narrow.dtype, True
    for layer, column, length in runs:
        values = block[:, column : column + length]
        # Before the cast, which wraps 300 to 44. One check of all layers is faster, but needs the ids as they came.
        is_clean &= is_same or find_outside(values, num_experts=num_experts) is None
        narrow[:, layer : layer + length] = values
    if is_same:
        is_clean = find_outside(narrow, num_experts=num_experts) is None
    return is_clean and not has_repeats(narrow)


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
    at = np.flatnonzero(routed)[invalid.invalid.any(axis=1)]
    first, last = first_row + int(at[0]), first_row + int(at[-1])
    if invalid.cause == "outside":
        cause = (
            "Likely physical ids, sent by an engine under expert load balancing (vLLM 0.21, SGLang 0.5.7 to 0.5.9, "
            "sglang-jax): turn it off or upgrade. Or they are of another model than the config."
            if int(invalid.rows.max()) >= model.num_experts
            else "Negative ids mark layers without data: the engine lost these, or the served model is dense there."
        )
        row = int(np.flatnonzero(invalid.invalid.any(axis=1))[0])  # rows without a route are not counted in it
        raise source.error(f"MRR307: {invalid.describe(model.moe_layer_numbers, first_row=first - row)} {cause}")
    if missing != "live":
        zeros = int((invalid.invalid & (invalid.rows == 0).all(axis=2)).sum())
        problem = f"{zeros} routes are all zero"
        cause = (
            "The engine lost them: a fused kernel that bypasses the capture (vLLM 0.22 to 0.26 with FlashInfer, SGLang), or "
            "a prefix-cache hit (vLLM 0.21). Use another MoE backend or a fixed version; missing='live' lets the live router "
            "decide such tokens, and counts them. Zeros in a whole layer also mean that it is dense in the served model: "
            "give that model's config."
        )
        if not zeros:
            problem = f"{int(invalid.invalid.sum())} routes name an expert twice"
            cause = "No router chooses one twice: the payload is damaged, or the model's topk or layers are others."
        layers = [model.moe_layer_numbers[i] for i in np.flatnonzero(invalid.invalid.any(axis=0)).tolist()]
        row, layer = np.argwhere(invalid.invalid)[0].tolist()
        raise source.error(
            f"MRR307: {problem}, in layers [{listed(layers)}], rows {first}..{last}; first: row {first}, layer_number "
            f"{model.moe_layer_numbers[layer]} = {invalid.rows[row, layer].tolist()}. {cause}"
        )
    routed[at] = False
    return routed


@lru_cache(maxsize=64)
def column_runs(columns: tuple[int, ...]) -> list[list[int]]:
    """Return (layer index, first column, number of columns) of each run of neighbouring columns, copied as one slice.

    Cached, for it is the same for every reply of a model and costs more than copying a short one.
    """
    runs: list[list[int]] = neighbour_runs(columns).tolist()
    return runs
