"""What a sender tells a receiver about a part before any of it is sent, and how the receiver judges it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_router_replay.header import TraceHeader
from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.plan import ParallelLayout, Part, Place, TransportPlan, bucket_rows
from megatron_router_replay.transport.timing import LegTime

PROTOCOL = 2


def terms(layout: ParallelLayout) -> dict[str, Any]:
    """Return what both sides of a transport must have alike before they exchange anything."""
    return {"protocol": PROTOCOL, **asdict(layout)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What is coming over a link.

    Args:
        digest: of the sender's plan.
        place: which gets it.
        header: of the trace that it gets.
        nbytes: as the sender predicts them; the header says how many there must be.
        leg_times: of the sender.
    """

    step: int
    digest: str
    place: str
    header: TraceHeader
    nbytes: int
    bucket_bytes: int
    leg_times: dict[str, LegTime]

    @classmethod
    def of(
        cls, plan: TransportPlan, part: Part, *, step: int, bucket_bytes: int, leg_times: dict[str, LegTime]
    ) -> Offer:
        """Return the offer of a part."""
        return cls(
            step=step,
            digest=plan.digest,
            place=str(part.place),
            header=part.header(plan.format),
            nbytes=part.nbytes,
            bucket_bytes=bucket_bytes,
            leg_times=leg_times,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "header"}
        return {"protocol": PROTOCOL, "header": self.header.to_json(), **values}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Offer:
        """Return what `to_json` described.

        Raises:
            TransportError: another version of the protocol.
            TraceError: the header is damaged.
        """
        if values.get("protocol") != PROTOCOL:
            raise TransportError(f"the other side speaks protocol {values.get('protocol')}, this one {PROTOCOL}.")
        return cls(
            header=TraceHeader.from_json(values["header"]),
            leg_times={name: (float(s), int(b)) for name, (s, b) in values["leg_times"].items()},
            **{name: values[name] for name in ("step", "digest", "place", "nbytes", "bucket_bytes")},
        )

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """The (start, stop) rows of each bucket."""
        return bucket_rows(self.header.num_tokens, self.header.row_bytes(), self.bucket_bytes)


def check_offer(
    offer: Offer,
    *,
    step: int,
    place: Place,
    layer_numbers: tuple[int, ...],
    expected: TransportPlan | None,
    part: Part | None,
) -> str | None:
    """Return why this place cannot take the offer, or None."""
    # Numbers before digests: of two sides that disagree, a person wants to know what about.
    required: dict[str, Any] = {
        "step": step,
        # What the rank 0 of a tensor-parallel group is sent all its ranks get.
        "place": str(place._replace(tp_rank=0)),
        "layer_numbers": layer_numbers,
    }
    offered: dict[str, Any] = {
        "step": offer.step,
        "place": offer.place,
        "layer_numbers": offer.header.layer_numbers,
    }
    if part is not None:
        required |= {"num_rows": part.num_rows, "nbytes": part.nbytes}
        offered |= {"num_rows": offer.header.num_tokens, "nbytes": offer.nbytes}
    for name, value in required.items():
        if offered[name] != value:
            return f"{place} expects {name}={value}, the rollout side sends {name}={offered[name]}"
    if expected is not None and offer.digest != expected.digest:
        return (
            f"{place} expects plan {expected.digest}, the rollout side sends {offer.digest}: sample lengths, partition, "
            "layout or format differ"
        )
    if offer.nbytes != offer.header.num_bytes:
        return (
            f"the rollout side announces {offer.nbytes} bytes to {place}, {offer.header.num_tokens} rows take "
            f"{offer.header.num_bytes}"
        )
    return None
