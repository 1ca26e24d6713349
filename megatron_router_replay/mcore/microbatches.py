"""The micro-batches of one model chunk: what their routers use, and which forward each belongs to.

    rows into a trace, or routes in a trainer's layout -> Microbatch -> queue -> current -> every router has routed it -> done

Routes are gathered as whole rows, one copy goes to the device, and 16 layers at a time are widened there when their first
layer asks. A chunk forwards one micro-batch after another, whoever calls its layers: its forward begins the next one where
it is called as a module; a router that has routed the current one begins the next otherwise. What a forward leaves unfinished
without having failed, or failed with others waiting, cannot be assigned and raises. Recomputes do not come here: see `tape`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_router_replay.errors import LayoutError, ReplayStateError
from megatron_router_replay.mcore.balance import Tokens
from megatron_router_replay.trace.runs import as_slice

Check = Callable[[Tensor, str], None]
"""(failed, message): raises now if the host knows that `failed` holds, else when the session ends."""

_BLOCK = 16
"""Layers that are widened to int64 at once: a launch for each router would cost more, all layers too much memory."""


class LayerRoutes:
    """The routes of one micro-batch on the routers' device; a forward, and a recompute, asks for each layer once.

    Args:
        compact: [num_tokens, num_layers, topk] in the dtype of the trace, written on the current stream.
    """

    __slots__ = ("_blocks", "_stream", "compact")

    def __init__(self, compact: Tensor) -> None:
        self.compact = compact
        self._stream = current_stream(compact.device)
        self._blocks: dict[int, tuple[Tensor, set[int], Any]] = {}

    def layer(self, position: int) -> Tensor:
        """Return [num_tokens, topk] int64."""
        number = position // _BLOCK
        found = self._blocks.get(number)
        if found is None:
            follow(self._stream, self.compact)
            layers = range(number * _BLOCK, min((number + 1) * _BLOCK, self.compact.shape[1]))
            source = self.compact[:, layers.start : layers.stop].transpose(0, 1)
            block = torch.empty(source.shape, dtype=torch.int64, device=source.device).copy_(source)
            found = self._blocks[number] = block, set(layers), current_stream(block.device)
        block, missing, stream = found
        if stream is not None:
            follow(stream, block)
        missing.discard(position)
        if not missing:
            self._blocks.pop(number, None)
        return block[position % _BLOCK]


class KeptLayer:
    """One layer of a micro-batch's routes as a tape keeps it: what it needs of a tensor, widened with its block.

    Args:
        routes: of the micro-batch.
        position: of the layer.
    """

    __slots__ = ("_position", "_routes", "dtype", "shape")

    def __init__(self, routes: LayerRoutes, position: int) -> None:
        self._routes, self._position = routes, position
        self.dtype, self.shape = routes.compact.dtype, routes.compact[:, position].shape

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return [num_tokens, topk] int64."""
        return self._routes.layer(self._position)


