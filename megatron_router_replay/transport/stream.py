"""How one part crosses one link, the same from the rollout side to TP rank 0 and from there to its TP group.

    receiver -> sender    request     step, digest of the receiver's plan if it has one, its leg times
    sender -> receiver    offer       step, what is coming: format, layers, rows, bytes, bucket size, the sender's leg times
    receiver -> sender    verdict     why not, or for how many buckets it has memory
    sender -> receiver    buckets     of whole rows; one message each for topk_indices and every value per token
    receiver -> sender    notes       one byte each: a bucket has arrived, there is memory for another, or both
    receiver -> sender    receipt     bytes received

The notes bound what a slow receiver costs the others. A bucket is gathered only when the receiver has memory for it, and
its staging buffer is free as soon as it has arrived, however long the receiver then works on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

from torch import Tensor

from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.link import Link, LinkError
from megatron_router_replay.transport.offer import PROTOCOL, Offer
from megatron_router_replay.transport.plan import Part, Place
from megatron_router_replay.transport.rows import RowSink, RowSource, as_bytes
from megatron_router_replay.transport.staging import Buffer, Staging
from megatron_router_replay.transport.timing import LegTime, LegTimes

Sink = TypeVar("Sink", bound=RowSink)

WINDOW = 2
"""Buckets of one part that are under way at once: one on the wire, one being filled or emptied."""
_ARRIVED, _READY = 1, 2
"""What a note may say, added up."""
_UNREAD_NOTES = 2 * (WINDOW + 1)
"""A sender that has sent a bucket has read every note but the last few."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """How long a side waits.

    Args:
        ready: for the other side to begin: a whole generation, or a whole training step.
        progress: for each message after that.
    """

    ready: timedelta
    progress: timedelta


class _OutgoingBuckets:
    """Buckets on their way over one link: which have arrived, and for how many more the receiver has memory."""

    def __init__(self, link: Link, *, window: int, timeout: timedelta) -> None:
        self._link, self._timeout = link, timeout
        self.room = window
        self.under_way: deque[tuple[list[Any], int]] = deque()

    def send(self, messages: Sequence[Tensor]) -> None:
        """Start to send a bucket, for which there must be room."""
        self.room -= 1
        nbytes = sum(message.numel() for message in messages)
        self.under_way.append((self._link.start_sending(messages), nbytes))

    def wait_for_note(self) -> int:
        """Wait for the receiver's next note; return the bytes of the oldest bucket if it has arrived, else 0."""
        note = self._link.recv_note(self._timeout)
        self.room += bool(note & _READY)
        if not note & _ARRIVED:
            return 0
        works, nbytes = self.under_way.popleft()
        self._link.finish(works, self._timeout)
        return nbytes


