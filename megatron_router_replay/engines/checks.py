"""What a broken engine sends, and how it is told from a genuine route.

A route names `topk` different experts, so for topk >= 2 lost data (all zeros) is a repeated id and is found in every
single row. The rest is statistics and errs on the side of believing the engine:

- A layer that sends one whole part (prompt or generation) to the same experts in the same order is refused if the
  part has `MIN_CONSTANT_TOKENS` different tokens (or that many rows, where token ids are unknown). If the most
  frequent row of a layer has probability p for each different token, a genuine part of n tokens is refused with
  probability p ** (n - 1): 5e-10 for p = 0.5 and n = 32; a balanced router over 64 experts has p below 0.02.
  Degenerate output that repeats a few tokens has few different tokens and is believed. Without token ids it may be
  refused; `allow_constant_layers=True` believes it.
- For topk = 1 a lost row is 0 in every MoE layer, which is also a possible route. It is refused where a balanced router
  would send such a row once in 2 ** 40 tokens (num_layers * log2(num_experts) >= 40); models with fewer layers or
  experts have only the constant check.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.engines.payload import Array, Source
from megatron_router_replay.errors import PayloadError, listed
from megatron_router_replay.ids import find_outside, repeated_routes

MIN_CONSTANT_TOKENS = 32
_LOST_ROW_BITS = 40


def check_range(
    values: Array, first_row: int, layer_numbers: Sequence[int], source: Source, model: ModelRoutingInfo
) -> None:
    """Raise if an id is not an expert's.

    Args:
        values: [rows, layers, topk], any integer dtype; row 0 is token `first_row`.
        layer_numbers: of each entry of axis 1 (may be longer).
    """
    fault = find_outside(values, num_experts=model.num_experts)
    if fault is None:
        return
    if int(values.max()) >= model.num_experts:
        cause = (
            "Likely physical ids, sent by an engine under expert load balancing (vLLM 0.14, 0.15 and 0.21, SGLang 0.5.7 "
            "to 0.5.9, sglang-jax): turn it off or upgrade. Or the config is not that of the served model."
        )
    else:
        cause = "Negative ids mark rows without data: the engine lost these, or the layer is dense in the served model."
    raise source.error(f"{fault.describe(layer_numbers, first_row=first_row)} {cause}")


def explain_repeats(
    rows: Array, *, first_row: int, num_prompt_tokens: int | None, model: ModelRoutingInfo, source: Source
) -> PayloadError:
    """Return the error for rows [rows, moe layers, topk] of which at least one names an expert twice."""
    repeated = repeated_routes(rows)
    zero = repeated & (rows == 0).all(axis=2)
    row, layer = (int(i) for i in np.argwhere(repeated)[0])
    layers = [model.moe_layer_numbers[i] for i in np.flatnonzero(repeated.any(axis=0))]
    bad_rows = np.flatnonzero(repeated.any(axis=1)) + first_row
    span = f"rows {bad_rows[0]}..{bad_rows[-1]}" if len(bad_rows) > 1 else f"row {bad_rows[0]}"
    if num_prompt_tokens is not None:
        # Rows that are wrong in one of the two alone tell engines' faults apart.
        prompt, generation = bad_rows[0] < num_prompt_tokens, bad_rows[-1] >= num_prompt_tokens
        span += " (prompt and generation)" if prompt and generation else " (prompt)" if prompt else " (generation)"
    if zero.any():
        what = f"{int(zero.sum())} routes are all zero"
        cause = (
            "The engine lost them: a fused kernel that bypasses the capture (vLLM 0.22 to 0.26 with FlashInfer, SGLang), a "
            "prefix-cache hit (vLLM 0.21) or vLLM 0.15. Use another MoE backend or a fixed version."
        )
    else:
        what = f"{int(repeated.sum())} routes name an expert twice"
        cause = "No router chooses one twice: the payload is damaged, or the model's topk or layers are others."
    return source.error(
        f"{what}, in layers [{listed(layers)}], {span}; first: row {first_row + row}, layer_number "
        f"{model.moe_layer_numbers[layer]} = {rows[row, layer].tolist()}. {cause}"
    )


def check_constant_layers(
    rows: Array,
    *,
    name: str,
    first_row: int,
    token_ids: Array | None,
    model: ModelRoutingInfo,
    source: Source,
) -> None:
    """Raise if a layer has the same route in every row of a part with enough different tokens.

    Args:
        rows: [rows, moe layers, topk] of one part.
        token_ids: [rows] of the part, or None.
    """
    if len(rows) < MIN_CONSTANT_TOKENS or model.topk == model.num_experts:
        return
    suspects = np.flatnonzero((rows[:MIN_CONSTANT_TOKENS] == rows[:1]).all(axis=(0, 2)))
    layers = [int(i) for i in suspects if (rows[:, i] == rows[0, i]).all()]
    # Degenerate output, of few different tokens, may well be that constant.
    if not layers or (token_ids is not None and len(np.unique(token_ids)) < MIN_CONSTANT_TOKENS):
        return
    numbers = listed([model.moe_layer_numbers[i] for i in layers])
    raise source.error(
        f"layers [{numbers}] hold the same route {rows[0, layers[0]].tolist()} in "
        f"all {len(rows)} rows {first_row}..{first_row + len(rows) - 1} ({name}): a broken capture kernel repeats one row. "
        "If the router really is that constant, pass allow_constant_layers=True."
    )


def check_lost_rows(rows: Array, *, name: str, first_row: int, model: ModelRoutingInfo, source: Source) -> None:
    """Raise if a row of a topk = 1 model is 0 in every layer, where that is as good as impossible."""
    if len(model.moe_layer_numbers) * math.log2(model.num_experts) < _LOST_ROW_BITS:
        return
    lost = np.flatnonzero(~rows.any(axis=(1, 2))) + first_row
    if lost.size:
        raise source.error(
            f"{lost.size} rows {lost[0]}..{lost[-1]} ({name}) are 0 in all {len(model.moe_layer_numbers)} MoE layers: "
            "the engine lost them."
        )
