"""The micro-batches of one model chunk: what their routers use, and which forward each belongs to.

    rows into a trace, or routes in a trainer's layout -> Microbatch -> queue -> current -> every router has routed it -> done

Routes are gathered as whole rows, one copy goes to the device, and 16 layers at a time are widened there when their first
layer asks. A chunk forwards one micro-batch after another, whoever calls its layers: its forward begins the next one where
it is called as a module; a router that has routed the current one begins the next otherwise. A new forward raises if the last
one left routers out without failing, or failed while others waited. Recomputes do not come here: see `tape`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.batches.upload import LayerRoutes
from megatron_router_replay.mcore.core.streams import current_stream, follow


class State(Enum):
    """How far a micro-batch has come; its queue alone changes it."""

    WAITING = "queued for a forward to come"
    RUNNING = "the forward of its chunk runs, called as a module"
    BEGUN = "some routers have routed it, and others will, outside of such a forward"
    DONE = "every router has routed it"
    FAILED = "its forward failed; or one failed before it, so nobody knows which forward it is for"


@dataclass(slots=True, eq=False, kw_only=True)
class Microbatch:
    """One micro-batch in one chunk: what its routers shall use, and how far it has come.

    Args:
        shape: (positions, sequences) of the tokens as this rank's routers get them, [s, b, h] without h.
        batch_shape: (b, s) of the tokens as this rank's model gets them.
        counts: what the session counts of it, ints or scalars on a device: see `count_rows`.
        num_routers: routers of the chunk that route it.
        routes: what they replay; None: they route live, for a recording.
        live_positions: [num_live] int64 on the routers' device, positions of the rows that the live router decides; None:
            there are none, or the host does not know them.
        live_mask: [num_tokens] bool on the routers' device, True: the live router decides the row; None: the host knows the
            positions.
        replay_mask: [num_tokens] bool on the same device, True: the row has a route that is replayed; None: all are.
        rows: [num_tokens] int64, trace rows as this rank's routers see them; None: a replay does not keep them.
        token_ids: [b, s] integers, what tokens its forward must get, below 0 where that is not known; None: nothing is.
        batch_rows: [b, s] int64, the rows of the trace that know these tokens; None: the caller alone named them.
        checked_layer: position of the layer that also takes its live top-k, -1: all do; None: none does.
        is_followed: its rows were found by its tokens; False: queued by hand.
        lengths: [S] int64, tokens of each sample that a recording numbers itself; None: rows were queued by hand.
        cu_seqlens: [num_seqs + 1] integers, where they start in the row, over all context-parallel ranks; None: not known.
    """

    shape: tuple[int, int]
    batch_shape: tuple[int, int]
    counts: dict[str, Tensor | int]
    num_routers: int
    routes: LayerRoutes | None = None
    live_positions: Tensor | None = None
    live_mask: Tensor | None = None
    replay_mask: Tensor | None = None
    rows: Tensor | None = None
    token_ids: Tensor | None = None
    batch_rows: Tensor | None = None
    checked_layer: int | None = None
    cu_seqlens: Tensor | None = None
    is_followed: bool = False
    lengths: Tensor | None = None
    state: State = State.WAITING
    number: int = -1
    routed: set[int] = field(default_factory=set)
    used: dict[int, Any] = field(default_factory=dict)  # position -> [num_tokens, topk], filled in a recording
    stream: Any = None  # under which it was queued

    def __post_init__(self) -> None:
        on_device = self._on_device()
        self.stream = current_stream(on_device[0].device) if on_device else None

    def _on_device(self) -> list[Tensor]:
        tensors = (self.live_positions, self.live_mask, self.replay_mask, self.token_ids, self.batch_rows)
        return [tensor for tensor in tensors if tensor is not None and tensor.device.type == "cuda"]

    def follow_stream(self) -> None:
        """Let the current stream, in which its forward begins, use what was queued under another one."""
        if self.stream is not None:
            follow(self.stream, *self._on_device())

    @property
    def is_routed(self) -> bool:
        """Whether every router has routed it."""
        return len(self.routed) == self.num_routers

    def check_shape(self, where: str, shape: tuple[int, ...]) -> None:
        """Raise unless a router's tokens, [s, b], are those of this micro-batch."""
        expected = self.shape
        # Megatron's [s, b, h]; a router that gets [n, h] has lost which token is whose unless there is one sequence.
        if tuple(shape) != expected and not (len(shape) == 1 and expected[1] == 1 and shape[0] == expected[0]):
            raise ReplayStateError(
                f"MRR201: {where}, micro-batch {self.number}: the router routes tokens of [s, b] = {list(shape)} on "
                f"this rank, the routes are for {list(expected)}: they must have the shape of this micro-batch's "
                "input_ids, [b, s]. If the model inserts positions itself (images), open the session on its language "
                "model, and give it the rows that this gets."
            )


