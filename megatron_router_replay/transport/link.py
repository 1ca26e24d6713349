"""A Link joins two processes by a process group of their own, and tells each what made the other fail.

Two ranks a group: it is no part of training's groups and needs no default group, a failure touches these two alone, and no
thread has to take turns with another. What can end a wait: the message, the peer's death or closing (noticed at once
with gloo), the peer's failure, or the timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import struct
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.errors import RouterReplayError

Backend = Literal["gloo", "nccl"]
Store = Any
"""torch.distributed's TCPStore (or FileStore on one machine); torch exports no common type that mypy accepts."""

_MAX_JSON = 256 << 20
_CANARY, _CLOSING = 1, 2
"""Tags that no message has."""
_CANARY_TIMEOUT = timedelta(days=365)
_GRACE_S = 1.0
"""For a message that came before the peer closed to be noticed."""
_POLL_S = 0.05
_LONGEST_POLL_S = 0.5
"""While one side waits for the other to appear, which may take hours, at hundreds of places."""
_CONNECT_TIMEOUT = timedelta(minutes=1)
"""For each request to the store, and for gloo once both sides are there; waits for messages have timeouts of their own."""
_NOTE_TIMEOUT = timedelta(seconds=5)


_open_links: weakref.WeakSet[Link] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_exiting = threading.Event()


