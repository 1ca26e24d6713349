"""DistributedReceiver: the training side over torch.distributed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch

from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.transport.endpoint import READY_TIMEOUT, TIMEOUT, ReceivingEndpoint
from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.link import Backend, Link, LinkError
from megatron_router_replay.transport.meeting import BELIEVE_S, Store, disagreement
from megatron_router_replay.transport.offer import Offer
from megatron_router_replay.transport.plan import ParallelLayout, Place, TransportPlan
from megatron_router_replay.transport.registry import Registry
from megatron_router_replay.transport.rows import Arena, BucketSink, RowSink, WholeTrace
from megatron_router_replay.transport.stream import WINDOW, PartReceiver, Timeouts
from megatron_router_replay.transport.threads import close_at_exit, run_in_thread
from megatron_router_replay.transport.timing import LegTimes

Sink = TypeVar("Sink", bound=RowSink)


class DistributedReceiver(ReceivingEndpoint):
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
        super().__init__(layout, place, times=times)
        self._store, self._name, self._backend, self._device = store, name, backend, torch.device(device)
        self._timeouts = Timeouts(ready=ready_timeout, progress=timeout)
        self._arena = Arena(device=self._device, pinned=pinned, reuse=reuse_memory)
        self._links: dict[Place, Link] = {}  # place of the link's receiving end: this one, or of the TP group
        self._closed = False
        self._posted: Future[RoutingTrace] | None = None
        self._disagree_since = 0.0
        self._registry = Registry(store, name, layout)
        for peer in self._peers():
            self._registry.forget(peer, side=int(peer == place))
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
                    self._registry.leave(peer, side=int(peer == self.place), why=str(self._failure()))

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
            result = PartReceiver(
                self._links[self.place],
                [self._links[peer] for peer in self._peers() if peer != self.place],
                sink_of,
                check=self._offer_check(plan),
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
                        identity=self._registry.identity,
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
        sender = self._registry.sender()
        text = None if sender is None else disagreement(self._registry.identity.terms, sender.terms, side=1)
        if sender is None or text is None:
            self._disagree_since = 0.0
            return None
        # The announcement may be of a sender that died; one that lives is met, or stays announced.
        self._disagree_since = self._disagree_since or time.monotonic()
        if time.monotonic() - self._disagree_since < BELIEVE_S:
            return None
        self._registry.refuse(sender, f"training side, {self.place}: {text}")
        return text
