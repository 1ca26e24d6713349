"""All ranks raise, or none: a rank that fails before a collective must not leave its peers waiting in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_router_replay.errors import RouterReplayError

T = TypeVar("T")


def raise_together(
    value: T | Exception,
    error_of_peers: Callable[[list[int], str], Exception],
    group: dist.ProcessGroup | None = None,
) -> list[T]:
    """Return the value of each rank of a group, or raise on all of its ranks.

    A collective. A job without torch.distributed is one rank.

    Args:
        value: of this rank; or the error for which it has none.
        error_of_peers: (ranks that have an error, message of the first one) -> the error to raise where there is none.

    Raises:
        Exception: this rank's error; if it has none and other ranks have one, that of `error_of_peers`.
    """
    error = value if isinstance(value, Exception) else None
    values: list[Any] = [(value, None)]
    ranks = [0]
    if dist.is_initialized():
        ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
        values = [None] * len(ranks)
        # An error goes as text, because not every exception can be pickled.
        dist.all_gather_object(values, (value, None) if error is None else (None, _text_of(error)), group=group)
    if error is not None:
        raise error
    texts = {rank: text for rank, (_, text) in zip(ranks, values) if text is not None}
    if texts:
        raise error_of_peers(list(texts), next(iter(texts.values())))
    return [each for each, _ in values]


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, RouterReplayError) else f"{type(error).__name__}: {error}"
