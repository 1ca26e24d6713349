"""Routes over Ray's object store: the plan of `plan.py`, one contiguous buffer per place, read without a copy.

    sender = RaySender(layout)                                  # in the rollout manager: a driver or an actor
    sender.send([actor_trace_ref, ...])                         # traces, or what rollout actors got from put_trace
    receiver = RayReceiver(layout, layout.place_of(rank))       # in a training rank of the same cluster
    trace = receiver.receive()

Routes never pass through the manager's thread: rollout actors decode their own responses and `put_trace` them, threads
gather every place's rows from there, and Ray moves a buffer between machines where a place is on another one. A mailbox
actor hands out references only. On one machine the ranks of a TP group share one buffer; across machines Ray fetches it
once a machine. The memory is free again when the last trace that looks into it is gone.

A training rank that closes its receiver, or dies as an actor that has asked for routes before (the mailbox pings it while it
owes a fetch), frees the sender within seconds; one that dies without having asked, or as a driver, by the timeouts. So does
one that was closed before there was a sender: there is nobody to tell. The rollout side's death is noticed at once, for the
mailbox dies with it.

Call `ray.init` first; these classes never do. Who reaches the cluster reaches the mailbox: it asks nobody for a password.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import ray  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.transport.endpoint import READY_TIMEOUT, TIMEOUT, ReceivingEndpoint, SendingEndpoint
from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.meeting import BELIEVE_S
from megatron_router_replay.transport.offer import Offer, terms
from megatron_router_replay.transport.partition import Partition
from megatron_router_replay.transport.plan import ParallelLayout, Part, Place, TransportPlan
from megatron_router_replay.transport.ray_calls import (
    POLL_S,
    MailboxGoneError,
    call,
    own_actor,
    start_mailbox,
)
from megatron_router_replay.transport.ray_refs import TraceRef, put_part, put_trace
from megatron_router_replay.transport.rows import RowSource, TraceRows
from megatron_router_replay.transport.threads import run_in_thread
from megatron_router_replay.transport.timing import LegTime, LegTimes

__all__ = ["RayReceiver", "RaySender", "TraceRef", "put_trace"]


class RaySender(SendingEndpoint):
    """The rollout side: puts every place's part into the object store, in the background.

    Args:
        layout: of training; receivers with another one, and this side, raise.
        name, namespace: of the mailbox actor, which ends with this process; free again as soon as this side was closed.
        num_threads: that gather rows at once.
        timeout: for receivers to fetch their part, once it is there and they have begun.
        ready_timeout: for receivers to begin.
        times: where legs are counted; make one to count decoding in it, too.

    Raises:
        TransportError: another sender has this name.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        *,
        name: str = "routes",
        namespace: str | None = None,
        num_threads: int = 4,
        timeout: timedelta = TIMEOUT,
        ready_timeout: timedelta = READY_TIMEOUT,
        times: LegTimes | None = None,
    ) -> None:
        super().__init__(layout, times=times)
        self._timeout, self._ready_timeout = timeout, ready_timeout
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="routes")
        self._mailbox: Any = start_mailbox(layout, name, namespace)
        self._sending: Future[None] | None = None

    def send(
        self,
        traces: RoutingTrace | TraceRef | Sequence[RoutingTrace | TraceRef],
        *,
        partition: Partition = "round_robin",
        cp_rows: Mapping[tuple[int, int], Tensor] | None = None,
        plan: TransportPlan | None = None,
    ) -> TransportPlan:
        """Start to send a batch and return; first waits until the last batch has arrived.

        Args:
            traces: the batch, or its parts from several rollout workers, in the order of the samples. Not to be changed
                until `join`, or the next `send`, has returned.
            partition, cp_rows, plan: as for `DistributedSender.send`.

        Raises:
            TransportError: the last batch did not arrive; the traces do not fit the plan; a rollout actor died.
        """
        self.join()
        items = [traces] if isinstance(traces, (RoutingTrace, TraceRef)) else list(traces)
        with self.times.measure("collect"):
            source = TraceRows([self._fetch(item) for item in items])
        plan = self._plan(source, partition=partition, cp_rows=cp_rows, plan=plan)
        leg_times = self.times.take_unreported()
        self._sending = run_in_thread(self._send, source, plan, self._step, leg_times, name="routes-send")
        self._step += 1
        return plan

    def join(self) -> None:
        """Wait until the batch under way has arrived everywhere.

        Raises:
            TransportError: a receiver failed or did not fetch its part in time. The transport cannot be used any more.
        """
        if self._sending is not None:
            sending, self._sending = self._sending, None
            sending.result()
        self._raise_if_broken()

    def fail(self, error: BaseException) -> None:
        """Tell every receiver that no routes will come, and why; their `receive` raises."""
        self._broken = self._broken or error
        call(self._mailbox.fail, f"rollout side: {type(error).__name__}: {error}", timeout=self._timeout)

    def close(self) -> None:
        """End the mailbox; a batch under way is not waited for."""
        self._broken = self._broken or TransportError("it was closed")
        self._threads.shutdown(wait=False, cancel_futures=True)
        ray.kill(self._mailbox)

    def _fetch(self, item: RoutingTrace | TraceRef) -> RoutingTrace:
        if isinstance(item, RoutingTrace):
            return item
        for name, (seconds, nbytes) in item.leg_times.items():
            self.times.add(name, seconds, nbytes)
        return item.get(self._timeout)

    def _send(self, source: RowSource, plan: TransportPlan, step: int, leg_times: dict[str, LegTime]) -> None:
        """Put and offer every part, and wait until all were fetched; runs in a thread of its own."""
        stage = f"rollout side, step {step}"
        try:
            parts = plan.parts.values()
            list(self._threads.map(lambda part: self._offer(source, plan, part, step, leg_times), parts))
            stage += ", waiting for the training side"
            # The mailbox gives up first, for it knows which ranks are missing; the call itself waits a little longer.
            limit = self._ready_timeout + self._timeout
            with self.times.measure("wait"):
                failed, reported = call(
                    self._mailbox.finish, step, limit.total_seconds(), timeout=limit + self._timeout
                )
            if failed:
                raise TransportError(failed)
            self.times.add_peer(reported)
        except BaseException as error:
            broken = TransportError(f"{stage}; {plan.nbytes:,} bytes in {len(plan.parts)} parts: {_text(error)}")
            self._broken = broken
            with contextlib.suppress(TransportError):  # it may be gone; what led to this is raised anyway
                call(self._mailbox.fail, str(broken), timeout=self._timeout)
            raise broken from error

    # Runs in one of `_threads`, a part each.
    def _offer(
        self, source: RowSource, plan: TransportPlan, part: Part, step: int, leg_times: dict[str, LegTime]
    ) -> None:
        with self.times.measure("partition", part.nbytes):
            ref = put_part(source, plan, part, leg_times)
        offer = Offer.of(plan, part, step=step, bucket_bytes=max(1, part.nbytes), leg_times=leg_times)
        call(self._mailbox.offer, step, part.place, offer.to_json(), ref, self.layout.tp_size, timeout=self._timeout)


