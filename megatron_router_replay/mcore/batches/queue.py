"""The micro-batches of a model chunk: the routes of each, and the forward that it belongs to.

    queue    a micro-batch waits for a forward to come
    begin    a forward of the chunk takes the next one; outside of a forward, so does a router that routed the current one
    routed   every router has routed it
    leave    its forward returned, so it is done; a forward that raised leaves nothing behind, and may be repeated

A new forward raises if the last one left routers out, or failed while others waited. Recomputes do not come here: see `tape`.
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
    RUNNING = "the forward of its chunk runs"
    BEGUN = "some routers may have routed it, and others will, outside of such a forward"
    FAILED = "its forward raised; or one before it did, so its forward is not known"


@dataclass(slots=True, eq=False)
class _Call:
    """A call of the chunk, or of a wrapper around it, that has not returned.

    Args:
        depth: 0 is the outermost wrapper; a deeper call runs inside of it.
        num_queued, num_begun, num_routed: micro-batches that were queued, had begun, and waited for the return of an outer
            call, when this call began.
    """

    depth: int
    num_queued: int
    num_begun: int
    num_routed: int


@dataclass(slots=True, eq=False, kw_only=True)
class Microbatch:
    """A micro-batch of a chunk: the experts of its routers, and how far it has come.

    Args:
        shape: (positions, sequences) of the tokens as this rank's routers get them, [s, b, h] without h.
        batch_shape: (b, s) of the tokens as this rank's model gets them.
        counts: kind ("rows", "live", "padding") -> number of rows, an int or a scalar on a device.
        num_routers: routers of the chunk that route it.
        routes: the experts that they replay; None: they route live, for a recording.
        live_positions: [num_live] int64 on the routers' device, positions of the rows that the live router decides; None:
            there are none, or the host cannot read them without a wait.
        live_mask: [num_tokens] bool on the routers' device, True: the live router decides the row; None: live_positions
            has them.
        replay_mask: [num_tokens] bool on the same device, True: the row has a route that is replayed; None: all are.
        rows: [num_tokens] int64, trace rows as this rank's routers see them; None: a replay does not keep them.
        token_ids: [b, s] integers, the tokens that its forward must get, below 0 where they are not known; None: none is.
        batch_rows: [b, s] int64, the rows of the trace that have these tokens; None: the trace has none.
        checked_layer: position of the layer that also takes its live top-k, -1: all do; None: none does.
        is_followed: its rows were found by its tokens; False: queued by hand.
        lengths: [S] int64, tokens of each sample that a recording numbers itself; None: rows were queued by hand.
        used: position -> [num_tokens, topk], the experts that a recording keeps; None: nothing is recorded.
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
    used: dict[int, Any] | None = None
    state: State = State.WAITING
    number: int = -1
    routed: set[int] = field(default_factory=set)
    stream: Any = None  # under which it was queued

    def __post_init__(self) -> None:
        on_device = self._on_device()
        self.stream = current_stream(on_device[0].device) if on_device else None

    def _on_device(self) -> list[Tensor]:
        tensors = (self.live_positions, self.live_mask, self.replay_mask, self.token_ids, self.batch_rows)
        return [tensor for tensor in tensors if tensor is not None and tensor.device.type == "cuda"]

    def follow_stream(self) -> None:
        """Let the current stream, in which its forward begins, use tensors that were queued under another one."""
        if self.stream is not None:
            follow(self.stream, *self._on_device())

    @property
    def is_routed(self) -> bool:
        """True if every router has routed it."""
        return len(self.routed) == self.num_routers

    def free(self) -> None:
        """Drop its tensors: the graph keeps those of recomputes, and it may stay the current one for long."""
        self.routes = self.live_positions = self.live_mask = self.replay_mask = None
        self.rows = self.batch_rows = self.token_ids = self.used = None

    def check_shape(self, where: str, shape: tuple[int, ...]) -> None:
        """Raise unless a router's tokens, [s, b], are those of this micro-batch."""
        expected = self.shape
        # Megatron's [s, b, h]; a router that gets [n, h] has lost the order of the tokens, unless there is one sequence.
        if tuple(shape) != expected and not (len(shape) == 1 and expected[1] == 1 and shape[0] == expected[0]):
            raise ReplayStateError(
                f"MRR201: {where}, micro-batch {self.number}: the router routes tokens of [s, b] = {list(shape)} on "
                f"this rank, the routes are for {list(expected)}: they must have the shape of this micro-batch's "
                "input_ids, [b, s]. If the model inserts positions itself (images), open the session on its language "
                "model, and give it the rows that this gets."
            )


