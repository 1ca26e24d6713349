"""What senders and receivers share: a `with` block that ends well on both sides, or tells the other side why not."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType
from typing import Self

from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.plan import ParallelLayout

TIMEOUT = timedelta(minutes=2)
READY_TIMEOUT = timedelta(hours=2)


class Endpoint:
    """One end of a transport, to be used as a `with` block or closed by hand.

    Args:
        side: for error texts, such as "rollout side".
    """

    def __init__(self, layout: ParallelLayout, *, side: str) -> None:
        self.layout = layout
        self._side = side
        self._broken: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Tell the other side that this one cannot go on, and why; it raises. The first failure counts."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections; the other side raises if it still waits for this one."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
            else:
                self.fail(error)
        finally:
            self.close()

    def _finish(self) -> None:
        """Do what is left at the end of a block without an exception."""

    def _failure(self) -> str | None:
        """Return why this endpoint cannot go on, for the other side; None while it can."""
        return None if self._broken is None else f"{self._side}: {type(self._broken).__name__}: {self._broken}"

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise TransportError(f"this transport failed before: {self._broken}") from self._broken