class Queue:
    """Assigns the forwards of one chunk's routers to the micro-batches that were queued for it.

    Args:
        where: "rank 0, chunk 1", for messages.
        layers: "layer 3" for each router that takes part.
        lacks: what a forward lacks if no micro-batch was queued for it, for the message.
        on_done: gets each micro-batch when all routers have routed it.
    """

    def __init__(self, where: str, layers: list[str], lacks: str, on_done: Callable[[Microbatch], None]) -> None:
        self.where = where
        self._lacks = lacks
        self.num_queued = 0
        self._layers = layers
        self._on_done = on_done
        self._waiting: deque[Microbatch] = deque()
        self.current: Microbatch | None = None  # the one that the chunk forwards, or forwarded last

    def queue(self, microbatch: Microbatch) -> None:
        """Add the micro-batch of a forward to come."""
        microbatch.number = self.num_queued
        self._waiting.append(microbatch)
        self.num_queued += 1

    def enter(self) -> Microbatch:
        """Take note that the chunk's forward begins; return its micro-batch."""
        microbatch = self._begin(self._layers[0])
        microbatch.state = State.RUNNING
        return microbatch

    def leave(self, num_begun: int, *, failed: bool) -> None:
        """Take note that a forward of the chunk, or of a wrapper around it, is over.

        Args:
            num_begun: of the queue, when that forward began. If none has begun since, it failed before it reached the chunk.
        """
        if failed and num_begun == self.num_begun:
            if not self._waiting or self._waiting[0].state is State.FAILED or self._is_unfinished():
                return  # it had no micro-batch, or the next forward raises anyway
            self._begin(self._layers[0])
        current = self.current
        if current is None:
            return
        if failed:
            # Also if every router had routed it: behind the last one are the output layer and the loss.
            for microbatch in self._waiting:
                microbatch.state = State.FAILED
            current.state = State.DONE if current.is_routed else State.FAILED
        elif current.state is State.RUNNING:  # it may still lack routers outside of the forward (MTP)
            current.state = State.DONE if current.is_routed else State.BEGUN

    def microbatch_of(self, position: int) -> Microbatch:
        """Return the micro-batch that the router at this position routes now.

        Raises:
            ReplayStateError: none is queued for this forward, or the chunk's forward called the router before.
        """
        current = self.current
        routed = current is not None and position in current.routed
        # Outside the chunk's own forward (a direct .forward, a plan's layers) a second call begins the next micro-batch.
        if current is not None and current.state is State.RUNNING and routed:
            raise ReplayStateError(
                f"MRR407: {self._name(current)}: one forward of the model called the router of "
                f"{self._layers[position]} twice. A micro-batch has one route for a token in a layer; layers that "
                "share a router cannot be told apart."
            )
        if current is None or current.state is State.FAILED or routed:
            return self._begin(self._layers[position])
        return current

    def routed(self, microbatch: Microbatch, position: int) -> None:
        """Take note that a router has routed the micro-batch; after the last one its routes are freed."""
        microbatch.routed.add(position)
        if len(microbatch.routed) == microbatch.num_routers:  # `is_routed`, and one call less in each router's
            if microbatch.state is State.BEGUN:
                microbatch.state = State.DONE
            self._on_done(microbatch)
            # The graph keeps what recomputes need; the micro-batch itself may stay the current one for long.
            microbatch.routes = microbatch.live_positions = microbatch.live_mask = microbatch.replay_mask = None
            microbatch.rows = microbatch.batch_rows = None
            microbatch.used = {}

    def problems(self) -> Iterator[str]:
        """Yield what was queued and not routed by every router; forwards that failed do not count."""
        if self._is_unfinished() and self.current is not None:
            yield f"{self._name(self.current)}: its {self._missing_layers(self.current)} was not forwarded"
        for microbatch in self._waiting:
            yield f"{self._name(microbatch)}, {self._layers[0]}: routes were queued, but no forward used them"

    def clear(self) -> None:
        """Forget every micro-batch."""
        self._waiting.clear()
        self.current = None

    @property
    def num_begun(self) -> int:
        """How many micro-batches have begun, and may be over."""
        return self.num_queued - len(self._waiting)

    @property
    def has_rows_by_hand(self) -> bool:
        """Whether a micro-batch waits whose rows were not found by its tokens."""
        return any(not microbatch.is_followed for microbatch in self._waiting)

    def _begin(self, layer: str) -> Microbatch:
        current = self.current
        if current is not None and self._is_unfinished():
            raise ReplayStateError(
                f"MRR407: {self._name(current)}: a new forward began, but no forward of its "
                f"{self._missing_layers(current)} came. The forwards of a chunk must run one after another and "
                "reach every router; if one failed, call the model itself, not its "
                ".forward, so that this is seen."
            )
        if current is not None and self._waiting and self._waiting[0].state is State.FAILED:
            raise ReplayStateError(
                f"MRR407: {self.where}: the forward of micro-batch {current.number} failed while {len(self._waiting)} "
                "others were queued, so whether the next forward repeats it or goes on cannot be told. Leave the "
                "session, or queue each micro-batch right before its forward."
            )
        if not self._waiting:
            raise ReplayStateError(
                f"MRR406: {self.where}, micro-batch {self.num_queued}, {layer}: a forward without {self._lacks}; "
                f"{self.num_queued} micro-batches were queued. A trace of RoutingTrace.from_samples finds them by "
                "the forward's input_ids; else call session.microbatch(rows, model) before each forward of each chunk."
            )
        self.current = self._waiting.popleft()
        self.current.state = State.BEGUN
        self.current.follow_stream()
        return self.current

    def _is_unfinished(self) -> bool:
        """Return whether the current micro-batch lacks routers, though its forward has not failed."""
        current = self.current
        return current is not None and current.state is not State.FAILED and not current.is_routed

    def _name(self, microbatch: Microbatch) -> str:
        return f"{self.where}, micro-batch {microbatch.number}"

    def _missing_layers(self, microbatch: Microbatch) -> str:
        missing = (layer for position, layer in enumerate(self._layers) if position not in microbatch.routed)
        return ", ".join(missing)
