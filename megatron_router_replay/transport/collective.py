"""Routes over torch.distributed: a rollout process sends, training ranks receive, in a group apart.

    store = open_store("10.0.0.7", 29400, is_server=False)                  # all processes meet here

    routes = RouteGroup(store, layout)                                      # in the rollout process
    routes.send(traces)                                                     # returns at once; the next send joins this one

    routes = RouteGroup(store, layout, place=layout.place_of(rank))         # in training rank `rank`
    trace = routes.receive()                                                # this place's samples and layers

A batch has three steps. All processes meet in the store, read the sizes of the traces, and compute the same plan. Buckets of
whole rows go from the rollout process to the first of the ranks that need them, and from each such rank to the next: tensor-
and context-parallel ranks get the same rows. All processes meet once more, so a batch has arrived everywhere or raises
everywhere. A process that raises, or closes, ends the waits of all with its words; one that is killed or stopped, within the
time-outs that you give. In a group of the caller's all of them end by the time-outs.

Several rollout processes have a transport each, with a `name` of its own; a training rank is in all of them, receives from
one after another and joins the traces with `concat_traces`.

Tested with gloo in processes of one machine. A group of NCCL, with `device="cuda"`, was not run.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from megatron_router_replay.checks import check_withdrawn
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.header import TraceFormat
from megatron_router_replay.transport.gather import Memory, RowSource, TraceRows, trace_of_memory, views_of_bytes
from megatron_router_replay.transport.group import Connections, Finish, Store
from megatron_router_replay.transport.plan import (
    ParallelLayout,
    Part,
    Partition,
    Place,
    TransportError,
    plan_buckets,
    plan_routes,
)
from megatron_router_replay.transport.timing import TransportTimes

_NUM_BUFFERS = 4
"""Buckets that the rollout process stages: while one is on the wire, the next is filled."""
_WINDOW = 2
"""Buckets of a training rank at a time: one on the wire, one that it consumes or passes on."""
_END_S = 2.0
_WITHDRAWN = {
    "host": "the environment variable GLOO_SOCKET_IFNAME names the interface.",
    "sender": "without place= it is the rollout process.",
    "num_senders": "each rollout process has a RouteGroup with a name= of its own, and training ranks are in all of them.",
}

T = TypeVar("T")
Consume = Callable[[int, RoutingTrace], None]


class RouteGroup:
    """One process of a transport. Its constructor waits for all processes, and `close` leaves.

    It is the rollout process, or with `place` a training rank. A `with` block joins and closes it.

    Args:
        store: where the processes meet, see `open_store`.
        layout: of training; the same in all processes, or all raise.
        place: of this training rank, `layout.place_of(rank)`.
        name: of the transport, unique on its store; used once.
        group: a process group of all processes, the rollout process first, then training ranks in order; used by this
            transport alone, for example a dedicated one of NCCL. Default: one of gloo, made here.
        device: of the messages, and so of received traces: "cuda" for a group of NCCL.
        bucket_bytes: the same in all processes. The rollout process stages at most four buckets, whatever the payload.
        timeout: for a batch to arrive everywhere once all processes have begun it, consumers of `stream` included.
        ready_timeout: for all processes to begin, at the start and with every batch. A process that was killed between
            batches ends the waits for it no sooner.
        times: where seconds are counted; make one to count decoding in it, too.

    Raises:
        TransportError: a process did not come, or they do not agree.
    """

    def __init__(
        self,
        store: Store,
        layout: ParallelLayout,
        *,
        place: Place | None = None,
        name: str = "routes",
        group: Any = None,
        device: torch.device | str = "cpu",
        bucket_bytes: int = 32 << 20,
        timeout: timedelta = timedelta(minutes=30),
        ready_timeout: timedelta = timedelta(hours=2),
        times: TransportTimes | None = None,
        **withdrawn: Any,
    ) -> None:
        check_withdrawn("RouteGroup", withdrawn, _WITHDRAWN)
        places = layout.places()
        if place not in (None, *places) or bucket_bytes < 1:
            raise TransportError(f"MRR601: there is no {place=} in {layout}, or {bucket_bytes=} is not above 0.")
        self.layout, self.place = layout, place
        self.times = times or TransportTimes("rollout" if place is None else "training")
        self._rank = 0 if place is None else 1 + places.index(place)
        self._bucket_bytes, self._ready_timeout = bucket_bytes, ready_timeout
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            # The thread of a batch has its own current device.
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._last: Future[Any] | None = None  # of the last thread that waited for other processes
        self._sent: Future[None] | None = None  # of the batch that `join` waits for
        members = ["the rollout process", *(f"training rank {place}" for place in places)]
        self._connections = Connections(store, name, rank=self._rank, members=members, timeout=timeout, group=group)
        terms = {"bucket_bytes": bucket_bytes, **asdict(layout)}
        self._wait(self._start(lambda: self._connections.connect(terms, ready_timeout)))
        _open.add(self)

    def send(
        self, traces: RoutingTrace | Sequence[RoutingTrace] | RowSource, *, partition: Partition = "round_robin"
    ) -> None:
        """Start to send a batch and return. It first waits until the last batch has arrived.

        Args:
            traces: the samples, or a source that writes rows as they are sent. Not to be changed until `join`, or
                the next `send`, has returned.
            partition: the samples of each data-parallel rank; see `partition_samples`.

        Raises:
            TransportError: the last batch did not arrive, or the traces differ in kind.
        """
        self.join()
        with self._connections.failing_all():
            if self.place is not None:
                raise TransportError(f"MRR601: training rank {self.place} receives: it does not send.")
            traces = [traces] if isinstance(traces, RoutingTrace) else traces
            source = TraceRows(traces) if isinstance(traces, Sequence) else traces
            header = {
                "format": source.format.to_json(),
                "sequence_lengths": [int(length) for length in source.sequence_lengths],
                "partition": partition if isinstance(partition, str) else [[*map(int, rank)] for rank in partition],
                "times": self.times.take(),
            }
        self._sent = self._start(lambda: self._send(source, header))

    def join(self) -> None:
        """Wait until the batch that is sent in the background has arrived everywhere.

        Raises:
            TransportError: a process failed, died or did not begin in time.
            Exception: the error of a source of your own, as it was raised.
        """
        if self._sent is not None:
            self._wait(self._sent)  # a batch that failed raises in every call
            self._sent = None

    def receive(self) -> RoutingTrace:
        """Return the next batch's routes for this place. They are its data-parallel rank's samples in its stage's layers.

        Raises:
            TransportError: a process failed, died or did not begin in time, or they do not agree.
        """

        def receive_all() -> RoutingTrace:
            part = self._begin_to_receive()
            memory = part.format.empty(part.num_rows, device=self._device)

            def keep(start: int, rows: Memory) -> None:
                for name, values in rows.items():
                    memory[name][start : start + len(values)] = values

            self._receive(part, keep)
            return trace_of_memory(memory, part.format, part.sequence_lengths)

        return self._wait(self._start(receive_all))

    def stream(self, consume: Consume) -> None:
        """Receive the next batch in buckets that are never all in memory. Batches larger than the memory need it.

        Args:
            consume: called with the first row of each bucket and its trace, in order, in a thread of the transport. The
                memory is used again afterwards, so copy what you keep.

        Raises:
            TransportError: as `receive`.
            Exception: the error of `consume`, as it was raised; all other processes raise TransportError.
        """

        def receive_all() -> None:
            part = self._begin_to_receive()
            self._receive(part, lambda start, rows: consume(start, trace_of_memory(rows, part.format)))

        self._wait(self._start(receive_all))

    def close(self) -> None:
        """Leave: a process that waits for this one, or will, raises. A batch under way is not waited for."""
        self._connections.fail(f"MRR603: {self._connections.member} closed the transport.")
        _open.discard(self)
        if self._last is not None:
            with suppress(TimeoutError):
                self._last.exception(_END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.join()
            else:
                self._connections.fail(f"MRR603: {self._connections.member}: {type(error).__name__}: {error}")
        finally:
            self.close()

    def _start(self, act: Callable[[], T]) -> Future[T]:
        """Do something that waits for other processes, in a thread of its own.

        A wait in C++ does not notice a signal such as Ctrl-C, which Python gives to the main thread.
        """
        self._connections.raise_if_failed()
        done: Future[T] = Future()

        def run() -> None:
            try:
                with self._connections.failing_all():
                    result = act()
                done.set_result(result)
            except BaseException as error:
                done.set_exception(error)

        # A daemon, no ThreadPoolExecutor: the interpreter joins an executor's threads before any atexit function runs, so
        # one that waits for a peer would keep the process from ending.
        Thread(target=run, name="routes", daemon=True).start()
        self._last = done
        return done

    def _wait(self, done: Future[T]) -> T:
        with self._connections.failing_all():  # by a signal that comes meanwhile
            return done.result()

    def _begin(self, header: dict[str, Any] | None) -> dict[Place, Part]:
        """Return the plan of the batch that all processes begin."""
        with self.times.measure("wait"):
            header = self._connections.begin(header, self._ready_timeout)
        if self.place is not None:
            self.times.add(header["times"])
        lengths, format = header["sequence_lengths"], TraceFormat.from_json(header["format"])
        return plan_routes(lengths, layout=self.layout, format=format, partition=header["partition"])

    def _send(self, source: RowSource, header: dict[str, Any]) -> None:
        plan = self._begin(header)
        with self.times.measure("send"):
            size = max(self._bucket_bytes, source.format.row_bytes())
            staging = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(_NUM_BUFFERS)]
            rank_of = {place: rank for rank, place in enumerate(self.layout.places(), start=1)}
            under_way: deque[Finish] = deque()
            for i, bucket in enumerate(plan_buckets(plan, self._bucket_bytes)):
                if i >= _NUM_BUFFERS:
                    under_way.popleft()()  # which was the last use of this buffer
                message = staging[i % _NUM_BUFFERS][: bucket.nbytes]
                memory = views_of_bytes(message, bucket.format, bucket.num_rows)
                source.fill(bucket.runs, bucket.format.layer_numbers, memory)
                under_way.append(self._connections.send(message, rank_of[bucket.place]))
            for finish in under_way:
                finish()
            self._connections.end()

    def _begin_to_receive(self) -> Part:
        if self.place is None:
            raise TransportError("MRR601: the rollout process sends: it does not receive.")
        return self._begin(None)[self.place.first_copy]

    def _receive(self, part: Part, use: Callable[[int, Memory], None]) -> None:
        """Receive the buckets of a part, pass each on to the next rank with the same rows, and call use(first row, rows)."""
        assert self.place is not None
        with self.times.measure("receive"):
            buckets = plan_buckets({self.place: part}, self._bucket_bytes)
            size = max((bucket.nbytes for bucket in buckets), default=0)
            window = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(_WINDOW)]
            messages = [window[i % _WINDOW][: bucket.nbytes] for i, bucket in enumerate(buckets)]
            copy = (self._rank - 1) % self.layout.num_copies
            source = self._rank - 1 if copy else 0
            is_passed_on = copy + 1 < self.layout.num_copies
            asked = deque(self._connections.receive(message, source) for message in messages[:_WINDOW])
            for i, (bucket, message) in enumerate(zip(buckets, messages)):
                asked.popleft()()
                passed_on = self._connections.send(message, self._rank + 1) if is_passed_on else None
                use(bucket.start, views_of_bytes(message, part.format, bucket.num_rows))
                if passed_on is not None:
                    passed_on()  # until then its memory must not change
                if i + _WINDOW < len(buckets):
                    asked.append(self._connections.receive(messages[i + _WINDOW], source))
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # the caller's thread has a current stream of its own
            self._connections.end()


_open: set[RouteGroup] = set()


@atexit.register
def _close_all() -> None:
    """Close open transports: a thread that comes back from C++ while the interpreter ends would abort the process."""
    for group in list(_open):
        group.close()
