"""Routes over torch.distributed: rollout processes send, training ranks receive, all in one group of their own.

    store = open_store("10.0.0.7", 29400, is_server=False)                  # all processes meet here

    routes = RouteGroup(store, layout, sender=0)                            # in the rollout process
    routes.send(traces)                                                     # returns at once; the next send joins this one

    routes = RouteGroup(store, layout, place=layout.place_of(rank))         # in training rank `rank`
    trace = routes.receive()                                                # this place's samples and layers

A batch has three steps. All processes meet in the store, read the sizes of the senders' traces, and compute the same plan.
Buckets of whole rows go from the sender that has them to TP rank 0 of a place, straight into its trace, and on to its TP
group. All processes meet once more, so a batch has arrived everywhere or raises everywhere. A process that raises, or closes,
ends the waits of all with its words. A process that is killed or stopped ends them within the time-outs that you give.

Tested with gloo in processes of one machine. A group of NCCL, with `device="cuda"`, was not run.

**No authentication.** The store and gloo accept any connection, and nothing is encrypted: a process that reaches them can
pose as a sender and so choose the experts that a model trains with. The store listens on the address that you give, gloo on
this machine's address towards the store, or on the interface that GLOO_SOCKET_IFNAME names. Use a network that only the job
can reach.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from itertools import accumulate
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.header import TraceFormat
from megatron_router_replay.transport.gather import Memory, RowSource, TraceRows, trace_of_memory, views_of_bytes
from megatron_router_replay.transport.group import Connections, Store, Transfer, run_in_thread
from megatron_router_replay.transport.plan import (
    Bucket,
    ParallelLayout,
    Part,
    Partition,
    Place,
    TransportError,
    plan_buckets,
    plan_routes,
)
from megatron_router_replay.transport.timing import TransportTimes

PROTOCOL = 4
_NUM_BUFFERS = 4
_WINDOW = 2
"""Buckets of a receiver at a time: one on the wire, one that it consumes or passes on."""
_END_S = 2.0

Consume = Callable[[int, RoutingTrace], None]


class RouteGroup:
    """One process of a transport. Its constructor waits for all processes, and `close` leaves.

    It is a rollout process with `sender`, a training rank with `place`. A `with` block joins and closes it.

    Args:
        store: where the processes meet, see `open_store`.
        layout: of training; the same in all processes, or all raise.
        sender, num_senders: which rollout process this is, of how many. A batch has the samples of sender 0, then those of
            sender 1 and so on.
        place: of this training rank, `layout.place_of(rank)`.
        name: of the transport, unique on its store; used once.
        group: a process group of all processes, rollout processes first, then training ranks in order; used by this
            transport alone, for example a dedicated one of NCCL. Default: one of gloo, made here.
        device: of the messages, and so of received traces: "cuda" for a group of NCCL.
        bucket_bytes: the same in all processes. A sender stages at most four buckets, whatever the payload.
        timeout: for each message, once a transfer has begun; for a consumer of `stream`, for each bucket. At the end of a
            batch, for as long as no process moves a bucket.
        ready_timeout: for all processes to begin, at the start and with every batch. A process that was killed between
            batches ends the others' waits no sooner.
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
        name: str = "routes",
        group: Any = None,
        device: torch.device | str = "cpu",
        bucket_bytes: int = 32 << 20,
        timeout: timedelta = timedelta(minutes=2),
        ready_timeout: timedelta = timedelta(hours=2),
        times: TransportTimes | None = None,
        host: None = None,
    ) -> None:
        if host is not None:
            raise TransportError(
                "MRR601: host= is gone in 0.3: the environment variable GLOO_SOCKET_IFNAME names the interface."
            )
        places = layout.places()
        if (sender is None) == (place is None) or bucket_bytes < 1:
            raise TransportError(
                f"MRR601: give a sender or a place, and bucket_bytes above 0: {sender}, {place}, {bucket_bytes}."
            )
        if sender not in (None, *range(num_senders)) or place not in (None, *places):
            raise TransportError(f"MRR601: there is no {sender=} of {num_senders}, or no {place=} in {layout}.")
        self.layout, self.sender, self.place = layout, sender, place
        self.times = times or TransportTimes("training" if sender is None else "rollout")
        self._rank = num_senders + places.index(place) if place is not None else sender or 0
        self._num_senders, self._bucket_bytes = num_senders, bucket_bytes
        self._ready_timeout, self._device = ready_timeout, torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            # The thread that sends a batch has its own current device.
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._error: BaseException | None = None
        self._sending: Future[None] | None = None
        self._staging: list[Tensor] = []  # kept from batch to batch: new memory costs time
        members = [f"rollout process {number}" for number in range(num_senders)]
        members += [f"training rank {place}" for place in places]
        self._connections = Connections(store, name, rank=self._rank, members=members, timeout=timeout, group=group)
        terms: dict[str, Any] = {"protocol": PROTOCOL, "num_senders": num_senders, "bucket_bytes": bucket_bytes}
        terms |= asdict(layout)
        with self._failing_all():
            self._connections.connect(terms=terms, timeout=ready_timeout)
        _open.add(self)

    def send(
        self, traces: RoutingTrace | Sequence[RoutingTrace] | RowSource, *, partition: Partition = "round_robin"
    ) -> None:
        """Start to send this sender's samples of a batch and return. It first waits until the last batch has arrived.

        Args:
            traces: the samples, or a source that writes rows as they are asked for. Not to be changed until `join`, or
                the next `send`, has returned.
            partition: of the samples of all senders, the same on all; see `partition_samples`.

        Raises:
            TransportError: the last batch did not arrive, or the traces differ in kind.
        """
        self.join()
        with self._failing_all():
            if self.sender is None:
                raise TransportError(f"MRR601: {self.place} is a training rank: it receives.")
            traces = [traces] if isinstance(traces, RoutingTrace) else traces
            source = TraceRows(traces) if isinstance(traces, Sequence) else traces
            header = {
                "format": source.format.to_json(),
                "sequence_lengths": [int(length) for length in source.sequence_lengths],
                "partition": partition if isinstance(partition, str) else [[*map(int, rank)] for rank in partition],
                "times": self.times.take(),
            }
        # The source lives as long as the thread: no other reference.
        self._sending = run_in_thread(self._send, source, header, name="routes-send")

    def join(self) -> None:
        """Wait until the batch that is sent in the background has arrived everywhere.

        Raises:
            TransportError: a process failed, died or did not begin in time.
            Exception: the error of a source of your own, as it was raised.
        """
        if self._sending is not None:
            self._sending.exception()  # waits
            sending, self._sending = self._sending, None
            sending.result()
        self._raise_if_over()

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
            consume: called with the first row of each bucket and its trace. The buckets of one sender come in order. The
                memory is used again afterwards, so copy what you keep.

        Raises:
            TransportError: as `receive`.
            Exception: the error of `consume`, as it was raised; all other processes raise TransportError.
        """
        self._receive(consume)

    def close(self) -> None:
        """Leave: a process that waits for this one, or will, raises. A batch under way is not waited for."""
        left = TransportError(f"MRR603: {self._connections.member} closed the transport.")
        self._error = self._error or left
        self._connections.fail(str(left))
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
            if error is not None:
                self._fail(error)
            else:
                self.join()
        finally:
            self.close()

    def _fail(self, error: BaseException) -> None:
        """Publish an error, so that all processes raise it. Only the first one counts."""
        self._error = self._error or error
        known = isinstance(error, TransportError)
        self._connections.fail(
            str(error) if known else f"MRR603: {self._connections.member}: {type(error).__name__}: {error}"
        )

    @contextmanager
    def _failing_all(self) -> Iterator[None]:
        """Raise errors of the body, and publish them first: the transport ends in all processes."""
        self._raise_if_over()
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise TransportError(f"MRR603: this transport is over: {self._error}") from self._error

    def _agree(self, header: dict[str, Any] | None) -> tuple[dict[Place, Part], list[int]]:
        """Return the plan of the batch that all processes begin, and where each sender's rows end in it."""
        if header is not None:
            self._connections.publish(header)
        self._connections.meet(self._ready_timeout)
        headers = self._connections.published(range(self._num_senders))
        for name in ("format", "partition"):
            first = headers[0].get(name)
            for number, value in enumerate(each.get(name) for each in headers):
                if value != first:
                    values = f"{str(value)[:200]}, rollout process 0 {str(first)[:200]}"
                    raise TransportError(f"MRR606: rollout process {number} sends {name}={values}: all send the same.")
        if self.sender is None:
            reports = [each["times"] for each in headers]
            names = {name for report in reports for name in report}
            # The senders worked at the same time, so the longest counts.
            self.times.add({name: max(report.get(name, 0.0) for report in reports) for name in names})
        format, partition = TraceFormat.from_json(headers[0]["format"]), headers[0]["partition"]
        lengths = [length for each in headers for length in each["sequence_lengths"]]
        plan = plan_routes(lengths, layout=self.layout, format=format, partition=partition)
        return plan, list(accumulate(sum(each["sequence_lengths"]) for each in headers))

    def _send(self, source: RowSource, header: dict[str, Any]) -> None:
        with self._failing_all():
            with self.times.measure("wait"):
                plan, sender_ends = self._agree(header)
            with self.times.measure("send"):
                size, free = max(self._bucket_bytes, source.format.row_bytes()), self._staging
                if not free or free[0].numel() < size:
                    free = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(_NUM_BUFFERS)]
                    self._staging = free
                under_way: deque[tuple[Transfer, Tensor]] = deque()
                ranks = {place: rank for rank, place in enumerate(plan, self._num_senders) if place.tp_rank == 0}
                for bucket in plan_buckets({place: plan[place] for place in ranks}, sender_ends, self._bucket_bytes):
                    if bucket.sender != self.sender:
                        continue
                    if not free:
                        free.append(self._finish_oldest(under_way))
                    buffer, format = free.pop(), plan[bucket.place].format
                    memory = views_of_bytes(buffer, format, bucket.stop - bucket.start)
                    source.fill(bucket.runs, format.layer_numbers, memory)
                    under_way.append((self._connections.send(_messages(memory), ranks[bucket.place]), buffer))
                while under_way:
                    free.append(self._finish_oldest(under_way))
                self._connections.meet(self._connections.timeout, while_moving=True)  # all that was sent has arrived

    def _finish_oldest(self, under_way: deque[tuple[Transfer, Tensor]]) -> Tensor:
        transfer, buffer = under_way.popleft()
        self._connections.finish(transfer)
        return buffer

    def _receive(self, consume: Consume | None) -> tuple[Part, dict[str, Tensor]]:
        with self._failing_all():
            if self.place is None:
                raise TransportError(f"MRR601: rollout process {self.sender} sends: it does not receive.")
            with self.times.measure("wait"):
                plan, sender_ends = self._agree(None)
            part = plan[self.place]
            with self.times.measure("receive"):
                buckets = plan_buckets({self.place: part}, sender_ends, self._bucket_bytes)
                memory = self._receive_buckets(part, buckets, self.place.tp_rank, consume)
                self._connections.meet(self._connections.timeout, while_moving=True)
            return part, memory

    def _receive_buckets(
        self, part: Part, buckets: Sequence[Bucket], tp_rank: int, consume: Consume | None
    ) -> dict[str, Tensor]:
        """Receive buckets into the memory of the whole part, or of two buckets for `consume`; TP rank 0 passes them on."""
        largest = max((bucket.stop - bucket.start for bucket in buckets), default=0)
        free = [part.format.empty(largest, device=self._device) for _ in range(_WINDOW)] if consume else []
        whole = part.format.empty(0 if consume else part.num_rows, device=self._device)
        relays = [self._rank + offset for offset in range(1, self.layout.tp_size)] if tp_rank == 0 else []
        coming, asked = deque(buckets), deque[tuple[Bucket, dict[str, Tensor], Memory, Transfer]]()
        while coming or asked:
            while coming and len(asked) < _WINDOW:
                bucket = coming.popleft()
                memory, start = (free.pop(), 0) if consume else (whole, bucket.start)
                rows: Memory = {name: each[start : start + bucket.stop - bucket.start] for name, each in memory.items()}
                rank = bucket.sender if tp_rank == 0 else self._rank - tp_rank
                asked.append((bucket, memory, rows, self._connections.receive(_messages(rows), rank)))
            bucket, memory, rows, transfer = asked.popleft()
            self._connections.finish(transfer)
            passed_on = [self._connections.send(_messages(rows), rank) for rank in relays]
            if consume:
                consume(bucket.start, trace_of_memory(rows, part.format))
                free.append(memory)
            for transfer in passed_on:  # until then their memory must not change
                self._connections.finish(transfer)
        return whole


def _messages(memory: Memory) -> list[Tensor]:
    """Return contiguous rows as flat uint8, one dtype for all."""
    return [memory[name].view(-1).view(torch.uint8) for name in sorted(memory) if memory[name].numel()]


_open: set[RouteGroup] = set()


@atexit.register
def _close_all() -> None:
    """Close open transports: a thread that comes back from C++ while the interpreter ends would abort the process."""
    for group in list(_open):
        group.close()
