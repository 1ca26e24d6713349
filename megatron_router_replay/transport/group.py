"""The processes of one transport: they meet in a store, and send tensors over a process group with time-outs.

Any thread that waits also polls the store for the first error of the transport, so all processes raise the same words. A
process that is killed or stopped publishes no error: its peers lose it, or run out of time, and write that into the store.
"""

from __future__ import annotations

import json
import os
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

_STORE_TIMEOUT = timedelta(seconds=10)
_POLL_S = 0.5
"""How often a process that waits for a message looks for an error in the store."""
_GRACE = timedelta(seconds=10)
_CLOSE = 1
"""A tag that no message has."""


def open_store(host: str, port: int = 0, *, is_server: bool, timeout: timedelta = timedelta(minutes=2)) -> Store:
    """Return the store where the processes of a transport meet.

    It has no authentication: any process that reaches the port can pose as one of the transport. The server listens on the
    address of `host` alone; give one of a network that only the job can reach.

    Args:
        host, port: of the server; port 0 takes a free one, `store.port`. If the server resolves its own name to a loopback
            address, as some distributions do, give the address; "0.0.0.0" listens on every interface.
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
                f"MRR602: cannot serve a store on {host}:{port}: {error}. Give an address of this machine that all "
                "processes reach, and a port that is free."
            ) from error
        port = listening.getsockname()[1]
        options["master_listen_fd"] = listening.detach()
    return dist.TCPStore(host, port, **options)  # type: ignore[attr-defined]


class Transfer(NamedTuple):
    """Messages on their way to or from a rank."""

    rank: int
    works: list[Any]


class Connections:
    """One process of a transport, from `connect` to `fail`.

    Args:
        store: where they meet; a clone of it is used.
        name: of the transport, used once on a store.
        rank, members: of this process, and the name of each process in errors.
        timeout: for each message, and for connecting.
        group: a process group of the same ranks. Default: one of gloo, made here.
    """

    def __init__(
        self, store: Store, name: str, *, rank: int, members: Sequence[str], timeout: timedelta, group: Any = None
    ) -> None:
        self.member = members[rank]
        self.timeout = timeout
        self._rank, self._members = rank, members
        # A client of a store serves one call at a time, so this process's other calls do not wait for ours.
        self._store = dist.PrefixStore(name, store.clone())  # type: ignore[attr-defined]
        self._tcp_address = (store.host, store.port) if isinstance(store, dist.TCPStore) else None  # type: ignore[attr-defined]
        self._store.set_timeout(_STORE_TIMEOUT)
        self._group, self._is_own_group = group, group is None
        self._meetings = 0
        self._moved_at = 0.0
        # At most some thousand requests a second come to the store, whatever the number of processes.
        self._meeting_poll_s = max(0.01, len(members) / 1000)

    def connect(self, *, terms: Mapping[str, Any], timeout: timedelta) -> None:
        """Wait for all processes and connect to them.

        Args:
            terms: JSON values that must be equal in all processes.
            timeout: for all processes to come.

        Raises:
            TransportError: a process did not come, has different terms, or failed.
        """
        text = json.dumps(terms)
        agreed = self._store.compare_set("terms", "", text).decode()
        if agreed != text:
            raise TransportError(f"MRR602: {self.member} has {text}, another process has {agreed}: give all the same.")
        self.meet(timeout)
        if self._group is None:
            try:
                store = dist.PrefixStore("gloo", self._store)  # type: ignore[attr-defined]
                options: Any = self.timeout  # gloo then listens on torch's default, or on GLOO_SOCKET_IFNAME
                if (host := self._host_towards_store()) is not None:
                    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                    options._timeout = self.timeout
                    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
                self._group = dist.ProcessGroupGloo(store, self._rank, len(self._members), options)
            except (OSError, RuntimeError) as error:
                raise TransportError(
                    f"MRR602: {self.member} cannot connect: {_first_line(error)}. gloo uses this machine's address towards "
                    "the store, or the interface that GLOO_SOCKET_IFNAME names."
                ) from error

    def _host_towards_store(self) -> str | None:
        """Return this machine's address towards the store, so that gloo listens on the same network alone.

        None where GLOO_SOCKET_IFNAME decides, or where the store has no address or listens on all interfaces.
        """
        if (
            os.environ.get("GLOO_SOCKET_IFNAME")
            or self._tcp_address is None
            or self._tcp_address[0] in ("0.0.0.0", "::")
        ):
            return None
        with socket.create_connection(self._tcp_address, timeout=_STORE_TIMEOUT.total_seconds()) as to_store:
            return str(to_store.getsockname()[0])

    def meet(self, timeout: timedelta, *, while_moving: bool = False) -> None:
        """Return when all processes have called it as often as this one.

        Args:
            timeout: for the last process to call.
            while_moving: the time starts again while any process finishes messages.

        Raises:
            TransportError: a process failed, or did not call in time.
        """
        self._meetings += 1
        with self._raising_first_words(None):
            self._store.set(f"at/{self._rank}", str(self._meetings))
            arrived = self._store.add("arrived", 1)
            if arrived > self._meetings * len(self._members):
                raise TransportError(
                    f"MRR602: {self.member} is one too many: this name was used before, take a new one."
                )
            if arrived == self._meetings * len(self._members):
                # A process that arrived may have run out of time since. None has left this meeting, so no error is later.
                self._raise_if_failed()
                self._store.set(f"met/{self._meetings}", "")
                self._store.delete_key(f"met/{self._meetings - 1}")  # all have seen it: they are here
                return
            deadline, moved = time.monotonic() + timeout.total_seconds(), -1
            while not self._store.check([f"met/{self._meetings}"]):
                self._raise_if_failed()
                if while_moving and (count := self._store.add("moved", 0)) != moved:
                    moved, deadline = count, time.monotonic() + timeout.total_seconds()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"waited {timeout.total_seconds():g} s for {self._late_members()}.")
                time.sleep(self._meeting_poll_s)

    def _late_members(self) -> str:
        keys = [f"at/{rank}" for rank in range(len(self._members))]
        late = [
            member
            for key, member in zip(keys, self._members)
            if not self._store.check([key]) or int(self._store.get(key)) < self._meetings
        ]
        more = f" and {len(late) - 1} more" if len(late) > 1 else ""
        return f"{late[0]}{more}" if late else "a process"

    def publish(self, message: Mapping[str, Any]) -> None:
        """Give all processes a message, JSON values, before a meeting."""
        with self._raising_first_words(None):
            self._store.set(f"message/{self._rank}", json.dumps(message))

    def published(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Return the messages that these ranks published before the last meeting."""
        with self._raising_first_words(None):
            return [json.loads(self._store.get(f"message/{rank}")) for rank in ranks]

    def send(self, messages: Sequence[Tensor], rank: int) -> Transfer:
        """Start to send contiguous uint8 messages. Their memory must not change before `finish`."""
        with self._raising_first_words(rank):
            return Transfer(rank, [self._group.send([message], rank, 0) for message in messages])

    def receive(self, messages: Sequence[Tensor], rank: int) -> Transfer:
        """Start to receive into contiguous uint8 tensors of just the sizes that are sent."""
        with self._raising_first_words(rank):
            return Transfer(rank, [self._group.recv([message], rank, 0) for message in messages])

    def finish(self, transfer: Transfer) -> None:
        """Wait until messages have arrived, or have left.

        Raises:
            TransportError: a process failed or died, or time ran out.
        """
        with self._raising_first_words(transfer.rank):
            for work in transfer.works:
                self._wait(work, transfer.rank)
            # Several times within a time-out, for the processes that wait at the end of the batch.
            if time.monotonic() > self._moved_at + min(1.0, self.timeout.total_seconds() / 4):
                self._moved_at = time.monotonic()
                self._store.add("moved", 1)

    def _wait(self, work: Any, rank: int) -> None:
        # In a thread that may outlive the call: neither Ctrl-C nor an error elsewhere ends a wait in C++.
        waiting = run_in_thread(work.wait, self.timeout + _GRACE, name="routes-wait")
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not wait([waiting], max(0.0, min(_POLL_S, deadline - time.monotonic()))).done:
            self._raise_if_failed()
            if time.monotonic() > deadline:
                # Its time ran out together with that of the processes that it waits for, so the culprit is not known.
                raise TimeoutError(
                    f"waited {self.timeout.total_seconds():g} s for {self._members[rank]}: it, or a process that it waits "
                    "for, does not move."
                )
        waiting.result()

    def _raise_if_failed(self) -> None:
        if self._store.check(["failed"]):
            raise TransportError(self._store.get("failed").decode())

    @contextmanager
    def _raising_first_words(self, rank: int | None) -> Iterator[None]:
        """Raise TransportError for an error of the group or the store, with the words of the process that failed first."""
        try:
            yield
        except TimeoutError as error:
            raise TransportError(self.fail(f"MRR603: {self.member} {error}")) from error
        except RuntimeError as error:
            peer = "the store" if rank is None else self._members[rank]
            raise TransportError(self.fail(f"MRR603: {self.member} lost {peer}: {_first_line(error)}")) from error

    def fail(self, text: str) -> str:
        """End the transport in all processes; returns the words of the process that failed first. Any thread may call it."""
        with suppress(RuntimeError):  # the store may be closed
            text = self._store.compare_set("failed", "", text).decode()
        self._close()
        return text

    def _close(self) -> None:
        """Close the connections of our own group, so that its threads in C++ come back and peers notice."""
        if self._group is None or not self._is_own_group:
            return
        # gloo (torch 2.13) closes all connections of a process when one wait runs out of time, and in no other way.
        for rank in range(len(self._members)):
            if rank != self._rank:
                with suppress(RuntimeError):
                    self._group.recv([torch.zeros(1, dtype=torch.uint8)], rank, _CLOSE).wait(timedelta(milliseconds=1))


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


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
