"""Check a session over the ranks of its group: ranks publish their numbers, and all raise or none.

A collective cannot do this: where one rank raised, its peers would wait in it for ever, and the exchange of the next session
would be shifted. So numbers go through the job's key-value store. The last rank to come reads those of all ranks and writes
one result, which its peers read. However many ranks there are, an end takes four requests a rank; an opening takes one, and
the first rank deletes an older result there. A rank that leaves its block by an exception, or cannot open its session,
publishes that before it raises, and does not wait.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.batches.forward_counts import ForwardCounts
from megatron_router_replay.mcore.judge.group_result import GroupResult, RankSummary, group_result
from megatron_router_replay.mcore.judge.rank_evidence import RankAgreement

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Keys:
    """Keys that this rank wrote for earlier sessions of a group, and must delete.

    Args:
        waiting: another rank may still read them.
        over: every rank has read them, because a later session is finished.
    """

    waiting: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)


# By store, because a job that is initialised again has none; then by group.
_keys: WeakKeyDictionary[Any, dict[str, _Keys]] = WeakKeyDictionary()


class GroupCheck:
    """Check a session over a group. Every rank makes it where the session begins, in the same order of sessions.

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
        self._has_published = len(self.ranks) == 1
        if not self._has_published:
            self._store: Any = distributed_c10d._get_default_store()
            prefix = f"router_replay/{len(self.ranks)}-{hash(tuple(self.ranks)) & 0xFFFFFFFF:x}"
            # Counted in the store, because a job that is initialised again may get a new store, or the same one.
            self._name = f"{prefix}/{self._store.add(f'{prefix}/opened/{self.rank}', 1)}"
            self._keys = _keys.setdefault(self._store, {}).setdefault(prefix, _Keys())
            while self._keys.over:
                self._store.delete_key(self._keys.over.pop())

    def fail(self) -> None:
        """Publish that this rank left its session by an exception; a no-op once it has published."""
        if self._has_published:
            return
        try:
            result = self._publish(None)
        except RuntimeError as error:
            # The process that serves the store may have ended first. This rank raises its own error, not this one.
            _LOG.warning("rank %d failed, and could not publish it: %s", self.rank, error)
            return
        if result is None:
            self._keys.waiting.append(self._key(self.rank))
        if self.rank == self.ranks[0]:
            self._keys.waiting.append(self._key("result"))

    def finish(self, summary: RankSummary) -> GroupResult:
        """Publish this rank's numbers, and return the result of all ranks.

        Raises:
            ReplayStateError: a rank did not come within the job's timeout.
        """
        if len(self.ranks) == 1:
            return group_result({self.rank: summary})
        try:
            result = self._publish(summary)
            if result is None:
                result = GroupResult(**json.loads(self._store.get(self._key("result"))))
                self._store.delete_key(self._key(self.rank))
        except RuntimeError as error:
            raise ReplayStateError(
                f"MRR420: rank {self.rank} waited {self._store.timeout} at the end of its session for the "
                f"{len(self.ranks)} ranks of its group: one was killed, hangs, or has no such session. Open the "
                "session on every rank that trains; give group= only where ranks hold different models."
            ) from error
        # All ranks are in this session, so all have read the results of earlier ones.
        self._keys.over, self._keys.waiting = self._keys.over + self._keys.waiting, []
        if self.rank == self.ranks[0]:
            self._keys.waiting.append(self._key("result"))
        return result

    def _key(self, name: int | str) -> str:
        return f"{self._name}/{name}"

    def _publish(self, summary: RankSummary | None) -> GroupResult | None:
        """Publish this rank's numbers, None if it failed. Return the result if this rank comes last."""
        self._has_published = True
        if self._store.add(self._key("arrived"), 1) < len(self.ranks):
            self._store.set(self._key(self.rank), json.dumps(_to_json(summary), separators=(",", ":")))
            return None
        others = [rank for rank in self.ranks if rank != self.rank]
        # Each of them has arrived, so its numbers are in the store, or will be in a moment.
        texts = map(json.loads, self._store.multi_get([self._key(rank) for rank in others]))
        summaries = {rank: _of_json(values) for rank, values in zip(others, texts)}
        result = group_result(summaries | {self.rank: summary})
        self._store.set(self._key("result"), json.dumps(asdict(result)))
        self._store.delete_key(self._key("arrived"))
        return result


def _to_json(summary: RankSummary | None) -> Any:
    """Return a summary as JSON values, None if the rank failed; `_of_json` is the inverse."""
    if summary is None:
        return None
    return summary._replace(agreement=None if summary.agreement is None else summary.agreement.published())


def _of_json(values: Any) -> RankSummary | None:
    if values is None:
        return None
    summary = RankSummary(*values)
    agreement = None if summary.agreement is None else RankAgreement.of_json(summary.agreement)
    return summary._replace(counts=ForwardCounts(*summary.counts), agreement=agreement)