def current_stream(device: torch.device) -> Any:
    """Return the stream on which work for this device is queued now; None: the device has none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def follow(stream: Any, *tensors: Tensor) -> None:
    """Let the current stream use what another one wrote: behind it, and with memory that stays until both are done."""
    if stream is None or stream == (current := current_stream(tensors[0].device)):
        return
    current.wait_stream(stream)
    for tensor in tensors:
        tensor.record_stream(current)


@dataclass(slots=True, eq=False, kw_only=True)
class Microbatch:
    """One micro-batch in one chunk: what its routers shall use, and how far it has come.

    Args:
        shape: (positions, sequences) of the tokens as this rank's routers get them, [s, b, h] without h.
        batch_shape: (b, s) of the tokens as this rank's model gets them.
        counts: what the session counts of it, ints or scalars on a device: see `count_rows`.
        num_routers: routers of the chunk that route it.
        routes: what they replay; None: they route live, for a recording.
        live: the rows that the live router decides, on the routers' device: [num_live] int64 positions where the host knows
            them, else [num_tokens] bool; None: there are none.
        replayed: [num_tokens] bool on the same device, True: the row has a route that is replayed; None: not asked for.
        rows: [num_tokens] int64, trace rows as this rank's routers see them; None: a replay does not keep them.
        batch_rows: [b, s] int64 on the CPU, trace rows as the model gets them; kept by sessions with positions.
        token_ids: [b, s] integers, what tokens its forward must get, below 0 where that is not known; None: nothing is.
        is_token: [num_tokens] bool on the routers' device, False: known to be padding; None: nothing is known of padding.
    """

    shape: tuple[int, int]
    batch_shape: tuple[int, int]
    counts: dict[str, Tensor | int]
    num_routers: int
    routes: LayerRoutes | None = None
    live: Tensor | None = None
    replayed: Tensor | None = None
    rows: Tensor | None = None
    batch_rows: Tensor | None = None
    token_ids: Tensor | None = None
    is_token: Tensor | None = None
    packed: bool = False
    failed: bool = False
    number: int = -1
    routed: set[int] = field(default_factory=set)
    used: dict[int, Any] = field(default_factory=dict)  # position -> [num_tokens, topk], filled in a recording
    attended: set[int] = field(default_factory=set)  # layers whose sparse attention ran, in sessions with positions
    stream: Any = None  # under which it was queued

    def __post_init__(self) -> None:
        on_device = self._on_device()
        self.stream = current_stream(on_device[0].device) if on_device else None

    def _on_device(self) -> list[Tensor]:
        tensors = (self.live, self.replayed, self.token_ids, self.is_token)
        return [tensor for tensor in tensors if tensor is not None and tensor.device.type == "cuda"]

    def follow_stream(self) -> None:
        """Let the current stream, in which its forward begins, use what was queued under another one."""
        if self.stream is not None:
            follow(self.stream, *self._on_device())

    @property
    def missing(self) -> int:
        """How many routers have not routed it."""
        return self.num_routers - len(self.routed)

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

    def tokens(self, tokens: Tokens, num_tokens: int, where: str) -> Tokens:
        """Fill in what is known of its tokens for balancing.

        Raises:
            ReplayStateError: a router that is live beside this micro-batch routes a different number of tokens.
        """
        if self.is_token is not None and self.is_token.numel() != num_tokens:
            raise ReplayStateError(
                f"MRR410: {where} routes {num_tokens} tokens beside a micro-batch that has {self.is_token.numel()} on "
                "this rank, so which of them are padding cannot be told. Leave padding= out, or take the layer in with "
                "mtp=True."
            )
        tokens.is_token, tokens.packed = self.is_token, self.packed
        return tokens


class Queue:
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
        microbatch.number = self.num_queued
        self._waiting.append(microbatch)
        self.num_queued += 1

    def enter(self) -> Microbatch:
        """Take note that the chunk's forward begins; return its micro-batch."""
        microbatch = self._begin(self._layers[0])
        self._running = True
        return microbatch

    def leave(self, *, failed: bool) -> None:
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
        self._begin(self._layers[0])
        self.leave(failed=True)

    def microbatch_of(self, position: int) -> Microbatch:
        """Return the micro-batch that the router at this position routes now.

        Raises:
            ReplayStateError: none is queued for this forward, or the chunk's forward called the router before.
        """
        current = self.current
        routed = current is not None and position in current.routed
        # Outside the chunk's own forward (a direct .forward, a plan's layers) a second call begins the next micro-batch.
        if self._running and current is not None and routed:
            raise ReplayStateError(
                f"MRR407: {self._name(current)}: one forward of the model called the router of "
                f"{self._layers[position]} twice. A micro-batch has one route for a token in a layer; layers that "
                "share a router cannot be told apart."
            )
        if current is None or current.failed or routed:
            return self._begin(self._layers[position])
        return current

    def running(self, who: str) -> Microbatch:
        """Return the micro-batch of the forward that runs, for a layer that may come before its first router.

        Raises:
            ReplayStateError: the model's forward does not run as a module's.
        """
        if not self._running or self.current is None:
            raise ReplayStateError(
                f"MRR406: {self.where}: {who} runs outside of a forward of the model, so which tokens it gets is not known: "
                "call the model itself, not its .forward or its layers."
            )
        return self.current

    def routed(self, microbatch: Microbatch, position: int) -> None:
        """Take note that a router has routed the micro-batch; after the last one its routes are freed."""
        microbatch.routed.add(position)
        if len(microbatch.routed) == microbatch.num_routers:
            self._on_done(microbatch)
            # The graph keeps what recomputes need; the micro-batch itself may stay the current one for long.
            microbatch.routes = microbatch.live = microbatch.replayed = microbatch.rows = None
            microbatch.used = {}

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

    def _begin(self, layer: str) -> Microbatch:
        unfinished = self.current
        if unfinished is not None and unfinished.missing and not unfinished.failed:
            raise ReplayStateError(
                f"MRR407: {self._name(unfinished)}: a new forward began, but no forward of its "
                f"{self._missing_layers(unfinished)} came. The forwards of a chunk must run one after another and "
                "reach every router (with mtp=True the MTP layers too); if one failed, call the model itself, not its "
                ".forward, so that this is seen."
            )
        if self._ambiguous is not None:
            raise ReplayStateError(
                f"MRR407: {self.where}: the forward of micro-batch {self._ambiguous} failed while {len(self._waiting)} "
                "others were queued, so whether the next forward repeats it or goes on cannot be told. Leave the "
                "session, or queue each micro-batch right before its forward."
            )
        if not self._waiting:
            raise ReplayStateError(
                f"MRR406: {self.where}, micro-batch {self.num_queued}, {layer}: a forward without routes; {self.num_queued} "
                "micro-batches were queued. Pass routing_rows=... to the model (after mrr.attach(model)), or call "
                "session.microbatch(...) before each forward of each chunk."
            )
        self.current = self._waiting.popleft()
        self.current.follow_stream()
        return self.current

    def _name(self, microbatch: Microbatch) -> str:
        return f"{self.where}, micro-batch {microbatch.number}"

    def _missing_layers(self, microbatch: Microbatch) -> str:
        missing = (layer for position, layer in enumerate(self._layers) if position not in microbatch.routed)
        return ", ".join(missing)