def start_thread(target: Callable[..., None], *args: Any, name: str) -> threading.Thread:
    """Start a daemon thread that works with links; the end of the process ends it.

    One that comes back from C++ while the interpreter shuts down would abort the process.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


@atexit.register
def _end() -> None:
    """Close what nobody closed, and wait for the threads while they can still end."""
    _exiting.set()
    for link in list(_open_links):
        link.close()
    deadline = time.monotonic() + 2 * _GRACE_S
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


class LinkError(RouterReplayError):
    """A link failed; the text says how, and what the peer said about it."""


class _Waits:
    """Waits for gloo's messages in a thread of its own, and for the peer's death in another.

    gloo wakes those who wait for a message that has not begun, but not those whose message is half through: such a wait
    lasts until its timeout. So a message that never comes, the canary, is always waited for.
    """

    def __init__(self, canary: Any) -> None:
        self._changed = threading.Condition()
        self._lost: RuntimeError | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = [
            start_thread(self._watch, canary, name="routes-link"),
            start_thread(self._serve, name="routes-link"),
        ]

    def wait(self, work: Any, timeout: timedelta) -> None:
        """Wait for one message; RuntimeError as gloo raises it."""
        job = _Job(work, timeout)
        self._jobs.put(job)
        with self._changed:
            self._changed.wait_for(lambda: job.done or self._lost is not None)
            self._changed.wait_for(lambda: job.done, _GRACE_S)
            if job.error is not None:
                raise job.error
            if not job.done:
                assert self._lost is not None
                raise self._lost

    def end(self) -> None:
        """Wait for the threads to end, now that the connection is closed; one in the middle of a message takes longer."""
        self._jobs.put(None)
        for thread in self._threads:
            thread.join(_GRACE_S)

    def _watch(self, canary: Any) -> None:
        try:
            canary.wait(_CANARY_TIMEOUT)
        except RuntimeError as error:
            with self._changed:
                self._lost = error
                self._changed.notify_all()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.work.wait(job.timeout)
            except RuntimeError as error:
                job.error = error
            with self._changed:
                job.done = True
                self._changed.notify_all()


class _Job:
    def __init__(self, work: Any, timeout: timedelta) -> None:
        self.work, self.timeout = work, timeout
        self.done = False
        self.error: RuntimeError | None = None


class Link:
    """One end of a connection between two processes.

    Args:
        store: where the two meet; used by this link alone from here on (a clone).
        name: of the connection, the same on both sides.
        side: 0 on one side, 1 on the other.
        backend: "nccl" needs a GPU on each side, and messages in its memory.
        device: of messages that the link makes itself.
        timeout: for the other side to appear.
        failure: asked while it has not; what it returns ends the wait, and the other side is told when it comes.

    Raises:
        LinkError: it did not appear, or failed before.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        side: int,
        backend: Backend,
        device: torch.device,
        timeout: timedelta,
        failure: Callable[[], str | None],
    ) -> None:
        self._name, self._side, self._backend, self._device = name, side, backend, device
        self._group: Any = None
        self._waits: _Waits | None = None
        try:
            # A clone, for a store's client serves one blocking call at a time.
            self._store = dist.PrefixStore(name, store.clone())  # type: ignore[attr-defined]
            self._meet(timeout, failure)
            self._group = self._connect(timeout)
            if backend == "gloo":
                self._waits = _Waits(self.irecv(torch.empty(1, dtype=torch.uint8), _CANARY))
            _open_links.add(self)
        except RuntimeError as error:
            reason = self._reason(error, min(timeout, _CONNECT_TIMEOUT))
            raise LinkError(f"cannot connect {name}: {reason}") from error
        if _exiting.is_set():
            self.close()  # nobody else will

    def _meet(self, timeout: timedelta, failure: Callable[[], str | None]) -> None:
        """Wait until the other side is there, too. gloo would wait for it in C++, where nothing could end the wait."""
        deadline = time.monotonic() + timeout.total_seconds()
        pause = _POLL_S
        other = 1 - self._side
        self._store.set_timeout(_CONNECT_TIMEOUT)
        self._store.set(f"here/{self._side}", "")
        while True:
            failed = "this process ends" if _exiting.is_set() else failure()
            if self._store.check([f"failed/{other}"]):
                said = self._store.get(f"failed/{other}").decode()
                raise LinkError(f"cannot connect {self._name}: the other side failed: {said}")
            if self._store.check([f"here/{other}"]):
                return
            if failed is not None:
                self._store.set(f"failed/{self._side}", failed)
                raise LinkError(f"cannot connect {self._name}: {failed}")
            if time.monotonic() > deadline:
                raise LinkError(f"cannot connect {self._name}: {_nothing_came(timeout)}")
            _exiting.wait(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)

    def _connect(self, timeout: timedelta) -> Any:
        rendezvous = dist.PrefixStore("group", self._store)  # type: ignore[attr-defined]
        if self._backend == "gloo":
            return dist.ProcessGroupGloo(rendezvous, self._side, 2, min(timeout, _CONNECT_TIMEOUT))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        torch.cuda.set_device(self._device)  # of this thread
        return dist.ProcessGroupNCCL(rendezvous, self._side, 2, options)

    def isend(self, message: Tensor) -> Any:
        """Start to send a contiguous uint8 message that the peer expects with just this size; wait for it with `wait`."""
        return self._start("send", message)

    def irecv(self, message: Tensor, tag: int = 0) -> Any:
        """Start to receive into a contiguous uint8 tensor."""
        return self._start("recv", message, tag)

    def _start(self, what: str, message: Tensor, tag: int = 0) -> Any:
        try:
            return getattr(self._open(), what)([message], 1 - self._side, tag)
        except RuntimeError as error:
            raise LinkError(self._reason(error, timedelta(0))) from error

    def wait(self, work: Any, timeout: timedelta) -> None:
        """Wait until a message has arrived or may be overwritten; the device is done with it, too.

        Raises:
            LinkError: the peer failed, died or closed the link, or time ran out. The link cannot be used any more.
        """
        try:
            if self._waits is not None:
                self._waits.wait(work, timeout)
            else:
                self._poll(work, timeout)
        except RuntimeError as error:
            raise LinkError(self._reason(error, timeout)) from error

    def _poll(self, work: Any, timeout: timedelta) -> None:
        """Wait for NCCL, which does not notice that a peer is gone, and ask for the peer's failure all the while."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not work.is_completed():
            said = self._peer_said()
            if said is not None or time.monotonic() > deadline:
                self._open().abort()
                raise LinkError(f"{said or f'nothing moved for {timeout.total_seconds():g} s'}")
            time.sleep(_POLL_S)
        work.wait()

    def send_json(self, value: dict[str, Any], timeout: timedelta) -> None:
        """Send a small message of plain values."""
        text = json.dumps(value).encode()
        for content in (struct.pack("<q", len(text)), text):
            self.wait(self.isend(torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)), timeout)

    def recv_json(self, timeout: timedelta) -> dict[str, Any]:
        """Receive what `send_json` sends.

        Raises:
            LinkError: as `wait`; or no such message came.
        """
        (length,) = struct.unpack("<q", self._recv_bytes(8, timeout))
        if not 2 <= length <= _MAX_JSON:
            raise LinkError(f"the peer announces a message of {length} bytes: it speaks another protocol.")
        try:
            value = json.loads(self._recv_bytes(length, timeout))
        except ValueError as error:
            raise LinkError("the peer's message is not JSON: it speaks another protocol.") from error
        assert isinstance(value, dict)
        return value

    def _recv_bytes(self, length: int, timeout: timedelta) -> bytes:
        message = torch.empty(length, dtype=torch.uint8, device=self._device)
        self.wait(self.irecv(message), timeout)
        return message.cpu().numpy().tobytes()

    def fail(self, text: str) -> None:
        """Tell the peer why, and close: whatever it waits for ends now. The first failure counts."""
        if self._group is None:
            return
        with contextlib.suppress(RuntimeError):  # the store may have died with the peer
            self._store.set_timeout(_NOTE_TIMEOUT)
            self._store.set(f"failed/{self._side}", text)
        self.close()

    def close(self) -> None:
        """Close the connection; twice is once."""
        group, self._group = self._group, None
        if group is None:
            return
        with contextlib.suppress(RuntimeError):
            if self._backend == "nccl":
                group.abort()
            else:
                # gloo has no call to close a connection, but it closes one on which a wait ran out, and that wakes the
                # peer. Dropping the group is not enough: tracebacks may hold it.
                group.recv([torch.empty(1, dtype=torch.uint8)], 1 - self._side, _CLOSING).wait(
                    timedelta(milliseconds=1)
                )
        if self._waits is not None:
            self._waits.end()

    def _open(self) -> Any:
        if self._group is None:
            raise LinkError(f"{self._name} is closed")
        return self._group

    def _peer_said(self) -> str | None:
        try:
            self._store.set_timeout(_NOTE_TIMEOUT)
            key = f"failed/{1 - self._side}"
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:
            return None

    def _reason(self, error: RuntimeError, timeout: timedelta) -> str:
        said = self._peer_said() if hasattr(self, "_store") else None
        if said is not None:
            return f"the other side failed: {said}"
        text = str(error).split("\n")[0]
        if "imed out" in text or "imeout" in text:
            return _nothing_came(timeout)
        if "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
            return "the other side died or closed the connection"
        return f"{type(error).__name__}: {text}"


def _nothing_came(timeout: timedelta) -> str:
    return f"nothing came from the other side within {timeout.total_seconds():g} s"
