"""The processes of a transport: they meet in a store, and send tensors over a process group with time-outs.

A process that fails writes its words into the store, if it is the first, and closes its connections. Its peers lose it, raise
the first words and close theirs, and so on; a process that waits in the store looks for an error there. A process that is
killed or stopped writes nothing: in a batch its peers lose it, or run out of time, and write that. Between batches, when
nothing is sent, each process counts up in the store, and a process that waits sees that a count stands still.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.transport.plan import TransportError

Store = Any
"""A torch.distributed.Store with `clone`, such as a TCPStore."""

_STORE_TIMEOUT = timedelta(seconds=10)
_TOGETHER_S = 1.0
"""Within so many seconds, processes that wait for each other run out of time together."""
_WAIT_LINE_S = 60.0
"""A process that waits logs a line so often: the process that it waits for may have been killed."""
_BEAT_S = 10.0
"""A process counts up in the store so often, in a thread: it lives, however long its rollout takes."""
_SILENT_S = 300.0
"""A process that has not counted up for so long was killed or stopped. A thread can wait minutes for Python's lock."""
_CLOSE = 1
"""A tag that no message has."""

_LOG = logging.getLogger(__name__)


def open_store(host: str, port: int = 0, *, is_server: bool, timeout: timedelta = timedelta(minutes=2)) -> Store:
    """Return the store where the processes of a transport meet.

    The store and gloo have no authentication, and nothing is encrypted: a process that reaches them can pose as a sender and
    so choose the experts that a model trains with. The server listens on the address of `host` alone, gloo on the interface
    of the host's name, or on the one that GLOO_SOCKET_IFNAME names. Use a network that only the job can reach.

    Args:
        host, port: of the server; port 0 takes a free one, `store.port`. If the server resolves its own name to a loopback
            address, as some distributions do, give the address; "0.0.0.0" listens on every interface.
        is_server: True in the one process that serves it; it must outlive the transport.
        timeout: for the server to appear.

    Raises:
        TransportError: the server cannot listen there, or did not answer in time.
    """
    if not isinstance(timeout, timedelta):
        raise TransportError(f"MRR601: {timeout=} must be a datetime.timedelta, as timedelta(minutes=2).")
    options: dict[str, Any] = {"is_master": is_server, "wait_for_workers": False, "timeout": timeout}
    if is_server:
        # torch's own server listens on all interfaces, whatever the host; it takes a socket that listens already.
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server(address[:2], family=family)  # an IPv6 address has two more entries
        except OSError as error:
            raise TransportError(
                f"MRR602: cannot serve a store on {host}:{port}: {error}. Give an address of this machine that all "
                "processes reach, and a port that is free."
            ) from error
        port = listening.getsockname()[1]
        options["master_listen_fd"] = listening.detach()
    try:
        return dist.TCPStore(host, port, **options)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise TransportError(
            f"MRR602: no store answers on {host}:{port} within {timeout.total_seconds():g} s: {_first_line(error)} One "
            "process serves it, open_store(host, port, is_server=True), and gives the others the address that they reach."
        ) from error


class Transfer(NamedTuple):
    """Messages on their way to or from a rank."""

    rank: int
    works: list[Any]