class PartSender:
    """Sends one part over a link.

    Args:
        offer: of the part, with this side's leg times.
        staging: shared with the senders of other parts.
    """

    def __init__(
        self,
        link: Link,
        source: RowSource,
        part: Part,
        *,
        offer: Offer,
        staging: Staging,
        timeouts: Timeouts,
        times: LegTimes,
    ) -> None:
        self._link, self._source, self._part, self._offer = link, source, part, offer
        self._staging, self._timeouts, self._times = staging, timeouts, times
        self._buffers: deque[Buffer] = deque()  # of the buckets under way, oldest first
        self._stage = "waiting for the training side's request"
        self._arrived_bytes = 0

    def run(self) -> dict[str, LegTime]:
        """Wait for the request, offer, send the buckets, wait for the receipt; return the other side's leg times.

        Raises:
            TransportError: the link failed, or the receiver refused; names place and bytes. The receiver raises, too.
        """
        try:
            with self._times.measure("wait"):
                request = self._link.recv_json(self._timeouts.ready)
            window = self._agree()
            self._stage = "sending"
            self._send_buckets(window)
            self._stage = "waiting for the receipt"
            received = self._link.recv_json(self._timeouts.progress).get("received")
            if not self._arrived_bytes == received == self._part.nbytes:
                raise TransportError(f"{self._arrived_bytes} bytes were sent, {received} received")
            return dict(request["leg_times"])
        except BaseException as error:
            what = f"rollout side, step {self._offer.step}, to {self._part.place}: {self._stage}"
            raise _failed([self._link], error, what, self._arrived_bytes, self._part.nbytes) from error
        finally:
            # Only now, after the link is closed: until then a failed part's messages may be read from these buffers.
            while self._buffers:
                self._staging.give_back(self._buffers.popleft())

    def _agree(self) -> int:
        self._stage = "agreeing on the plan"
        self._link.send_json(self._offer.to_json(), self._timeouts.progress)
        verdict = self._link.recv_json(self._timeouts.progress)
        if verdict.get("refused"):
            raise TransportError(f"refused: {verdict['refused']}")
        return int(verdict["window"])

    def _send_buckets(self, window: int) -> None:
        outgoing = _OutgoingBuckets(self._link, window=window, timeout=self._timeouts.progress)
        coming = deque(self._offer.buckets)
        while coming or outgoing.under_way:
            # With a bucket under way there is a note to wait for, and a buffer that comes back with it: take another
            # one only if nobody else needs it. With none, wait for one: who has it gives it back as its bucket arrives.
            buffer = None
            if coming and outgoing.room and len(outgoing.under_way) < WINDOW:
                buffer = self._staging.take(block=not outgoing.under_way)
            if buffer is None:
                self._wait_for_note(outgoing)
            else:
                self._buffers.append(buffer)
                self._send_bucket(outgoing, buffer, *coming.popleft())

    def _send_bucket(self, outgoing: _OutgoingBuckets, buffer: Buffer, start: int, stop: int) -> None:
        with self._times.measure("partition", (stop - start) * self._offer.header.row_bytes()):
            memory = buffer.views(self._offer.header, stop - start, self._staging.bucket_bytes)
            self._source.fill(self._part, start, stop, memory)
            messages = [message for message in buffer.messages(memory) if message.numel()]
        outgoing.send(messages)

    def _wait_for_note(self, outgoing: _OutgoingBuckets) -> None:
        with self._times.measure("send"):
            nbytes = outgoing.wait_for_note()
        if nbytes:
            self._staging.give_back(self._buffers.popleft())
            self._times.add("send", 0.0, nbytes)
            self._arrived_bytes += nbytes


