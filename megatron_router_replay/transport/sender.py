"""DistributedSender: the rollout side over torch.distributed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta

import torch
from torch import Tensor

from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.transport.endpoint import READY_TIMEOUT, TIMEOUT, SendingEndpoint
from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.link import Backend, Link
from megatron_router_replay.transport.meeting import Store
from megatron_router_replay.transport.offer import Offer
from megatron_router_replay.transport.partition import Partition
from megatron_router_replay.transport.plan import ParallelLayout, Place, TransportPlan
from megatron_router_replay.transport.registry import Registry
from megatron_router_replay.transport.rows import RowSource, TraceRows
from megatron_router_replay.transport.staging import Staging
from megatron_router_replay.transport.stream import PartSender, Timeouts
from megatron_router_replay.transport.threads import close_at_exit, run_in_thread
from megatron_router_replay.transport.timing import LegTime, LegTimes, longest

BUCKET_BYTES = 32 << 20
"""Every bucket costs about a millisecond of Python on both sides, whatever its size."""


class DistributedSender(SendingEndpoint):
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
        super().__init__(layout, times=times)
        self._store, self._name, self._backend, self._device = store, name, backend, torch.device(device)
        self._timeouts = Timeouts(ready=ready_timeout, progress=timeout)
        self._staging = Staging(buffers=num_buffers, bucket_bytes=bucket_bytes, device=self._device)
        self._links: dict[Place, Link] = {}
        self._closed = False
        self._sending: list[Future[dict[str, LegTime]]] = []  # of each place; empty when nothing is under way
        self._registry = Registry(store, name, layout)
        for place in layout.receivers():
            self._registry.forget(place, side=0)
        self._registry.announce()
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
        plan = self._plan(source, partition=partition, cp_rows=cp_rows, plan=plan)
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
                    self._registry.leave(place, side=0, why=str(self._failure()))
            self._registry.withdraw()

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
                identity=self._registry.identity,
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
        return super()._failure() or self._registry.refused()


def _as_source(traces: RoutingTrace | Sequence[RoutingTrace] | RowSource) -> RowSource:
    if isinstance(traces, RoutingTrace):
        return TraceRows([traces])
    return TraceRows(traces) if isinstance(traces, Sequence) else traces