class RayReceiver(ReceivingEndpoint):
    """The training side: fetches this place's part.

    Args:
        layout, name, namespace: as for the sender.
        place: of this rank, `layout.place_of(rank)`.
        timeout: for the part to be fetched from another machine.
        ready_timeout: for the routes to come.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        place: Place,
        *,
        name: str = "routes",
        namespace: str | None = None,
        timeout: timedelta = TIMEOUT,
        ready_timeout: timedelta = READY_TIMEOUT,
        times: LegTimes | None = None,
    ) -> None:
        super().__init__(layout, place, times=times)
        self._name, self._namespace = name, namespace
        self._timeout, self._ready_timeout = timeout, ready_timeout
        self._token = uuid.uuid4().hex  # tells the mailbox this receiver from an earlier one in its place
        self._mailbox: Any = None

    def receive(self, plan: TransportPlan | None = None) -> RoutingTrace:
        """Return the next batch's routes for this place; they look into the object store and must not be written to.

        Args, Raises: as for `DistributedReceiver.receive`.
        """
        self._raise_if_broken()
        stage, total = "waiting for the rollout side", 0
        try:
            with self.times.measure("wait"):
                offer, ref = self._take()
            total = offer.nbytes
            self.times.add_peer(offer.leg_times)
            refused = self._offer_check(plan)(offer)
            if refused:
                raise TransportError(refused)
            stage = "receiving"
            with self.times.measure("receive", offer.nbytes):
                trace: RoutingTrace = ref.get(self._timeout)
            leg_times = self.times.take_unreported()
            call(self._mailbox.confirm, self._step, self.place, leg_times, timeout=self._timeout)
        except BaseException as error:
            self._broken = TransportError(
                f"training side, step {self._step}, {self.place}: {stage}; {total:,} bytes: {_text(error)}"
            )
            self.fail(self._broken)
            raise self._broken from error
        self._step += 1
        return trace

    def fail(self, error: BaseException) -> None:
        """Tell the sender and all receivers that this rank cannot go on, and why; they raise."""
        self._broken = self._broken or error
        mailbox = self._mailbox or self._mailbox_now()
        if mailbox is not None:
            with contextlib.suppress(TransportError):  # it may be gone; what led to this is raised anyway
                call(mailbox.fail, str(self._failure()), timeout=self._timeout)

    def close(self) -> None:
        """Let go of the sender, which raises if it has, or gets, routes for this rank; received traces stay as they are."""
        broken, self._broken = self._broken, self._broken or TransportError("it was closed")
        mailbox, self._mailbox = self._mailbox or self._mailbox_now(), None
        if mailbox is not None and broken is None:
            with contextlib.suppress(TransportError):  # it may be gone, which is well
                call(mailbox.leave, self.place, self._token, str(self._failure()), timeout=self._timeout)

    def _take(self) -> tuple[Offer, TraceRef]:
        """Wait for the mailbox and for what it has for this rank."""
        gone: MailboxGoneError | None = None
        deadline = time.monotonic() + self._ready_timeout.total_seconds()
        while True:
            try:
                mailbox = self._find_mailbox(deadline)
                arguments = (
                    self._step,
                    self.place,
                    self._ready_timeout.total_seconds(),
                    terms(self.layout),
                    self._token,
                )
                limit = self._ready_timeout + self._timeout
                failed, taken = call(mailbox.take, *arguments, own_actor(), timeout=limit)
                break
            except MailboxGoneError as error:
                # It may be an earlier sender's that was just closed: another takes its name within seconds, or none does.
                if self._mailbox is None or self._step:
                    raise gone or error from error
                if gone is None:
                    gone, deadline = error, time.monotonic() + BELIEVE_S
                self._mailbox = None
                time.sleep(POLL_S)
        if failed:
            raise TransportError(f"the other side failed: {failed}")
        return Offer.from_json(taken[0]), taken[1]

    def _find_mailbox(self, deadline: float) -> Any:
        while self._mailbox is None:
            self._mailbox = self._mailbox_now()
            if self._mailbox is None:
                if time.monotonic() > deadline:
                    raise MailboxGoneError(f"there is no sender {self._name!r} in this Ray cluster")
                time.sleep(POLL_S)
        return self._mailbox

    def _mailbox_now(self) -> Any:
        try:
            return ray.get_actor(self._name, namespace=self._namespace)
        except ValueError:
            return None


def _text(error: BaseException) -> str:
    return str(error).rstrip(".") if isinstance(error, TransportError) else f"{type(error).__name__}: {error}"
