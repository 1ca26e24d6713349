"""The error of the capture package."""

from megatron_router_replay.errors import RouterReplayError


class CaptureError(RouterReplayError, ValueError):
    """Routes cannot be captured as asked, or some of a request's tokens have none."""
