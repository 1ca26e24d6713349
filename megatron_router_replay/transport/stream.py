"""How one part crosses one link, the same from the rollout side to TP rank 0 and from there to its TP group.

    receiver -> sender    request     step, digest of the receiver's plan if it has one, its leg times
    sender -> receiver    offer       step, what is coming: format, layers, rows, bytes, bucket size, the sender's leg times
    receiver -> sender    verdict     yes, or why not
    sender -> receiver    buckets     of whole rows; one message each for topk_indices and every value per token
    receiver -> sender    receipt     bytes received

Sizes are agreed on before any bucket: gloo ends the process that gets more than it asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.link import Link, LinkError
from megatron_router_replay.transport.plan import Part, Place, TraceFormat, TransportPlan, bucket_rows
from megatron_router_replay.transport.rows import Memory, RowSink, RowSource, as_bytes, carve
from megatron_router_replay.transport.timing import Lap, LegTimes

Sink = TypeVar("Sink", bound=RowSink)

PROTOCOL = 1
_IN_FLIGHT = 2
"""Buckets of one part that are under way at once: one on the wire, one being filled or emptied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """How long a side waits.

    Args:
        ready: for the other side to begin: a whole generation, or a whole training step.
        progress: for each message after that.
    """

    ready: timedelta
    progress: timedelta


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
    laps: dict[str, Lap]

    @classmethod
    def of(cls, plan: TransportPlan, part: Part, *, step: int, bucket_bytes: int, laps: dict[str, Lap]) -> Offer:
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
            laps=laps,
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
            laps={name: (float(s), int(b)) for name, (s, b) in values["laps"].items()},
            **{name: values[name] for name in ("step", "digest", "place", "num_rows", "nbytes", "bucket_bytes")},
        )

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """The (start, stop) rows of each bucket."""
        return bucket_rows(self.num_rows, self.format.row_bytes(len(self.layer_numbers)), self.bucket_bytes)


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
    predicted = offer.num_rows * offer.format.row_bytes(len(offer.layer_numbers))
    if offer.nbytes != predicted:
        return f"the rollout side announces {offer.nbytes} bytes to {place}, {offer.num_rows} rows take {predicted}"
    return None


class Staging:
    """A fixed number of bucket buffers that all parts of a transport share.

    Args:
        buffers: how many.
        bucket_bytes: of each; a bucket is never larger unless it is a single row.
        device: where messages lie; on a GPU each buffer has a page-locked twin on the host, where rows are gathered.
    """

    def __init__(self, *, buffers: int, bucket_bytes: int, device: torch.device) -> None:
        self.bucket_bytes = bucket_bytes
        self._device = device
        self._free: SimpleQueue[Buffer] = SimpleQueue()
        for _ in range(buffers):
            self._free.put(Buffer(device))

    def take(self, *, block: bool) -> Buffer | None:
        """Return a buffer, or None if there is none and the caller shall not wait.

        A waiting caller holds no buffer, and who holds one gives it back within its timeout: this ends.
        """
        try:
            return self._free.get(block=block)
        except Empty:
            return None

    def give_back(self, buffer: Buffer) -> None:
        """Let others have the buffer."""
        self._free.put(buffer)


