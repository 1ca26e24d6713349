"""Rows that have a route and are left to the live router all the same: by which choice, and which routes are too old.

`RoutingTrace.left_live` holds 0 for a row that nobody left out (it is replayed, or it never had a route), else the number of
the choice that did. A choice is made once, on the whole trace, before its rows are given to ranks and micro-batches: so every
layer, every rank and every recompute sees the same one.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_router_replay.errors import TraceError

NOT_KEPT = 1
"""`RoutingTrace.keep` left the row out."""

STALE = 2
"""`RoutingTrace.limit_age` did: the weights that chose its route are too old."""

Stale = Literal["replay", "live", "raise"]
"""What becomes of a row whose route is older than max_age."""


def leave_out(rows: Tensor, choice: int, *, replay_mask: Tensor, left_live: Tensor | None) -> Tensor:
    """Return `left_live` with this choice where `rows` have a route; an earlier choice stays.

    Args:
        rows: [num_tokens] bool, True: the live router shall decide this row.
        replay_mask: [num_tokens] bool, before the choice.
        left_live: [num_tokens] uint8, or None.
    """
    before = torch.zeros_like(replay_mask, dtype=torch.uint8) if left_live is None else left_live
    return torch.where(rows & replay_mask, choice, before)


def check_nothing_left_out(left_live: Tensor | None, attempt: str, where: str) -> None:
    """Raise TraceError if a row was left out: its route would be lost, and that it was by choice.

    Args:
        left_live: of the trace.
        attempt, where: for the message, what cannot be done, and what to choose in instead.
    """
    count = 0 if left_live is None else int((left_live > 0).sum())
    if count:
        raise TraceError(
            f"cannot {attempt} of which {count} rows were left live by choice (keep, limit_age): that choice would be taken "
            f"for lost routes. Take the trace as it was before, and choose in {where}."
        )


def check_stale(stale: Any) -> None:
    """Raise TraceError unless `stale` is one of Stale."""
    if stale not in get_args(Stale):
        raise TraceError(f"stale={stale!r} must be one of {', '.join(map(repr, get_args(Stale)))}.")


def find_stale(
    weight_version: Tensor | None,
    replay_mask: Tensor,
    *,
    max_age: int,
    trainer_version: int,
    sequence_lengths: Sequence[int] | None = None,
) -> Tensor:
    """Return which rows have a route of weights that are more than `max_age` versions behind the trainer's.

    Args:
        weight_version: [num_tokens] int32, of the weights that chose each row's route, below 0 where that is not known.
        replay_mask: [num_tokens] bool; a row without a route has no age.
        max_age: >= 0; 0: only routes of the trainer's own version are not stale.
        trainer_version: >= 0, of the weights that are trained, counted as `weight_version` is.
        sequence_lengths: for messages, tokens of each sample.

    Returns:
        [num_tokens] bool on the device of `replay_mask`.

    Raises:
        TraceError: a route has no version, or one that is newer than the trainer's; max_age or trainer_version is negative
            or no integer.
    """
    oldest = _as_count("trainer_version", trainer_version) - _as_count("max_age", max_age)
    if weight_version is None:
        raise TraceError(
            "max_age needs to know how old each route is, and the trace has no weight_version: decode with "
            "weight_version=..., or give it to take_routes."
        )
    # Wider than int32: `oldest` may lie below what that holds, and torch would compare a wrapped number.
    versions = weight_version.to(device=replay_mask.device, dtype=torch.int64)
    unknown = replay_mask & (versions < 0)
    if bool(unknown.any()):
        raise TraceError(
            f"max_age needs to know how old each route is, and {int(unknown.sum())} rows have a route without a weight "
            f"version, the first is {_first(unknown, sequence_lengths)}. Stamp every segment, or leave such rows out with "
            "keep first."
        )
    newer = replay_mask & (versions > trainer_version)
    if bool(newer.any()):
        raise TraceError(
            f"{int(newer.sum())} rows have a route of weights that are newer than trainer_version={trainer_version}: the "
            f"first is {_first(newer, sequence_lengths)} with weight_version={int(versions[newer][0])}. Do engine and "
            "trainer count the same thing, from the same start?"
        )
    return replay_mask & (versions < oldest)


def describe_stale(
    stale: Tensor, weight_version: Tensor, *, trainer_version: int, sequence_lengths: Sequence[int] | None
) -> str:
    """Return how many rows are stale, the first of them and its age; at least one is."""
    version = int(weight_version[stale][0])
    return (
        f"{int(stale.sum())} rows have a route that is too old: the first is {_first(stale, sequence_lengths)}, of "
        f"weight_version={version}, {trainer_version - version} versions behind trainer_version={trainer_version}"
    )


def _as_count(name: str, value: Any) -> int:
    try:
        # True is an integer for Python, and int() would cut a float off: neither is what anybody means by a version.
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise TraceError(f"{name}={value!r} must be an integer of 0 or more, got {type(value).__name__}.")
    return number


def _first(rows: Tensor, lengths: Sequence[int] | None) -> str:
    row = int(rows.nonzero()[0])
    if lengths is None:
        return f"row {row}"
    sample = bisect_right(list(accumulate(lengths)), row)
    return f"row {row} (token {row - sum(lengths[:sample])} of sample {sample})"
