"""The error of every transport."""

from megatron_router_replay.errors import RouterReplayError


class TransportError(RouterReplayError):
    """Routes did not reach a training rank, or the two sides do not agree on what to send; names place and bytes."""