class Buffer:
    """Memory for one bucket, allocated when first used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._on_device = self._host

    @property
    def nbytes(self) -> int:
        return self._host.numel()

    def carve(self, format: TraceFormat, rows: int, layers: int, size: int) -> Memory:
        """Return the format's tensors for some rows, in this buffer's host memory; `size` is the least to allocate."""
        size = max(size, rows * format.row_bytes(layers))
        if self._host.numel() < size:
            cuda = self._device.type == "cuda"
            self._host = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
            self._on_device = torch.empty_like(self._host, device=self._device) if cuda else self._host
        return carve(self._host, format, rows, layers)

    def messages(self, memory: Memory) -> list[Tensor]:
        """Return what to send of carved memory, in the format's order, on the device."""
        parts = [as_bytes(memory[name]) for name in sorted(memory)]
        if self._device.type != "cuda":
            return parts
        sent = [self._on_device[at : at + part.numel()] for part in parts for at in (part.storage_offset(),)]
        for target, part in zip(sent, parts):
            target.copy_(part, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()  # a sender thread of the rollout side, not training
        return sent


def push(
    link: Link,
    source: RowSource,
    part: Part,
    *,
    plan: TransportPlan,
    step: int,
    staging: Staging,
    timeouts: Timeouts,
    times: LegTimes,
    laps: dict[str, Lap],
) -> dict[str, Lap]:
    """Send one part over a link: wait for the request, offer, send the buckets, wait for the receipt.

    Args:
        laps: this side's leg times, for the other side.

    Returns:
        The other side's leg times.

    Raises:
        TransportError: the link failed, or the receiver refused; names place and bytes. The receiver raises, too.
    """
    sent = 0
    under_way: deque[tuple[Buffer, list[Any], int]] = deque()

    def finish_oldest() -> Buffer:
        nonlocal sent
        buffer, works, nbytes = under_way[0]
        with times.leg("send", nbytes):
            for work in works:
                link.wait(work, timeouts.progress)
        under_way.popleft()
        sent += nbytes
        return buffer

    stage = "waiting for the training side's request"
    try:
        with times.leg("wait"):
            request = link.recv_json(timeouts.ready)
        stage = "agreeing on the plan"
        offer = Offer.of(plan, part, step=step, bucket_bytes=staging.bucket_bytes, laps=laps)
        link.send_json(offer.to_json(), timeouts.progress)
        _raise_if_refused(link.recv_json(timeouts.progress))
        stage = "sending"
        for start, stop in offer.buckets:
            buffer = None
            if len(under_way) < _IN_FLIGHT:
                # Never wait for another's buffer while one of our own can be finished.
                buffer = staging.take(block=not under_way)
            if buffer is None:
                buffer = finish_oldest()
            under_way.append((buffer, [], 0))
            nbytes = (stop - start) * plan.format.row_bytes(part.num_layers)
            with times.leg("partition", nbytes):
                memory = buffer.carve(plan.format, stop - start, part.num_layers, staging.bucket_bytes)
                source.fill(part, start, stop, memory)
                messages = buffer.messages(memory)
            under_way[-1] = (buffer, [link.isend(message) for message in messages if message.numel()], nbytes)
        while under_way:
            staging.give_back(finish_oldest())
        stage = "waiting for the receipt"
        received = link.recv_json(timeouts.progress).get("received")
        if not sent == received == part.nbytes:
            raise TransportError(f"{sent} bytes were sent, {received} received")
        return dict(request["laps"])
    except BaseException as error:
        raise _failed(link, error, f"rollout side, step {step}, to {part.place}: {stage}", sent, part.nbytes) from error
    finally:
        # After the link is closed: until then a failed part's messages may still be read from these buffers.
        for buffer, _, _ in under_way:
            staging.give_back(buffer)


def pull(
    up: Link,
    down: Sequence[Link],
    sink_of: Callable[[Offer], Sink],
    *,
    check: Callable[[Offer], str | None],
    digest: str | None,
    step: int,
    place: Place,
    timeouts: Timeouts,
    times: LegTimes,
    waits: LegTimes,
) -> tuple[Offer, Sink]:
    """Receive one part over `up`, passing every bucket on to the links in `down` as it comes.

    Args:
        sink_of: offer -> RowSink, asked once the offer is accepted.
        check: offer -> why it cannot be taken, or None.
        waits: where waiting for the other side is counted.

    Raises:
        TransportError: a link failed, or the sides do not agree; names place and bytes. All links' other ends raise, too.
    """
    received, total = 0, 0
    stage = "waiting for this place's TP group"
    try:
        with waits.leg("wait"):
            for link in down:
                link.recv_json(timeouts.ready)
            stage = "waiting for the rollout side" if place.tp_rank == 0 else "waiting for TP rank 0"
            request = {"protocol": PROTOCOL, "step": step, "plan": digest, "laps": times.lap()}
            up.send_json(request, timeouts.ready)
            answer = up.recv_json(timeouts.ready)
        stage = "agreeing on the plan"
        offer = Offer.from_json(answer)
        total = offer.nbytes
        times.hear(offer.laps)
        for link in down:
            link.send_json(answer, timeouts.progress)
        refusals = [check(offer)] + [link.recv_json(timeouts.progress).get("refused") for link in down]
        refused = next((text for text in refusals if text), None)
        up.send_json({"refused": refused}, timeouts.progress)
        if refused:
            raise TransportError(refused)
        sink = sink_of(offer)
        stage = "receiving"
        under_way: deque[tuple[tuple[int, int], list[Tensor], list[Any]]] = deque()

        def finish_oldest() -> None:
            nonlocal received
            (start, stop), messages, works = under_way[0]
            with times.leg("receive"):
                for work in works:
                    up.wait(work, timeouts.progress)
                passed_on = [(link, link.isend(message)) for message in messages for link in down]
                for link, work in passed_on:
                    link.wait(work, timeouts.progress)
            under_way.popleft()
            nbytes = sum(message.numel() for message in messages)
            times.add("receive", 0.0, nbytes)
            received += nbytes
            sink.done(start, stop)

        for start, stop in offer.buckets:
            memory = sink.memory(start, stop)
            messages = [part for name in sorted(memory) if (part := as_bytes(memory[name])).numel()]
            under_way.append(((start, stop), messages, [up.irecv(message) for message in messages]))
            if len(under_way) == _IN_FLIGHT:
                finish_oldest()
        while under_way:
            finish_oldest()
        stage = "handing over"
        if received != offer.nbytes:
            raise TransportError(f"{offer.nbytes} bytes were announced")
        for link in down:
            if link.recv_json(timeouts.progress).get("received") != received:
                raise TransportError("a rank of the TP group received another number of bytes")
        up.send_json({"received": received}, timeouts.progress)
        return offer, sink
    except BaseException as error:
        raised = _failed(up, error, f"training side, step {step}, {place}: {stage}", received, total)
        for link in down:
            link.fail(str(raised))
        raise raised from error


def _raise_if_refused(verdict: dict[str, Any]) -> None:
    if verdict.get("refused"):
        raise TransportError(f"refused: {verdict['refused']}")


def _failed(link: Link, error: BaseException, what: str, moved: int, total: int) -> BaseException:
    """Tell the other side, and return what to raise on this one."""
    text = f"{what}; {moved:,} of {total:,} bytes had moved: {_text(error)}"
    link.fail(text)
    return TransportError(text) if isinstance(error, Exception) else error


def _text(error: BaseException) -> str:
    known = isinstance(error, (TransportError, LinkError))
    return str(error).rstrip(".") if known else f"{type(error).__name__}: {error}"
