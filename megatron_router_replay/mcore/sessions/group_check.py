"""Check of a session over the ranks of its group: ranks publish their numbers, and all raise or none.

A rank that leaves its block by an exception, or cannot open its session, says so before it raises, and waits for nobody. A
collective cannot do this: the others would wait in it for ever, and the next session's exchange would be shifted. So numbers
go through the job's key-value store. The rank that comes last reads those of all, judges, and writes one verdict, which the
others read: at most four requests a rank, however many there are.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.sessions.report import share_of

_LOG = logging.getLogger(__name__)


class Numbers(NamedTuple):
    """What one rank tells the others at the end of a session.

    Args:
        at_fault: something is wrong on this rank, which raises whatever the others say.
        chunks: model chunks with routers that take micro-batches.
        rows_replayed, rows_live, rows_padding: as in the report.
        options: those that must be the same on all ranks: balance, min_replayed, min_agreement.
        num_rows: the highest row that a recording queued, plus 1.
        agreement: see `agreement.Agreement.numbers`.
    """

    at_fault: bool = False
    chunks: int = 0
    rows_replayed: int = 0
    rows_live: int = 0
    rows_padding: int = 0
    options: Any = None
    num_rows: int = 0
    agreement: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """What the ranks of a group agree on, the same on all of them.

    Args:
        problems: what is wrong with the group as a whole.
        warnings: what looks wrong, and raises nothing.
        at_fault: ranks on which something is wrong.
        left: ranks that left their block by an exception, or could not open their session.
        num_rows: of a recording, over all ranks.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    at_fault: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    num_rows: int = 0

    def problems_of(self, rank: int, *, at_fault: bool) -> list[str]:
        """Return what a rank raises of it; one that is at fault itself has reasons of its own."""
        if self.left:
            return [
                f"ranks {self.left} left their session by an exception, or could not open it; their own errors say why"
            ]
        if self.at_fault and not self.problems and not at_fault:
            return [f"rank {rank} is in order, but ranks {self.at_fault} are not; their own errors say why"]
        return self.problems


Judge = Callable[[Mapping[int, Numbers]], tuple[list[str], list[str]]]
"""rank -> its numbers; returns what is wrong with the group as a whole, and what only looks wrong."""


@dataclass(slots=True, eq=False)
class _Keys:
    """Keys of earlier sessions of one group that this rank has to take away.

    Args:
        waiting: somebody may still read them.
        over: nobody reads them any more, because a later session is settled.
    """

    waiting: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)


# By store, so that a job that is initialised anew has none; then by group.
_keys: WeakKeyDictionary[Any, dict[str, _Keys]] = WeakKeyDictionary()


class GroupCheck:
    """What the ranks of a group finish when one session ends; ranks open accounts in the same order, where sessions begin.

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
        self._published = len(self.ranks) == 1
        if not self._published:
            self._store: Any = distributed_c10d._get_default_store()
            prefix = f"router_replay/{len(self.ranks)}-{hash(tuple(self.ranks)) & 0xFFFFFFFF:x}"
            # Counted where the keys are: a job that is initialised anew may get another store, or the same one again.
            self._name = f"{prefix}/{self._store.add(f'{prefix}/opened/{self.rank}', 1)}"
            self._keys = _keys.setdefault(self._store, {}).setdefault(prefix, _Keys())
            while self._keys.over:
                self._store.delete_key(self._keys.over.pop())

    def fail(self) -> None:
        """Publish that this rank left its session by an exception. Later calls of `fail` or `finish` are no-ops."""
        if self._published:
            return
        try:
            result = self._publish(None, lambda everyone: ([], []))
        except RuntimeError as error:
            # The process that serves the store may have ended first. This rank raises its own error, which must not be lost.
            _LOG.warning("rank %d failed, and the other ranks were not told: %s", self.rank, error)
            return
        if result is None:
            self._keys.waiting.append(self._key(self.rank))
        if self.rank == self.ranks[0]:
            self._keys.waiting.append(self._key("verdict"))

    def finish(self, numbers: Numbers, judge: Judge) -> GroupResult:
        """Tell this rank's numbers, and return what those of all ranks come to.

        Raises:
            ReplayStateError: a rank did not come within the job's timeout.
        """
        if len(self.ranks) == 1:
            return _judged({self.rank: numbers}, judge)
        try:
            verdict = self._publish(numbers, judge)
            if verdict is None:
                verdict = GroupResult(**json.loads(self._store.get(self._key("verdict"))))
                self._store.delete_key(self._key(self.rank))
        except RuntimeError as error:
            raise ReplayStateError(
                f"MRR420: rank {self.rank} waited {self._store.timeout} at the end of its session for the "
                f"{len(self.ranks)} ranks of its group: one was killed, hangs, or has no such session. Give group= the "
                "ranks that have one."
            ) from error
        # Everybody is here, so everybody is done with the sessions before.
        self._keys.over, self._keys.waiting = self._keys.over + self._keys.waiting, []
        if self.rank == self.ranks[0]:
            self._keys.waiting.append(self._key("verdict"))
        return verdict

    def _key(self, name: int | str) -> str:
        return f"{self._name}/{name}"

    def _publish(self, numbers: Numbers | None, judge: Judge) -> GroupResult | None:
        """Tell this rank's numbers, None if it failed. Return the verdict if this rank came last."""
        self._published = True
        if self._store.add(self._key("arrived"), 1) < len(self.ranks):
            self._store.set(self._key(self.rank), json.dumps(numbers))
            return None
        others = [rank for rank in self.ranks if rank != self.rank]
        # Each of them has arrived, so what it tells is there, or will be in a moment.
        texts = map(json.loads, self._store.multi_get([self._key(rank) for rank in others]))
        numbers_of_rank = {rank: None if values is None else Numbers(*values) for rank, values in zip(others, texts)}
        verdict = _judged(numbers_of_rank | {self.rank: numbers}, judge)
        self._store.set(self._key("verdict"), json.dumps(asdict(verdict)))
        self._store.delete_key(self._key("arrived"))
        return verdict


