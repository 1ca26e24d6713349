"""Routes over Ray's object store: the plan of `plan.py`, one contiguous buffer per place, read without a copy.

    sender = RaySender(layout)                                  # in the rollout manager: a driver or an actor
    sender.send([actor_trace_ref, ...])                         # traces, or what rollout actors got from put_trace
    receiver = RayReceiver(layout, layout.place_of(rank))       # in a training rank of the same cluster
    trace = receiver.receive()

Routes never pass through the manager's thread: rollout actors decode their own responses and `put_trace` them, threads
gather every place's rows from there, and Ray moves a buffer between machines where a place is on another one. A mailbox
actor hands out references only. On one machine the ranks of a TP group share one buffer; across machines Ray fetches it
once a machine. The memory is free again when the last trace that looks into it is gone.

The death of a training rank is noticed at once if the rank is an actor that has asked for routes before (the mailbox pings
it while it owes a fetch); of a rank that never asked, or is a driver, by the timeouts. The rollout side's death is noticed
at once, for the mailbox dies with it.

Call `ray.init` first; these classes never do.
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import ray  # type: ignore[import-not-found, unused-ignore]
import torch
from torch import Tensor

from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.transport.endpoint import Endpoint
from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.offer import Offer, check_offer
from megatron_router_replay.transport.partition import Partition
from megatron_router_replay.transport.plan import ParallelLayout, Part, Place, TraceFormat, TransportPlan, plan_routes
from megatron_router_replay.transport.rows import RowSource, TraceRows, check_plan, views_of_bytes
from megatron_router_replay.transport.timing import LegTime, LegTimes

TIMEOUT = timedelta(minutes=2)
READY_TIMEOUT = timedelta(hours=2)
_POLL_S = 0.05
_PING_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRef:
    """A trace in the object store: small enough to pass around.

    Args:
        buffer: a list with the one reference, so that Ray passes it on instead of fetching it.
        seconds: what the worker measured on the way here, by leg; counted by the sender.
    """

    buffer: list[Any]
    format: TraceFormat
    layer_numbers: tuple[int, ...]
    num_rows: int
    sequence_lengths: tuple[int, ...] | None
    leg_times: Mapping[str, LegTime]

    def get(self, timeout: timedelta | None = None) -> RoutingTrace:
        """Return the trace, which looks into the object store and must not be written to.

        Raises:
            TransportError: the buffer is gone (its worker died) or did not come in time.
        """
        try:
            array = ray.get(self.buffer[0], timeout=None if timeout is None else timeout.total_seconds())
        except ray.exceptions.RayError as error:
            raise TransportError(f"cannot get {self.num_rows} rows of routes: {_first_line(error)}") from error
        expected = self.num_rows * self.format.row_bytes(len(self.layer_numbers))
        if array.nbytes != expected:
            raise TransportError(f"{array.nbytes} bytes came, {self.num_rows} rows take {expected}.")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
            flat = torch.from_numpy(array)
        memory = views_of_bytes(flat, self.format, self.num_rows, len(self.layer_numbers))
        return RoutingTrace.from_checked(
            **memory,
            layer_numbers=self.layer_numbers,
            num_experts=self.format.num_experts,
            sequence_lengths=self.sequence_lengths,
        )


def put_trace(trace: RoutingTrace, *, times: LegTimes | None = None) -> TraceRef:
    """Put a trace into the object store; for rollout actors, so that their manager handles references only.

    Args:
        times: where this worker counted collecting and decoding; its lap travels with the trace.
    """
    source = TraceRows([trace])
    plan = plan_routes(
        source.sequence_lengths, layout=ParallelLayout(stage_layers=(trace.layer_numbers,)), format=source.format
    )
    leg_times = {} if times is None else times.take_unreported()
    return _put_part(source, plan, plan.part(Place()), leg_times)


def _put_part(source: RowSource, plan: TransportPlan, part: Part, leg_times: Mapping[str, LegTime]) -> TraceRef:
    flat = np.empty(part.nbytes, np.uint8)
    memory = views_of_bytes(torch.from_numpy(flat), plan.format, part.num_rows, part.num_layers)
    source.fill(part, 0, part.num_rows, memory)
    # A numpy array is put as one buffer beside the pickle, not through it.
    return TraceRef(
        buffer=[ray.put(flat)],
        format=TraceFormat(**{**plan.format.to_json(), "layer_numbers": part.layer_numbers}),
        layer_numbers=part.layer_numbers,
        num_rows=part.num_rows,
        sequence_lengths=part.sequence_lengths,
        leg_times=leg_times,
    )


class Mailbox:
    """The actor where references wait; it never touches routes. Its waits end by a result, a failure or a timeout.

    It keeps handles of the training ranks that are actors, so it keeps these alive until it ends with the sender.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._offers: dict[tuple[int, Place], tuple[dict[str, Any], TraceRef]] = {}
        self._left: dict[tuple[int, Place], int] = {}  # ranks of the TP group that have not confirmed
        self._leg_times: dict[int, dict[str, LegTime]] = {}
        self._failed: str | None = None
        self._ranks: dict[Place, Any] = {}  # training ranks that are actors, once they have asked for routes
        self._watched: dict[Place, asyncio.Task[None]] = {}

    async def offer(self, step: int, place: Place, offer: dict[str, Any], ref: TraceRef, ranks: int) -> None:
        """Take a part for a place, which `ranks` ranks will fetch."""
        self._offers[step, place], self._left[step, place] = (offer, ref), ranks
        self._watch(place)
        await self._tell()

    async def take(self, step: int, place: Place, timeout_s: float, actor: Any = None) -> tuple[str | None, Any]:
        """Return (None, (offer, reference)) when there is one, or (why not, None); `actor` is the rank, if it is one."""
        key = (step, place._replace(tp_rank=0))
        if actor is not None:
            self._ranks[place] = actor
            self._watch(place)
        came = await self._wait(lambda: key in self._offers, timeout_s)
        if self._failed is not None or not came:
            return self._failed or "nothing came from the rollout side in time", None
        return None, self._offers[key]

    async def confirm(self, step: int, place: Place, leg_times: dict[str, LegTime]) -> None:
        """Take note that a rank has its part; the reference goes when all of its TP group have."""
        key = (step, place._replace(tp_rank=0))
        heard = self._leg_times.setdefault(step, {})
        for name, lap in leg_times.items():
            heard[name] = max(heard.get(name, (0.0, 0)), lap)
        self._left[key] -= 1
        if not self._left[key]:
            del self._offers[key]
        await self._tell()

    async def finish(self, step: int, timeout_s: float) -> tuple[str | None, dict[str, LegTime]]:
        """Return (None, the training side's leg_times) when every rank has confirmed, or why that does not happen."""
        done = await self._wait(lambda: not any(self._left.values()), timeout_s)
        if self._failed is None and not done:
            missing = [str(place) for (_, place), left in self._left.items() if left]
            self._failed = f"{', '.join(missing)} did not fetch their routes within {timeout_s:g} s"
            await self._tell()
        self._left.clear()
        return self._failed, self._leg_times.pop(step, {})

    async def fail(self, text: str) -> None:
        """Let every call raise, now and later; the first failure counts."""
        self._failed = self._failed or text
        self._offers.clear()
        await self._tell()

    def _watch(self, part: Place) -> None:
        """Watch the ranks of a part's TP group, as far as they are known, while one of them has not confirmed."""
        for place in self._ranks:
            if place._replace(tp_rank=0) == part._replace(tp_rank=0) and place not in self._watched:
                self._watched[place] = asyncio.ensure_future(self._ping(place))

    async def _ping(self, place: Place) -> None:
        part = place._replace(tp_rank=0)
        try:
            while self._failed is None and any(left for (_, of), left in self._left.items() if of == part):
                # Waits while the rank is busy, and raises when it is dead.
                await self._ranks[place].__ray_ready__.remote()
                await asyncio.sleep(_PING_S)
        except ray.exceptions.RayActorError as error:
            await self.fail(f"training side, {place}: its actor died ({_first_line(error)})")
        finally:
            del self._watched[place]

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with self._changed:
                waiting = self._changed.wait_for(lambda: self._failed is not None or condition())
                await asyncio.wait_for(waiting, timeout_s)
        except TimeoutError:
            return False
        return True


