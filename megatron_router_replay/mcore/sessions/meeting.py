"""What ranks tell each other at the end of a session, through the job's key-value store: nobody waits for a rank that failed.

A rank that leaves its block by an exception, or cannot open its session, says so before it raises, and waits for nobody. So a
collective is no way to do this: the others would wait in it for ever, and the next session's exchange would be shifted.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_router_replay.errors import ReplayStateError

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the numbers of one that neither ended its session nor failed in it: it was killed, or hangs."""


class Meeting:
    """One session's meeting of the ranks of a group; numbered where sessions begin, in the same order on all ranks.

    Args:
        group: None: all ranks of the job.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        initialized = dist.is_initialized()
        self.rank = dist.get_rank() if initialized else 0
        self.ranks = [self.rank]
        if initialized and dist.get_world_size(group) > 1:
            self.ranks = (
                dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
            )
        self._told = len(self.ranks) == 1
        if not self._told:
            self._store: Any = distributed_c10d._get_default_store()
            # All state is where the keys are: a job that is initialised anew may get another store, or the same one again.
            prefix = f"router_replay/{_digest(self.ranks)}"
            self._name = f"{prefix}/{self._store.add(f'{prefix}/opened/{self.rank}', 1)}"
            self._told_keys = f"{prefix}/told/{self.rank}"  # what this rank has to take away

    def tell(self, numbers: dict[str, Any] | None) -> None:
        """Tell this rank's numbers; None: it failed. Only the first call tells."""
        if self._told:
            return
        self._told = True
        keys = [f"{self._name}/{self.rank}"]
        if self.rank == self.ranks[0]:
            keys += [f"{self._name}/arrived", f"{self._name}/complete"]
        self._store.set(self._told_keys, json.dumps(self._earlier() + keys))
        self._store.set(keys[0], json.dumps(numbers))
        if self._store.add(f"{self._name}/arrived", 1) == len(self.ranks):
            self._store.set(f"{self._name}/complete", "1")

    def exchange(self, numbers: dict[str, Any]) -> dict[int, dict[str, Any] | None]:
        """Tell this rank's numbers, and return those of every rank, None for one that failed.

        Raises:
            ReplayStateError: a rank did not come within TIMEOUT.
        """
        if len(self.ranks) == 1:
            return {self.rank: numbers}
        self.tell(numbers)
        try:
            self._store.wait([f"{self._name}/complete"], TIMEOUT)
        except Exception as error:
            raise ReplayStateError(
                f"MRR420: rank {self.rank} waited {TIMEOUT} at the end of its session for the {len(self.ranks)} ranks "
                "of its group: one was killed, hangs, or has no such session. Give group= the ranks that have one."
            ) from error
        told = {rank: json.loads(self._store.get(f"{self._name}/{rank}")) for rank in self.ranks}
        # Everybody is here, so everybody has read what was told before.
        keys = self._earlier()
        here = [key for key in keys if key.startswith(f"{self._name}/")]
        for key in set(keys) - set(here):
            self._store.delete_key(key)
        self._store.set(self._told_keys, json.dumps(here))
        return told

    def _earlier(self) -> list[str]:
        known = self._store.check([self._told_keys])
        return list(json.loads(self._store.get(self._told_keys))) if known else []


def _digest(ranks: list[int]) -> str:
    return f"{len(ranks)}-{hash(tuple(ranks)) & 0xFFFFFFFF:x}"
