"""What senders and receivers share: a `with` block that ends well on both sides, or tells the other side why not."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Endpoint:
    """One end of a transport, to be used as a `with` block or closed by hand."""

    def fail(self, error: BaseException) -> None:
        """Tell the other side that this one cannot go on, and why."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections."""
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
