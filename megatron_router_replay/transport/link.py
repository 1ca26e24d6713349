"""A Link joins two processes by a process group of their own, and tells each what made the other fail.

Two ranks a group: it is no part of training's groups and needs no default group, a failure touches these two alone, and no
thread has to take turns with another. A link has no threads. What can end a wait: the message, the peer's death or closing
(noticed at once with gloo), the peer's failure, or the timeout.

What gloo (torch 2.13) does, and what it forces here:

1. When a connection breaks, gloo wakes those who wait for a message that has not begun, but not those whose message is half
   through, sent or received: they sleep until their timeout. So nobody waits for a large message. A sender waits for the
   receiver's note that it has arrived, and a receiver waits for the one byte, `end`, that follows it; when that is there, the
   message before it is, too, and waiting for it returns at once.
2. A wait that runs out closes the connection, so there is no short wait to be repeated: a timeout is the end of a link.
3. There is no call that closes a connection (`abort` and `shutdown` leave the peer waiting), and dropping the group is not
   enough, for a traceback may hold it. So `close` lets a wait of a millisecond run out: see 2.
4. While gloo connects, nothing can end its wait. So the two sides meet in the store first (`meeting`), and connect when both
   are there.
5. A message of another size than the one that is waited for ends the process. So sizes are agreed on before (`stream`).
"""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.transport.meeting import STORE_TIMEOUT, Identity, MeetingError, Store, meet, prefixed, read

Backend = Literal["gloo", "nccl"]

_MAX_JSON = 256 << 20
_CLOSING_TAG = 1
"""A tag that no message has."""
_POLL_S = 0.05
_ERROR_TIMEOUT = timedelta(seconds=5)
"""For reading or writing why a link failed: the store may have died with the peer."""


class LinkError(RouterReplayError):
    """A link failed; the text says how, and what the peer said about it."""


