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
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.batches.forward_counts import ForwardCounts
from megatron_router_replay.mcore.judge.report import share_of
from megatron_router_replay.mcore.judge.verdict import group_verdict, published

_LOG = logging.getLogger(__name__)


class RankSummary(NamedTuple):
    """Summary of a session that one rank publishes at its end.

    Args:
        at_fault: this rank raises in any case.
        chunks: model chunks with routers that take micro-batches.
        counts: of the forwards of all chunks.
        options: of a replay, the same on all ranks: min_replayed, min_agreement, wrong_routes; None: a recording.
        num_rows: the highest row that was given to a recording, plus 1.
        agreement: see `agreement.Agreement.summary`; its `published` part goes to the other ranks.
        stage: (lowest of the ranks that differ in their pipeline stage alone, this rank's stage, [number of micro-batches,
            digest of their rows] of each chunk); None: there is one stage, or no chunk.
    """

    at_fault: bool = False
    chunks: int = 0
    counts: ForwardCounts = ForwardCounts()
    options: Any = None
    num_rows: int = 0
    agreement: Any = None
    stage: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """Result of a group's check, the same on all of its ranks.

    Args:
        problems: errors of the group as a whole.
        warnings: cause -> text, of which none raises.
        at_fault: ranks that raise errors of their own.
        left: ranks that left their block by an exception, or could not open their session.
        num_rows: of a recording, over all ranks.
        wrong_rows: see `verdict.Verdict`.
    """

    problems: list[str] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)
    at_fault: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    num_rows: int = 0
    wrong_rows: dict[str, list[list[int]]] = field(default_factory=dict)

    def problems_of(self, rank: int, *, at_fault: bool) -> list[str]:
        """Return the errors that a rank raises, in addition to its own."""
        if self.left:
            return [f"ranks {self.left} left their session by an exception, or could not open it; read their errors"]
        if self.at_fault and not self.problems and not at_fault:
            return [f"rank {rank} is in order, but ranks {self.at_fault} are not; read their errors"]
        return self.problems


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
        self._published = len(self.ranks) == 1
        if not self._published:
            self._store: Any = distributed_c10d._get_default_store()
            prefix = f"router_replay/{len(self.ranks)}-{hash(tuple(self.ranks)) & 0xFFFFFFFF:x}"
            # Counted in the store, because a job that is initialised again may get a new store, or the same one.
            self._name = f"{prefix}/{self._store.add(f'{prefix}/opened/{self.rank}', 1)}"
            self._keys = _keys.setdefault(self._store, {}).setdefault(prefix, _Keys())
            while self._keys.over:
                self._store.delete_key(self._keys.over.pop())

    def fail(self) -> None:
        """Publish that this rank left its session by an exception. Later calls of `fail` or `finish` are no-ops."""
        if self._published:
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
            return _result({self.rank: summary})
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
        self._published = True
        if self._store.add(self._key("arrived"), 1) < len(self.ranks):
            self._store.set(self._key(self.rank), json.dumps(_published(summary), separators=(",", ":")))
            return None
        others = [rank for rank in self.ranks if rank != self.rank]
        # Each of them has arrived, so its numbers are in the store, or will be in a moment.
        texts = map(json.loads, self._store.multi_get([self._key(rank) for rank in others]))
        summaries = {rank: _read(values) for rank, values in zip(others, texts)}
        result = _result(summaries | {self.rank: summary})
        self._store.set(self._key("result"), json.dumps(asdict(result)))
        self._store.delete_key(self._key("arrived"))
        return result


def _published(summary: RankSummary | None) -> Any:
    """Return a summary as JSON values, None if the rank failed; `_read` is the inverse."""
    if summary is None:
        return None
    agreement = None if summary.agreement is None else published(summary.agreement)
    return summary._replace(counts=astuple(summary.counts), agreement=agreement)  # type: ignore[arg-type]


def _read(values: Any) -> RankSummary | None:
    if values is None:
        return None
    summary = RankSummary(*values)
    return summary._replace(counts=ForwardCounts(*summary.counts))  # type: ignore[misc]


def _result(summaries: Mapping[int, RankSummary | None]) -> GroupResult:
    """Return the result of the ranks' summaries, None for a rank that failed."""
    left = sorted(rank for rank, summary in summaries.items() if summary is None)
    everyone = {rank: summary for rank, summary in sorted(summaries.items()) if summary is not None}
    if left:
        return GroupResult(left=left)
    problems: list[str] = []
    warnings: dict[str, str] = {}
    least_replayed = None
    wrong_rows: dict[str, list[list[int]]] = {}
    if options := next((each.options for each in everyone.values() if each.options), None):
        least_replayed, min_agreement, wrong_routes = options
        agreements = [each.agreement for each in everyone.values() if each.agreement]
        wrong, little, wrong_rows = group_verdict(agreements, min_agreement)
        problems = replay_problems(everyone, least_replayed)
        if wrong_routes == "warn":
            little = wrong or little
        else:
            problems += wrong
        if little:
            warnings["agreement"] = little[0]
    else:
        problems = recording_problems(everyone)
    problems += stages_with_other_rows(everyone)
    if least_replayed != 0 and (text := ranks_without_forwards(everyone)):
        warnings["a rank without a forward"] = text
    return GroupResult(
        problems=problems,
        warnings={} if problems else warnings,
        at_fault=[rank for rank, summary in everyone.items() if summary.at_fault],
        num_rows=max(summary.num_rows for summary in everyone.values()),
        wrong_rows=wrong_rows,
    )


