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
from megatron_router_replay.engines.payload import Array, EncodedRows, Source
from megatron_router_replay.trace.ids import find_invalid_routes
from megatron_router_replay.trace.runs import as_slice

_BLOCK_BYTES = 1 << 20
"""Bytes that one step reads: they stay in a processor's cache while they are checked and copied."""


def copy_routes(
    part: Array | EncodedRows,
    out: Array,
    *,
    columns: Sequence[int],
    model: ModelRoutingInfo,
    source: Source,
    missing: str,
    first_row: int,
    begin: int = 0,
    dense: Sequence[int] = (),
) -> Array:
    """Copy and check the MoE layers of each row; return the mask of rows with a route.

    Args:
        part: [rows, columns of any layers, topk], any integer dtype.
        out: [n, MoE layers, topk] in the narrow dtype, for `part[begin : begin + n]`; n is 1 or more. Rows without a route
            are undefined afterwards.
        columns: of the MoE layers, in order.
        dense: columns that must have filler.
        missing: "raise", or "live": rows that are absent or lost have no route.
        first_row: the token of row `begin`, for messages.

    Returns:
        [n] bool.

    Raises:
        PayloadError: see the module's table.
    """
    chosen, holds_experts = as_slice(columns), np.iinfo(part.dtype).max >= model.num_experts - 1
    # Of three rows, base64 has whole groups of characters.
    step = 3 * max(1, _BLOCK_BYTES // 3 // max(1, part.shape[1] * part.shape[2] * part.dtype.itemsize))
    fillers: set[int] = set()
    is_clean = holds_experts
    for start in range(0, len(out), step):
        narrow = out[start : start + step]
        block = part[begin + start : begin + start + len(narrow)]
        is_clean = is_clean and _is_filler(block, dense, fillers)
        is_clean = is_clean and find_invalid_routes(block[:, chosen], num_experts=model.num_experts, out=narrow) is None
        if not is_clean:
            break
    if is_clean:
        return np.ones(len(out), np.bool_)
    # All rows are searched for a fault, not its block alone: the number of wrong rows names the cause.
    rows = part[begin : begin + len(out)]
    check_filler(rows, dense, source, missing, first_row)
    if not holds_experts:
        raise source.error(
            f"MRR307: ids are {part.dtype}, which cannot hold the ids of {model.num_experts} experts: a cast has wrapped "
            "them. Keep them in int16, uint16 or wider."
        )
    out[:] = rows[:, chosen]
    return _sort_out(rows[:, chosen], model, source, missing, first_row)


def _is_filler(block: Array, dense: Sequence[int], fillers: set[int]) -> bool:
    """Return whether the columns of dense layers have one number in all blocks so far, 0 or -1.

    Args:
        fillers: the numbers of earlier blocks, to which this one's is added.
    """
    if dense:
        values = block[:, as_slice(dense)]
        lowest = int(values.min())
        fillers.add(lowest)
        return len(fillers) == 1 and lowest in (0, -1) and int(values.max()) == lowest
    return True


def check_filler(rows: Array, columns: Sequence[int], source: Source, missing: str, first_row: int) -> None:
    """Raise if a dense layer's column has routes: the columns are then those of another model or release."""
    for column in columns:
        values = rows[:, column]
        if (values == 0).all() or (values == -1).all():
            continue
        # A row that was not captured is -1 in dense layers, too: `copy_routes` raises for it, or it is live.
        captured = values[(rows != -1).any(axis=(1, 2))]
        if (captured == 0).all() or (captured == -1).all():
            continue
        is_filler = (values == 0).all(axis=1) | (values == -1).all(axis=1)
        if not is_filler.all() or missing != "live":
            row = int((is_filler if is_filler.all() else ~is_filler).argmax())
            raise source.error(
                f"MRR306: column {column} is of a dense layer by the model's config, but row {first_row + row} holds "
                f"{values[row].tolist()} there, not filler (0 or -1). Is this the config of the served model, and does "
                "the payload have one column for each hidden layer?"
            )


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