class RaySender(Endpoint):
    """The rollout side: puts every place's part into the object store, in the background.

    Args:
        layout: of training; the receivers must have the same.
        name, namespace: of the mailbox actor, which ends with this process; another name after a failure.
        num_threads: that gather rows at once.
        timeout: for receivers to fetch their part, once it is there and they have begun.
        ready_timeout: for receivers to begin.
        times: where legs are counted; make one to count decoding in it, too.
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
        self.layout = layout
        self.times = LegTimes("rollout") if times is None else times
        self._timeout, self._ready_timeout = timeout, ready_timeout
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="routes")
        options: dict[str, Any] = {"name": name, "num_cpus": 0}
        if namespace is not None:
            options["namespace"] = namespace
        self._mailbox: Any = ray.remote(Mailbox).options(**options).remote()
        self._step = 0
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None

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
        if plan is None:
            plan = plan_routes(
                source.sequence_lengths,
                layout=self.layout,
                format=source.format,
                partition=partition,
                cp_rows=cp_rows,
            )
        check_plan(plan, source, self.layout)
        self._thread = threading.Thread(
            target=self._send,
            args=(source, plan, self._step, self.times.take_unreported()),
            name="routes-send",
            daemon=True,
        )
        self._thread.start()
        self._step += 1
        return plan

    def join(self) -> None:
        """Wait until the batch under way has arrived everywhere.

        Raises:
            TransportError: a receiver failed or did not fetch its part in time. The transport cannot be used any more.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if self._broken is not None:
                raise TransportError(str(self._broken)) from self._broken
        if self._broken is not None:
            raise TransportError(f"this transport failed before: {self._broken}") from self._broken

    def fail(self, error: BaseException) -> None:
        """Tell every receiver that no routes will come, and why; their `receive` raises."""
        self._broken = self._broken or error
        _call(self._mailbox.fail, f"rollout side: {type(error).__name__}: {error}", timeout=self._timeout)

    def close(self) -> None:
        """End the mailbox; a batch under way is not waited for."""
        self._broken = self._broken or TransportError("it was closed")
        self._threads.shutdown(wait=False, cancel_futures=True)
        ray.kill(self._mailbox)

    def _finish(self) -> None:
        self.join()

    def _fetch(self, item: RoutingTrace | TraceRef) -> RoutingTrace:
        if isinstance(item, RoutingTrace):
            return item
        for name, (seconds, nbytes) in item.leg_times.items():
            self.times.add(name, seconds, nbytes)
        return item.get(self._timeout)

    def _send(self, source: RowSource, plan: TransportPlan, step: int, leg_times: dict[str, LegTime]) -> None:
        what = f"rollout side, step {step}"
        try:
            for _ in self._threads.map(
                lambda part: self._offer(source, plan, part, step, leg_times), plan.parts.values()
            ):
                pass
            what += ", waiting for the training side"
            limit = self._ready_timeout + self._timeout
            with self.times.measure("wait"):
                failed, heard = _call(self._mailbox.finish, step, limit.total_seconds(), timeout=limit + self._timeout)
            if failed:
                raise TransportError(failed)
            self.times.add_peer(heard)
        except BaseException as error:
            self._broken = TransportError(f"{what}; {plan.nbytes:,} bytes in {len(plan.parts)} parts: {_text(error)}")
            with _quietly():
                _call(self._mailbox.fail, str(self._broken), timeout=self._timeout)

    def _offer(
        self, source: RowSource, plan: TransportPlan, part: Part, step: int, leg_times: dict[str, LegTime]
    ) -> None:
        with self.times.measure("partition", part.nbytes):
            ref = _put_part(source, plan, part, leg_times)
        offer = Offer.of(plan, part, step=step, bucket_bytes=max(1, part.nbytes), leg_times=leg_times)
        _call(self._mailbox.offer, step, part.place, offer.to_json(), ref, self.layout.tp_size, timeout=self._timeout)