def _judged(numbers_of_rank: Mapping[int, Numbers | None], judge: Judge) -> GroupResult:
    """Return the verdict on what the ranks told."""
    left = sorted(rank for rank, numbers in numbers_of_rank.items() if numbers is None)
    everyone = {rank: numbers for rank, numbers in sorted(numbers_of_rank.items()) if numbers is not None}
    if left:
        return GroupResult(left=left)
    problems, warnings = judge(everyone)
    return GroupResult(
        problems=problems,
        warnings=[] if problems else warnings,
        at_fault=[rank for rank, numbers in everyone.items() if numbers.at_fault],
        num_rows=max(numbers.num_rows for numbers in everyone.values()),
    )


# ---- what the ranks of a replay judge together
def judge_replay(everyone: Mapping[int, Numbers], least: float | None) -> list[str]:
    """Return what is wrong with the ranks of a replay as a whole: one may rightly have nothing, or padding alone.

    Args:
        least: `min_replayed` of `replay`.
    """
    all_numbers = list(everyone.values())
    if len({json.dumps(numbers.options) for numbers in all_numbers}) > 1:
        return ["ranks replay with different balance=, min_replayed= or min_agreement=: give them all the same."]
    ranks = "this rank" if len(all_numbers) == 1 else f"{len(all_numbers)} ranks"
    sums: list[Any] = [
        sum(values) for values in zip(*(numbers._replace(options=0, agreement=0) for numbers in all_numbers))
    ]
    total = Numbers(*sums)
    problem = _nothing_replayed(total, ranks, least=least) or _too_little_replayed(
        total, ranks, all_numbers, least=least
    )
    return [problem] if problem else []


def _nothing_replayed(total: Numbers, ranks: str, *, least: float | None) -> str:
    """Return why nothing was replayed; a session that replays nothing is a mistake, unless somebody said min_replayed=0."""
    meant = "If it is meant so, replay(..., min_replayed=0) says it."
    with_token = total.rows_replayed + total.rows_live
    if with_token == 0 and total.chunks and least != 0:
        if total.rows_padding:
            return (
                f"none of {total.rows_padding} tokens was replayed on {ranks}, for padding= calls all of them padding. "
                f"Is the mask inverted (True is padding)? {meant}"
            )
        return (
            f"nothing ran on {ranks}, so nothing was replayed: no forward of the model came inside the session. {meant}"
        )
    if not with_token or total.rows_replayed:
        return ""
    return (
        f"none of {total.rows_live} tokens was replayed on {ranks}; the trace has no route for any of them, or all rows "
        "are -1. Were the routes lost on the way, is a mask inverted (trace.without_routes), or is this another rank's part "
        "of a recording (recording.gather)?"
    )


def _too_little_replayed(total: Numbers, ranks: str, all_numbers: list[Numbers], *, least: float | None) -> str:
    """Return what is wrong with the share that was replayed, over all ranks."""
    share = share_of(total.rows_replayed, total.rows_live)
    if least is None or share is None or share >= least:
        return ""
    return (
        f"{share:.4%} of {total.rows_replayed + total.rows_live} tokens were replayed on {ranks}, less than "
        f"min_replayed={least}."
    )
