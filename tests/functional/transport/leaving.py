"""What the tests of leaving share over torch.distributed and over Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from megatron_router_replay.transport import TransportError


def leave(receiver: Any, how: str) -> None:
    """Leave a receiver's `with` block, "cleanly" or "by exception"."""
    if how == "by exception":
        with pytest.raises(KeyError), receiver:
            raise KeyError("the optimizer is gone")
    else:
        with receiver:
            pass


def raises_promptly(function: Callable[[], Any], match: str, *, within: float) -> None:
    """Check that a call raises and does not wait for a timeout: `within` is seconds, far below every timeout."""
    began = time.monotonic()
    with pytest.raises(TransportError, match=match):
        function()
    assert time.monotonic() - began < within
