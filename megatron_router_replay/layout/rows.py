"""Compare the tokens of a batch with those of its trace rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MOVED_APART = "tokens and rows were not moved by the same code."
"""The cause of a position with a different token than its row."""


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
        rows: [b, s] integers, the trace rows that these are of; None: they were given by hand.
        why: the cause, for the message.

    Returns:
        The number of positions that differ, a scalar on the device; and a function that waits, and returns the first place.
    """
    known = expected >= 0
    wrong = (expected != input_ids) & known
    counts = torch.stack([wrong, known]).flatten(1).sum(1)  # one launch fewer than two sums
    if not wrong.numel() or (wrong.device.type == "cpu" and not counts[0]):
        return counts[0], lambda: ""  # nothing to detail
    first = wrong.flatten().to(torch.int8).argmax().view(1)
    columns = [input_ids, expected] if rows is None else [input_ids, expected, rows]
    values = torch.stack(columns).flatten(1).index_select(1, first)
    length = wrong.shape[-1]  # `detail` lives as long as the session, so it keeps these few numbers and no batch

    def detail() -> str:
        token, recorded, *row = values.flatten().tolist()
        num_wrong, num_known = counts.tolist()
        at = list(divmod(int(first), length))
        there = f"its routing row {row[0]} was recorded for" if row else "the row given there is of"
        return f"input_ids{at} is {token}, but {there} token {recorded} ({num_wrong} of {num_known} positions differ): {why}"

    return counts[0], detail