class Queue:
    """Assigns the forwards of a chunk to the micro-batches that were queued for it.

    Args:
        where: "rank 0, chunk 1", for messages.
        layers: "layer 3" for each router that takes part.
        missing: names the rows of a forward for which no micro-batch was queued, in a message.
        on_done: gets each micro-batch that all routers have routed, when its forward has returned.
    """

    def __init__(self, where: str, layers: list[str], missing: str, on_done: Callable[[Microbatch], None]) -> None:
        self.where = where
        self._missing = missing
        self.num_queued = 0
        self._layers = layers
        self._on_done = on_done
        self._waiting: deque[Microbatch] = deque()
        self.current: Microbatch | None = None  # the one that the chunk forwards, or forwarded last
        self._calls: list[_Call] = []  # the innermost last
        self._routed: list[Microbatch] = []  # by every router, in a call that has not returned

    def queue(self, microbatch: Microbatch) -> None:
        """Add the micro-batch of a forward to come."""
        microbatch.number = self.num_queued
        self._waiting.append(microbatch)
        self.num_queued += 1

    # ---- calls of the chunk and of its wrappers
    def enter(self, depth: int) -> None:
        """Begin a call."""
        self._drop_calls(depth)
        self._calls.append(_Call(depth, self.num_queued, self._num_begun, len(self._routed)))

    def leave(self, depth: int, *, failed: bool) -> None:
        """End a call; only one that returned is a success."""
        self._drop_calls(depth + 1)
        if not self._calls or self._calls[-1].depth != depth:
            return  # it failed, and was left already; or the session was paused when it began
        call = self._calls.pop()
        if failed:
            self._fail(call)
            return
        if self.current is not None and self.current.state is State.RUNNING:
            self.current.state = State.BEGUN  # some routers may run outside of the forward (MTP)
        if not self._calls:
            self._hand_on()

    def is_innermost(self, depth: int) -> bool:
        """Return whether the innermost open call has this depth."""
        return bool(self._calls) and self._calls[-1].depth == depth

    def begin(self) -> Microbatch:
        """Return the micro-batch of the chunk's forward that begins."""
        microbatch = self._begin(self._layers[0])
        microbatch.state = State.RUNNING
        return microbatch

    def _drop_calls(self, depth: int) -> None:
        """Fail the calls of this depth or deeper that are open: no call of them runs any more."""
        # An exception that calls no hook, such as KeyboardInterrupt, left them open.
        while self._calls and self._calls[-1].depth >= depth:
            self._fail(self._calls.pop(), is_late=True)

    def _fail(self, call: _Call, *, is_late: bool = False) -> None:
        """Discard the micro-batches of a call that did not return; its caller may queue them again.

        Args:
            is_late: the call failed some time ago, and its micro-batch may have been queued again since.
        """
        has_begun = self._num_begun > call.num_begun
        if not has_begun:
            if not self._waiting or self._waiting[0].state is State.FAILED or self._is_unfinished():
                return  # it had no micro-batch, or the next forward raises anyway
            self._begin(self._layers[0])
        for microbatch in self._waiting:
            if not (is_late and has_begun) or microbatch.number < call.num_queued:
                microbatch.state = State.FAILED
        assert self.current is not None, "it has begun"
        # Also if every router had routed it: the output layer comes after the last one.
        self.current.state = State.FAILED
        for microbatch in (self.current, *self._routed[call.num_routed :]):
            microbatch.free()
        del self._routed[call.num_routed :]

    def _hand_on(self) -> None:
        routed, self._routed = self._routed, []
        for microbatch in routed:
            self._on_done(microbatch)
            microbatch.free()

    # ---- calls of routers
    def microbatch_of(self, position: int) -> Microbatch:
        """Return the micro-batch that the router at this position routes now.

        Raises:
            ReplayStateError: none is queued for this forward, or the chunk's forward called the router before.
        """
        current = self.current
        routed = current is not None and position in current.routed
        # Outside the chunk's own forward (a plan's layers) a second call begins the next micro-batch.
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
        """Note that a router has routed the micro-batch; after the last one it is done, once its forward returns."""
        microbatch.routed.add(position)
        if len(microbatch.routed) == microbatch.num_routers:  # `is_routed`, and one call less in each router's
            self._routed.append(microbatch)
            if not self._calls:
                self._hand_on()

    # ---- the end
    def problems(self) -> Iterator[str]:
        """Yield the micro-batches that were queued and not routed by every router; forwards that failed do not count."""
        self._drop_calls(0)
        if self._is_unfinished() and self.current is not None:
            yield f"{self._name(self.current)}: its {self._missing_layers(self.current)} was not forwarded"
        for microbatch in self._waiting:
            yield f"{self._name(microbatch)}, {self._layers[0]}: routes were queued, but no forward used them"

    def clear(self) -> None:
        """Forget every micro-batch."""
        self._waiting.clear()
        self.current, self._calls, self._routed = None, [], []

    @property
    def has_rows_by_hand(self) -> bool:
        """True if a micro-batch waits with rows that were queued by hand."""
        return any(not microbatch.is_followed for microbatch in self._waiting)

    @property
    def _num_begun(self) -> int:
        return self.num_queued - len(self._waiting)

    def _begin(self, layer: str) -> Microbatch:
        current = self.current
        if current is not None and self._is_unfinished():
            raise ReplayStateError(
                f"MRR407: {self._name(current)}: a new forward began, but no forward of its "
                f"{self._missing_layers(current)} came. The forwards of a chunk must run one after another and "
                "reach every router."
            )
        if current is not None and self._waiting and self._waiting[0].state is State.FAILED:
            raise ReplayStateError(
                f"MRR407: {self.where}: the forward of micro-batch {current.number} failed while {len(self._waiting)} "
                "others were queued, so the next forward may repeat it or be the next one. Leave the "
                "session, or queue each micro-batch right before its forward."
            )
        if not self._waiting:
            raise ReplayStateError(
                f"MRR406: {self.where}, micro-batch {self.num_queued}, {layer}: a forward without {self._missing}; "
                f"{self.num_queued} micro-batches were queued. A trace of RoutingTrace.from_samples finds them by the "
                "forward's input_ids; else call session.microbatch(rows, model) before each forward of each chunk. An "
                "evaluation or a reference pass runs inside `with session.paused():`."
            )
        self.current = self._waiting.popleft()
        self.current.state = State.BEGUN
        self.current.follow_stream()
        return self.current

    def _is_unfinished(self) -> bool:
        """Return whether some routers have not routed the current micro-batch, though its forward has not failed."""
        current = self.current
        return current is not None and current.state is not State.FAILED and not current.is_routed

    def _name(self, microbatch: Microbatch) -> str:
        return f"{self.where}, micro-batch {microbatch.number}"

    def _missing_layers(self, microbatch: Microbatch) -> str:
        missing = (layer for position, layer in enumerate(self._layers) if position not in microbatch.routed)
        return ", ".join(missing)
