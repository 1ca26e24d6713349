"""Routes over torch.distributed: rollout processes send, training ranks receive, in a group apart.

    store = open_store("10.0.0.7", 29400, is_server=False)                  # all processes meet here

    routes = RouteGroup(store, layout, sender=0)                            # in the rollout process
    routes.send(traces)                                                     # returns at once; the next send joins this one

    routes = RouteGroup(store, layout, place=layout.place_of(rank))         # in training rank `rank`
    trace = routes.receive()                                                # this place's samples and layers

A batch has three steps. All processes meet in the store, read the sizes of the senders' traces, and compute the same plan.
Buckets of whole rows go from the sender that has them to the first of the ranks that need them, straight into its trace, and
from each such rank to the next: tensor- and context-parallel ranks get the same rows. All processes meet once more, so a
batch has arrived everywhere or raises everywhere. A process that raises, or closes, ends the waits of all with its words; one
that is killed or stopped, within the time-outs that you give. In a group of the caller's all of them end by the time-outs.

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
from itertools import accumulate
from threading import Thread
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.header import TraceFormat, views_of_bytes
from megatron_router_replay.transport.gather import (
    Memory,
    RowSource,
    TraceRows,
    check_rows,
    trace_of_memory,
)
from megatron_router_replay.transport.group import Connections, Store, Transfer
from megatron_router_replay.transport.plan import (
    ParallelLayout,
    Part,
    Partition,
    Place,
    TransportError,
    as_partition,
    plan_buckets,
    plan_routes,
)
from megatron_router_replay.transport.timing import TransportTimes

_BUCKET_BYTES = 32 << 20
"""Of a message. All processes plan the same buckets."""
_NUM_BUFFERS = 4
"""Buckets that a sender stages: while one is on the wire, the next is filled."""
_WINDOW = 2
"""Buckets of a receiver at a time: one on the wire, one that it consumes or passes on."""
_END_S = 2.0

Consume = Callable[[int, RoutingTrace], None]


class RouteGroup:
    """One process of a transport. Its constructor waits for all processes, and `close` leaves.

    It is a rollout process with `sender`, a training rank with `place`. A `with` block joins and closes it.

    Args:
        store: where the processes meet, see `open_store`: a store for each transport.
        layout: of training; the same in all processes, or all raise.
        sender, num_senders: which rollout process this is, of how many. A batch has the samples of sender 0, then those of
            sender 1 and so on.
        place: of this training rank, `layout.place_of(rank)`.
        group: a process group of all processes, rollout processes first, then training ranks in order; used by this
            transport alone, for example a dedicated one of NCCL. Default: one of gloo, made here.
        device: of the messages, and so of received traces: "cuda" for a group of NCCL.
        timeout: for a batch to arrive everywhere once all processes have begun it, consumers of `stream` included.
        ready_timeout: for all processes to begin, at the start and with every batch: longer than a rollout. A process that
            was killed or stopped between batches ends the waits for it after 5 minutes; the log names it after one.
        times: where seconds are counted; make one to count decoding in it, too.

    Raises:
        TransportError: a process did not come, or they do not agree.
    """

    def __init__(
        self,
        store: Store,
        layout: ParallelLayout,
        *,
        sender: int | None = None,
        place: Place | None = None,
        num_senders: int = 1,
        group: Any = None,
        device: torch.device | str = "cpu",
        timeout: timedelta = timedelta(minutes=30),
        ready_timeout: timedelta = timedelta(hours=2),
        times: TransportTimes | None = None,
    ) -> None:
        if not isinstance(layout, ParallelLayout):
            raise TransportError(f"MRR601: the layout must be a ParallelLayout, got {type(layout).__name__}.")
        places = layout.places()
        if (sender is None) == (place is None):
            raise TransportError(
                f"MRR601: {sender=} and {place=}: a rollout process gives sender=, a training rank "
                "place=layout.place_of(rank)."
            )
        if not (isinstance(timeout, timedelta) and isinstance(ready_timeout, timedelta)):
            raise TransportError(f"MRR601: {timeout=} and {ready_timeout=} must be a datetime.timedelta.")
        if sender not in (None, *range(num_senders)):
            raise TransportError(f"MRR601: there is no {sender=} of {num_senders=}: senders count from 0.")
        if place not in (None, *places):
            raise TransportError(f"MRR601: there is no {place=} in {layout}: give place=layout.place_of(rank).")
        if not hasattr(store, "clone"):
            raise TransportError(f"MRR601: the store must be one of open_store, got {type(store).__name__}.")
        self.layout, self.sender, self.place = layout, sender, place
        self.times = times or TransportTimes("training" if sender is None else "rollout")
        self._rank = num_senders + places.index(place) if place is not None else sender or 0
        self._num_senders, self._ready_timeout = num_senders, ready_timeout
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            # The thread that sends a batch has its own current device.
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._sending: Future[None] | None = None
        members = [f"rollout process {number}" for number in range(num_senders)]
        members += [f"training rank {place}" for place in places]
        self._connections = Connections(store, rank=self._rank, members=members, timeout=timeout, group=group)
        self._connections.connect({"num_senders": num_senders, **asdict(layout)}, ready_timeout)
        _open.add(self)

    def send(
        self, traces: RoutingTrace | Sequence[RoutingTrace] | RowSource, *, partition: Partition = "round_robin"
    ) -> None:
        """Start to send this sender's samples of a batch and return. It first waits until the last batch has arrived.

        Args:
            traces: the samples, or a source that writes rows as they are sent and checked. Not to be changed until `join`, or
                the next `send`, has returned.
            partition: of the samples of all senders, the same on all; see `partition_samples`.

        Raises:
            TransportError: the last batch did not arrive, or the traces differ in kind.
        """
        self.join()
        with self._connections.failing_all():
            if self.sender is None:
                raise TransportError(f"MRR601: {self.place} is a training rank: it receives.")
            traces = [traces] if isinstance(traces, RoutingTrace) else traces
            others = (
                [each for each in traces if not isinstance(each, RoutingTrace)] if isinstance(traces, Sequence) else []
            )
            if others or not (isinstance(traces, Sequence) or hasattr(traces, "format")):
                kind = type(others[0] if others else traces).__name__
                raise TransportError(f"MRR601: cannot send a {kind}: decode a reply first, which makes a RoutingTrace.")
            source = TraceRows(traces) if isinstance(traces, Sequence) else traces
            header = {
                "format": source.format.to_json(),
                "sequence_lengths": [int(length) for length in source.sequence_lengths],
                "partition": as_partition(partition),
                "times": self.times.take(),
            }
            sending: Future[None] = Future()
            # A daemon, no ThreadPoolExecutor: the interpreter joins an executor's threads before any atexit function runs,
            # so one that waits for a peer would keep the process from ending.
            Thread(target=self._send, args=(source, header, sending), name="routes-send", daemon=True).start()
            self._sending = sending  # not before: without its thread, it would never be done

    def join(self) -> None:
        """Wait until the batch that is sent in the background has arrived everywhere.

        Raises:
            TransportError: a process failed, died or did not begin in time.
            Exception: the error of a source of your own, as it was raised.
        """
        if self._sending is not None:
            self._sending.result()  # waits; a batch that failed raises in every call
            self._sending = None

    def receive(self) -> RoutingTrace:
        """Return the next batch's routes for this place. They are its data-parallel rank's samples in its stage's layers.

        Raises:
            TransportError: a process failed, died or did not begin in time, or they do not agree.
        """
        part, memory = self._receive(None)
        return trace_of_memory(memory, part.format, part.sequence_lengths)

    def stream(self, consume: Consume) -> None:
        """Receive the next batch in buckets that are never all in memory. Batches larger than the memory need it.

        Args:
            consume: called with the first row of each bucket and its trace. The buckets of a sender come in order. The
                memory is used again afterwards, so copy what you keep, and change nothing in it.

        Raises:
            TransportError: as `receive`.
            Exception: the error of `consume`, as it was raised; all other processes raise TransportError.
        """
        self._receive(consume)

    def close(self) -> None:
        """Leave: a process that waits for this one, or will, raises. A batch under way is not waited for."""
        self._connections.fail(f"MRR603: {self._connections.member} closed the transport.")
        _open.discard(self)
        if self._sending is not None:
            with suppress(TimeoutError):
                self._sending.exception(_END_S)

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

    def _begin(self, header: dict[str, Any] | None) -> tuple[dict[Place, Part], list[int]]:
        """Return the plan of the batch that all processes begin, and where each sender's rows end in it."""
        with self.times.measure("wait"):
            headers = self._connections.begin(header, self._ready_timeout, self._num_senders)
        first = headers[0]
        for number, each in enumerate(headers):
            for name in ("format", "partition"):
                if each[name] != first[name]:
                    values = f"{str(each[name])[:200]}, rollout process 0 {str(first[name])[:200]}"
                    raise TransportError(f"MRR606: rollout process {number} sends {name}={values}: all send the same.")
        if self.sender is None:
            # The senders worked at the same time, so the longest counts.
            for name in {name for each in headers for name in each["times"]}:
                self.times.add({name: max(each["times"].get(name, 0.0) for each in headers)})
        lengths = [length for each in headers for length in each["sequence_lengths"]]
        format = TraceFormat.from_json(first["format"])
        plan = plan_routes(lengths, layout=self.layout, format=format, partition=first["partition"])
        return plan, list(accumulate(sum(each["sequence_lengths"]) for each in headers))

    def _send(self, source: RowSource, header: dict[str, Any], done: Future[None]) -> None:
        try:
            with self._connections.failing_all():
                self._send_batch(source, header)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    def _send_batch(self, source: RowSource, header: dict[str, Any]) -> None:
        plan, sender_ends = self._begin(header)
        with self.times.measure("send"):
            size = max(_BUCKET_BYTES, source.format.row_bytes())
            staging = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(_NUM_BUFFERS)]
            # Tensor- and context-parallel ranks get their rows from the rank before them.
            first_ranks = list(plan)[:: self.layout.num_copies]
            rank_of = {place: rank for rank, place in enumerate(plan, self._num_senders)}
            buckets = plan_buckets({place: plan[place] for place in first_ranks}, sender_ends, _BUCKET_BYTES)
            under_way: deque[Transfer] = deque()
            for i, bucket in enumerate(bucket for bucket in buckets if bucket.sender == self.sender):
                if i >= _NUM_BUFFERS:
                    self._connections.finish(under_way.popleft())  # which was the last use of this buffer
                format = plan[bucket.place].format
                memory = views_of_bytes(staging[i % _NUM_BUFFERS], format, bucket.stop - bucket.start)
                source.fill(bucket.runs, format.layer_numbers, memory)
                if type(source) is not TraceRows:  # TraceRows were checked when their traces were made
                    check_rows(memory, format)
                under_way.append(self._connections.send(_messages(memory), rank_of[bucket.place]))
            for transfer in under_way:
                self._connections.finish(transfer)
            self._connections.end()

    def _receive(self, consume: Consume | None) -> tuple[Part, dict[str, Tensor]]:
        """Receive buckets into the memory of the whole part, or of two buckets for `consume`, and pass them on."""
        with self._connections.failing_all():
            if self.place is None:
                raise TransportError(f"MRR601: rollout process {self.sender} sends: it does not receive.")
            plan, sender_ends = self._begin(None)
            part = plan[self.place]
            with self.times.measure("receive"):
                buckets = plan_buckets({self.place: part}, sender_ends, _BUCKET_BYTES)
                largest = max((bucket.stop - bucket.start for bucket in buckets), default=0)
                window = [part.format.empty(largest, device=self._device) for _ in range(_WINDOW)] if consume else []
                whole = part.format.empty(0 if consume else part.num_rows, device=self._device)
                copy = (self._rank - self._num_senders) % self.layout.num_copies
                next_rank = [self._rank + 1] if copy + 1 < self.layout.num_copies else []

                def ask(i: int) -> tuple[Memory, Transfer]:
                    start, stop = buckets[i].start, buckets[i].stop
                    memory, offset = (window[i % _WINDOW], start) if consume else (whole, 0)
                    rows: Memory = {name: each[start - offset : stop - offset] for name, each in memory.items()}
                    source = self._rank - 1 if copy else buckets[i].sender
                    return rows, self._connections.receive(_messages(rows), source)

                asked = deque(ask(i) for i in range(min(_WINDOW, len(buckets))))
                for i, bucket in enumerate(buckets):
                    rows, transfer = asked.popleft()
                    self._connections.finish(transfer)
                    passed_on = [self._connections.send(_messages(rows), rank) for rank in next_rank]
                    if consume:
                        trace = trace_of_memory(rows, part.format)
                        consume(bucket.start, trace)
                        trace.check_unchanged()  # the next rank is sent this memory
                    for transfer in passed_on:  # until then its memory must not change
                        self._connections.finish(transfer)
                    if i + _WINDOW < len(buckets):
                        asked.append(ask(i + _WINDOW))
                self._connections.end()
            return part, whole


def _messages(memory: Memory) -> list[Tensor]:
    """Return contiguous rows as flat uint8, one dtype for all."""
    return [memory[name].view(-1).view(torch.uint8) for name in sorted(memory) if memory[name].numel()]


_open: set[RouteGroup] = set()


@atexit.register
def _close_all() -> None:
    """Close open transports: a thread that comes back from C++ while the interpreter ends would abort the process."""
    for group in list(_open):
        group.close()
