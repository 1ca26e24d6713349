"""Prove that routes and tokens still match after a data pipeline moved both."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_router_replay.errors import LayoutError


def check_rows(rows: Tensor, input_ids: Tensor, *, token_ids: Tensor) -> None:
    """Raise unless every position that has a row holds the token that the row was recorded for.

    Args:
        rows: [b, s] integer, the trace row of each position, -1 on padding.
        input_ids: [b, s] integer.
        token_ids: [num_tokens] integer, `trace.token_ids`; -1 where the token is unknown (see `merge_traces`).

    Raises:
        LayoutError: shapes differ, a row lies outside the trace, or a token differs; names the first position.
    """
    if rows.shape != input_ids.shape:
        raise LayoutError(
            f"routing_rows are {list(rows.shape)}, input_ids {list(input_ids.shape)}: one row a position."
        )
    outside = (rows < -1) | (rows >= token_ids.shape[0])
    if bool(outside.any()):
        at = outside.nonzero()[0].tolist()
        raise LayoutError(
            f"routing_rows{at} is {int(rows[tuple(at)])}: the trace has rows 0..{token_ids.shape[0] - 1}, "
            "padding is -1."
        )
    if not bool((rows >= 0).any()):
        return  # nothing to compare, and a trace without rows could not be indexed
    expected = token_ids.to(rows.device)[rows.clamp(min=0).to(torch.int64)]
    wrong = (rows >= 0) & (expected != -1) & (expected != input_ids.to(rows.device))
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        raise LayoutError(
            f"input_ids{at} is {int(input_ids[tuple(at)])}, but its routing row {int(rows[tuple(at)])} was recorded "
            f"for token {int(expected[tuple(at)])} ({int(wrong.sum())} of {int((rows >= 0).sum())} positions differ): "
            "tokens and routing_rows were not moved by the same code."
        )
