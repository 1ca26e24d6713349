"""Compare the tokens of a batch with those of its trace rows."""

from __future__ import annotations

from torch import Tensor

MOVED_APART = "tokens and rows were not moved by the same code."
"""The cause of a position with a different token than its row."""


def differing_tokens(input_ids: Tensor, expected: Tensor, rows: Tensor | None = None, *, why: str = MOVED_APART) -> str:
    """Return which token is the first that differs from the expected one, and how many do; "": none does.

    Args:
        input_ids: [b, s] integers on the host.
        expected: [b, s] integers, the token of each position; below 0: not known.
        rows: [b, s] integers, the trace rows that these are of; None: they were given by hand.
        why: the cause, for the message.
    """
    known = expected >= 0
    wrong = (expected != input_ids) & known
    if not wrong.any():
        return ""
    first = tuple(wrong.nonzero()[0].tolist())
    there = "the row given there is of" if rows is None else f"its routing row {int(rows[first])} was recorded for"
    return (
        f"input_ids{list(first)} is {int(input_ids[first])}, but {there} token {int(expected[first])} ({int(wrong.sum())} of "
        f"{int(known.sum())} positions differ): {why}"
    )
