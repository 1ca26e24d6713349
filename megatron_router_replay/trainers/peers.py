"""Wait, before the first collective of a replay, for the ranks of the job; name those that do not come.

A process without the hooks runs its trainer's own code and never comes: one on a node whose launcher was not changed, say.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_router_replay.errors import ReplayStateError, listed

_LOG = logging.getLogger(__name__)

PATIENCE = timedelta(seconds=60)
"""The time until a warning names the ranks that have not come: they may load a model, or compile."""

_met: WeakSet[Any] = WeakSet()
"""Stores of the jobs whose ranks have all come."""


def wait_for_peers(trainer: str) -> None:
    """Wait until each rank of the job has called this; at once where all ranks came before.

    Each rank writes a key to the job's store, and the last one a key for all.

    Raises:
        ReplayStateError: a rank did not come within the job's time-out.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store: Any = distributed_c10d._get_default_store()
    if store in _met:
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    # Counted in the store, because a job that is initialised again may get a new store, or the same one.
    name = f"router_replay/first_pass/{store.add(f'router_replay/first_pass_of/{rank}', 1)}"
    store.set(f"{name}/{rank}", "")
    if store.add(f"{name}/number", 1) == size:
        store.set(f"{name}/all", "")
    patience = min(PATIENCE, store.timeout)
    if not _is_set(store, f"{name}/all", patience):
        _LOG.warning("after %s, %s", patience, _missing(store, name, trainer))
        if not _is_set(store, f"{name}/all", store.timeout - patience):
            raise ReplayStateError(f"MRR809: after {store.timeout}, {_missing(store, name, trainer)}.")
    _met.add(store)


def _is_set(store: Any, key: str, timeout: timedelta) -> bool:
    try:
        store.wait([key], max(timeout, timedelta(milliseconds=1)))  # 0 would not end
    except RuntimeError:  # each store has its own; of one that is gone, the next request raises
        return False
    return True


def _missing(store: Any, name: str, trainer: str) -> str:
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    missing = [each for each in ranks if not store.check([f"{name}/{each}"])]
    return (
        f"rank {rank} is at its first pass that replays, and ranks {listed(missing)} are not. If they neither load nor "
        f"compile, they run without the hooks: let each process of {trainer} import this package, on each node, as "
        f"{trainer}'s page says"
    )
