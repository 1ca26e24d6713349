"""The errors of the package: each says what was attempted, the values seen and what to do."""

from collections.abc import Sequence
from typing import Any


def listed(values: Sequence[Any]) -> str:
    """Return values for a message: at most eight of them, and how many there are."""
    return ", ".join(map(str, values[:8])) + (f", ... ({len(values)} in all)" if len(values) > 8 else "")


class RouterReplayError(Exception):
    """Base of every error that this package raises on purpose."""


class TraceError(RouterReplayError, ValueError):
    """A RoutingTrace cannot hold these values, or two traces do not fit together."""


class PayloadError(RouterReplayError, ValueError):
    """What an inference engine returned cannot be read as the routes of its tokens."""


class LayoutError(RouterReplayError, ValueError):
    """Rows cannot be laid out, split or matched to tokens as asked."""


class StoreError(RouterReplayError):
    """A file or directory of routes is damaged, incomplete or of another kind."""


class UnsupportedRouterError(RouterReplayError):
    """A router of this model cannot be replayed exactly; the message names the router and the config field."""


class ReplayStateError(RouterReplayError):
    """Forwards, recomputes and micro-batches did not match one to one."""


class ReplayDataError(ReplayStateError, ValueError):
    """Routes for another number of routers; a ValueError too, which Megatron-Core's own class raises."""
