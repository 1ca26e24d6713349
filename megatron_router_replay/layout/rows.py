"""Prove that the trace rows of a batch, laid out by hand, still match its tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_router_replay.errors import LayoutError

MOVED_APART = "tokens and rows were not moved by the same code."
"""The cause of a position with a different token than its row."""


def check_tokens(rows: Tensor, input_ids: Tensor, *, token_ids: Tensor) -> None:
    """Raise unless each position with a row has the token of that row.

    Args:
        rows: [b, s] integer, the trace row of each position, -1 on padding.
        input_ids: [b, s] integer.
        token_ids: [num_tokens] integer, `trace.token_ids`; -1 where the token is unknown (see `merge_traces`).

    Raises:
        LayoutError: shapes differ, a row lies outside the trace, or a token differs; names the first position.
    """
    if rows.shape != input_ids.shape:
        raise LayoutError(
            f"MRR201: rows are {list(rows.shape)}, input_ids {list(input_ids.shape)}: one row a position."
        )
    outside = (rows < -1) | (rows >= token_ids.shape[0])
    if bool(outside.any()):
        at = outside.nonzero()[0].tolist()
        raise LayoutError(
            f"MRR202: rows{at} is {int(rows[tuple(at)])}: the trace has rows 0..{token_ids.shape[0] - 1}, "
            "padding is -1."
        )
    if not bool((rows >= 0).any()):
        return  # nothing to compare, and a trace without rows could not be indexed
    expected = torch.where(rows >= 0, token_ids.to(rows.device)[rows.clamp(min=0).to(torch.int64)], -1)
    count, detail = count_differing_tokens(input_ids.to(rows.device), expected, rows)
    if bool(count):
        raise LayoutError(f"MRR203: {detail()}")


def count_differing_tokens(
    input_ids: Tensor,
    expected: Tensor,
    rows: Tensor | None = None,
    *,
    why: str = MOVED_APART,
) -> tuple[Tensor, Callable[[], str]]:
    """Count the tokens that differ from the expected ones; on a GPU without a wait.

    Args:
        input_ids: [b, s] integers.
        expected: [b, s] integers, the token of each position; below 0: not known.
        rows: [b, s] integers, the trace rows that these are of; None: they were queued as such.
        why: the cause, for the message.

    Returns:
        The number of positions that differ, a scalar on the device; and a function that waits, and returns the first place.
    """
    known = expected >= 0
    wrong = (expected != input_ids) & known
    num_wrong = wrong.sum()
    if not wrong.numel() or (wrong.device.type == "cpu" and not num_wrong):
        return num_wrong, lambda: ""  # nothing to detail
    counts = torch.stack([num_wrong, known.sum()])
    first = wrong.flatten().to(torch.int8).argmax().view(1)
    columns = [input_ids, expected] if rows is None else [input_ids, expected, rows]
    values = torch.stack(columns).flatten(1).index_select(1, first)
    length = wrong.shape[-1]  # `detail` lives as long as the session, so it keeps these few numbers and no batch

    def detail() -> str:
        token, recorded, *row = values.flatten().tolist()
        different, compared = counts.tolist()
        at = list(divmod(int(first), length))
        there = f"its routing row {row[0]} was recorded for" if row else "what was queued there is of"
        return f"input_ids{at} is {token}, but {there} token {recorded} ({different} of {compared} positions differ): {why}"

    return num_wrong, detail
