"""All processes of one transport, connected by gloo: what ends one of them ends the others' waits.

What gloo (torch 2.13) does, and what it forces here:

1. Only the two ends learn of a broken connection. So each process watches the next one, in a ring. Who loses a peer, or
   gives up, writes why into the store and closes its connections. Whoever waits for long looks into the store.
2. A message that is half through sleeps until its timeout, whatever becomes of its connection, and Ctrl-C reaches no wait
   in C++. So work is waited for in a thread, which may be left behind.
3. A wait that runs out closes all connections of its process, and no call does. So closing lets a millisecond run out.
4. A message of a different size than is waited for ends the process. So every size is agreed on before.
5. Connecting cannot be interrupted. So the processes meet in the store first, and connect when all are there.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.transport.plan import TransportError

T = TypeVar("T")
Store = Any
"""A torch.distributed.Store with `clone`, such as a TCPStore."""

_POLL_S = 0.05
_STORE_TIMEOUT = timedelta(seconds=10)
_HEAR_S = 1.0
"""How often a process that waits looks whether another one has failed."""
_FOREVER = timedelta(days=365)
_MOVED = "moved"
"""Key of the store that counts up while some process moves buckets."""
_GRACE = timedelta(seconds=10)
_WATCH, _PROBE, _CLOSE = 1, 2, 3
"""Tags that no message has."""


def open_store(host: str, port: int = 0, *, is_server: bool, timeout: timedelta = timedelta(minutes=2)) -> Store:
    """Return the store where the processes of a transport meet.

    It has no authentication: whoever reaches the port can pose as one of the processes. The server listens on the address
    of `host` alone; give one of a network that only the job can reach.

    Args:
        host, port: of the server; port 0 takes a free one, `store.port`. Where the server itself resolves its name to a
            loopback address, as some distributions do, give the address; "0.0.0.0" listens on every interface.
        is_server: True in the one process that serves it; it must outlive the transport.
        timeout: for the server to appear.

    Raises:
        TransportError: the server cannot listen there.
    """
    options: dict[str, Any] = {"is_master": is_server, "wait_for_workers": False, "timeout": timeout}
    if is_server:
        # torch's own server listens on all interfaces, whatever the host; it takes a socket that listens already.
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server(address[:2], family=family)  # an IPv6 address has two more entries
        except OSError as error:
            raise TransportError(
                f"MRR602: cannot serve a store on {host}:{port}: {error}. Give an address of this machine that the "
                "others reach, and a port that is free."
            ) from error
        port = listening.getsockname()[1]
        options["master_listen_fd"] = listening.detach()
    return dist.TCPStore(host, port, **options)  # type: ignore[attr-defined]


class Transfer(NamedTuple):
    """Messages on their way to or from a rank."""

    rank: int
    works: list[Any]


class Connections:
    """The connections of one process to all others, from `connect` to `fail`.

    Args:
        store: where they meet; a clone of it is used.
        name: of the transport, used once on a store.
        rank, members: of this process, and what errors call each process.
        timeout: for each message, and for connecting.
    """

    def __init__(self, store: Store, name: str, *, rank: int, members: Sequence[str], timeout: timedelta) -> None:
        self.member = members[rank]
        self._rank, self._members, self._timeout = rank, members, timeout
        # A client serves one call at a time, and connecting is a long one.
        self._store = dist.PrefixStore(name, store.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(_STORE_TIMEOUT)
        self._gloo: Any = None
        self._told_moved = 0.0
        self._watching: Future[None] | None = None

    def connect(self, *, terms: Mapping[str, Any], host: str, timeout: timedelta) -> None:
        """Wait for all processes and connect to them.

        Args:
            terms: what all must have alike; JSON values.
            host: address of this machine on which gloo listens.
            timeout: for all processes to come.

        Raises:
            TransportError: not all came, one has different terms, or one failed.
        """
        self._meet(json.dumps(terms), timeout)
        place = self._rank, len(self._members)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            store = dist.PrefixStore("gloo", self._store)  # type: ignore[attr-defined]
            self._gloo = dist.ProcessGroupGloo(store, *place, options)
        except RuntimeError as error:
            text = f"{self.member} cannot connect from {host}: {_first_line(error)}"
            raise TransportError(f"MRR602: {text} Between machines, each process gives its own host.") from error
        self._watching = run_in_thread(self._watch_next, name="routes-watch")

    def _meet(self, terms: str, timeout: timedelta) -> None:
        agreed = self._store.compare_set("terms", "", terms).decode()
        if agreed != terms:
            raise TransportError(f"MRR602: {self.member} has {terms}, another process has {agreed}: give all the same.")
        arrived = self._store.add("arrived", 1)
        if arrived > len(self._members):
            raise TransportError(f"MRR602: {self.member} is one too many: this name was used before, take a new one.")
        deadline = time.monotonic() + timeout.total_seconds()
        while arrived < len(self._members) and not self._store.check(["failed"]):
            if time.monotonic() > deadline:
                text = f"{arrived} of {len(self._members)} processes came within {timeout.total_seconds():g} s"
                raise TransportError(f"MRR602: {self.member} cannot begin: {text}.")
            time.sleep(_POLL_S)
            arrived = self._store.add("arrived", 0)
        if self._store.check(["failed"]):
            raise TransportError(self._store.get("failed").decode())

    def _watch_next(self) -> None:
        """Tell all when the next process of the ring is lost; ends with this process's connections."""
        peer = (self._rank + 1) % len(self._members)
        try:
            self._gloo.recv([_byte()], peer, _WATCH).wait(_FOREVER)
        except RuntimeError:
            self._write(f"MRR603: {self.member} lost {self._members[peer]}, which died or closed the connection.")

    def exchange(self, message: dict[str, Any] | None, timeout: timedelta) -> list[dict[str, Any] | None]:
        """Give all processes each other's messages, in the order of ranks; it returns when all have called it.

        Args:
            message: JSON values; None costs eight bytes.
            timeout: for the last process to call.

        Raises:
            TransportError: a process failed, died or did not call in time.
        """
        content = b"" if message is None else json.dumps(message).encode()
        sizes = self._meet_again(len(content), timeout)
        result: list[dict[str, Any] | None] = [None] * len(sizes)
        for rank, size in enumerate(map(int, sizes)):
            if size:
                data = torch.empty(size, dtype=torch.uint8)
                if rank == self._rank:
                    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                with self._explained(None, self._timeout):
                    self._wait(self._gloo.broadcast(data, rank, self._timeout + _GRACE), self._timeout)
                result[rank] = json.loads(data.numpy().tobytes())
        return result

    def end_batch(self) -> None:
        """Return when all processes have called it.

        Raises:
            TransportError: a process failed or died, or none moved a bucket for as long as a message may take.
        """
        self._meet_again(0, self._timeout, while_moving=True)

    def _meet_again(self, value: int, timeout: timedelta, *, while_moving: bool = False) -> list[Tensor]:
        values = [torch.zeros(1, dtype=torch.int64) for _ in self._members]
        with self._explained(None, timeout):
            patience = _FOREVER if while_moving else timeout + _GRACE  # gloo's; `_wait` is over before
            work = self._gloo.allgather(values, torch.tensor([value]), patience)
            self._wait(work, timeout, patience, while_moving=while_moving)
        return values

    def send(self, messages: Sequence[Tensor], rank: int) -> Transfer:
        """Start to send contiguous uint8 messages, whose memory must not change before `finish`."""
        with self._explained(rank, self._timeout):
            return Transfer(rank, [self._gloo.send([message], rank, 0) for message in messages])

    def receive(self, messages: Sequence[Tensor], rank: int) -> Transfer:
        """Start to receive into contiguous uint8 tensors of just the sizes that are sent."""
        with self._explained(rank, self._timeout):
            return Transfer(rank, [self._gloo.recv([message], rank, 0) for message in messages])

    def finish(self, transfer: Transfer) -> None:
        """Wait until messages have arrived, or have left.

        Raises:
            TransportError: a process failed or died, or time ran out.
        """
        with self._explained(transfer.rank, self._timeout):
            for work in transfer.works:
                self._wait(work, self._timeout)
            # Several times within a time-out, so that who waits for the end sees it.
            if time.monotonic() > self._told_moved + min(_HEAR_S, self._timeout.total_seconds() / 4):
                self._told_moved = time.monotonic()
                self._store.add(_MOVED, 1)

    def _wait(
        self, work: Any, timeout: timedelta, patience: timedelta | None = None, *, while_moving: bool = False
    ) -> None:
        # It runs out of time before gloo does, while the connections are open, so that the first words are its own.
        waiting = run_in_thread(work.wait, patience or timeout + _GRACE, name="routes-wait")
        deadline, has_failed, moved = time.monotonic() + timeout.total_seconds(), False, -1
        while not wait([waiting], max(0.0, min(_HEAR_S, deadline - time.monotonic()))).done:
            if has_failed:
                raise TransportError(self.fail("MRR603: the transport is over."))
            if while_moving and (count := self._store.add(_MOVED, 0)) != moved:
                moved, deadline = count, time.monotonic() + timeout.total_seconds()
            if time.monotonic() > deadline:
                raise TimeoutError
            # Once more: somebody may have left behind a batch that is about to end here, too.
            has_failed = self._store.check(["failed"])
        waiting.result()

    def fail(self, text: str) -> str:
        """End the transport in all processes; returns the words of the process that failed first. Any thread may."""
        text = self._write(text)
        self._close()
        return text

    def leave(self, text: str, seconds: float) -> None:
        """End the transport in all processes, and wait for the thread here."""
        if self._watching is None or not self._watching.done():  # else it is over, and the store may be gone
            self._write(text)
        self._close()
        if self._watching is not None:
            wait([self._watching], seconds)

    def _write(self, text: str) -> str:
        with suppress(RuntimeError):  # the store may be gone
            return str(self._store.compare_set("failed", "", text).decode())
        return text

    def _close(self) -> None:
        if self._gloo is None:
            return
        for peer in self._peers():
            try:
                self._gloo.recv([_byte()], peer, _CLOSE).wait(timedelta(milliseconds=1))  # see 3. above
            except RuntimeError as error:
                if "imed out" in str(error):
                    break  # else this connection was closed before, and the next one may not be

    @contextmanager
    def _explained(self, rank: int | None, timeout: timedelta) -> Iterator[None]:
        """Raise TransportError for an error of gloo, with the words of whoever failed first, and end the transport."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            text = _first_line(error)
            if isinstance(error, TimeoutError):
                peer = "a process" if rank is None else self._members[rank]
                text = f"waited {timeout.total_seconds():g} s for {peer}."
            elif "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
                text = f"lost {self._lost_peer()}, which died or closed the connection."
            raise TransportError(self.fail(f"MRR603: {self.member} {text}")) from error

    def _lost_peer(self) -> str:
        """Return whose connection is broken: it died, or wrote its words into the store before."""
        for peer in self._peers():
            try:
                self._gloo.recv([_byte()], peer, _PROBE)
            except RuntimeError:
                return self._members[peer]
        return "a process"

    def _peers(self) -> list[int]:
        return [rank for rank in range(len(self._members)) if rank != self._rank]


def run_in_thread(function: Callable[..., T], *args: Any, name: str) -> Future[T]:
    """Run a function in a daemon thread of this name and return its Future.

    Not a ThreadPoolExecutor: the interpreter joins an executor's threads before any atexit function runs, so one that waits
    for a peer would keep the process from ending.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _byte() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
