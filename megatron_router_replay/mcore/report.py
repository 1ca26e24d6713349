"""What a session did on this rank, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megatron_router_replay.diagnostics.live import LiveReport

if TYPE_CHECKING:  # a room, which the core does not load
    from megatron_router_replay.transport.timing import LegReport


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionReport:
    """Counts of one session on this rank.

    Args:
        kind: "replay", "record" or "freeze_recompute".
        routers: routers the session holds.
        microbatches: forwards of model chunks.
        tokens: rows these forwards routed, each counted once a chunk; replayed + live + padding.
        rows_replayed: rows that used the trace's routes.
        rows_live: rows without a route, decided by the live router (and frozen for their recompute).
        rows_padding: rows of padding, spread over all experts.
        forwards, recomputes: forwards and recomputes of single routers.
        recompute_flips: (row, layer) pairs whose recompute would have chosen another set of experts; 0 unless
            count_flips=True.
        decisions_verified: (row, layer) pairs whose routing map was compared on its way out of the router, forwards and
            recomputes; 0 unless verify=True.
        live: the live router beside the replayed routes; None unless compare_live.
        leg_times: how long each leg of the routes' way here took, on both sides; None unless leg_times was given.
        decisions_wrong: those that did not hold exactly the experts this session chose.
    """

    kind: str
    routers: int = 0
    microbatches: int = 0
    tokens: int = 0
    rows_replayed: int = 0
    rows_live: int = 0
    rows_padding: int = 0
    forwards: int = 0
    recomputes: int = 0
    recompute_flips: int = 0
    decisions_verified: int = 0
    decisions_wrong: int = 0
    live: LiveReport | None = None
    leg_times: LegReport | None = None

    @property
    def replayed_share(self) -> float:
        """Tokens replayed / tokens trained on, padding left out; 0.0 without tokens."""
        trained = self.rows_replayed + self.rows_live
        return self.rows_replayed / trained if trained else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return every field, and `replayed_share`; `live` and `leg_times` as dicts of their own, where there are any."""
        apart = {"live": self.live, "leg_times": self.leg_times}
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in apart}
        values["replayed_share"] = self.replayed_share
        return values | {name: part.to_dict() for name, part in apart.items() if part is not None}

    def metrics(self, prefix: str = "router_replay/") -> dict[str, float]:
        """Return the numbers for a training logger, keys under `prefix`; leg times under `{prefix}transport/`."""
        numbers = {name: value for name, value in self.to_dict().items() if isinstance(value, int | float)}
        live = {} if self.live is None else self.live.metrics(f"{prefix}live/")
        legs = {} if self.leg_times is None else self.leg_times.metrics(f"{prefix}transport/")
        return {prefix + name: float(value) for name, value in numbers.items()} | live | legs

    def __str__(self) -> str:
        lines = [
            f"router {self.kind}: {self.routers} routers, {self.microbatches} micro-batches",
            f"  forwards / recomputes       {self.forwards:>12,} / {self.recomputes:,}",
        ]
        if self.kind == "replay":
            lines += [
                f"  tokens replayed             {self.rows_replayed:>12,}  ({self.replayed_share:.1%} of those with a token)",
                f"  tokens routed live          {self.rows_live:>12,}",
                f"  padding                     {self.rows_padding:>12,}",
            ]
        if self.recompute_flips:
            lines.append(f"  recompute flips prevented   {self.recompute_flips:>12,}")
        if self.decisions_verified:
            lines.append(f"  decisions verified / wrong  {self.decisions_verified:>12,} / {self.decisions_wrong:,}")
        if self.leg_times is not None:
            lines.append(f"  {self.leg_times}")
        return "\n".join([*lines, *([str(self.live)] if self.live is not None else [])])
