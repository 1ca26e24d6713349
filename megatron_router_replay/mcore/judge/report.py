"""Report the counts of a session, of this rank or of several together."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, cast

import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.checks import warn
from megatron_router_replay.mcore.judge.agreement import LiveAgreement
from megatron_router_replay.mcore.judge.sums import add_up
from megatron_router_replay.tables import Table

_LOG = logging.getLogger(__name__)

_NOT_MEASURED = {
    "record": ("rows_replayed", "rows_repeated", "segments_"),
    "freeze_recompute": ("rows_", "tokens", "segments_"),  # it sees no rows
}
"""Kind of a session -> how the names of counts begin that it does not take."""

LOW_SHARE = 0.9
"""A replay session warns below this share. Samples of ten tokens and more stay above, with a live last token each."""


class Decisions(TypedDict, total=False):
    """Counts of (row, layer) pairs in a report.

    A logger gets each with the prefix `decisions_`.

    Args:
        recomputed: pairs among which flips were looked for; with ask_every_layer=True.
        verified, wrong: pairs of which the routing map was compared as it left the router, and those with different
            experts than the decided ones; with verify=True.
    """

    recomputed: int
    verified: int
    wrong: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionReport:
    """Counts of a session on this rank, or after `reduce` on several.

    A count that this kind of session does not take is 0, and not among its metrics.

    Args:
        kind: "replay", "record" or "freeze_recompute".
        routers: routers of the session, on all ranks.
        ranks: how many are counted.
        microbatches: micro-batches that reached every router of the first chunk; in a freeze, forwards of chunks.
        forwards, recomputes: forwards and recomputes of single routers.
        rows_replayed: rows that used the given routes.
        rows_live: rows without a route, decided by the live router (and frozen for their recompute).
        rows_padding: rows that are padding; the live router decides them, too.
        rows_repeated: rows by hand that a micro-batch names a second time.
        segments_ambiguous: sequences that several samples begin with; the first one with the most routes was used.
        decisions: (row, layer) pairs by treatment; pairs that were not counted are missing.
        flips_of_layer: layer number -> how many of its recomputed decisions would have chosen different experts.
        agreement: of the live router with the replayed routes; None: they were not compared.
        wrong_rows: [num_tokens] bool, rows of this rank's trace that any rank of the group found wrong, for
            `trace.without_routes(report.wrong_rows)`; None: the session is open, or nothing was compared.
        counted_at: layer number and tensor-parallel replica of the routers that counted rows and micro-batches, and this
            rank's number among those with parts of the same micro-batches; None: this rank has no such routers.
    """

    kind: str
    routers: int = 0
    ranks: int = 1
    microbatches: int = 0
    forwards: int = 0
    recomputes: int = 0
    rows_replayed: int = 0
    rows_live: int = 0
    rows_padding: int = 0
    rows_repeated: int = 0
    segments_ambiguous: int = 0
    decisions: Decisions = field(default_factory=Decisions)
    flips_of_layer: Mapping[int, int] = field(default_factory=dict)
    agreement: LiveAgreement | None = None
    wrong_rows: Tensor | None = field(default=None, compare=False)
    counted_at: tuple[int, int, int] | None = None

    @property
    def tokens(self) -> int:
        """Return the number of rows that the forwards routed, with padding."""
        return self.rows_replayed + self.rows_live + self.rows_padding

    @property
    def recompute_flips(self) -> int | None:
        """Return how many decisions a live recompute would have changed.

        It is None without ask_every_layer=True.
        """
        return sum(self.flips_of_layer.values()) if "recomputed" in self.decisions else None

    @property
    def replayed_share(self) -> float | None:
        """Return rows replayed / rows with a token, without padding.

        It is None for sessions that replay nothing, and without rows.
        """
        if self.kind != "replay":
            return None
        return share_of(self.rows_replayed, self.rows_live)

    @property
    def padding_share(self) -> float | None:
        """Return rows known to be padding / all rows; None without rows."""
        return self.rows_padding / self.tokens if self.tokens else None

    def reduce(self, group: dist.ProcessGroup | None = None) -> SessionReport:
        """Return one report for all ranks of a group, the same on each of them.

        A collective: every rank of the group calls it. A row counts once, however many pipeline stages and tensor-parallel
        ranks route it, and a micro-batch once, however many ranks share it: the lowest of them count for all. Routers,
        forwards, recomputes and decisions are added up. `wrong_rows` stays that of this rank's trace.

        Args:
            group: that of the session; None: all ranks of the job.
        """
        if not dist.is_initialized():
            return self
        reports: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(reports, replace(self, wrong_rows=None), group=group)
        return replace(_add_up(reports), wrong_rows=self.wrong_rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and shares as a dict.

        `agreement` is four numbers, where it was measured.
        """
        # `counted_at` is for `reduce` alone, and `ranks` for the text.
        left_out = ("counted_at", "wrong_rows", "ranks")
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}
        agreement = values.pop("agreement")
        values |= {f"decisions_{name}": count for name, count in values.pop("decisions").items()}
        values["flips_of_layer"] = dict(self.flips_of_layer)
        for name in ("tokens", "recompute_flips", "replayed_share", "padding_share"):
            values[name] = getattr(self, name)
        return values if agreement is None else values | agreement.to_dict()

    def metrics(self) -> dict[str, float]:
        """Return the measured numbers for a training logger.

        Keys begin with "router_replay/"; layer n has flips/layer_n.
        """
        numbers = {name: value for name, value in self.to_dict().items() if isinstance(value, int | float)}
        numbers = {
            name: value for name, value in numbers.items() if not name.startswith(_NOT_MEASURED.get(self.kind, ()))
        }
        by_layer = {f"flips/layer_{layer}": count for layer, count in self.flips_of_layer.items()}
        return {"router_replay/" + name: float(value) for name, value in (numbers | by_layer).items()}

    def table(self) -> Table:
        """Return the counts that `print(report)` shows, each with a remark."""
        rows = [("forwards / recomputes", f"{self.forwards:,}", f"/ {self.recomputes:,}")]
        # Without a recompute a freeze has no effect, so point to the setting.
        if self.kind == "freeze_recompute" and not self.recomputes:
            rows.append(("nothing to freeze", "", "no router was recomputed: is activation checkpointing on?"))
        if self.kind == "replay":
            share = "" if self.replayed_share is None else f"({self.replayed_share:.1%} of the tokens)"
            rows += [
                ("tokens replayed", f"{self.rows_replayed:,}", share),
                ("tokens routed live", f"{self.rows_live:,}", ""),
                ("padding", f"{self.rows_padding:,}", ""),
            ]
        if self.rows_repeated:
            rows.append(("rows named twice", f"{self.rows_repeated:,}", "(two tokens got one token's routes)"))
        done = self.decisions
        if self.recompute_flips is not None:
            first = next((layer for layer, count in sorted(self.flips_of_layer.items()) if count), None)
            where = "" if first is None else f", first in layer {first}"
            remark = f"of {done['recomputed']:,} decisions{where}"
            rows.append(("recompute flips prevented", f"{self.recompute_flips:,}", remark))
        if "verified" in done:
            rows.append(("decisions verified / wrong", f"{done['verified']:,}", f"/ {done['wrong']:,}"))
        if self.agreement is not None:
            rows += self.agreement.low()
        return Table(words=(0, 2), rows=rows)

    def _headline(self) -> str:
        of_ranks = "" if self.ranks == 1 else f" on {self.ranks} ranks"
        head = f"router {self.kind}: {self.routers} routers{of_ranks}, {self.microbatches} micro-batches"
        return head if self.agreement is None else f"{head}; {self.agreement}"

    def __str__(self) -> str:
        return "\n".join([self._headline(), self.table().text()])

    __repr__ = __str__  # for notebooks and debuggers; `to_dict` has every count


