"""The capturer that captures nothing: the loop runs the same, and the model has no hook and no attribute of ours."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron_router_replay.capture.interface import RoutedExpertsCapturer


class DisabledCapturer(RoutedExpertsCapturer):
    """Does nothing and returns None; what each method is for stands in RoutedExpertsCapturer."""

    enabled = False
    num_requests = 0
    host_bytes = 0

    def add_request(self, *args: Any, **kwargs: Any) -> None: ...

    def begin_forward(self, *args: Any, **kwargs: Any) -> None: ...

    def end_forward(self) -> None: ...

    def cancel_forward(self) -> None: ...

    def forward(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self, *args: Any, **kwargs: Any) -> None: ...

    def abort(self, *args: Any, **kwargs: Any) -> None: ...

    def drain(self) -> None: ...

    def close(self) -> None: ...
