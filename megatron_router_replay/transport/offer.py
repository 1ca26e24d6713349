"""What a sender tells a receiver about a part before any of it is sent, and how the receiver judges it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.plan import Part, Place, TraceFormat, TransportPlan, bucket_rows
from megatron_router_replay.transport.timing import LegTime

PROTOCOL = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What is coming over a link."""

    step: int
    digest: str
    place: str
    format: TraceFormat
    layer_numbers: tuple[int, ...]
    num_rows: int
    nbytes: int
    bucket_bytes: int
    sequence_lengths: tuple[int, ...] | None
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
            format=plan.format,
            layer_numbers=part.layer_numbers,
            num_rows=part.num_rows,
            nbytes=part.nbytes,
            bucket_bytes=bucket_bytes,
            sequence_lengths=part.sequence_lengths,
            leg_times=leg_times,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "format"}
        return {"protocol": PROTOCOL, "format": self.format.to_json(), **values}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Offer:
        """Return what `to_json` described.

        Raises:
            TransportError: another version of the protocol.
        """
        if values.get("protocol") != PROTOCOL:
            raise TransportError(f"the other side speaks protocol {values.get('protocol')}, this one {PROTOCOL}.")
        lengths = values["sequence_lengths"]
        return cls(
            format=TraceFormat.from_json(values["format"]),
            layer_numbers=tuple(values["layer_numbers"]),
            sequence_lengths=None if lengths is None else tuple(lengths),
            leg_times={name: (float(s), int(b)) for name, (s, b) in values["leg_times"].items()},
            **{name: values[name] for name in ("step", "digest", "place", "num_rows", "nbytes", "bucket_bytes")},
        )

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """The (start, stop) rows of each bucket."""
        return bucket_rows(self.num_rows, self.row_bytes, self.bucket_bytes)

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        return self.format.row_bytes(len(self.layer_numbers))


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
    own: dict[str, Any] = {"step": step, "place": str(place._replace(tp_rank=0)), "layer_numbers": layer_numbers}
    if part is not None:
        own |= {"num_rows": part.num_rows, "nbytes": part.nbytes}
    for name, value in own.items():
        if getattr(offer, name) != value:
            return f"{place} expects {name}={value}, the rollout side sends {name}={getattr(offer, name)}"
    if expected is not None and offer.digest != expected.digest:
        return (
            f"{place} expects plan {expected.digest}, the rollout side sends {offer.digest}: sample lengths, partition, "
            "layout or format differ"
        )
    predicted = offer.num_rows * offer.row_bytes
    if offer.nbytes != predicted:
        return f"the rollout side announces {offer.nbytes} bytes to {place}, {offer.num_rows} rows take {predicted}"
    return None
