"""Decide what all ranks of a session raise, or warn of, from their summaries, on the rank that comes last."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_router_replay.mcore.batches.forward_counts import ForwardCounts
from megatron_router_replay.mcore.judge.rank_evidence import RankAgreement
from megatron_router_replay.mcore.judge.report import share_of
from megatron_router_replay.mcore.judge.verdict import group_verdict


class RankSummary(NamedTuple):
    """Summary of a session that one rank publishes at its end.

    Args:
        at_fault: this rank raises in any case.
        chunks: model chunks with routers that take micro-batches.
        counts: of the forwards of all chunks.
        options: of a replay, the same on all ranks: min_replayed, min_agreement, wrong_routes; None: a recording.
        agreement: of a replay that compares; its `published` part goes to the other ranks.
        stage: (lowest of the ranks that differ in their pipeline stage alone, this rank's stage, [number of micro-batches,
            digest of their rows] of each chunk); None: there is one stage, or no chunk.
    """

    at_fault: bool = False
    chunks: int = 0
    counts: ForwardCounts = ForwardCounts()
    options: Any = None
    agreement: RankAgreement | None = None
    stage: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """Result of a group's check, the same on all of its ranks.

    Args:
        problems: errors of the group as a whole.
        warnings: cause -> text, of which none raises.
        at_fault: ranks that raise errors of their own.
        left: ranks that left their block by an exception, or could not open their session.
        wrong_rows: see `verdict.Verdict`.
    """

    problems: list[str] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)
    at_fault: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    wrong_rows: dict[str, list[list[int]]] = field(default_factory=dict)

    def problems_of(self, rank: int, *, at_fault: bool) -> list[str]:
        """Return the errors that a rank raises, in addition to its own."""
        if self.left:
            return [f"ranks {self.left} left their session by an exception, or could not open it; read their errors"]
        if self.at_fault and not self.problems and not at_fault:
            return [f"rank {rank} is in order, but ranks {self.at_fault} are not; read their errors"]
        return self.problems


def group_result(summaries: Mapping[int, RankSummary | None]) -> GroupResult:
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
