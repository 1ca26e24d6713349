"""Routes over torch.distributed: gloo between hosts' memories, NCCL between GPUs; one sender, every training rank a receiver.

Tested with gloo in processes of one machine. NCCL takes the same path but was not run yet: its test needs two GPUs.

store = open_store("10.0.0.7", 29400, is_server=False)              # rollout manager and training ranks meet here

sender = DistributedSender(store, layout)                           # in the rollout manager
sender.send(traces)                                                 # returns at once; the next send joins this one

receiver = DistributedReceiver(store, layout, layout.place_of(rank))   # in training rank `rank`
trace = receiver.receive()                                          # this place's rows and layers

**No authentication.** Neither the store nor gloo's and NCCL's connections ask who connects, and nothing is encrypted: whoever
reaches the store's port can read and write its keys, pose as a sender and so choose the experts that a model trains with.
Serve the store on an address of a network that only the job can reach (`open_store` listens on that address alone), and keep
gloo on it with GLOO_SOCKET_IFNAME.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor

from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.transport.endpoint import Endpoint
from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.link import Backend, Link, LinkError
from megatron_router_replay.transport.meeting import (
    BELIEVE_S,
    STORE_TIMEOUT,
    Identity,
    Store,
    disagreement,
    forget,
    leave,
    prefixed,
    read,
)
from megatron_router_replay.transport.offer import PROTOCOL, Offer, check_offer
from megatron_router_replay.transport.partition import Partition
from megatron_router_replay.transport.plan import ParallelLayout, Place, TransportPlan, plan_routes
from megatron_router_replay.transport.rows import (
    Arena,
    BucketSink,
    RowSink,
    RowSource,
    TraceRows,
    WholeTrace,
    check_plan,
)
from megatron_router_replay.transport.staging import Staging
from megatron_router_replay.transport.store_server import open_store
from megatron_router_replay.transport.stream import WINDOW, PartReceiver, PartSender, Timeouts
from megatron_router_replay.transport.threads import close_at_exit, run_in_thread
from megatron_router_replay.transport.timing import LegTime, LegTimes, longest

__all__ = ["DistributedReceiver", "DistributedSender", "open_store"]

BUCKET_BYTES = 8 << 20
TIMEOUT = timedelta(minutes=2)
READY_TIMEOUT = timedelta(hours=2)

Sink = TypeVar("Sink", bound=RowSink)


class _Room:
    """What an endpoint keeps in the store under the name of its transport."""

    def __init__(self, store: Store, name: str, layout: ParallelLayout) -> None:
        # Every endpoint has a token of its own, so that a name can be used again at once.
        self.identity = Identity(token=uuid.uuid4().hex, terms={"protocol": PROTOCOL, **asdict(layout)})
        self._store = prefixed(store.clone(), name)
        self._store.set_timeout(STORE_TIMEOUT)

    def announce(self) -> None:
        """Say that the sender is here, and with which layout, also to places that it knows nothing of."""
        self._store.set("sender", self.identity.to_json())

    def withdraw(self) -> None:
        """Take the announcement back, unless another sender has made its own."""
        text = read(self._store, "sender")
        if text is not None and Identity.from_json(text).token == self.identity.token:
            self._store.delete_key("sender")

    def sender(self) -> Identity | None:
        """Return the sender that is here, or None."""
        text = read(self._store, "sender")
        return None if text is None else Identity.from_json(text)

    def refuse(self, sender: Identity, why: str) -> None:
        """Tell a sender that a receiver cannot work with it."""
        self._store.set(f"refused/{sender.token}", why)

    def refused(self) -> str | None:
        """Return why a receiver cannot work with this sender, or None."""
        text = read(self._store, f"refused/{self.identity.token}")
        return None if text is None else text.decode()

    def forget(self, place: Place, *, side: int) -> None:
        """Take back what an earlier endpoint left here."""
        forget(prefixed(self._store, str(place)), side=side)

    def leave(self, place: Place, *, side: int, why: str) -> None:
        """Leave a note for a peer that was not met."""
        leave(prefixed(self._store, str(place)), side=side, token=self.identity.token, why=why)


class DistributedSender(Endpoint):
    """The rollout side: sends every place its part, in the background.

    Args:
        store: where the sides meet, see `open_store`.
        layout: of training; receivers with another one, and this side, raise.
        name: tells transports on one store apart; it can be used again as soon as both sides were closed.
        backend, device: "nccl" sends from the GPU `device`, which should run no inference engine.
        bucket_bytes, num_buffers: staging memory is at most their product, whatever the payload.
        timeout: for each message, once a transfer has begun.
        ready_timeout: for a receiver to begin.
        times: where legs are counted; make one to count decoding in it, too.
    """

    def __init__(
        self,
        store: Store,
        layout: ParallelLayout,
        *,
        name: str = "routes",
        backend: Backend = "gloo",
        device: torch.device | str = "cpu",
        bucket_bytes: int = BUCKET_BYTES,
        num_buffers: int = 4,
        timeout: timedelta = TIMEOUT,
        ready_timeout: timedelta = READY_TIMEOUT,
        times: LegTimes | None = None,
    ) -> None:
        if bucket_bytes < 1 or num_buffers < 2:
            raise TransportError(f"bucket_bytes={bucket_bytes}, num_buffers={num_buffers}: at least 1 and 2.")
        super().__init__(layout, side="rollout side")
        self.times = LegTimes("rollout") if times is None else times
        self._store, self._name, self._backend, self._device = store, name, backend, torch.device(device)
        self._timeouts = Timeouts(ready=ready_timeout, progress=timeout)
        self._staging = Staging(buffers=num_buffers, bucket_bytes=bucket_bytes, device=self._device)
        self._links: dict[Place, Link] = {}
        self._closed = False
        self._step = 0
        self._sending: list[Future[dict[str, LegTime]]] = []  # of each place; empty when nothing is under way
        self._room = _Room(store, name, layout)
        for place in layout.receivers():
            self._room.forget(place, side=0)
        self._room.announce()
        close_at_exit(self)

    def send(
        self,
        traces: RoutingTrace | Sequence[RoutingTrace] | RowSource,
        *,
        partition: Partition = "round_robin",
        cp_rows: Mapping[tuple[int, int], Tensor] | None = None,
        plan: TransportPlan | None = None,
    ) -> TransportPlan:
        """Start to send a batch and return; first waits until the last batch has arrived.

        Args:
            traces: the batch, or its parts from several rollout workers, in the order of the samples. Not to be changed
                until `join`, or the next `send`, has returned.
            partition, cp_rows: as for `plan_routes`.
            plan: made already; partition and cp_rows are not looked at.

        Raises:
            TransportError: the last batch did not arrive; the traces do not fit the plan.
        """
        self.join()
        source = _as_source(traces)
        if plan is None:
            plan = plan_routes(
                source.sequence_lengths,
                layout=self.layout,
                format=source.format,
                partition=partition,
                cp_rows=cp_rows,
            )
        check_plan(plan, source, self.layout)
        leg_times = self.times.take_unreported()
        # A thread per receiver, so that a slow one holds up nobody. They alone hold the source: it is gone when they are.
        self._sending = [
            run_in_thread(self._send_part, source, plan, place, self._step, leg_times, name=f"routes-{place}")
            for place in plan.parts
        ]
        self._step += 1
        return plan

    def join(self) -> None:
        """Wait until the batch under way has arrived everywhere.

        Raises:
            TransportError: a receiver failed, died or did not begin in time. The transport cannot be used any more.
        """
        if self._sending:
            sending, self._sending = self._sending, []
            done, _ = wait(sending, return_when=FIRST_EXCEPTION)
            errors = [error for future in done if (error := future.exception()) is not None]
            if errors:
                self._broken = TransportError(str(errors[0]))
                raise self._broken from errors[0]
            self.times.add_peer(longest([future.result() for future in sending]))
        self._raise_if_broken()

    def fail(self, error: BaseException) -> None:
        """Tell every receiver that no routes will come, and why; their `receive` raises."""
        self._broken = self._broken or error
        for link in list(self._links.values()):
            link.fail(f"rollout side: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Close the connections; a batch under way is not waited for."""
        if self._closed:
            return
        self._closed = True
        self._broken = self._broken or TransportError("it was closed")
        self._sending = []
        links = dict(self._links)
        for link in links.values():
            link.close()
        # Receivers that were not met yet find a note; those that were see the connection end.
        with contextlib.suppress(RuntimeError):  # the store may be gone
            for place in self.layout.receivers():
                if place not in links:
                    self._room.leave(place, side=0, why=str(self._failure()))
            self._room.withdraw()

    def _finish(self) -> None:
        self.join()

    def _send_part(
        self, source: RowSource, plan: TransportPlan, place: Place, step: int, leg_times: dict[str, LegTime]
    ) -> dict[str, LegTime]:
        """Send one place its part and return the leg times of its rank; runs in a thread of its own."""
        with self.times.measure("wait"):
            link = self._link(place)
        part = plan.parts[place]
        bucket_bytes = self._staging.bucket_bytes
        return PartSender(
            link,
            source,
            part,
            offer=Offer.of(plan, part, step=step, bucket_bytes=bucket_bytes, leg_times=leg_times),
            staging=self._staging,
            timeouts=self._timeouts,
            times=self.times,
        ).run()

    def _link(self, place: Place) -> Link:
        if place not in self._links:
            self._links[place] = Link(
                self._store,
                f"{self._name}/{place}",
                identity=self._room.identity,
                side=0,
                backend=self._backend,
                device=self._device,
                timeout=self._timeouts.ready,
                failure=self._failure,
            )
            if (failure := self._failure()) is not None:  # just while this thread was connecting
                self._links[place].fail(failure)
                raise TransportError(failure)
        return self._links[place]

    def _failure(self) -> str | None:
        return super()._failure() or self._room.refused()