class Link:
    """One end of a connection between two processes.

    Args:
        store: where the two meet; used by this link alone from here on (a clone).
        name: of the connection, the same on both sides.
        identity: of this side.
        side: 0 sends routes, 1 receives them.
        backend: "nccl" needs a GPU on each side, and messages in its memory.
        device: of messages that the link makes itself.
        timeout: for the other side to appear.
        failure: asked while it has not; what it returns ends the wait, and the other side is told when it comes.

    Raises:
        LinkError: it did not appear, left before, or disagrees on the terms.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        identity: Identity,
        side: int,
        backend: Backend,
        device: torch.device,
        timeout: timedelta,
        failure: Callable[[], str | None],
    ) -> None:
        self._name, self._side, self._backend, self._device = name, side, backend, device
        self._control: Any = None
        self._data: Any = None
        self._pair: Store = None
        try:
            # A clone, for a store's client serves one blocking call at a time.
            place = prefixed(store.clone(), name)
            place.set_timeout(STORE_TIMEOUT)
            _, self._pair = meet(place, identity, side=side, timeout=timeout, failure=failure)
            self._control = self._connect("control", timeout)
            # NCCL runs what one group does in the order in which it was asked for; notes must not wait behind routes.
            self._data = self._control if backend == "gloo" else self._connect("data", timeout)
        except MeetingError as error:
            raise LinkError(f"cannot connect {name}: {error}") from error
        except RuntimeError as error:
            raise LinkError(f"cannot connect {name}: {self._reason(error, min(timeout, STORE_TIMEOUT))}") from error

    def _connect(self, group: str, timeout: timedelta) -> Any:
        rendezvous = prefixed(self._pair, group)
        if self._backend == "gloo":
            return dist.ProcessGroupGloo(rendezvous, self._side, 2, min(timeout, STORE_TIMEOUT))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        torch.cuda.set_device(self._device)  # of this thread
        return dist.ProcessGroupNCCL(rendezvous, self._side, 2, options)

    def start_sending(self, messages: Sequence[Tensor]) -> list[Any]:
        """Start to send contiguous uint8 messages, and a byte that says that they have come; `finish` the returned works."""
        return [self._start(self._data, "send", message) for message in [*messages, self._byte()]]

    def start_receiving(self, messages: Sequence[Tensor]) -> list[Any]:
        """Start to receive into contiguous uint8 tensors of just the sizes that are sent; `finish` the returned works."""
        return [self._start(self._data, "recv", message) for message in [*messages, self._byte()]]

    def finish(self, works: Sequence[Any], timeout: timedelta) -> None:
        """Wait until messages have arrived, the last first: by then the others are there (see 1. above).

        A sender calls it when the receiver's note says so, and returns at once.

        Raises:
            LinkError: the peer failed, died or closed the link, or time ran out. The link cannot be used any more.
        """
        for work in reversed(works):
            self._wait(work, timeout)

    def start_note(self, value: int) -> Any:
        """Start to send a note of one byte; `finish` the returned work when the peer has surely read it."""
        return self._start(self._control, "send", self._byte(value))

    def recv_note(self, timeout: timedelta) -> int:
        """Wait for a note of one byte and return it."""
        message = self._byte()
        self._wait(self._start(self._control, "recv", message), timeout)
        return int(message)

    def send_json(self, value: dict[str, Any], timeout: timedelta) -> None:
        """Send a small message of plain values."""
        text = json.dumps(value).encode()
        for content in (struct.pack("<q", len(text)), text):
            message = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
            self._wait(self._start(self._control, "send", message), timeout)

    def recv_json(self, timeout: timedelta) -> dict[str, Any]:
        """Receive what `send_json` sends.

        Raises:
            LinkError: as `finish`; or no such message came.
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

    def fail(self, text: str) -> None:
        """Tell the peer why, and close: whatever it waits for ends now. The first failure counts."""
        if self._control is None:
            return
        with contextlib.suppress(RuntimeError):  # the store may have died with the peer
            self._pair.set_timeout(_ERROR_TIMEOUT)
            self._pair.set(f"failed/{self._side}", text)
        self.close()

    def close(self) -> None:
        """Close the connection; closing it again does nothing. Any thread may, while another waits for a message."""
        group, data, self._control, self._data = self._control, self._data, None, None
        if group is None:
            return
        with contextlib.suppress(RuntimeError):
            if self._backend == "nccl":
                group.abort()
                data.abort()
            else:
                # See 3. above: a wait that runs out closes the connection, and that wakes the peer.
                closing = group.recv([torch.empty(1, dtype=torch.uint8)], 1 - self._side, _CLOSING_TAG)
                closing.wait(timedelta(milliseconds=1))

    def _byte(self, value: int = 0) -> Tensor:
        return torch.full((1,), value, dtype=torch.uint8, device=self._device)

    def _recv_bytes(self, length: int, timeout: timedelta) -> bytes:
        message = torch.empty(length, dtype=torch.uint8, device=self._device)
        self._wait(self._start(self._control, "recv", message), timeout)
        return message.cpu().numpy().tobytes()

    def _start(self, group: Any, operation: str, message: Tensor) -> Any:
        if group is None:
            raise LinkError(self._peer_error() or f"{self._name} is closed")
        try:
            return getattr(group, operation)([message], 1 - self._side, 0)
        except RuntimeError as error:
            raise LinkError(self._reason(error, timedelta(0))) from error

    def _wait(self, work: Any, timeout: timedelta) -> None:
        try:
            if self._backend == "gloo":
                work.wait(timeout)
            else:
                self._poll(work, timeout)
        except RuntimeError as error:
            raise LinkError(self._reason(error, timeout)) from error

    def _poll(self, work: Any, timeout: timedelta) -> None:
        """Wait for NCCL, which does not notice that a peer is gone, and ask for the peer's failure all the while."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not work.is_completed():
            peer_error = self._peer_error()
            if peer_error is not None or time.monotonic() > deadline:
                self.close()
                raise LinkError(peer_error or f"nothing moved for {timeout.total_seconds():g} s")
            time.sleep(_POLL_S)
        work.wait()

    def _peer_error(self) -> str | None:
        if self._pair is None:
            return None
        try:
            self._pair.set_timeout(_ERROR_TIMEOUT)
            text = read(self._pair, f"failed/{1 - self._side}")
        except RuntimeError:
            return None
        return None if text is None else f"the other side failed: {text.decode()}"

    def _reason(self, error: RuntimeError, timeout: timedelta) -> str:
        peer_error = self._peer_error()
        if peer_error is not None:
            return peer_error
        if self._control is None and self._data is None and self._pair is not None:
            return f"{self._name} was closed"
        text = str(error).split("\n")[0]
        if "imed out" in text or "imeout" in text:
            return f"nothing came from the other side within {timeout.total_seconds():g} s"
        if "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
            return "the other side died or closed the connection"
        return f"{type(error).__name__}: {text}"
