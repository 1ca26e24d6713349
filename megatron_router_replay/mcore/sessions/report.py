"""Report the counts of a session, of this rank or of several together."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, cast

import torch
import torch.distributed as dist

from megatron_router_replay.checks import warn
from megatron_router_replay.mcore.core.streams import collective_device
from megatron_router_replay.mcore.sessions.agreement import LiveAgreement, Unit
from megatron_router_replay.tables import Table

_LOG = logging.getLogger(__name__)

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

    A count that was not taken is None.

    Args:
        kind: "replay", "record" or "freeze_recompute".
        routers: routers of the session.
        microbatches: micro-batches that reached every router of the first chunk; in a freeze, forwards of chunks.
        forwards, recomputes: forwards and recomputes of single routers.
        rows_replayed: rows that used the given routes.
        rows_live: rows without a route, decided by the live router (and frozen for their recompute).
        rows_padding: rows that are padding; the live router decides them, too.
        rows_repeated: rows that a micro-batch names a second time, counted where rows are on the host.
        segments_ambiguous: sequences that several samples of the trace begin with; the first one's rows were used.
        decisions: (row, layer) pairs by treatment; pairs that were not counted are missing.
        flips_of_layer: layer number -> how many of its recomputed decisions would have chosen different experts.
        agreement: of the live router with the replayed routes; None: they were not compared.
        counted_at: layer number and tensor-parallel replica of the routers that counted rows and micro-batches; None: this
            rank has no such routers.
    """

    kind: str
    routers: int = 0
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
    counted_at: tuple[int, int] | None = None

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

    def reduce(self, *groups: dist.ProcessGroup | None) -> SessionReport:
        """Return one report for all ranks of these groups, the same on each of them.

        A collective: every rank of each group calls it. A row counts once, however many pipeline stages and tensor-parallel
        ranks route it: the lowest of them count for all. Routers, forwards, recomputes and decisions are added up.

        Args:
            groups: process groups that share this rank alone; none given: all ranks of the job.
        """
        summed = self
        if not dist.is_initialized():
            return summed
        # One after another: all ranks of a group have its sum, and the next group, across it, adds up sums.
        for group in groups or (None,):
            summed = _add_up(summed, _over(group))
        return summed

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and shares as a dict.

        `agreement` is four numbers, where it was measured.
        """
        # `counted_at` is for `reduce` alone: it is a place, not a count.
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "counted_at"}
        agreement = values.pop("agreement")
        values |= {f"decisions_{name}": count for name, count in values.pop("decisions").items()}
        values["flips_of_layer"] = dict(self.flips_of_layer)
        for name in ("tokens", "recompute_flips", "replayed_share", "padding_share"):
            values[name] = getattr(self, name)
        return values if agreement is None else values | agreement.to_dict()

    def metrics(self, prefix: str = "router_replay/") -> dict[str, float]:
        """Return the measured numbers for a training logger.

        Keys begin with `prefix`; layer n has flips/layer_n.
        """
        numbers = {name: value for name, value in self.to_dict().items() if isinstance(value, int | float)}
        if self.kind == "freeze_recompute":  # which sees no rows, so their counts are not measured
            numbers = {name: value for name, value in numbers.items() if not name.startswith(("rows_", "tokens"))}
        by_layer = {f"flips/layer_{layer}": count for layer, count in self.flips_of_layer.items()}
        return {prefix + name: float(value) for name, value in (numbers | by_layer).items()}

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
        head = f"router {self.kind}: {self.routers} routers, {self.microbatches} micro-batches"
        return head if self.agreement is None else f"{head}; {self.agreement}"

    def __str__(self) -> str:
        return "\n".join([self._headline(), self.table().text()])

    __repr__ = __str__  # for notebooks and debuggers; `to_dict` has every count


def share_of(rows_replayed: int, rows_live: int) -> float | None:
    """Return rows replayed / rows with a token; None without such rows."""
    with_token = rows_replayed + rows_live
    return rows_replayed / with_token if with_token else None


_COUNTS = [each.name for each in fields(SessionReport) if str(each.type) in ("int", "int | None")]
# Counts of the batch, which other ranks repeat; routers and their forwards differ on each rank.
_OF_BATCH = [name for name in _COUNTS if name not in ("routers", "forwards", "recomputes")]
_REPLICAS = 1 << 20
"""More than the tensor-parallel ranks of a job: a place in `counted_at` is one number for `_add_up`."""


def _layers_of(report: SessionReport) -> list[int]:
    agreement = {} if report.agreement is None else report.agreement.layers
    return [*report.flips_of_layer, *agreement]


def _flat(report: SessionReport, top: int, *, counts: bool) -> dict[str, float]:
    """Return the numbers of a report by names that are equal on all ranks.

    Args:
        top: the highest layer number of all ranks.
        counts: True: this rank counts rows; False: another rank counts the same ones.
    """
    flat: dict[str, float] = {}

    def put(name: str, value: float | None) -> None:
        # Whether it was measured adds up, too: a stage without routers must not hide the counts of its peers.
        flat[name], flat[f"has {name}"] = value or 0, value is not None

    agreement, decisions = report.agreement, cast(Mapping[str, int], report.decisions)
    for name in _COUNTS:
        put(name, getattr(report, name) if counts or name not in _OF_BATCH else 0)
    for name in Decisions.__annotations__:
        put(f"decisions {name}", decisions.get(name))
    for name in ("samples", "samples_not_judged"):
        put(name, None if agreement is None else getattr(agreement, name) * counts)
    # Also layers of other stages: the collective needs tensors of equal size on all ranks.
    for layer in range(top + 1):
        put(f"flips {layer}", report.flips_of_layer.get(layer))
        unit = None if agreement is None else agreement.layers.get(layer)
        for name in Unit._fields:
            put(f"{name} {layer}", None if unit is None else getattr(unit, name))
    return flat


def _add_up(report: SessionReport, reduce: Callable[[list[float], str], list[float]]) -> SessionReport:
    """Return the SessionReport of all ranks, the sum of theirs.

    Args:
        reduce: (this rank's numbers, "max" or "sum") -> those of all ranks together.
    """
    agreement = report.agreement
    sample = None if agreement is None else agreement.least_sample
    highest = [max(_layers_of(report), default=0), 0 if agreement is None else agreement.num_layers]
    # Pipeline stages have different lowest layers, so the rows of the first layer are the batch's. Tensor-parallel ranks
    # without sequence parallelism have the same rows, as different replicas. All other ranks have different rows.
    at = math.inf if report.counted_at is None else report.counted_at[0] * _REPLICAS + report.counted_at[1]
    # A minimum is the negative maximum of negatives, so one collective returns both.
    top, num_layers, least, first = reduce([*highest, -math.inf if sample is None else -sample, -at], "max")
    if report.counted_at is not None and at % _REPLICAS != -first % _REPLICAS:  # another replica has its rows
        report = replace(report, agreement=None)
    flat = _flat(report, int(top), counts=at == -first)
    total = dict(zip(flat, reduce(list(flat.values()), "sum")))

    def get(name: str) -> int | None:
        return int(total[name]) if total[f"has {name}"] else None

    def by_layer(name: str) -> dict[int, int]:
        return {layer: count for layer in range(int(top) + 1) if (count := get(f"{name} {layer}")) is not None}

    units = {layer: Unit(*(total[f"{name} {layer}"] for name in Unit._fields)) for layer in by_layer("rows")}
    decisions = {name: count for name in Decisions.__annotations__ if (count := get(f"decisions {name}")) is not None}
    samples = get("samples")
    return SessionReport(
        kind=report.kind,
        decisions=cast(Decisions, decisions),
        flips_of_layer=by_layer("flips"),
        agreement=LiveAgreement(
            layers=units,
            # Ranks of a stage have the same layers, and each stage different ones; a layer may not have been compared yet.
            num_layers=max(len(units), int(num_layers)),
            least_sample=None if least == -math.inf else -least,
            samples=samples,
            samples_not_judged=get("samples_not_judged") or 0,
        )
        if samples is not None
        else None,
        counted_at=None if first == -math.inf else divmod(int(-first), _REPLICAS),
        **{name: get(name) for name in _COUNTS},  # type: ignore[arg-type]  # None where it may be
    )


def _over(group: dist.ProcessGroup | None) -> Callable[[list[float], str], list[float]]:
    """Return `reduce` for `_add_up`: an all_reduce over a group."""

    def reduce(numbers: list[float], how: str) -> list[float]:
        # float64 is exact for counts up to 2 ** 53.
        values = torch.tensor(numbers, dtype=torch.float64, device=collective_device(group))
        dist.all_reduce(values, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM, group=group)
        return values.tolist()

    return reduce


# ---- log: INFO when a session begins or ends, WARNING for a low share
def log_began(kind: str, num_routers: int) -> None:
    """Log that a session began."""
    _LOG.info("%s session began with %d routers", kind, num_routers)


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
    # Without padding, which has no routes to replay.
    expected = report.rows_replayed + report.rows_live
    if report.kind == "replay" and expected and report.rows_replayed / expected < LOW_SHARE:
        warn(
            "share",
            f"only {100 * report.rows_replayed / expected:.1f} % of the tokens were replayed ({report.rows_replayed} of "
            f"{expected}); the live router decided the rest. Do some samples have no routes? "
            "replay(min_replayed=...) makes this an error",
        )
    if report.rows_repeated:
        warn(
            "rows named twice",
            f"{report.rows_repeated} rows were named twice in a micro-batch: do rows start anew in each sample? "
            "Their tokens share routes",
        )


def log_failed(kind: str, error: BaseException) -> None:
    """Log that a session was left by an exception."""
    _LOG.info("%s session was left by %s; the routers are released, nothing was verified", kind, type(error).__name__)