def take_rows(topk_indices: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Gather whole rows of routes and copy them to the routers' device, without a wait.

    Args:
        topk_indices: [num_rows, num_layers, topk].
        rows: [n] int64 on the same device, each a row.

    Returns:
        [n, num_layers, topk] on `device`.
    """
    if not topk_indices.shape[0]:  # an empty trace, whose micro-batches have no row
        return topk_indices.new_zeros(rows.numel(), *topk_indices.shape[1:]).to(device)
    if device.type == "cpu" or topk_indices.device.type != "cpu":
        return topk_indices.index_select(0, rows).to(device, non_blocking=True)
    # Page-locked, or the copy would wait for the device; torch reuses such memory only when the copy is done.
    staged = torch.empty(rows.numel(), *topk_indices.shape[1:], dtype=topk_indices.dtype, pin_memory=True)
    torch.index_select(topk_indices, 0, rows, out=staged)
    return staged.to(device, non_blocking=True)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return values on a device; on the way up without a wait."""
    if device.type == "cpu" or values.device.type != "cpu":
        return values.to(device)
    # Page-locked, or the copy would wait for all that the device has to do; our own, for a trainer writes into its again.
    staged = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
    return staged.to(device, non_blocking=True)


def take_layers(values: Tensor, indices: Sequence[int], *, dim: int) -> Tensor:
    """Return some layers of values, a view where they are neighbours; a list as an index would make a GPU's host wait."""
    which = as_slice(list(indices))
    if isinstance(which, slice):
        return values.narrow(dim, which.start, which.stop - which.start)
    return values.index_select(dim, to_device(torch.tensor(which), values.device))


def spread_padding(compact: Tensor, padding: Tensor, ordinals: Tensor, num_experts: int) -> Tensor:
    """Give rows of padding K distinct experts each, spread evenly over all of them.

    Args:
        compact: [num_tokens, num_layers, topk].
        padding: [num_tokens] bool, True: padding.
        ordinals: [num_tokens] int64, how many paddings of the micro-batch come before each, over all tensor-parallel ranks.

    Source: paddings that all take the same experts overload these.
    """
    at = padding.nonzero().squeeze(1) if padding.device.type == "cpu" else None  # a GPU's host would wait for it
    ordinals = ordinals if at is None else ordinals[at]
    slots = ordinals.unsqueeze(1) * compact.shape[2] + torch.arange(compact.shape[2], device=compact.device)
    spread = (slots % num_experts).to(compact.dtype).unsqueeze(1)
    if at is None:
        return torch.where(padding.view(-1, 1, 1), spread, compact)
    return compact.index_copy(0, at, spread.expand(-1, compact.shape[1], -1)) if at.numel() else compact


def padding_ordinals(padding: Tensor) -> Tensor:
    """Return how many paddings come before each position in the router's order (s-major), [b, s] int64."""
    # Counted in the order of the whole batch, so that the ranks that share a sequence go on where the one before stopped.
    by_position = padding.t().reshape(-1)
    return (by_position.cumsum(0) - by_position.to(torch.int64)).view(padding.shape[::-1]).t()


@dataclass(frozen=True, kw_only=True, slots=True)
class LaidOut:
    """The routes of one micro-batch, as this rank's routers see their tokens.

    Args:
        compact: [num_tokens, num_layers, topk] in the dtype that ids of the model need, layers as the chunk's routers.
        live: [num_tokens] bool, rows without a route; None: there is none.
        padding: [b, s] bool, known to be padding; None: nothing is known.
        batch_shape: (b, s).
        token_ids: [b, s] int64; None: not known.
        split: this sequence-parallel rank's part of s was given already.
    """

    compact: Tensor
    live: Tensor | None
    padding: Tensor | None
    batch_shape: tuple[int, int]
    token_ids: Tensor | None
    split: bool = False


def count_rows(num_rows: int, live: Tensor | None, padding: Tensor | None) -> dict[str, Tensor | int]:
    """Return how many rows there are, and how many of them are live and padding."""
    return {"rows": num_rows} | {
        name: 0 if mask is None else mask.sum() for name, mask in (("live", live), ("padding", padding))
    }


def check_padding(rows: Tensor, padding: Tensor | None, check: Check) -> None:
    """Check that padding has no rows."""
    if padding is not None:
        check(
            (padding & (rows >= 0)).any(),
            "MRR203: a position that padding= says is padding has a routing row: mask and rows moved apart, or the mask is "
            "inverted (True is padding).",
        )


def check_trained(without: Tensor, check: Check, *, order: str) -> None:
    """Check that no trained position is without a route; `without` is bool, its order is for the message."""
    which = ""
    if is_known(without):
        first = int(without.flatten().nonzero()[0])
        which = f" ({int(without.sum())} of them, the first is token {first} {order})"
    check(
        without.any(),
        f"MRR410: a trained position has no route{which}: its row is -1, or there is no route for it. Leave `trained` out to "
        "let the live router decide such positions.",
    )


def is_known(values: Tensor) -> bool:
    """Return whether the host can read these values without waiting, and some are True."""
    return values.device.type == "cpu" and bool(values.any())


@dataclass(frozen=True, kw_only=True, slots=True)
class RowInputs:
    """What a caller queues for one forward; copies, for trainers reuse their buffers.

    Args:
        rows: [b, s] int64.
        token_ids: [b, s] int64; None: not given.
        padding, trained: [b, s] bool; None: not given.
    """

    rows: Tensor
    token_ids: Tensor | None
    padding: Tensor | None
    trained: Tensor | None

    @classmethod
    def checked(cls, rows: Any, *, token_ids: Any, padding: Any, trained: Any) -> RowInputs:
        """Check shapes and copy.

        Raises:
            LayoutError: rows are not [b, s] (or [n], one packed row), or something beside them has another shape or kind.
        """
        rows = as_integers(rows, "routing_rows")
        if rows.dim() not in (1, 2):
            raise LayoutError(f"MRR201: routing_rows must have the shape of input_ids, [b, s], got {list(rows.shape)}.")
        # Of eight bytes it is -1 again when it is widened.
        if not rows.dtype.is_signed and rows.dtype.itemsize < 8:
            highest = torch.iinfo(rows.dtype).max
            if bool((rows.to(torch.int64) == highest).any()):
                raise LayoutError(
                    f"MRR201: routing_rows are {rows.dtype} and hold {highest}, which a -1 becomes there: padding "
                    "cannot be told from that row. Give a signed dtype."
                )
        as_2d = (1, -1) if rows.dim() == 1 else rows.shape
        beside: dict[str, Tensor | None] = {}
        for name, values in (("token_ids", token_ids), ("padding", padding), ("trained", trained)):
            if values is None:
                beside[name] = None
                continue
            values = as_integers(values, name) if name == "token_ids" else as_mask(values, name)
            if values.shape != rows.shape:
                raise LayoutError(
                    f"MRR201: routing_rows {list(rows.shape)} and {name} {list(values.shape)} differ in shape."
                )
            dtype = torch.int64 if name == "token_ids" else torch.bool
            beside[name] = values.reshape(as_2d).to(rows.device, dtype, copy=True)
        return cls(rows=rows.reshape(as_2d).to(torch.int64, copy=True), **beside)


def as_integers(values: Any, name: str) -> Tensor:
    """Return integers given as a tensor, a numpy array or a list.

    Raises:
        LayoutError: they are no integers.
    """
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LayoutError(
            f"MRR201: {name} must be integers in a tensor or an array, got {type(values).__name__}: {error}"
        ) from error
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise LayoutError(f"MRR201: {name} must be integers, got {list(tensor.shape)} {tensor.dtype}.")
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        raise LayoutError(
            f"MRR201: {name} must be a plain tensor, got a {'nested' if tensor.is_nested else tensor.layout} one on "
            f"{tensor.device}: give [b, s], or [1, total] of a packed batch (nested.values().unsqueeze(0))."
        )
    return tensor


def as_mask(values: Any, name: str) -> Tensor:
    """Return a mask given as a tensor, a numpy array or a list, True where it is not zero.

    Raises:
        LayoutError: it is none of these.
    """
    try:
        return torch.as_tensor(values) != 0
    except (TypeError, ValueError, RuntimeError) as error:
        raise LayoutError(
            f"MRR201: {name} must be a mask in a tensor or an array, got {type(values).__name__}: {error}"
        ) from error