class Connections:
    """One process of a transport, from `connect` to `fail`.

    Args:
        store: where the processes meet; a clone of it is used, by one transport.
        rank, members: of this process, and the name of each process in errors.
        timeout: for all messages of a batch.
        group: a process group of the same ranks. Default: one of gloo, made here.
    """

    def __init__(
        self, store: Store, *, rank: int, members: Sequence[str], timeout: timedelta, group: Any = None
    ) -> None:
        self.member = members[rank]
        self._rank, self._members, self._timeout = rank, members, timeout
        # A client of a store serves one call at a time, so this process's other calls do not wait for ours.
        self._store, self._beat_store = (
            dist.PrefixStore("routes", store.clone())  # type: ignore[attr-defined]
            for _ in range(2)
        )
        self._store.set_timeout(_STORE_TIMEOUT)
        self._group, self._is_own_group = group, group is None
        self._meetings = 0
        self._deadline = 0.0
        self._is_over = Event()
        self._beating = Thread(target=self._beat, name="routes-beat", daemon=True)
        # A process looks for an error so often: at most some thousand requests a second come to the store, whatever the
        # number of processes.
        self._look_s = min(max(0.01, len(members) / 1000), 1.0)

    def connect(self, terms: Mapping[str, Any], timeout: timedelta) -> None:
        """Wait for all processes and connect to them.

        Args:
            terms: JSON values that must be equal in all processes.
            timeout: for all processes to come.

        Raises:
            TransportError: a process did not come, has different terms, or failed.
        """
        with self._raising_first_words("the store"):
            times_joined = self._store.add(f"joined/{self._rank}", 1)
        if times_joined > 1:
            raise TransportError(
                f"MRR602: {self.member} is one too many: this store had a transport before. Serve a new store."
            )
        self._beating.start()
        with self.failing_all():
            self._connect(json.dumps(terms), timeout)

    def _beat(self) -> None:
        """Count up in the store until the transport is over."""
        while True:
            try:
                self._beat_store.add(f"beat/{self._rank}", 1)
            except dist.DistNetworkError:  # the server has ended, and with it the transport
                return
            except RuntimeError:  # it is busy
                pass
            if self._is_over.wait(_BEAT_S):
                return

    def _connect(self, terms: str, timeout: timedelta) -> None:
        agreed = self._store.compare_set("terms", "", terms).decode()
        if agreed != terms:
            raise TransportError(f"MRR602: {self.member} has {terms}, another process has {agreed}: give all the same.")
        self._meet(timeout, time.monotonic() + timeout.total_seconds())
        if self._group is None:
            try:
                store = dist.PrefixStore("gloo", self._store)  # type: ignore[attr-defined]
                self._group = dist.ProcessGroupGloo(store, self._rank, len(self._members), self._timeout)
            except RuntimeError as error:
                raise TransportError(
                    f"MRR602: {self.member} cannot connect: {_first_line(error)}. gloo uses the interface of this host's "
                    "name, or the one that GLOO_SOCKET_IFNAME names."
                ) from error

    def begin(self, message: Any, timeout: timedelta, num_senders: int) -> list[Any]:
        """Meet all processes that begin a batch; the time for its messages starts.

        Args:
            message: JSON value of this process for all; None: it has none.
            timeout: for all processes to begin.
            num_senders: ranks 0..num_senders - 1 have a message.

        Returns:
            The messages of these ranks.
        """
        with self._raising_first_words("the store"):
            if message is not None:
                self._store.set(f"message/{self._rank}", json.dumps(message))
            self._meet(timeout, time.monotonic() + timeout.total_seconds())
            self._deadline = time.monotonic() + self._timeout.total_seconds()
            return [json.loads(self._store.get(f"message/{rank}")) for rank in range(num_senders)]

    def end(self) -> None:
        """Return when every process has all messages of the batch."""
        self._meet(self._timeout, self._deadline, option="timeout")

    def _meet(self, timeout: timedelta, deadline: float, *, option: str = "ready_timeout") -> None:
        """Return when all processes have called it as often as this one.

        Args:
            option: the caller's name of the time-out, for the log.
        """
        began = next_look = time.monotonic()
        next_line = began + _WAIT_LINE_S
        heard: dict[int, tuple[int, float]] = {}  # the count of each late process, and when it was new
        self._meetings += 1  # the store counts the arrivals of all meetings, so that no key is reset
        with self._raising_first_words("the store"):
            self._store.add(f"at/{self._rank}", 1)
            if self._store.add("arrived", 1) == self._meetings * len(self._members):
                # A process that arrived may have run out of time since. None has left this meeting, so no error is later.
                self.raise_if_failed()
                self._store.set(f"met/{self._meetings}", "")
                self._store.delete_key(f"met/{self._meetings - 1}")  # all have seen it: they are here
                return
            while not self._store.check([f"met/{self._meetings}"]):
                try:
                    self.raise_if_failed()
                except TransportError:
                    # Since that look, the last process may have arrived, and a fast one may have closed the transport.
                    if self._store.check([f"met/{self._meetings}"]):
                        return
                    raise
                if time.monotonic() > deadline:
                    raise TimeoutError(f"waited {timeout.total_seconds():g} s for {self._name_late(self._late())}.")
                if time.monotonic() > next_line:
                    next_line += _WAIT_LINE_S
                    waited, limit = time.monotonic() - began, timeout.total_seconds()
                    late = self._name_late(self._late())
                    _LOG.warning("%s waits for %s, %.0f s of %s=%g s", self.member, late, waited, option, limit)
                if time.monotonic() > next_look:
                    next_look += _BEAT_S
                    self._check_beats(heard)
                with suppress(dist.DistStoreError):  # time is over
                    # The store answers as soon as all have met, however seldom a process looks for an error.
                    self._store.wait([f"met/{self._meetings}"], timedelta(seconds=self._look_s))

    def _late(self) -> list[int]:
        """Return the ranks that have not come to this meeting."""
        # Adding 0 also reads the count of a process that never came.
        counts = [self._store.add(f"at/{rank}", 0) for rank in range(len(self._members))]
        return [rank for rank, count in enumerate(counts) if count < self._meetings]

    def _name_late(self, ranks: Sequence[int]) -> str:
        more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        return f"{self._members[ranks[0]]}{more}" if ranks else "a process"

    def _check_beats(self, heard: dict[int, tuple[int, float]]) -> None:
        """Raise TimeoutError if a process that is late has stopped counting up; one that never came has not begun to."""
        for rank in self._late():
            count, now = self._store.add(f"beat/{rank}", 0), time.monotonic()
            if rank not in heard or heard[rank][0] != count:
                heard[rank] = count, now
            elif count and now - heard[rank][1] > _SILENT_S:
                raise TimeoutError(
                    f"waits for {self._members[rank]}, which was killed or stopped: no sign for {_SILENT_S:g} s."
                )

    def send(self, messages: Sequence[Tensor], rank: int) -> Transfer:
        """Start to send contiguous uint8 messages. Their memory must not change before `finish`."""
        with self._raising_first_words(self._members[rank]):
            return Transfer(rank, [self._group.send([message], rank, 0) for message in messages])

    def receive(self, messages: Sequence[Tensor], rank: int) -> Transfer:
        """Start to receive into contiguous uint8 tensors of just the sizes that are sent."""
        with self._raising_first_words(self._members[rank]):
            return Transfer(rank, [self._group.recv([message], rank, 0) for message in messages])

    def finish(self, transfer: Transfer) -> None:
        """Wait until messages have arrived, or have left.

        Raises:
            TransportError: a process failed or died, or the time for the batch is over.
        """
        peer = self._members[transfer.rank]
        with self._raising_first_words(peer):
            for work in transfer.works:
                left = self._deadline - time.monotonic()
                try:
                    work.wait(timedelta(seconds=max(left, 0.001)))
                except RuntimeError as error:
                    # A wait that runs out of time closes gloo's connections, so a peer's may seem lost a moment before.
                    if time.monotonic() < self._deadline - _TOGETHER_S:
                        raise
                    # Its time ran out together with that of the processes that it waits for: the culprit is not known.
                    raise TimeoutError(
                        f"did not move a batch within {self._timeout.total_seconds():g} s: {peer}, or a process that it "
                        "waits for, does not move."
                    ) from error

    def raise_if_failed(self) -> None:
        """Raise the first error of the transport."""
        if self._store.check(["failed"]):
            raise TransportError(self._store.get("failed").decode())

    @contextmanager
    def failing_all(self) -> Iterator[None]:
        """Raise errors of the body, and publish them first: the transport ends in all processes."""
        with self._raising_first_words("the store"):
            self.raise_if_failed()
        try:
            yield
        except BaseException as error:
            is_ours = isinstance(error, TransportError)
            self.fail(str(error) if is_ours else f"MRR603: {self.member}: {type(error).__name__}: {error}")
            raise

    @contextmanager
    def _raising_first_words(self, peer: str) -> Iterator[None]:
        """Raise TransportError for an error of the group or the store, with the words of the process that failed first."""
        try:
            yield
        except TimeoutError as error:
            raise TransportError(self.fail(f"MRR603: {self.member} {error}")) from error
        except RuntimeError as error:
            raise TransportError(self.fail(f"MRR603: {self.member} lost {peer}: {_first_line(error)}")) from error

    def fail(self, text: str) -> str:
        """End the transport in all processes; returns the words of the process that failed first. Any thread may call it."""
        self._is_over.set()
        if self._beating.is_alive():
            # A thread that comes back from C++ while the interpreter ends would abort the process.
            self._beating.join(_TOGETHER_S)
        with suppress(RuntimeError):  # the store may be closed
            text = self._store.compare_set("failed", "", text).decode()
        if self._group is not None and self._is_own_group:
            # gloo (torch 2.13) closes all connections of a process when one wait runs out of time, and in no other way:
            # its threads in C++ come back then, and peers notice.
            for rank in range(len(self._members)):
                if rank != self._rank:
                    with suppress(RuntimeError):
                        empty = torch.zeros(1, dtype=torch.uint8)
                        self._group.recv([empty], rank, _CLOSE).wait(timedelta(milliseconds=1))
        return text


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
