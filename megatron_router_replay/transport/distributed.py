"""Routes over torch.distributed: gloo between hosts' memories, NCCL between GPUs; one sender, every training rank a receiver.

Tested with gloo in processes of one machine. NCCL takes the same path but was not run yet: its test needs two GPUs.

store = open_store("trainer-0", 29400, is_server=False)             # rollout manager and training ranks meet here

sender = DistributedSender(store, layout)                           # in the rollout manager
sender.send(traces)                                                 # returns at once; the next send joins this one

receiver = DistributedReceiver(store, layout, layout.place_of(rank))   # in training rank `rank`
trace = receiver.receive()                                          # this place's rows and layers
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.transport.endpoint import Endpoint
from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.link import Backend, Link, LinkError, Store, start_thread
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
from megatron_router_replay.transport.stream import Offer, Staging, Timeouts, check_offer, pull, push
from megatron_router_replay.transport.timing import Lap, LegTimes

BUCKET_BYTES = 32 << 20
TIMEOUT = timedelta(minutes=2)
READY_TIMEOUT = timedelta(hours=2)

Sink = TypeVar("Sink", bound=RowSink)


def open_store(host: str, port: int = 0, *, is_server: bool, timeout: timedelta = TIMEOUT) -> Store:
    """Return the store where sender and receivers meet.

    Args:
        host, port: of the server; port 0 takes a free one, `store.port`.
        is_server: True in the one process that serves it; it must outlive the transport.
        timeout: for the server to appear.
    """
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=is_server, wait_for_workers=False, timeout=timeout
    )


class DistributedSender(Endpoint):
    """The rollout side: sends every place its part, in the background.

    Args:
        store: where the sides meet, see `open_store`.
        layout: of training; the receivers must have the same.
        name: tells transports on one store apart; use another one after a failure.
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
        self.layout = layout
        self.times = LegTimes("rollout") if times is None else times
        self._store, self._name, self._backend, self._device = store, name, backend, torch.device(device)
        self._timeouts = Timeouts(ready=ready_timeout, progress=timeout)
        self._staging = Staging(buffers=num_buffers, bucket_bytes=bucket_bytes, device=self._device)
        self._links: dict[Place, Link] = {}
        self._step = 0
        self._sending: _Sending | None = None
        self._broken: BaseException | None = None

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
        self._sending = _Sending(self, source, plan, self._step, self.times.lap())
        self._step += 1
        return plan

    def join(self) -> None:
        """Wait until the batch under way has arrived everywhere.

        Raises:
            TransportError: a receiver failed, died or did not begin in time. The transport cannot be used any more.
        """
        if self._sending is not None:
            sending, self._sending = self._sending, None
            try:
                sending.join()
            except TransportError as error:
                self._broken = error
                raise
        if self._broken is not None:
            raise TransportError(f"this transport failed before: {self._broken}") from self._broken

    def fail(self, error: BaseException) -> None:
        """Tell every receiver that no routes will come, and why; their `receive` raises."""
        self._broken = self._broken or error
        for link in list(self._links.values()):
            link.fail(f"rollout side: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Close the connections; a batch under way is not waited for."""
        self._broken = self._broken or TransportError("it was closed")
        self._sending = None
        for link in list(self._links.values()):
            link.close()

    def _finish(self) -> None:
        self.join()

    def _link(self, place: Place) -> Link:
        if place not in self._links:
            self._links[place] = Link(
                self._store,
                f"{self._name}/{place}",
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
        return None if self._broken is None else f"rollout side: {type(self._broken).__name__}: {self._broken}"


class _Sending:
    """One batch on its way: a thread per receiver, so that a slow one holds up nobody."""

    def __init__(
        self, sender: DistributedSender, source: RowSource, plan: TransportPlan, step: int, laps: dict[str, Lap]
    ) -> None:
        self._sender, self._plan, self._step, self._laps = sender, plan, step, laps
        self._lock = threading.Condition()
        self._left = len(plan.parts)
        self._errors: list[BaseException] = []
        self._heard: dict[str, Lap] = {}
        for place in plan.parts:
            # The source is held by these threads alone: it is gone when they are.
            start_thread(self._send, source, place, name=f"routes-{place}")

    def _send(self, source: RowSource, place: Place) -> None:
        sender = self._sender
        try:
            with sender.times.leg("wait"):
                link = sender._link(place)
            heard = push(
                link,
                source,
                self._plan.parts[place],
                plan=self._plan,
                step=self._step,
                staging=sender._staging,
                timeouts=sender._timeouts,
                times=sender.times,
                laps=self._laps,
            )
            with self._lock:
                for name, lap in heard.items():
                    self._heard[name] = max(self._heard.get(name, (0.0, 0)), (float(lap[0]), int(lap[1])))
        except BaseException as error:
            with self._lock:
                self._errors.append(error)
        with self._lock:
            self._left -= 1
            self._lock.notify_all()

    def join(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._errors or not self._left)
            if self._errors:
                error = self._errors[0]
                raise TransportError(str(error)) from error
            self._sender.times.hear(self._heard)


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
        self.layout, self.place = layout, place
        self.times = LegTimes("training") if times is None else times
        self._store, self._name, self._backend, self._device = store, name, backend, torch.device(device)
        self._timeouts = Timeouts(ready=ready_timeout, progress=timeout)
        self._arena = Arena(device=self._device, pinned=pinned, reuse=reuse_memory)
        self._up: Link | None = None
        self._down: list[Link] = []
        self._step = 0
        self._posted: _Posted | None = None
        self._broken: BaseException | None = None

    def post(self, plan: TransportPlan | None = None) -> None:
        """Begin to receive the next batch in the background; `receive` then returns it.

        Call it on all ranks of a TP group. On GPUs with "nccl" the pending receive occupies the device.
        """
        if self._posted is not None:
            raise TransportError(f"{self.place} has posted a receive already: receive that batch first.")
        self._posted = _Posted(lambda: self._receive_trace(plan, LegTimes("training")))

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
        with self.times.leg("wait"):
            return posted.join()

    def stream(self, consume: Callable[[int, RoutingTrace], None], plan: TransportPlan | None = None) -> None:
        """Receive the next batch in buckets that are never all in memory; for batches larger than that.

        Args:
            consume: called with the first row of each bucket and its trace, in order; the memory is used again
                afterwards, so what is kept must be copied.
        """
        self._receive(
            lambda offer: BucketSink(offer.format, offer.layer_numbers, consume, device=self._device),
            plan,
            self.times,
        )

    def fail(self, error: BaseException) -> None:
        """Tell the sender and the TP group that this rank cannot go on, and why; they raise."""
        self._broken = self._broken or error
        for link in self._links():
            link.fail(f"training side, {self.place}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Close the connections."""
        self._broken = self._broken or TransportError("it was closed")
        for link in self._links():
            link.close()

    def _receive_trace(self, plan: TransportPlan | None, waits: LegTimes) -> RoutingTrace:
        def sink_of(offer: Offer) -> WholeTrace:
            layers = len(offer.layer_numbers)
            return WholeTrace(offer.format, offer.num_rows, layers, self._arena)

        offer, sink = self._receive(sink_of, plan, waits)
        return sink.trace(offer.format, offer.layer_numbers, offer.sequence_lengths)

    def _receive(
        self, sink_of: Callable[[Offer], Sink], plan: TransportPlan | None, waits: LegTimes
    ) -> tuple[Offer, Sink]:
        if self._broken is not None:
            raise TransportError(f"this transport failed before: {self._broken}") from self._broken
        try:
            with waits.leg("wait"):
                self._connect()
            assert self._up is not None
            part = None if plan is None else plan.part(self.place)
            result = pull(
                self._up,
                self._down,
                sink_of,
                check=lambda offer: check_offer(
                    offer,
                    step=self._step,
                    place=self.place,
                    layer_numbers=self.layout.stage_layers[self.place.pp_rank],
                    expected=plan,
                    part=part,
                ),
                digest=None if plan is None else plan.digest,
                step=self._step,
                place=self.place,
                timeouts=self._timeouts,
                times=self.times,
                waits=waits,
            )
        except BaseException as error:
            self._broken = error
            raise
        self._step += 1
        return result

    def _connect(self) -> None:
        if self._up is not None:
            return
        first = self.place._replace(tp_rank=0)
        try:
            if self.place.tp_rank:
                self._up = self._link(f"{self._name}/{self.place}", side=1)
                return
            self._down = [
                self._link(f"{self._name}/{first._replace(tp_rank=tp_rank)}", side=0)
                for tp_rank in range(1, self.layout.tp_size)
            ]
            self._up = self._link(f"{self._name}/{first}", side=1)
        except LinkError as error:
            for link in self._links():
                link.fail(f"training side, {self.place}: {error}")
            raise TransportError(f"training side, {self.place}: {error}") from error

    def _link(self, name: str, *, side: int) -> Link:
        return Link(
            self._store,
            name,
            side=side,
            backend=self._backend,
            device=self._device,
            timeout=self._timeouts.ready,
            failure=self._failure,
        )

    def _failure(self) -> str | None:
        if self._broken is None:
            return None
        return f"training side, {self.place}: {type(self._broken).__name__}: {self._broken}"

    def _links(self) -> list[Link]:
        return [*([self._up] if self._up is not None else []), *self._down]


class _Posted:
    """A receive that runs in the background."""

    def __init__(self, receive: Callable[[], RoutingTrace]) -> None:
        self._result: RoutingTrace | None = None
        self._error: BaseException | None = None
        self._thread = start_thread(self._run, receive, name="routes-receive")

    def _run(self, receive: Callable[[], RoutingTrace]) -> None:
        try:
            self._result = receive()
        except BaseException as error:
            self._error = error

    def join(self) -> RoutingTrace:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def _as_source(traces: RoutingTrace | Sequence[RoutingTrace] | RowSource) -> RowSource:
    if isinstance(traces, RoutingTrace):
        return TraceRows([traces])
    return TraceRows(traces) if isinstance(traces, Sequence) else traces