class RayReceiver(Endpoint):
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
        if place not in layout.places():
            raise TransportError(f"{place} is not in the layout: {layout}.")
        self.layout, self.place = layout, place
        self.times = LegTimes("training") if times is None else times
        self._name, self._namespace = name, namespace
        self._timeout, self._ready_timeout = timeout, ready_timeout
        self._mailbox: Any = None
        self._step = 0
        self._broken: BaseException | None = None

    def receive(self, plan: TransportPlan | None = None) -> RoutingTrace:
        """Return the next batch's routes for this place; they look into the object store and must not be written to.

        Args, Raises: as for `DistributedReceiver.receive`.
        """
        if self._broken is not None:
            raise TransportError(f"this transport failed before: {self._broken}") from self._broken
        stage, total = "waiting for the rollout side", 0
        try:
            with self.times.measure("wait"):
                mailbox = self._find_mailbox()
                limit = self._ready_timeout.total_seconds()
                take = (self._step, self.place, limit, _own_actor())
                failed, taken = _call(mailbox.take, *take, timeout=self._ready_timeout + self._timeout)
            if failed:
                raise TransportError(f"the other side failed: {failed}")
            offer, ref = Offer.from_json(taken[0]), taken[1]
            total = offer.nbytes
            self.times.add_peer(offer.leg_times)
            refused = check_offer(
                offer,
                step=self._step,
                place=self.place,
                layer_numbers=self.layout.stage_layers[self.place.pp_rank],
                expected=plan,
                part=None if plan is None else plan.part(self.place),
            )
            if refused:
                raise TransportError(refused)
            stage = "receiving"
            with self.times.measure("receive", offer.nbytes):
                trace: RoutingTrace = ref.get(self._timeout)
            _call(mailbox.confirm, self._step, self.place, self.times.take_unreported(), timeout=self._timeout)
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
        if self._mailbox is not None:
            with _quietly():
                _call(self._mailbox.fail, str(error), timeout=self._timeout)

    def close(self) -> None:
        """Let go of the sender; traces that were received stay as they are."""
        self._broken = self._broken or TransportError("it was closed")
        self._mailbox = None

    def _find_mailbox(self) -> Any:
        deadline = time.monotonic() + self._ready_timeout.total_seconds()
        while self._mailbox is None:
            try:
                self._mailbox = ray.get_actor(self._name, namespace=self._namespace)
            except ValueError:
                if time.monotonic() > deadline:
                    raise TransportError(f"there is no sender {self._name!r} in this Ray cluster.") from None
                time.sleep(_POLL_S)
        return self._mailbox


def _own_actor() -> Any:
    """Return the handle of the actor that this code runs in, or None."""
    try:
        return ray.get_runtime_context().current_actor
    except RuntimeError:
        return None


class _quietly:  # noqa: N801  # a context manager
    """Let a message to a mailbox that may be gone fail: the error that led to it is raised anyway."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        return isinstance(error, TransportError)


def _call(method: Any, *args: Any, timeout: timedelta) -> Any:
    """Call the mailbox.

    Raises:
        TransportError: it is gone, or time ran out.
    """
    try:
        return ray.get(method.remote(*args), timeout=timeout.total_seconds())
    except ray.exceptions.GetTimeoutError:
        raise TransportError(f"no answer within {timeout.total_seconds():g} s") from None
    except ray.exceptions.RayActorError as error:
        raise TransportError(f"the rollout side is gone, or closed the transport ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def _text(error: BaseException) -> str:
    return str(error).rstrip(".") if isinstance(error, TransportError) else f"{type(error).__name__}: {error}"