class PartReceiver(Generic[Sink]):
    """Receives one part over a link and passes every bucket on to the links of its TP group as it comes.

    Args:
        up, down: to who sends, and to the other ranks of the TP group, if this is rank 0.
        sink_of: offer -> RowSink, asked once the offer is accepted.
        check: offer -> why it cannot be taken, or None.
        times, waits: where legs, and waiting for the other side, are counted.
    """

    def __init__(
        self,
        up: Link,
        down: Sequence[Link],
        sink_of: Callable[[Offer], Sink],
        *,
        check: Callable[[Offer], str | None],
        step: int,
        place: Place,
        timeouts: Timeouts,
        times: LegTimes,
        waits: LegTimes,
    ) -> None:
        self._up, self._down, self._sink_of, self._check = up, down, sink_of, check
        self._step, self._place, self._timeouts, self._times, self._waits = step, place, timeouts, times, waits
        self._notes: deque[Any] = deque()  # that the sender may not have read yet
        self._stage = ""
        self._received, self._total = 0, 0

    def run(self, digest: str | None) -> Sink:
        """Ask for the part, judge the offer, take the buckets, send the receipt; return the filled sink.

        Args:
            digest: of the plan that this side expects; for the request.

        Raises:
            TransportError: a link failed, or the sides do not agree; names place and bytes. All links' other ends raise.
        """
        try:
            answer = self._request(digest)
            offer, windows = self._agree(answer)
            sink = self._sink_of(offer)
            window = min(WINDOW, len(offer.buckets))
            self._up.send_json({"window": window}, self._timeouts.progress)
            self._stage = "receiving"
            relays = [
                _OutgoingBuckets(link, window=room, timeout=self._timeouts.progress)
                for link, room in zip(self._down, windows)
            ]
            self._receive_buckets(offer, sink, window, relays)
            self._hand_over()
            return sink
        except BaseException as error:
            what = f"training side, step {self._step}, {self._place}: {self._stage}"
            raise _failed([self._up, *self._down], error, what, self._received, self._total) from error

    def _request(self, digest: str | None) -> dict[str, Any]:
        with self._waits.measure("wait"):
            self._stage = "waiting for this place's TP group"
            for link in self._down:
                link.recv_json(self._timeouts.ready)
            self._stage = f"waiting for {'TP rank 0' if self._place.tp_rank else 'the rollout side'}"
            leg_times = self._times.take_unreported()
            request = {"protocol": PROTOCOL, "step": self._step, "plan": digest, "leg_times": leg_times}
            self._up.send_json(request, self._timeouts.ready)
            return self._up.recv_json(self._timeouts.ready)

    def _agree(self, answer: dict[str, Any]) -> tuple[Offer, list[int]]:
        """Judge the offer together with the TP group; return it, and for how many buckets each of the group has memory."""
        self._stage = "agreeing on the plan"
        offer = Offer.from_json(answer)
        self._total = offer.nbytes
        self._times.add_peer(offer.leg_times)
        for link in self._down:
            link.send_json(answer, self._timeouts.progress)
        verdicts = [link.recv_json(self._timeouts.progress) for link in self._down]
        reasons = [self._check(offer), *(verdict.get("refused") for verdict in verdicts)]
        refused = next((text for text in reasons if text), None)
        if refused:
            self._up.send_json({"refused": refused}, self._timeouts.progress)
            raise TransportError(refused)
        return offer, [int(verdict["window"]) for verdict in verdicts]

    def _receive_buckets(self, offer: Offer, sink: RowSink, window: int, relays: list[_OutgoingBuckets]) -> None:
        coming = deque(offer.buckets)
        posted: deque[tuple[tuple[int, int], list[Tensor], list[Any]]] = deque()

        def post(*, block: bool) -> bool:
            """Begin to receive the next bucket, if there is one and memory for it."""
            memory = sink.memory(*coming[0], block=block) if coming else None
            if memory is not None:
                messages = [part for name in sorted(memory) if (part := as_bytes(memory[name])).numel()]
                posted.append((coming.popleft(), messages, self._up.start_receiving(messages)))
            return memory is not None

        for _ in range(window):
            post(block=True)
        while coming or posted:
            if not posted:  # the sink was full, and all that came has been handed to it
                post(block=True)
                self._send_note(_READY)
                continue
            rows, messages, works = posted.popleft()
            with self._times.measure("receive", sum(message.numel() for message in messages)):
                self._up.finish(works, self._timeouts.progress)
                _relay(relays, messages)
            self._received += sum(message.numel() for message in messages)
            sink.done(*rows)
            self._send_note(_ARRIVED | (_READY if post(block=False) else 0))

    def _send_note(self, note: int) -> None:
        self._notes.append(self._up.start_note(note))
        while len(self._notes) > _UNREAD_NOTES:
            self._up.finish([self._notes.popleft()], self._timeouts.progress)

    def _hand_over(self) -> None:
        self._stage = "handing over"
        if self._received != self._total:
            raise TransportError(f"{self._total} bytes were announced")
        for link in self._down:
            if link.recv_json(self._timeouts.progress).get("received") != self._received:
                raise TransportError("a rank of the TP group received another number of bytes")
        # The sender reads all notes before it waits for the receipt.
        self._up.finish(list(self._notes), self._timeouts.progress)
        self._up.send_json({"received": self._received}, self._timeouts.progress)


def _relay(relays: Sequence[_OutgoingBuckets], messages: Sequence[Tensor]) -> None:
    """Pass a bucket on to every rank of the TP group and wait until all have it: its memory may be used again then."""
    for relay in relays:
        while not relay.room:
            relay.wait_for_note()
        relay.send(messages)
    for relay in relays:
        while relay.under_way:
            relay.wait_for_note()


def _failed(links: Sequence[Link], error: BaseException, what: str, moved: int, total: int) -> BaseException:
    """Tell the other sides, and return what to raise on this one."""
    known = isinstance(error, (TransportError, LinkError))
    reason = str(error).rstrip(".") if known else f"{type(error).__name__}: {error}"
    text = f"{what}; {moved:,} of {total:,} bytes had moved: {reason}"
    for link in links:
        link.fail(text)
    return TransportError(text) if isinstance(error, Exception) else error
