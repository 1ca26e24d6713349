"""What a session did on this rank, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from html import escape
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_router_replay.tables import Table

if TYPE_CHECKING:  # rooms, which the core does not load
    from megatron_router_replay.diagnostics.live import LiveReport
    from megatron_router_replay.transport.timing import LegReport

_BY_LAYER = {"flips_of_layer": "flips", "left_live_of_layer": "left_live"}
"""Counts of single layers, and the folder of their metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionReport:
    """Counts of one session on this rank, or after `reduce` on several. What was not measured is None.

    Args:
        kind: "replay", "record" or "freeze_recompute".
        ranks: how many ranks are added up here.
        routers: routers the session holds.
        microbatches: forwards of model chunks that reached every router.
        tokens: rows these forwards routed, each counted once a chunk; replayed + live + padding.
        rows_replayed: rows that used the trace's routes.
        rows_live: rows without a route, decided by the live router (and frozen for their recompute).
        rows_padding: rows known to be padding, spread over all experts.
        rows_not_kept, rows_stale: live rows that have a route which was left out by choice (`trace.keep`,
            `trace.limit_age`); the other live rows have none.
        rows_trained_live: of those two, the rows that are trained on; where `trained` was said.
        decisions_weighed: (row, layer) pairs of replayed rows whose margin was looked at; with min_margin or max_margin.
        decisions_below_margin, decisions_above_margin: those that the live router took, because it disagrees by less than
            min_margin, or by more than max_margin.
        left_live_of_layer: layer number -> the two together.
        forwards, recomputes: forwards and recomputes of single routers.
        recompute_flips: (row, layer) pairs whose recompute would have chosen another set of experts; with count_flips=True.
        decisions_recomputed: (row, layer) pairs that these were counted among.
        flips_of_layer: layer number -> the flips among its recomputed decisions; with count_flips=True.
        decisions_verified: (row, layer) pairs whose routing map was compared on its way out of the router, forwards and
            recomputes; with verify=True.
        decisions_wrong: those that did not hold exactly the experts this session chose.
        decisions_counted: (row, layer) pairs that went into the counters behind the expert bias, each once, padding left out;
            None: the model has no expert bias.
        expert_bias, aux_loss: what `replay` was told to count; None: the model has none, or the session replays nothing.
        live: the live router beside the replayed routes; with compare_live.
        leg_times: how long each leg of the routes' way here took, on both sides; with leg_times.
    """

    kind: str
    ranks: int = 1
    routers: int = 0
    microbatches: int = 0
    tokens: int = 0
    rows_replayed: int = 0
    rows_live: int = 0
    rows_padding: int = 0
    rows_not_kept: int = 0
    rows_stale: int = 0
    rows_trained_live: int | None = None
    decisions_weighed: int | None = None
    decisions_below_margin: int | None = None
    decisions_above_margin: int | None = None
    left_live_of_layer: Mapping[int, int] = field(default_factory=dict)
    forwards: int = 0
    recomputes: int = 0
    recompute_flips: int | None = None
    decisions_recomputed: int | None = None
    flips_of_layer: Mapping[int, int] = field(default_factory=dict)
    decisions_verified: int | None = None
    decisions_wrong: int | None = None
    decisions_counted: int | None = None
    expert_bias: str | None = None
    aux_loss: str | None = None
    live: LiveReport | None = None
    leg_times: LegReport | None = None

    @property
    def replayed_share(self) -> float | None:
        """Tokens replayed / tokens trained on, padding left out; None for sessions that replay nothing, or no tokens.

        With margins a token counts by the share of its decisions that were replayed.
        """
        trained = self.rows_replayed + self.rows_live
        if not trained or self.kind != "replay":
            return None
        by_margin = self.decisions_left_live / self.decisions_weighed if self.decisions_weighed else 0.0
        return self.rows_replayed * (1 - by_margin) / trained

    @property
    def decisions_left_live(self) -> int:
        """Decisions of replayed rows that the live router took because of their margin."""
        return (self.decisions_below_margin or 0) + (self.decisions_above_margin or 0)

    @property
    def rows_without_route(self) -> int | None:
        """Live rows that nobody chose: the trace has no route for them, or their row is -1; None: nothing is replayed."""
        return self.rows_live - self.rows_not_kept - self.rows_stale if self.kind == "replay" else None

    @property
    def padding_share(self) -> float | None:
        """Rows known to be padding / all rows; None without rows."""
        return self.rows_padding / self.tokens if self.tokens else None

    def reduce(self, *groups: dist.ProcessGroup | None) -> SessionReport:
        """Return one report for all ranks of these groups, the same on each of them.

        A collective: every rank of each group calls it. Counts are added up, so rows that several ranks route (tensor,
        pipeline parallelism) count once for each; shares stay shares. `live` and `leg_times` are left out:
        `session.live_report` adds up the first.

        Args:
            groups: process groups that do not overlap but in this rank; none given: all ranks of the job.
        """
        summed = replace(self, live=None, leg_times=None)
        if not dist.is_initialized():
            return summed
        # In turn: once a group's ranks hold its sum, the next group, across it, adds up sums.
        for group in groups or (None,):
            parts: list[SessionReport | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, summed, group=group)
            summed = _add_up([part for part in parts if part is not None])
        return summed

    def to_dict(self) -> dict[str, Any]:
        """Return every field and the properties beside them; `live` and `leg_times` as dicts, where there are any."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        parts = {name: values.pop(name) for name in ("live", "leg_times")}
        values |= {name: dict(values[name]) for name in _BY_LAYER}
        values |= {name: getattr(self, name) for name in ("replayed_share", "padding_share", "rows_without_route")}
        return values | {name: part.to_dict() for name, part in parts.items() if part is not None}

    def metrics(self, prefix: str = "router_replay/") -> dict[str, float]:
        """Return the measured numbers for a training logger, keys under `prefix`.

        Leg times are under `{prefix}transport/`, flips of single layers under `{prefix}flips/layer_{n}`, decisions left live
        by their margin under `{prefix}left_live/layer_{n}`.
        """
        numbers = {name: value for name, value in self.to_dict().items() if isinstance(value, int | float)}
        by_layer = {
            f"{folder}/layer_{layer}": count
            for name, folder in _BY_LAYER.items()
            for layer, count in getattr(self, name).items()
        }
        live = {} if self.live is None else self.live.metrics(f"{prefix}live/")
        legs = {} if self.leg_times is None else self.leg_times.metrics(f"{prefix}transport/")
        return {prefix + name: float(value) for name, value in (numbers | by_layer).items()} | live | legs

    def table(self) -> Table:
        """Return the counts that `print(report)` shows, each with a remark."""
        rows = [("forwards / recomputes", f"{self.forwards:,}", f"/ {self.recomputes:,}")]
        if self.kind == "replay":
            share = "" if self.replayed_share is None else f"({self.replayed_share:.1%} of those with a token)"
            rows += [
                ("tokens replayed", f"{self.rows_replayed:,}", share),
                ("tokens routed live", f"{self.rows_live:,}", self._why_live()),
                ("padding", f"{self.rows_padding:,}", ""),
            ]
        if self.decisions_weighed is not None:
            remark = (
                f"of {self.decisions_weighed:,} ({self.decisions_below_margin or 0:,} below min_margin, "
                f"{self.decisions_above_margin or 0:,} above max_margin)"
            )
            rows.append(("decisions left live by margin", f"{self.decisions_left_live:,}", remark))
        if self.recompute_flips is not None:
            first = next((layer for layer, count in sorted(self.flips_of_layer.items()) if count), None)
            where = "" if first is None else f", first in layer {first}"
            remark = f"of {self.decisions_recomputed:,} decisions{where}"
            rows.append(("recompute flips prevented", f"{self.recompute_flips:,}", remark))
        if self.decisions_verified is not None:
            rows.append(("decisions verified / wrong", f"{self.decisions_verified:,}", f"/ {self.decisions_wrong:,}"))
        if self.decisions_counted is not None:
            remark = "" if self.expert_bias is None else f"expert_bias={self.expert_bias}"
            rows.append(("expert-bias decisions", f"{self.decisions_counted:,}", remark))
        if self.aux_loss is not None:
            rows.append(("aux loss", "", f"aux_loss={self.aux_loss}"))
        return Table(name="session", words=(0, 2), rows=rows)

    def _why_live(self) -> str:
        if not self.rows_not_kept and not self.rows_stale:
            return ""  # none has a route, as the line before says
        trained = "" if self.rows_trained_live is None else f"; trained, of the last two: {self.rows_trained_live:,}"
        return (
            f"({self.rows_without_route or 0:,} without a route, {self.rows_not_kept:,} not kept, {self.rows_stale:,} too old"
            f"{trained})"
        )

    def _headline(self) -> str:
        on_ranks = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        return f"router {self.kind}: {self.routers} routers, {self.microbatches} micro-batches{on_ranks}"

    def __str__(self) -> str:
        lines = [self._headline(), self.table().text()]
        if self.leg_times is not None:
            lines.append(f"  {self.leg_times}")
        return "\n".join([*lines, *([str(self.live)] if self.live is not None else [])])

    __repr__ = __str__  # what a notebook or a debugger shows; `to_dict` has every field

    def _repr_html_(self) -> str:
        live = "" if self.live is None else self.live._repr_html_()
        legs = "" if self.leg_times is None else f"<br>{escape(str(self.leg_times))}"
        return f"<div><b>{escape(self._headline())}</b>{self.table().html()}{legs}{live}</div>"


def _add_up(reports: list[SessionReport]) -> SessionReport:
    totals: dict[str, Any] = {}
    for each in fields(SessionReport):
        # A stage without routers measures less than the others, and None there must not hide what they measured.
        measured = [value for report in reports if (value := getattr(report, each.name)) is not None]
        if each.name in _BY_LAYER:
            layers = sorted({layer for counts in measured for layer in counts})
            totals[each.name] = {layer: sum(counts.get(layer, 0) for counts in measured) for layer in layers}
        elif measured and isinstance(measured[0], int):
            totals[each.name] = sum(measured)
        elif measured:  # words: the kind, and the choices that `Agreement` has compared
            totals[each.name] = measured[0]
    return SessionReport(**totals)