class DistributedReceiver(Endpoint):
    """The training side: receives this place's part; TP rank 0 passes it on within its TP group.

    Args:
        store, layout, name, backend, device: as for the sender; with "nccl" the trace lies on the GPU `device`.
        place: of this rank, `layout.place_of(rank)`.
        timeout, ready_timeout: as for the sender; ready_timeout is for the routes to come, and for the TP group.
        pinned: receive into page-locked memory; only with CUDA and gloo.
        reuse_memory: receive into the memory of earlier traces, once nothing refers to them any more; it spares the kernel
            clearing new pages for every batch, and keeps as much memory as was in use at once.
    """

    def __init__(
        self,
        store: Store,
        layout: ParallelLayout,
        place: Place,
        *,
        name: str = "routes",
        backend: Backend = "gloo",
        device: torch.device | str = "cpu",
        timeout: timedelta = TIMEOUT,
        ready_timeout: timedelta = READY_TIMEOUT,
        pinned: bool = False,
        reuse_memory: bool = False,
        times: LegTimes | None = None,
    ) -> None:
        if place not in layout.places():
            raise TransportError(f"{place} is not in the layout: {layout}.")
        super().__init__(layout, side=f"training side, {place}")
        self.place = place
        self.times = LegTimes("training") if times is None else times
        self._store, self._name, self._backend, self._device = store, name, backend, torch.device(device)
        self._timeouts = Timeouts(ready=ready_timeout, progress=timeout)
        self._arena = Arena(device=self._device, pinned=pinned, reuse=reuse_memory)
        self._links: dict[Place, Link] = {}  # place of the link's receiving end: this one, or of the TP group
        self._closed = False
        self._step = 0
        self._posted: Future[RoutingTrace] | None = None
        self._disagree_since = 0.0
        self._room = _Room(store, name, layout)
        for peer in self._peers():
            self._room.forget(peer, side=int(peer == place))
        close_at_exit(self)

    def post(self, plan: TransportPlan | None = None) -> None:
        """Begin to receive the next batch in the background; `receive` then returns it.

        Call it on all ranks of a TP group. On GPUs with "nccl" the pending receive occupies the device.
        """
        if self._posted is not None:
            raise TransportError(f"{self.place} has posted a receive already: receive that batch first.")
        # This thread's waiting is not the caller's: it is not counted.
        self._posted = run_in_thread(self._receive_trace, plan, LegTimes("training"), name="routes-receive")

    def receive(self, plan: TransportPlan | None = None) -> RoutingTrace:
        """Return the next batch's routes for this place: its data-parallel rank's samples, its stage's layers.

        Args:
            plan: the plan as this side computes it; the sender's must be the same. None: take what comes.

        Raises:
            TransportError: nothing came in time, the sender failed or died, a rank of the TP group did, or the sides do
                not agree on step, layout, layers or sizes. The sender raises, too. The transport cannot be used any more.
        """
        if self._posted is None:
            return self._receive_trace(plan, self.times)
        posted, self._posted = self._posted, None
        with self.times.measure("wait"):
            return posted.result()

    def stream(self, consume: Callable[[int, RoutingTrace], None], plan: TransportPlan | None = None) -> None:
        """Receive the next batch in buckets that are never all in memory; for batches larger than that.

        Args:
            consume: called with the first row of each bucket and its trace, in order; the memory is used again
                afterwards, so what is kept must be copied.

        Raises:
            TransportError: as `receive`; or `consume` raised.
        """
        sinks: Future[BucketSink | None] = Future()  # None: there was no offer to make one for

        def sink_of(offer: Offer) -> BucketSink:
            sink = BucketSink(offer.header, device=self._device, buckets=WINDOW)
            sinks.set_result(sink)
            return sink

        # A thread receives while this one consumes: the sender must hear at once what has arrived, however long that takes.
        receiving = run_in_thread(self._receive, sink_of, plan, self.times, name="routes-receive")
        receiving.add_done_callback(lambda _: None if sinks.done() else sinks.set_result(None))
        sink = sinks.result()
        if sink is not None:
            receiving.add_done_callback(lambda _: sink.end())
            try:
                sink.consume(consume)
            except BaseException as error:
                self.fail(error)
                sink.stop()
                raise TransportError(f"{self._failure()}") from error
        receiving.result()

    def fail(self, error: BaseException) -> None:
        """Tell the sender and the TP group that this rank cannot go on, and why; they raise."""
        self._broken = self._broken or error
        for link in list(self._links.values()):
            link.fail(f"training side, {self.place}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Close the connections: a sender that waits for this rank, or begins to within seconds, raises."""
        if self._closed:
            return
        self._closed = True
        self._broken = self._broken or TransportError("it was closed")
        links = dict(self._links)
        for link in links.values():
            link.close()
        with contextlib.suppress(RuntimeError):  # the store may be gone
            for peer in self._peers():
                if peer not in links:
                    self._room.leave(peer, side=int(peer == self.place), why=str(self._failure()))

    def _receive_trace(self, plan: TransportPlan | None, waits: LegTimes) -> RoutingTrace:
        def sink_of(offer: Offer) -> WholeTrace:
            return WholeTrace(offer.header, self._arena)

        sink = self._receive(sink_of, plan, waits)
        return sink.trace()

    def _receive(self, sink_of: Callable[[Offer], Sink], plan: TransportPlan | None, waits: LegTimes) -> Sink:
        self._raise_if_broken()
        try:
            with waits.measure("wait"):
                self._connect()
            part = None if plan is None else plan.part(self.place)
            result = PartReceiver(
                self._links[self.place],
                [self._links[peer] for peer in self._peers() if peer != self.place],
                sink_of,
                check=lambda offer: check_offer(
                    offer,
                    step=self._step,
                    place=self.place,
                    layer_numbers=self.layout.stage_layers[self.place.pp_rank],
                    expected=plan,
                    part=part,
                ),
                step=self._step,
                place=self.place,
                timeouts=self._timeouts,
                times=self.times,
                waits=waits,
            ).run(None if plan is None else plan.digest)
        except BaseException as error:
            self._broken = error
            raise
        self._step += 1
        return result

    def _peers(self) -> list[Place]:
        """Return the receiving ends of this rank's links: for TP rank 0 its TP group's and, last, its own."""
        group = range(1, self.layout.tp_size) if self.place.tp_rank == 0 else ()
        return [*(self.place._replace(tp_rank=tp_rank) for tp_rank in group), self.place]

    def _connect(self) -> None:
        try:
            for peer in self._peers():
                if peer not in self._links:
                    self._links[peer] = Link(
                        self._store,
                        f"{self._name}/{peer}",
                        identity=self._room.identity,
                        side=int(peer == self.place),
                        backend=self._backend,
                        device=self._device,
                        timeout=self._timeouts.ready,
                        failure=self._failure,
                    )
        except LinkError as error:
            for link in list(self._links.values()):
                link.fail(f"training side, {self.place}: {error}")
            raise TransportError(f"training side, {self.place}: {error}") from error

    def _failure(self) -> str | None:
        return super()._failure() or self._disagreement()

    def _disagreement(self) -> str | None:
        """Return how the sender's layout differs from this one's, and tell it: it may not know this rank's place at all."""
        sender = self._room.sender()
        text = None if sender is None else disagreement(self._room.identity.terms, sender.terms, side=1)
        if sender is None or text is None:
            self._disagree_since = 0.0
            return None
        # The announcement may be of a sender that died; one that lives is met, or stays announced.
        self._disagree_since = self._disagree_since or time.monotonic()
        if time.monotonic() - self._disagree_since < BELIEVE_S:
            return None
        self._room.refuse(sender, f"training side, {self.place}: {text}")
        return text


def _as_source(traces: RoutingTrace | Sequence[RoutingTrace] | RowSource) -> RowSource:
    if isinstance(traces, RoutingTrace):
        return TraceRows([traces])
    return TraceRows(traces) if isinstance(traces, Sequence) else traces
