"""The processes of a transport: they meet in a store, and send messages over a process group with time-outs.

Each meeting has one outcome, a key of the store that is written once: either the last process that arrives writes that all
have met, or the first that fails writes its error. So all processes leave a meeting, or all raise the same words. A process
that fails also closes its connections: peers in the middle of a message lose it, and find its words in the store. A process
that is killed or stopped writes nothing: its peers lose it, or run out of time, and write that.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.transport.plan import TransportError

Store = Any
"""A torch.distributed.Store with `clone`, such as a TCPStore."""

Finish = Callable[[], None]
"""Waits until a message has arrived, or has left; raises TransportError."""

_MET = "met"
_STORE_TIMEOUT = timedelta(seconds=10)
_CLOSE = 1
"""A tag that no message has."""


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


class Connections:
    """One process of a transport, from `connect` to `fail`.

    Args:
        store: where the processes meet; a clone of it is used.
        name: of the transport, used once on a store.
        rank, members: of this process, and the name of each process in errors.
        timeout: for all messages of a batch.
        group: a process group of the same ranks. Default: one of gloo, made here.

    Raises:
        TransportError: the name was used before.
    """

    def __init__(
        self, store: Store, name: str, *, rank: int, members: Sequence[str], timeout: timedelta, group: Any = None
    ) -> None:
        self.member = members[rank]
        self._rank, self._members, self._timeout = rank, members, timeout
        # A client of a store serves one call at a time, so this process's other calls do not wait for ours.
        self._store = dist.PrefixStore(name, store.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(_STORE_TIMEOUT)
        self._group, self._is_own_group = group, group is None
        self._meeting = 1  # the number of the meeting that this process is in, or will be in next
        self._error: str | None = None  # what ended the transport
        self._deadline = 0.0
        # At most some thousand requests a second come to the store, whatever the number of processes.
        self._poll_s = max(0.01, len(members) / 1000)
        with self._losing("the store"):
            times_joined = self._store.add(f"joined/{rank}", 1)
        if times_joined > 1:
            raise TransportError(f"MRR602: {self.member} is one too many: this name was used before, take a new one.")

    def connect(self, terms: Mapping[str, Any], timeout: timedelta) -> None:
        """Wait for all processes and connect to them.

        Args:
            terms: JSON values that must be equal in all processes.
            timeout: for all processes to come.

        Raises:
            TransportError: a process did not come, has different terms, or failed.
        """
        own = json.dumps(terms)
        with self._losing("the store"):
            agreed = self._store.compare_set("terms", "", own).decode()
        if agreed != own:
            raise TransportError(f"MRR602: {self.member} has {own}, another process has {agreed}: give all the same.")
        self._meet(timeout, time.monotonic() + timeout.total_seconds())
        if self._is_own_group:
            self._group = self._make_group()

    def _make_group(self) -> Any:
        try:
            store = dist.PrefixStore("gloo", self._store)  # type: ignore[attr-defined]
            return dist.ProcessGroupGloo(store, self._rank, len(self._members), self._timeout)
        except RuntimeError as error:
            raise TransportError(
                f"MRR602: {self.member} cannot connect: {_first_line(error)}. gloo uses the interface of this host's "
                "name, or the one that GLOO_SOCKET_IFNAME names."
            ) from error

    def begin(self, header: dict[str, Any] | None, timeout: timedelta) -> dict[str, Any]:
        """Meet all processes that begin a batch, and return its header; the time for its messages starts.

        Args:
            header: JSON values; None in all processes but one.
            timeout: for all processes to begin.
        """
        with self._losing("the store"):
            if header is not None:
                self._store.set("header", json.dumps(header))
            self._meet(timeout, time.monotonic() + timeout.total_seconds())
            self._deadline = time.monotonic() + self._timeout.total_seconds()
            agreed: dict[str, Any] = json.loads(self._store.get("header"))
            return agreed

    def end(self) -> None:
        """Return when every process has all messages of the batch."""
        self._meet(self._timeout, self._deadline)

    def _meet(self, timeout: timedelta, deadline: float) -> None:
        """Return when all processes have called it as often as this one."""
        outcome = self._outcome(self._meeting)
        with self._losing("the store"):
            self._store.add(f"at/{self._rank}", 1)
            # The store counts the arrivals of all meetings, so that no key is reset.
            if self._store.add("arrived", 1) == self._meeting * len(self._members):
                self._store.compare_set(outcome, "", _MET)
                # All are here, so none reads the outcome of the meeting before the last.
                self._store.delete_key(self._outcome(self._meeting - 2))
            while not self._store.check([outcome]):
                if time.monotonic() > deadline:
                    late = f"MRR603: {self.member} waited {timeout.total_seconds():g} s for {self._late_members()}."
                    self._store.compare_set(outcome, "", late)  # unless the last has arrived in this moment
                else:
                    time.sleep(self._poll_s)
            words = self._store.get(outcome).decode()
        if words != _MET:
            raise TransportError(words)
        self._meeting += 1

    def _outcome(self, meeting: int) -> str:
        return f"outcome/{meeting}"

    def _late_members(self) -> str:
        # Adding 0 also reads the count of a process that never came.
        counts = [self._store.add(f"at/{rank}", 0) for rank in range(len(self._members))]
        late = [member for member, count in zip(self._members, counts) if count < self._meeting]
        more = f" and {len(late) - 1} more" if len(late) > 1 else ""
        return f"{late[0]}{more}" if late else "a process"

    def send(self, message: Tensor, rank: int) -> Finish:
        """Start to send a contiguous uint8 message. Its memory must not change before it has left."""
        with self._losing(self._members[rank]):
            return partial(self._finish, self._group.send([message], rank, 0), rank)

    def receive(self, message: Tensor, rank: int) -> Finish:
        """Start to receive into a contiguous uint8 tensor of just the size that is sent."""
        with self._losing(self._members[rank]):
            return partial(self._finish, self._group.recv([message], rank, 0), rank)

    def _finish(self, work: Any, rank: int) -> None:
        # Processes that wait for each other run out of time together, and each closes its connections: which of them does
        # not move is not known here.
        limit = f"{self._timeout.total_seconds():g} s"
        why = f" (it ended, or it or a process that it waits for did not move a batch within {limit})"
        with self._losing(self._members[rank] + why):
            work.wait(timedelta(seconds=max(self._deadline - time.monotonic(), 0.001)))

    def raise_if_failed(self) -> None:
        """Raise the error that ended the transport in this process."""
        if self._error is not None:
            raise TransportError(self._error)

    @contextmanager
    def failing_all(self) -> Iterator[None]:
        """End the transport in all processes if the body raises; raise the words of the process that failed first.

        An error that is none of the transport, such as one of the caller's own code, is raised as it is.
        """
        try:
            yield
        except TransportError as error:
            words = self.fail(str(error))
            if words == str(error):
                raise
            raise TransportError(words) from error
        except BaseException as error:
            self.fail(f"MRR603: {self.member}: {type(error).__name__}: {error}")
            raise

    @contextmanager
    def _losing(self, peer: str) -> Iterator[None]:
        """Raise TransportError for an error of the group or of the store."""
        try:
            yield
        except RuntimeError as error:
            raise TransportError(f"MRR603: {self.member} lost {peer}: {_first_line(error)}") from error

    def fail(self, text: str) -> str:
        """End the transport in all processes; returns the words of the process that failed first. Any thread may call it."""
        if self._error is None:
            self._error = self._publish(text)
            self._close_connections()
        return self._error

    def _publish(self, text: str) -> str:
        # The others are in the same meeting, or will be; where they have just met, they will be in the next.
        for meeting in (self._meeting, self._meeting + 1):
            with suppress(RuntimeError):  # the store may be closed
                words: str = self._store.compare_set(self._outcome(meeting), "", text).decode()
                if words != _MET:
                    return words
        return text

    def _close_connections(self) -> None:
        if self._group is None or not self._is_own_group:
            return
        # gloo (torch 2.13) closes all connections of a process when one wait runs out of time, and in no other way:
        # its threads in C++ come back then, and peers notice.
        for rank in range(len(self._members)):
            if rank != self._rank:
                with suppress(RuntimeError):
                    empty = torch.zeros(1, dtype=torch.uint8)
                    self._group.recv([empty], rank, _CLOSE).wait(timedelta(milliseconds=1))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