def share_of(rows_replayed: int, rows_live: int) -> float | None:
    """Return rows replayed / rows with a token; None without such rows."""
    with_token = rows_replayed + rows_live
    return rows_replayed / with_token if with_token else None


_COUNTS = [each.name for each in fields(SessionReport) if str(each.type) == "int"]
_OF_RANK = ("routers", "ranks", "forwards", "recomputes")
_OF_FORWARDS = ("microbatches", "segments_ambiguous")
"""Counts of whole micro-batches: each rank with a part of such a micro-batch counts it."""
_OF_ROWS = [name for name in _COUNTS if name not in _OF_RANK + _OF_FORWARDS]


def _add_up(reports: Sequence[SessionReport]) -> SessionReport:
    """Return the SessionReport of all ranks, the sum of theirs without repetitions."""
    first = min((each.counted_at for each in reports if each.counted_at is not None), default=None)
    reports = [_without_repetitions(each, first) for each in reports]
    counts = {name: sum(getattr(each, name) for each in reports) for name in _COUNTS}
    decisions: Counter[str] = Counter()
    flips: Counter[int] = Counter()
    for each in reports:
        decisions.update(cast(Mapping[str, int], each.decisions))
        flips.update(each.flips_of_layer)
    return SessionReport(
        kind=reports[0].kind,
        decisions=cast(Decisions, dict(decisions)),
        flips_of_layer=dict(sorted(flips.items())),
        agreement=_add_up_agreement([each.agreement for each in reports if each.agreement is not None]),
        counted_at=first,
        **counts,
    )


