"""Which routes are too old to be replayed: a mask over the rows of a trace, for `trace.keep(~mask)`."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import torch
from torch import Tensor

from megatron_router_replay.checks import as_integer
from megatron_router_replay.errors import TraceError
from megatron_router_replay.trace.routing_trace import RoutingTrace, check_traces


def stale_rows(trace: RoutingTrace | Tensor, *, max_age: int, trainer_version: int) -> Tensor:
    """Return which rows have a route of weights that are too old, bool.

    Too old is more than `max_age` versions behind the trainer's weights.

    The age of a row is trainer_version - its weight_version, so one sample of a partial rollout has rows of several ages.
    Call it with the same numbers on every rank, on the whole trace, before its rows are split:

        trace = trace.keep(~stale_rows(trace, max_age=1, trainer_version=18))

    Args:
        trace: with a weight_version in every row that has a route; a row without a route has no age. Or versions in any
            shape, -1 where there is no route, for `mrr.microbatch(routes=..., stale=...)`.
        max_age: >= 0; 0: only routes of the trainer's own version are not stale.
        trainer_version: >= 0, of the weights that are trained, counted as `weight_version` is.

    Returns:
        [num_tokens] bool on the device of the trace, or in the shape of the versions.

    Raises:
        TraceError: a route has no version, or one that is newer than the trainer's; a number is negative or no integer.
    """
    trainer_version = as_integer("trainer_version", trainer_version, least=0)
    oldest = trainer_version - as_integer("max_age", max_age, least=0)
    if isinstance(trace, Tensor):
        versions = trace.to(torch.int64)
        if bool((versions > trainer_version).any()):
            raise TraceError(
                f"MRR112: routes are of weight version {int(versions.max())}, newer than trainer_version={trainer_version}. "
                "Do engine and trainer count the same thing, from the same start?"
            )
        return (versions >= 0) & (versions < oldest)
    check_traces([trace], "tell how old routes are of")
    if trace.weight_version is None:
        raise TraceError(
            "MRR112: cannot tell how old routes are: the trace has no weight_version. Decode with weight_version=...."
        )
    # Wider than int32: `oldest` may lie below what that holds, and torch would compare a wrapped number.
    versions = trace.weight_version.to(torch.int64)
    unknown = trace.replay_mask & (versions < 0)
    if bool(unknown.any()):
        raise TraceError(
            f"MRR112: cannot tell how old {int(unknown.sum())} routes are: they have no weight version, the first is "
            f"{_first(unknown, trace)}. Stamp every segment, or leave such rows out with keep first."
        )
    newer = trace.replay_mask & (versions > trainer_version)
    if bool(newer.any()):
        raise TraceError(
            f"MRR112: {int(newer.sum())} routes are of weights that are newer than trainer_version={trainer_version}: "
            f"the first is {_first(newer, trace)} with weight_version={int(versions[newer][0])}. Do engine and trainer "
            "count the same thing, from the same start?"
        )
    return trace.replay_mask & (versions < oldest)


def _first(rows: Tensor, trace: RoutingTrace) -> str:
    row = int(rows.nonzero()[0])
    if trace.sequence_lengths is None:
        return f"row {row}"
    sample = bisect_right(list(accumulate(trace.sequence_lengths)), row)
    return f"row {row} (token {row - sum(trace.sequence_lengths[:sample])} of sample {sample})"