def recording_problems(everyone: Mapping[int, RankSummary]) -> list[str]:
    """Return that no rank recorded anything, as a replay raises where nothing was replayed."""
    ranks = list(everyone.values())
    if not any(each.chunks for each in ranks) or any(each.counts.rows or each.at_fault for each in ranks):
        return []
    where = "this rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
    return [
        f"nothing was recorded on {where}: no forward of the model reached all of its routers inside the session. Does the "
        "block run the model that it was opened on, outside of session.paused()?"
    ]


def ranks_without_forwards(everyone: Mapping[int, RankSummary]) -> str:
    """Return a text that names ranks with routers but no forward where others ran some; "": there are none.

    A rank may rightly have no micro-batch. Or it trained before or after its session, without routes.
    """
    ran: dict[bool, list[int]] = {True: [], False: []}
    for rank, each in everyone.items():
        if each.chunks:  # a stage without routers has none
            ran[bool(each.counts.rows)].append(rank)
    if not ran[True] or not ran[False]:
        return ""
    return (
        f"ranks {_first(ran[False])} have routers and ran no forward inside their session, ranks {_first(ran[True])} did. "
        "Training before or after it had no session: run the step inside the block on every rank. For a step in "
        "which a rank may have no micro-batch, pass min_replayed=0."
    )


def _first(ranks: list[int], most: int = 8) -> str:
    return f"[{', '.join(map(str, ranks[:most]))}{', ...' * (len(ranks) > most)}]"


def stages_with_other_rows(everyone: Mapping[int, RankSummary]) -> list[str]:
    """Return the pipeline stages whose forwards had other rows than those of the first stage."""
    if any(each.at_fault for each in everyone.values()):
        return []  # that rank may have fewer forwards, and its own error explains more
    pipelines: dict[int, list[tuple[int, int, Any]]] = {}
    for rank, summary in everyone.items():
        if summary.stage:
            lowest, stage, digests = summary.stage
            pipelines.setdefault(lowest, []).append((stage, rank, digests))
    problems = []
    for stages in pipelines.values():
        (first_stage, first_rank, (first, *_)), *_ = sorted(stages)
        for stage, rank, digests in sorted(stages):
            for digest in digests:
                if digest != first:
                    what = (
                        f"routed {digest[0]} micro-batches, not {first[0]} as"
                        if digest[0] != first[0]
                        else "found other rows for its micro-batches than"
                    )
                    problems.append(
                        f"pipeline stage {stage} (rank {rank}) {what} stage {first_stage} (rank {first_rank}). Give every "
                        "stage the input_ids and packed_seq_params of the first one, no dummies; or call session.microbatch "
                        "with the same rows on all stages."
                    )
    return problems[:4]


def replay_problems(everyone: Mapping[int, RankSummary], least: float | None) -> list[str]:
    """Return the problems of a replay over all ranks: one rank may rightly have no rows, or padding alone.

    Args:
        least: `min_replayed` of `replay`.
    """
    ranks = list(everyone.values())
    if len({json.dumps(each.options) for each in ranks}) > 1:
        return ["ranks replay with different min_replayed=, min_agreement= or wrong_routes=: give them all the same."]
    where = "this rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
    counts = ForwardCounts.total(each.counts for each in ranks)
    replayed, live, padding = counts.rows_replayed, counts.rows_live, counts.rows_padding
    share = share_of(replayed, live)
    if share is not None and not replayed:
        return [
            f"none of {live} tokens was replayed on {where}; the trace has no route for any of them, or all rows are -1. "
            "Were the routes lost on the way, is a mask inverted (trace.without_routes), or is this another rank's part "
            "of a recording (recording.gather)?"
        ]
    if share is not None and least is not None and share < least:
        ends = (
            " An engine gives the last token of a sample no route, so its traces never reach 1." if least == 1 else ""
        )
        return [
            f"{share:.4%} of {replayed + live} tokens were replayed on {where}, less than min_replayed={least}.{ends}"
        ]
    # Where a rank is at fault, a forward may have come and reached some routers: its own error names them.
    if share is None and least != 0 and any(each.chunks for each in ranks) and not any(e.at_fault for e in ranks):
        if padding:
            return [
                f"none of {padding} tokens was replayed on {where}, for padding= calls all of them padding. Is the mask "
                "inverted? True is padding."
            ]
        return [
            f"nothing was replayed on {where}: no forward of the model reached all of its routers inside the session. Does "
            "the block run the model that it was opened on, outside of session.paused()? For a step that may have no "
            "micro-batch, pass min_replayed=0."
        ]
    return []