def _without_repetitions(report: SessionReport, first: tuple[int, int, int] | None) -> SessionReport:
    """Return a rank's SessionReport without the counts that another rank of its group has, too.

    Args:
        first: the lowest `counted_at` of the group; None: no rank has one.
    """
    if first is None:
        return report
    # Pipeline stages have different lowest layers, so the rows of the first layer are the batch's. Tensor-parallel ranks
    # without sequence parallelism have the same rows, as different replicas. All other ranks have different rows.
    at = report.counted_at
    repeated = [*(_OF_FORWARDS if at != first else ()), *(_OF_ROWS if at is None or at[:2] != first[:2] else ())]
    without: dict[str, Any] = dict.fromkeys(repeated, 0)
    if at is not None and at[1] != first[1]:
        without["agreement"] = None  # of the other stages it stays, for each compares its own layers
    return replace(report, **without)


def _add_up_agreement(parts: Sequence[LiveAgreement]) -> LiveAgreement | None:
    """Return the agreement over ranks; None: no rank compared."""
    if not parts:
        return None
    layers = add_up(item for each in parts for item in each.layers.items())
    return LiveAgreement(
        layers=dict(sorted(layers.items())),
        # Ranks of a stage have the same layers, and each stage different ones; a layer may not have been compared yet.
        num_layers=max(len(layers), *(each.num_layers for each in parts)),
        block=max(each.block for each in parts),
        rows_apart=sum(each.rows_apart for each in parts),
        layout=sorted({fact for each in parts for fact in each.layout}),
    )


def log_ended(report: SessionReport) -> None:
    """Log the counts of a session that ended in order, and warn if it replayed little."""
    _LOG.info(
        "%s session ended: %d micro-batches, %d forwards, %d recomputes, rows %d replayed, %d live, %d padding",
        report.kind,
        report.microbatches,
        report.forwards,
        report.recomputes,
        report.rows_replayed,
        report.rows_live,
        report.rows_padding,
    )
    share = report.replayed_share
    if share is not None and share < LOW_SHARE:
        warn(
            "share",
            f"only {100 * share:.1f} % of the tokens were replayed ({report.rows_replayed} of "
            f"{report.rows_replayed + report.rows_live}); the live router decided the rest. Do some samples have no routes? "
            "replay(min_replayed=...) makes this an error",
        )
    if report.rows_repeated:
        warn(
            "rows named twice",
            f"{report.rows_repeated} rows were named twice in a micro-batch: do rows start anew in each sample? "
            "Their tokens share routes",
        )
