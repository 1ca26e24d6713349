"""The micro-batches of one model chunk: queued, forwarded by its routers, done.

    queue() -> waiting -> begin() -> current -> every router of the chunk has routed it -> on_done, and its routes are freed

A chunk forwards one micro-batch after another, whoever calls its layers: Megatron's schedules, a plan that was built first,
or a direct `model.forward()`. The chunk's forward begins the next one where it is called as a module; a router that has
routed the current one begins the next otherwise. What a forward leaves unfinished without having failed, or failed with
others waiting, cannot be assigned to a micro-batch and raises. Recomputes do not come here: see `recompute`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from torch import Tensor

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.targets import Targets


class Microbatch:
    """One micro-batch in one chunk: what its routers shall use, and how far it has come.

    Args:
        number: how many were queued for this chunk before it.
        num_routers: routers of the chunk that route it.
        shape: (positions, sequences) of the tokens as this rank's routers get them, [s, b, h] without h.
        rows: [b, s] int64, its routing rows.
        router_rows: [num_tokens] int64, the same as this rank's routers see them; None: a replay does not keep them.
        token_ids: [b, s] integers, what the caller says its tokens are; None: not said.
        targets: what its routers replay; None: a recording.
        is_token: [num_tokens] bool on the routers' device, False: known to be padding; None: nothing is known of padding.
        counts: [3] int64, rows replayed, live, padding.
    """

    def __init__(
        self,
        number: int,
        num_routers: int,
        *,
        shape: tuple[int, int],
        rows: Tensor,
        router_rows: Tensor | None = None,
        token_ids: Tensor | None = None,
        targets: Targets | None = None,
        is_token: Tensor | None = None,
        counts: Tensor,
    ) -> None:
        self.number = number
        self.shape = shape
        self.rows = rows
        self.router_rows = router_rows
        self.token_ids = token_ids
        self.targets = targets
        self.is_token = is_token
        self.packed = False  # it is replayed, and the model got packed sequences
        self.counts = counts
        self.routed = [False] * num_routers
        self.used: list[Tensor | None] = [None] * num_routers  # [num_tokens, topk] each, filled in a recording alone
        self.missing = num_routers
        self.failed = False


class Ledger:
    """Assigns the forwards of one chunk's routers to the micro-batches that were queued for it.

    Args:
        where: "rank 0, chunk 1", for messages.
        layers: "layer 3" or "MTP layer 5" for each router that takes part.
        on_done: gets each micro-batch when all routers have routed it.
    """

    def __init__(self, where: str, layers: list[str], on_done: Callable[[Microbatch], None]) -> None:
        self.where = where
        self.num_queued = 0
        self._layers = layers
        self._on_done = on_done
        self._waiting: deque[Microbatch] = deque()
        self.current: Microbatch | None = None  # the one that the chunk forwards, or forwarded last
        self._running = False  # the chunk's forward runs, called as a module
        self._ambiguous: int | None = None  # the micro-batch whose forward failed while others were waiting

    def queue(self, microbatch: Microbatch) -> None:
        """Add the micro-batch of a forward to come."""
        self._waiting.append(microbatch)
        self.num_queued += 1

    def enter(self) -> Microbatch:
        """Take note that the chunk's forward begins; return its micro-batch.

        Raises:
            ReplayStateError: as `begin`.
        """
        microbatch = self.begin(self._layers[0])
        self._running = True
        return microbatch

    def begin(self, layer: str) -> Microbatch:
        """Make the next micro-batch the current one and return it.

        Args:
            layer: which layer's router, or the chunk's first, asks for it; for messages.

        Raises:
            ReplayStateError: none was queued, the last forward left out a router, or one failed and what comes next
                cannot be told.
        """
        unfinished = self.current
        if unfinished is not None and unfinished.missing and not unfinished.failed:
            raise ReplayStateError(
                f"{self._name(unfinished)}: a new forward began, but no forward of its {self._missing_layers(unfinished)} "
                "came. The forwards of a chunk must run one after another and reach every router (with mtp=True the "
                "MTP layers too); if one failed, call the model itself, not its .forward, so that this is seen."
            )
        if self._ambiguous is not None:
            raise ReplayStateError(
                f"{self.where}: the forward of micro-batch {self._ambiguous} failed while {len(self._waiting)} others were "
                "queued, so whether the next forward repeats it or goes on cannot be told. Leave the session, or queue each "
                "micro-batch right before its forward."
            )
        if not self._waiting:
            raise ReplayStateError(
                f"{self.where}, micro-batch {self.num_queued}, {layer}: a forward without routes; "
                f"{self.num_queued} micro-batches were queued. Call session.microbatch(routing_rows, model) before each "
                "forward of each chunk."
            )
        self.current = self._waiting.popleft()
        return self.current

    def end(self, *, failed: bool) -> None:
        """Take note that the chunk's forward is over; the current micro-batch may still lack routers outside of it (MTP)."""
        self._running = False
        if failed and self.current is not None:
            # Also if every router had routed it: behind the last one are the output layer and the loss.
            self.current.failed = self.current.missing > 0
            self._ambiguous = self.current.number if self._waiting else None

    def fail_next(self) -> None:
        """Take note that a forward failed before it reached the chunk: its micro-batch is over."""
        unfinished = self.current is not None and self.current.missing > 0 and not self.current.failed
        if not self._waiting or self._ambiguous is not None or unfinished:
            return  # it had no micro-batch, or the next forward raises anyway
        self.begin(self._layers[0])
        self.end(failed=True)

    def microbatch_of(self, position: int) -> Microbatch:
        """Return the micro-batch that the router at this position routes now.

        Raises:
            ReplayStateError: as `begin`; or the chunk's forward called the router before.
        """
        current = self.current
        # Outside the chunk's own forward (a direct .forward, a plan's layers) a second call begins the next micro-batch.
        if self._running and current is not None and current.routed[position]:
            raise ReplayStateError(
                f"{self._name(current)}: one forward of the model called the router of {self._layers[position]} twice. A "
                "micro-batch has one route for a token in a layer; layers that share a router cannot be told apart."
            )
        if current is None or current.failed or current.routed[position]:
            return self.begin(self._layers[position])
        return current

    def routed(self, microbatch: Microbatch, position: int) -> None:
        """Take note that a router has routed the micro-batch; after the last one its routes are freed."""
        microbatch.routed[position] = True
        microbatch.missing -= 1
        if not microbatch.missing:
            self._on_done(microbatch)
            # The graph keeps what recomputes need; the micro-batch itself may stay the current one for long.
            microbatch.targets = None
            microbatch.used = []

    def problems(self) -> Iterator[str]:
        """Yield what was queued and not routed by every router; forwards that failed do not count."""
        current = self.current
        if current is not None and current.missing and not current.failed:
            yield f"{self._name(current)}: its {self._missing_layers(current)} was not forwarded"
        for microbatch in self._waiting:
            yield f"{self._name(microbatch)}, {self._layers[0]}: routes were queued, but no forward used them"

    def clear(self) -> None:
        """Forget every micro-batch."""
        self._waiting.clear()
        self.current = None

    @property
    def num_waiting(self) -> int:
        """How many micro-batches wait for their forward to begin."""
        return len(self._waiting)

    @property
    def unfinished(self) -> list[Microbatch]:
        """The micro-batches that still hold routes, oldest first."""
        current = [self.current] if self.current is not None and self.current.missing else []
        return [*current, *self._waiting]

    def _name(self, microbatch: Microbatch) -> str:
        return f"{self.where}, micro-batch {microbatch.number}"

    def _missing_layers(self, microbatch: Microbatch) -> str:
        return ", ".join(layer for layer, routed in zip(self._layers, microbatch.routed) if not routed)
